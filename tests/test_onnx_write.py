"""MLP.to_onnx: what is written is read back, and other runtimes compute the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import NETS, random_net, same_bits

from cupymlp import MLP
from cupymlp.activations import ACTIVATIONS
from cupymlp.network import DTYPES

onnx = pytest.importorskip("onnx")
from onnx_models import computed  # noqa: E402


def drawn_specs(rng, depth):
    """An activation a layer, as users write them, with parameters that float32 does not hold among them."""

    def one(last):
        name = rng.choice([a.name for a in ACTIVATIONS.values() if last or not a.over_row])
        parameter = ACTIVATIONS[name].parameter
        return (str(name), float(rng.choice([0.2, 1 / 3, 1.0, 30.0]))) if parameter else str(name)

    return [one(i == depth - 1) for i in range(depth)]


def round_trip(net, path, **options):
    net.to_onnx(path, **options)
    again = MLP.from_onnx(path)
    assert again.network == net.network
    assert all(same_bits(a, b) for a, b in zip(again.weights, net.weights, strict=True))
    assert all((a is None and b is None) or same_bits(a, b) for a, b in zip(again.biases, net.biases, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_round_trip(tmp_path, rng, sizes, dtype):
    for _ in range(2):
        activations = drawn_specs(rng, len(sizes) - 1)
        net = random_net(rng, sizes, dtype, activations=activations).mlp()
        round_trip(net, tmp_path / "net.onnx", opset=22)
    assert os.listdir(tmp_path) == ["net.onnx"]


@pytest.mark.parametrize("opset", [13, 14, 18, 20, None, 24])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_round_trip_of_every_activation(tmp_path, rng, dtype, opset):
    """celu(1) is the same function as elu(1), which stands for it where ONNX has no celu. It comes back as celu."""
    specs = [
        (a.name, p) if a.parameter else a.name for a in ACTIVATIONS.values() if not a.over_row for p in (1.0, 1 / 3)
    ]
    for last in ("softmax", "log_softmax"):
        net = random_net(rng, [3] * (len(specs) + 2), dtype, activations=[*specs, last]).mlp()
        round_trip(net, tmp_path / "net.onnx", **({} if opset is None else {"opset": opset}))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_other_runtimes_compute_the_same(tmp_path, rng, name, dtype):
    """onnxruntime, or onnx's reference where that has no kernel."""
    onnxruntime = pytest.importorskip("onnxruntime")
    spec = (name, 0.25) if ACTIVATIONS[name].parameter else name
    hidden = "tanh" if ACTIVATIONS[name].over_row else spec
    net = random_net(rng, (6, 9, 9, 4), dtype, activations=[hidden, hidden, spec], scale=0.3).mlp()
    x = rng.standard_normal((11, 6)).astype(dtype)
    net.to_onnx(tmp_path / "net.onnx")
    try:
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
        (y,) = session.run(["y"], {"x": x})
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        y = computed(onnx.load(tmp_path / "net.onnx"), x)
    assert y.dtype == dtype
    ours = net(x, device="cpu")
    # onnxruntime's float64 kernels of these have constants of float32.
    rough = name in ("selu", "hard_sigmoid", "hard_swish", "gelu", "gelu_tanh")
    close = {"float32": 1e-4, "float64": 1e-5 if rough else 1e-10}[dtype]
    np.testing.assert_allclose(y, ours, rtol=close, atol=close)


def test_what_the_file_says(tmp_path, rng):
    net = random_net(rng, (3, 4, 2), biases=[True, False], activations=[("elu", 1 / 3), "identity"]).mlp(
        weight_layout="out_in"
    )
    net.to_onnx(str(tmp_path / "net.onnx"), opset=17)
    proto = onnx.load(tmp_path / "net.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert proto.producer_name == "cupymlp"
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 17)]
    assert [n.op_type for n in proto.graph.node] == ["Gemm", "Elu", "Gemm"]
    assert [t.name for t in proto.graph.initializer] == ["weight_0", "bias_0", "weight_1"]
    assert (proto.graph.input[0].name, proto.graph.output[0].name) == ("x", "y")
    assert [d.dim_param or d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim] == ["rows", 3]
    assert json.loads(proto.metadata_props[0].value) == [["elu", 1 / 3], "identity"]
    assert MLP.from_onnx(proto).network == net.network


def test_metadata_says_nothing_that_the_graph_does_not(tmp_path, rng):
    net = random_net(rng, (3, 4, 2), activations=[("elu", 0.5), "relu"]).mlp()
    net.to_onnx(tmp_path / "net.onnx")
    proto = onnx.load(tmp_path / "net.onnx")
    for text in (
        '[["elu", 0.6], "relu"]',
        '["tanh", "relu"]',
        "[",
        '[["elu", [0.5]], "relu"]',
        "null",
        "[" * 10**5,
        '[["elu", true], "relu"]',
        "3",
    ):
        proto.metadata_props[0].value = text
        assert MLP.from_onnx(proto).network == net.network


def test_errors_of_writing(tmp_path, rng, monkeypatch):
    net = random_net(rng, (3, 4, 2), "bfloat16", activations=["elu", "softsign"]).mlp()
    path = tmp_path / "net.onnx"
    for opset in (12, 10**6, 20.0, True, None):
        with pytest.raises(
            ValueError, match=r"opset is .*; accepted: 13 to \d\d, the newest that the installed onnx knows"
        ):
            net.to_onnx(path, opset=opset)
    with pytest.raises(
        ValueError, match="opset is 20, which has no Elu of bfloat16 for the activation 'elu': opset=22 or later has it"
    ):
        net.to_onnx(path)
    net.to_onnx(path, opset=22)
    before = path.read_bytes()
    for parameter in (1e-60, 1e300):
        with pytest.raises(
            ValueError, match=r"the parameter of Elu is 1e.*; ONNX keeps it as float32, which does not hold"
        ):
            random_net(rng, (3, 2), "float64", activations=[("elu", parameter)]).mlp().to_onnx(path)
    monkeypatch.setattr("cupymlp.models._onnx.writer.MOST_BYTES", 1 << 20)
    with pytest.raises(
        ValueError, match=r"the network has \d+ bytes; an ONNX file holds less than 1,048,576\. MLP\.save has no limit"
    ):
        net.to_onnx(path)
    monkeypatch.undo()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        random_net(rng, (5, 6)).mlp().to_onnx(path)
    assert os.listdir(tmp_path) == ["net.onnx"]
    assert path.read_bytes() == before


def test_the_documented_example_runs(tmp_path):
    (example,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "onnx.md").read_text(), re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["policy.onnx"]
