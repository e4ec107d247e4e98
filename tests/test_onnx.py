"""MLP.from_onnx on models made by hand: folding, constants, shapes, the choice of an output."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support import same_bits

from cupymlp import MLP
from cupymlp.network import DTYPES, numpy_dtype

onnx = pytest.importorskip("onnx")
from onnx_models import RNG, W2, B, W, X, checked, computed, model, tensor  # noqa: E402


def f4(*arrays):
    return [a.astype("f4") for a in arrays]


def same_function(proto, net, x=X):
    """Whether onnx's reference implementation gives the same, in float64."""
    np.testing.assert_allclose(net(x, device="cpu"), computed(proto, x), rtol=1e-11, atol=1e-12)


def test_what_is_folded_is_rounded_once():
    """In float32: the nearest to what float64 makes of it."""
    mean, std, scale = f4(RNG.standard_normal(4), RNG.random(4) + 0.5, RNG.standard_normal(3))
    w, b = f4(W, B)
    nodes = [
        ("Sub", ["x", "mean"], ["c"]), ("Div", ["c", "std"], ["d"]), ("Gemm", ["d", "w", "b"], ["e"]),
        ("Mul", ["e", "scale"], ["y"]),
    ]  # fmt: skip
    net = MLP.from_onnx(model(nodes, {"mean": mean, "std": std, "w": w, "b": b, "scale": scale}))
    mean, std, w, b, scale = (a.astype("f8") for a in (mean, std, w, b, scale))
    weight, bias = w / std[:, None] * scale, (b - (mean / std) @ w) * scale
    assert np.abs(net.weights[0] - weight).max() <= np.spacing(np.abs(weight).astype("f4")).max() / 2 * (1 + 1e-6)
    assert (np.abs(net.biases[0] - bias) <= np.spacing(np.abs(bias).astype("f4")) * (1 / 2 + 1e-6)).all()


def test_a_scale_after_the_last_activation_is_a_layer():
    nodes = [
        ("MatMul", ["x", "W"], ["a"]),
        ("Tanh", ["a"], ["b"]),
        ("Mul", ["b", "s"], ["c"]),
        ("Add", ["c", "t"], ["y"]),
    ]
    proto = checked(model(nodes, {"W": W, "s": B, "t": np.array(0.5)}, dtype="float64"))
    net = MLP.from_onnx(proto)
    assert net.network.describe() == "4-3-3 float64, tanh identity, bias in layer 2"
    assert np.array_equal(net.weights[1], np.diag(B))
    same_function(proto, net)
    wide = {"W": np.ones((4, 2000)), "s": np.array(2.0), "t": np.array(0.5)}
    with pytest.raises(
        ValueError, match="for which a layer of 2000 x 2000 would be needed; choose a tensor before that with output="
    ):
        MLP.from_onnx(model(nodes, wide, dtype="float64", y=("rows", 2000)))


def test_a_scale_that_does_not_fit_is_an_error():
    nodes = [("MatMul", ["x", "W"], ["a"]), ("Mul", ["a", "s"], ["y"])]
    with pytest.raises(ValueError, match="around the weight 'W', folded into it, are more than float16 holds"):
        MLP.from_onnx(model(nodes, {"W": (W * 1e3).astype("f2"), "s": np.array(1e4, "f2")}, dtype="float16"))
    net = MLP.from_onnx(
        model(nodes, {"W": (W * 1e3).astype("f2"), "s": np.array(1e4, "f2")}, dtype="float16"), dtype="float32"
    )
    assert np.isfinite(net.weights[0]).all()


def test_constants_are_computed():
    """Weights that are transposed, cast, reshaped and scaled in the graph."""
    nodes = [
        ("Constant", [], ["half"], {"value": tensor("", np.array(0.5))}),
        ("Cast", ["raw"], ["a"], {"to": 11}),
        ("Reshape", ["a", "shape"], ["b"]),
        ("Transpose", ["b"], ["c"], {"perm": [1, 0]}),
        ("Mul", ["c", "half"], ["W"]),
        ("ConstantOfShape", ["three"], ["B"], {"value": tensor("", np.array([2.5]))}),
        ("Unsqueeze", ["B", "zero"], ["B1"]),
        ("Gemm", ["x", "W", "B1"], ["y"]),
    ]
    raw = W.astype("f4")
    constants = {
        "raw": raw.T.reshape(-1).copy(),
        "shape": np.array([3, -1]),
        "three": np.array([3]),
        "zero": np.array([0]),
    }
    proto = checked(model(nodes, constants, dtype="float64"))
    net = MLP.from_onnx(proto)
    assert np.array_equal(net.weights[0], raw.astype("f8") / 2)
    assert net.biases[0].tolist() == [2.5] * 3
    same_function(proto, net)


def test_shapes_that_stay_are_passed_over():
    nodes = [
        ("Shape", ["x"], ["s"]), ("Gather", ["s", "i"], ["n"]), ("Unsqueeze", ["n", "zero"], ["n1"]),
        ("Concat", ["n1", "free"], ["t"], {"axis": 0}), ("Reshape", ["x", "t"], ["a"]), ("Flatten", ["a"], ["b"]),
        ("Unsqueeze", ["b", "one"], ["c"]), ("MatMul", ["c", "W"], ["d"]), ("Squeeze", ["d", "one"], ["e"]),
        ("Transpose", ["e"], ["f"], {"perm": [0, 1]}), ("Cast", ["f"], ["y"], {"to": 11}),
    ]  # fmt: skip
    constants = {"i": np.array(0), "zero": np.array([0]), "one": np.array([1]), "free": np.array([-1]), "W": W}
    proto = checked(model(nodes, constants, dtype="float64"))
    net = MLP.from_onnx(proto)
    assert np.array_equal(net.weights[0], W)
    same_function(proto, net)


def test_an_input_of_images_is_taken_as_rows():
    proto = model(
        [("Flatten", ["x"], ["a"]), ("MatMul", ["a", "W"], ["y"])], {"W": W}, x=("n", 1, 2, 2), dtype="float64"
    )
    net = MLP.from_onnx(checked(proto))
    np.testing.assert_allclose(net(X, device="cpu"), computed(proto, X.reshape(6, 1, 2, 2)), rtol=1e-12)


def test_an_input_that_says_nothing_of_its_shape():
    proto = model([("MatMul", ["x", "W"], ["y"])], {"W": W}, x=None, y=None, dtype="float64")
    assert MLP.from_onnx(proto).network.sizes == (4, 3)


def test_weights_that_are_inputs_with_a_default():
    """As files of before version 4 of the format list them."""
    proto = model([("MatMul", ["x", "W"], ["y"])], {"W": W}, dtype="float64")
    proto.graph.input.append(onnx.helper.make_tensor_value_info("W", 11, [4, 3]))
    assert MLP.from_onnx(proto).network.sizes == (4, 3)


def test_numbers_that_are_not_raw(rng):
    for dtype in DTYPES:
        array = rng.standard_normal((4, 3)).astype(numpy_dtype(dtype))
        proto = model([("MatMul", ["x", "W"], ["y"])], {}, dtype=dtype)
        kind = proto.graph.input[0].type.tensor_type.elem_type
        made = onnx.helper.make_tensor("W", kind, (4, 3), array.astype("f8").ravel())
        assert not made.HasField("raw_data")
        proto.graph.initializer.append(made)
        assert same_bits(MLP.from_onnx(proto).weights[0], array)


# --- Which tensor ---------------------------------------------------------------------------------------------------------


def test_several_outputs():
    nodes = [
        ("MatMul", ["x", "W"], ["h"]),
        ("Relu", ["h"], ["r"]),
        ("MatMul", ["h", "V"], ["value"]),
        ("Tanh", ["h"], ["y"]),
    ]
    proto = model(nodes, {"W": W, "V": W2}, dtype="float64", outputs=("y", "value"))
    with pytest.raises(
        ValueError,
        match="it has several outputs of real numbers; choose with output=, by its name, one of 'y', 'value', or any",
    ):
        MLP.from_onnx(proto)
    assert MLP.from_onnx(proto, output="value").network.sizes == (4, 3, 2)
    assert MLP.from_onnx(proto, output="y").network.activations == ("tanh",)
    assert MLP.from_onnx(proto, output="r").network.activations == ("relu",)
    with pytest.raises(ValueError, match="output is 'z', which no node makes; the model's outputs are 'y', 'value'"):
        MLP.from_onnx(proto, output="z")
    with pytest.raises(TypeError, match="output is a int; accepted: the name of a tensor, or None"):
        MLP.from_onnx(proto, output=0)


def test_several_inputs():
    proto = model([("MatMul", ["x", "W"], ["h"]), ("MatMul", ["z", "W"], ["i"]), ("Add", ["h", "i"], ["y"])], {"W": W})
    proto.graph.input.append(onnx.helper.make_tensor_value_info("z", 1, ["rows", 4]))
    with pytest.raises(
        ValueError, match=r"'n1' \(MatMul\).*it takes the model's input 'z', and another node takes 'x'"
    ):
        MLP.from_onnx(proto)


# --- Without onnx ---------------------------------------------------------------------------------------------------------


def test_without_the_package_onnx():
    program = """
    import sys
    import numpy as np, cupymlp

    assert "onnx" not in sys.modules
    sys.modules["onnx"] = None
    net = cupymlp.MLP([np.eye(3)])
    for call in (lambda: net.to_onnx("net.onnx"), lambda: cupymlp.MLP.from_onnx("net.onnx")):
        try:
            call()
        except ImportError as error:
            assert "pip install 'cupymlp[onnx]'" in str(error), error
        else:
            sys.exit("no error")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
