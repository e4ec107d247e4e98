"""MLP.from_state_dict, from_safetensors and to_safetensors: against torch itself, files that it wrote, and broken files."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from support import random_net, unavailable

from cupymlp import MLP
from cupymlp.activations import ACTIVATIONS
from cupymlp.network import numpy_dtype
from cupymlp.reference import error_in_bounds, forward_and_bound

DATA = Path(__file__).parent / "data"
DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.fixture(autouse=True)
def needs_safetensors():
    try:
        import safetensors  # noqa: F401
    except ImportError:
        unavailable("the package safetensors is needed")


def within(net, x, expected):
    """The network on the CPU beside what a framework computed in float64, where both may be off by the bound."""
    own, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    found = net(x, device="cpu")
    assert error_in_bounds(found, expected, bound).max() <= (2 if net.network.dtype == "float64" else 1.001)
    assert error_in_bounds(own, expected, bound).max() <= 1


# --- Files that torch wrote -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch_deep_float32", "torch_nested_float64", "torch_bfloat16", "torch_tied_float32"])
def test_files_that_torch_wrote(name):
    """11 square layers, whose names do not sort as texts; nested modules; bfloat16; a weight that two layers share."""
    if "bfloat16" in name:
        pytest.importorskip("ml_dtypes")
    net = MLP.from_safetensors(DATA / f"{name}.safetensors", activation="relu")
    with np.load(DATA / "torch_answers.npz") as answers:
        x, y = answers[f"{name}_x"], answers[f"{name}_y"]
    assert net.network.dtype == name.rpartition("_")[2]
    within(net, x.astype(net.dtype), y)
    if "tied" in name:
        assert (net.weights[0] == net.weights[1]).all()


# --- Against torch --------------------------------------------------------------------------------------------------------

MODULES = {  # what torch calls each activation
    "identity": lambda nn: nn.Identity(),
    "relu": lambda nn: nn.ReLU(),
    ("leaky_relu", 0.01): lambda nn: nn.LeakyReLU(),
    ("leaky_relu", 0.25): lambda nn: nn.LeakyReLU(0.25),
    ("elu", 1.0): lambda nn: nn.ELU(),
    ("elu", 0.5): lambda nn: nn.ELU(0.5),
    ("celu", 2.0): lambda nn: nn.CELU(2.0),
    "selu": lambda nn: nn.SELU(),
    "gelu": lambda nn: nn.GELU(),
    "gelu_tanh": lambda nn: nn.GELU("tanh"),
    "silu": lambda nn: nn.SiLU(),
    "tanh": lambda nn: nn.Tanh(),
    "sigmoid": lambda nn: nn.Sigmoid(),
    "softplus": lambda nn: nn.Softplus(threshold=1000),
    "softsign": lambda nn: nn.Softsign(),
    "hard_sigmoid": lambda nn: nn.Hardsigmoid(),
    "hard_swish": lambda nn: nn.Hardswish(),
    "relu6": lambda nn: nn.ReLU6(),
}
LAST = {"softmax": lambda nn: nn.Softmax(-1), "log_softmax": lambda nn: nn.LogSoftmax(-1)}


def name_of(spec):
    return spec if isinstance(spec, str) else spec[0]


def known(modules):
    return [spec for spec in modules if name_of(spec) in ACTIVATIONS]


def torch_net(torch, sizes, activation, last, dtype, biases):
    from torch import nn

    layers = []
    for i, (k, n) in enumerate(zip(sizes, sizes[1:])):
        final = i == len(sizes) - 2
        module = {**MODULES, **LAST}[last if final else activation]
        layers += [nn.Linear(k, n, bias=biases[i % len(biases)]), module(nn)]
    return nn.Sequential(*layers).to(getattr(torch, dtype))


@pytest.mark.parametrize("activation", known(MODULES), ids=str)
@pytest.mark.parametrize("sizes", [(5, 3), (4, 4, 4), (3, 8, 8, 2), (6, 6, 6, 6, 6, 6)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_state_dicts_of_torch(sizes, activation, dtype, tmp_path):
    """Depths of 1 to 5, square layers, biases on and off, all activations; directly and through a file."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    torch.manual_seed(len(sizes))
    last = activation if len(sizes) == 2 else "identity"
    module = torch_net(torch, sizes, activation, last, dtype, [True, False] if len(sizes) % 2 else [True])
    save_file(module.state_dict(), tmp_path / "net.safetensors")
    x = torch.randn(20, sizes[0], dtype=getattr(torch, dtype))
    with torch.no_grad():
        expected = module.double()(x.double()).numpy()
    module.to(getattr(torch, dtype))
    for net in (
        MLP.from_state_dict(module.state_dict(), activation=activation, out_activation=last),
        MLP.from_safetensors(tmp_path / "net.safetensors", activation=activation, out_activation=last),
    ):
        assert net.network.dtype == dtype
        assert net.network.sizes == sizes
        within(net, x.numpy(), expected)


@pytest.mark.parametrize("last", known(LAST))
def test_output_functions_of_torch(last):
    torch = pytest.importorskip("torch")
    module = torch_net(torch, (4, 6, 3), "relu", last, "float64", [True])
    x = torch.randn(20, 4, dtype=torch.float64)
    net = MLP.from_state_dict(module.state_dict(), activation="relu", out_activation=last)
    within(net, x.numpy(), module(x).detach().numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_torch_that_record_gradients(dtype):
    torch = pytest.importorskip("torch")
    module = torch_net(torch, (4, 4, 4), "relu", "identity", dtype, [True])
    net = MLP.from_state_dict(dict(module.named_parameters()), activation="relu")
    assert net.network.dtype == dtype
    for mine, theirs in zip(net.weights, (module[0].weight, module[2].weight)):
        assert (mine.astype("f8") == theirs.detach().double().numpy().T).all()


def test_tensors_without_numbers():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"0\.weight is a torch\.Tensor that has no numbers to read"):
        MLP.from_state_dict({"0.weight": torch.empty(3, 3, device="meta")}, activation="relu")


def test_quantized_tensors():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: they are deprecated
        tensor = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"0\.weight is a torch\.Tensor that NumPy makes no array of"):
        MLP.from_state_dict({"0.weight": tensor})
    with pytest.raises(TypeError, match=r"0\.bias is a torch\.Tensor that NumPy makes no array of"):
        MLP.from_state_dict({"0.weight": torch.eye(3), "0.bias": tensor[0]})


@pytest.mark.parametrize("value", [[[1.0, 2.0], [3.0]], [np.ones(2), np.ones(3)]])
def test_values_that_are_no_arrays(value):
    with pytest.raises(TypeError, match=r"state_dict\['0\.weight'\] is a .*; accepted: a tensor or an array"):
        MLP.from_state_dict({"0.weight": value})


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_files_load_strictly_into_a_sequential(rng, tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    net = random_net(rng, (4, 4, 4, 2), dtype, biases=[True, True, True], activations=["relu", "identity", "identity"])
    net.mlp().to_safetensors(tmp_path / "net.safetensors")
    nn = torch.nn
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)).to(
        getattr(torch, dtype)
    )
    module.load_state_dict(load_file(tmp_path / "net.safetensors"), strict=True)
    for i, weight in enumerate(net.weights):
        assert (module[2 * i].weight.detach().double().numpy() == weight.T.astype("f8")).all()


# --- Our files ------------------------------------------------------------------------------------------------------------


def bits(net):
    return [None if a is None else a.tobytes() for a in (*net.weights, *net.biases)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(3, 2), (4, 4, 4), (5, 7, 1, 2), (3,) * 13, (4, 0, 2)], ids=str)
@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_our_files_give_the_same_network(rng, tmp_path, dtype, sizes, layout):
    net = random_net(rng, sizes, dtype).mlp(weight_layout=layout)
    net.to_safetensors(tmp_path / "net.safetensors", prefix="policy.net")
    again = MLP.from_safetensors(tmp_path / "net.safetensors")
    assert again.network == net.network
    in_out = MLP([w.T for w in net.weights], net.biases, dtype=dtype) if layout == "out_in" else net
    assert bits(again) == bits(in_out)
    assert os.listdir(tmp_path) == ["net.safetensors"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_our_files_say_the_activations(rng, tmp_path, activation):
    row = ACTIVATIONS[activation]
    if getattr(row, "parameter", None) is not None:
        activation = (activation, 0.75)
    hidden = "relu" if getattr(row, "over_row", False) else activation
    net = MLP([rng.standard_normal((3, 3)) for _ in range(3)], None, ["relu", hidden], activation)
    net.to_safetensors(tmp_path / "net")
    again = MLP.from_safetensors(tmp_path / "net")
    assert again.network == net.network
    assert MLP.from_safetensors(tmp_path / "net", activation="identity").network.activations[:2] == ("identity",) * 2
    assert MLP.from_safetensors(tmp_path / "net", out_activation="relu").network.activations[2] == "relu"


def test_our_files_say_the_precision(rng, tmp_path):
    net = random_net(rng, (3, 4, 2), "float32").mlp(precision="split3")
    net.to_safetensors(tmp_path / "net")
    assert MLP.from_safetensors(tmp_path / "net").network == net.network
    assert MLP.from_safetensors(tmp_path / "net", dtype="float32").network.precision == "split3"


def test_an_interrupted_save_leaves_the_old_file(rng, tmp_path, monkeypatch):
    import safetensors.numpy

    net = random_net(rng, (3, 4, 2), "float32").mlp()
    net.to_safetensors(tmp_path / "net")
    before = (tmp_path / "net").read_bytes()

    def fails(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.numpy, "save_file", fails)
    with pytest.raises(OSError, match="no space left"):
        net.to_safetensors(tmp_path / "net")
    assert (tmp_path / "net").read_bytes() == before
    assert os.listdir(tmp_path) == ["net"]


def test_bfloat16_where_nothing_imported_ml_dtypes_before(rng, tmp_path):
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, (3, 4, 2), "bfloat16").mlp()
    net.to_safetensors(tmp_path / "net")
    program = f"import cupymlp; print(cupymlp.MLP.from_safetensors({str(tmp_path / 'net')!r}).dtype)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "bfloat16\n"


def test_without_the_package(tmp_path):
    program = """
import sys, numpy as np, cupymlp
sys.modules["safetensors"] = None
net = cupymlp.MLP.from_state_dict({"0.weight": np.eye(2)})
for call in (lambda: net.to_safetensors("x"), lambda: cupymlp.MLP.from_safetensors("x")):
    try:
        call()
    except ImportError as error:
        assert "pip install safetensors" in str(error), error
    else:
        sys.exit("no error")
assert "torch" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


# --- Names and orders -----------------------------------------------------------------------------------------------------


def state(*names, size=3, bias=True):
    """Square layers that can be told apart: layer i adds i to what it gets."""
    tensors = OrderedDict()
    for i, name in enumerate(names):
        dot = "." if name else ""
        tensors[f"{name}{dot}weight"] = np.eye(size, dtype="f4")
        if bias:
            tensors[f"{name}{dot}bias"] = np.full(size, 10.0**i, "f4")
    return tensors


ORDERS = {
    "numbers": ["0", "2", "4"],
    "ten after two": ["net.2", "net.9", "net.10", "net.11"],
    "numbers behind words": ["fc1", "fc2", "fc10"],
    "numbers behind words below": ["model.layer_1.linear", "model.layer_2.linear", "model.layer_10.linear"],
    "nested": ["net.0", "net.2.0", "net.2.2", "net.3"],
    "deeply nested": ["a.b.c.0", "a.b.c.1"],
    "one alone": ["head"],
    "one without a name": [""],
    "a number with zeros": ["l00", "l01", "l02"],
}


@pytest.mark.parametrize("name", ORDERS)
def test_layers_are_in_the_order_of_their_numbers(rng, name):
    tensors = state(*ORDERS[name])
    shuffled = list(tensors)
    rng.shuffle(shuffled)
    net = MLP.from_state_dict({n: tensors[n] for n in shuffled}, activation="identity")
    assert [b[0] for b in net.biases] == [10.0**i for i in range(len(ORDERS[name]))]


def test_prefixes_choose_and_order():
    tensors = state("actor.0", "actor.2", "actor.out", "critic.0", "critic.2")
    tensors["log_std"] = np.zeros(3)

    def firsts(prefix):
        net = MLP.from_state_dict(tensors, activation="relu", prefix=prefix)
        return [round(np.log10(b[0])) for b in net.biases]

    assert firsts("critic") == firsts("critic.") == [3, 4]
    assert firsts(["actor.0", "actor.2", "actor.out"]) == [0, 1, 2]
    assert firsts(("actor.out", "critic")) == [2, 3, 4]
    assert firsts("actor.out") == [2]


def test_a_policy_of_stable_baselines_with_its_last_layer_elsewhere():
    tensors = state(
        "mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net", "mlp_extractor.value_net.0"
    )
    net = MLP.from_state_dict(tensors, activation="relu", prefix=["mlp_extractor.policy_net", "action_net"])
    assert [b[0] for b in net.biases] == [1, 10, 100]


def test_biases_may_be_missing_here_and_there():
    tensors = state("0", "2")
    del tensors["0.bias"]
    assert MLP.from_state_dict(tensors, activation="relu").network.biases == (False, True)


def test_a_single_layer_needs_no_activation():
    assert MLP.from_state_dict(state("0")).network.depth == 1


def extra(name, shape=(3,)):
    return lambda: {**state("0", "2"), name: np.ones(shape, "f4")}


def without(name, base=("0", "2")):
    return lambda: {k: v for k, v in state(*base).items() if k != name}


def changed(name, value):
    return lambda: {**state("0", "2"), name: value}


BAD_TREES = {
    "BatchNorm": (
        extra("1.running_mean"),
        "1.running_mean of the state dict is no weight or bias of a dense layer: it belongs to a BatchNorm",
    ),
    "BatchNorm's count": (extra("1.num_batches_tracked", ()), "1.num_batches_tracked .* belongs to a BatchNorm layer"),
    "LayerNorm": (extra("1.weight"), r"1.weight of the state dict has shape \(3,\): it belongs to a normalization"),
    "a scalar": (extra("1.weight", ()), r"1.weight of the state dict has shape \(\)"),
    "Conv1d": (
        extra("1.weight", (3, 3, 1)),
        r"1.weight of the state dict has shape \(3, 3, 1\): it belongs to a convolution",
    ),
    "Conv2d": (extra("1.weight", (3, 3, 1, 1)), "it belongs to a convolution or a layer with more axes"),
    "weight_norm": (extra("2.weight_g"), r"2.weight_g .* belongs to a parametrized \(weight_norm"),
    "parametrizations": (extra("2.parametrizations.weight.original0"), "original0 .* belongs to a parametrized"),
    "an LSTM": (extra("rnn.weight_ih_l0"), "rnn.weight_ih_l0 .* belongs to a recurrent layer"),
    "a GRU's bias": (extra("rnn.bias_hh_l0_reverse"), "rnn.bias_hh_l0_reverse .* belongs to a recurrent layer"),
    "attention": (extra("attn.in_proj_weight", (9, 3)), "attn.in_proj_weight .* belongs to an attention layer"),
    "a parameter of its own": (
        extra("log_std"),
        "log_std of the state dict is no weight or bias of a dense layer. prefix=",
    ),
    "a weight missing": (without("2.weight"), "'2.bias' of the state dict has no weight beside it"),
    "the first weight missing": (without("0.weight"), "'0.bias' of the state dict has no weight beside it"),
    "nothing": (dict, "no array of the state dict has a name that begins with prefix ''"),
    "a bias too short": (
        changed("2.bias", np.ones(2)),
        r"2.bias has shape \(2,\); beside 2.weight \(3, 3\) it needs \(3,\)",
    ),
    "a bias with two axes": (changed("2.bias", np.ones((1, 3))), r"2.bias has shape \(1, 3\); beside 2.weight"),
    "shapes that do not chain": (
        changed("2.weight", np.ones((3, 4))),
        r"0.weight \(3, 3\) and 2.weight \(3, 4\) do not chain as \(out, in\) weights: the one gives 3 .* takes 4",
    ),
    "NaN": (changed("2.weight", np.full((3, 3), np.nan)), "2.weight has NaN or infinite numbers, 9 of 9"),
    "infinity": (changed("0.bias", np.array([0, np.inf, 1])), "0.bias has NaN or infinite numbers, 1 of 3"),
    "two words": (
        lambda: state("actor.0", "critic.0"),
        "has layers under 'actor', 'critic', and their names do not say which comes first",
    ),
    "words on one level": (
        lambda: state("net.hidden", "net.out"),
        "layers under 'net.hidden', 'net.out', .* prefix=\\['net.hidden', 'net.out'\\]",
    ),
    "a word without a number": (lambda: state("fc", "fc1"), "layers under 'fc', 'fc1'"),
    "one number twice": (lambda: state("l1", "l01"), "layers under 'l1', 'l01'"),
    "a layer that holds another": (lambda: state("net", "net.0"), "layers under 'net.', 'net.0'"),
    "many words": (lambda: state(*(f"{c}x" for c in "abcdefghij")), "'hx' and 2 more, and their names"),
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_state_dicts_that_are_no_chain_are_refused(name):
    make, message = BAD_TREES[name]
    with pytest.raises(ValueError, match=message):
        MLP.from_state_dict(make(), activation="relu")


def test_arguments_that_do_not_suit_are_refused():
    with pytest.raises(
        ValueError, match="activation is None, and nothing but the caller knows what is between the 2 layers"
    ):
        MLP.from_state_dict(state("0", "2"))
    with pytest.raises(
        ValueError,
        match="no array of the state dict has a name that begins with prefix 'pi'; they begin with '0', '2', '10'",
    ):
        MLP.from_state_dict(state("0", "10", "2"), activation="relu", prefix="pi")
    with pytest.raises(ValueError, match=r"takes '0\.weight' twice"):
        MLP.from_state_dict(state("0", "2"), activation="relu", prefix=["", "0"])
    with pytest.raises(ValueError, match="has no weights; accepted: at least one dense layer"):
        MLP.from_state_dict(state("0"), prefix=[])
    for bad in (3, None, [1]):
        with pytest.raises(TypeError, match=r"prefix is a .*; accepted: a text"):
            MLP.from_state_dict(state("0"), prefix=bad)
    with pytest.raises(TypeError, match=r"state_dict is a str; accepted: .* MLP\.from_safetensors"):
        MLP.from_state_dict("net.safetensors")
    with pytest.raises(TypeError, match="state_dict has the key 0; accepted: names"):
        MLP.from_state_dict({0: np.eye(2)})
    with pytest.raises(TypeError, match=r"state_dict\['model'\] is a mapping; .* Then pass it alone"):
        MLP.from_state_dict({"model": state("0"), "epoch": 3})
    with pytest.raises(TypeError, match=r"0\.weight has dtype int64; accepted: floating-point numbers"):
        MLP.from_state_dict({"0.weight": np.eye(2, dtype=np.int64)})
    with pytest.raises(
        TypeError, match=r"0\.weight has dtype complex128; accepted|0\.weight is a .* of dtype complex128"
    ):
        MLP.from_state_dict({"0.weight": np.eye(2, dtype=complex)})

    class Module:
        def state_dict(self):
            return state("0")

    with pytest.raises(TypeError, match=r"Module; accepted: .* Pass its state_dict\(\)"):
        MLP.from_state_dict(Module())


# --- Broken files ---------------------------------------------------------------------------------------------------------


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


GOOD = {"0.weight": entry((2, 3), 0, 24), "0.bias": entry((2,), 24, 32)}


def raw(header, data=bytes(32), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def torch_zip():
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    return buffer.getvalue()


def described(**changes):
    fields = {"format": 1, "activations": ["identity"], "precision": "ieee", **changes}
    return {"__metadata__": {"cupymlp": json.dumps(fields)}, **GOOD}


TWICE = (
    json.dumps({"0.weight": entry((2, 4), 0, 32), "0 weight": entry((4, 2), 0, 32)})
    .replace(" weight", ".weight")
    .encode()
)
NAN = np.full(8, np.nan, "<f4").tobytes()
PICKLE = "looks like a file of torch.save: a pickle, which can run any code when it is read"
DAMAGED = "is not a safetensors file, or it is damaged: "
BAD_FILES = {
    "empty": (b"", DAMAGED),
    "a few bytes": (b"\x01\x02\x03", DAMAGED),
    "text": (b"hello, this is no network at all", DAMAGED),
    "no header": (struct.pack("<Q", 0), DAMAGED),
    "a header of 2^60 bytes": (raw(GOOD, length=2**60), DAMAGED + ".*header too large"),
    "a header of 2^64 - 1 bytes": (raw(GOOD, length=2**64 - 1), DAMAGED),
    "a header longer than the file": (raw(GOOD, length=10**6), DAMAGED),
    "a header that is cut": (raw(GOOD, length=20), DAMAGED),
    "a header that is no JSON": (raw(b"{nothing}"), DAMAGED),
    "a header that is a list": (raw(b"[]"), DAMAGED),
    "a header that is no UTF-8": (raw(b'{"\xff\xfe": 1}'), DAMAGED),
    "a header of brackets": (raw(b"[" * 100_000), DAMAGED),
    "a header of nested objects": (raw(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), DAMAGED),
    "no tensors": (raw({}, b""), "no array of .* has a name that begins with prefix ''"),
    "an absurd shape": (raw({"0.weight": entry((2**31, 2**31), 0, 32)}), DAMAGED),
    "an overflowing shape": (raw({"0.weight": entry((2**40, 2**40), 0, 32)}), DAMAGED + ".*overflow"),
    "a negative size": (raw({"0.weight": entry((-2, 3), 0, 32)}), DAMAGED),
    "a size that is no integer": (raw({"0.weight": entry((2.5, 3), 0, 32)}), DAMAGED),
    "overlapping offsets": (raw({**GOOD, "0.bias": entry((2,), 20, 28)}, bytes(28)), DAMAGED + ".*offset"),
    "a hole between tensors": (raw({**GOOD, "0.bias": entry((2,), 28, 36)}, bytes(36)), DAMAGED + ".*offset"),
    "offsets backwards": (raw({**GOOD, "0.bias": entry((2,), 32, 24)}), DAMAGED),
    "offsets past the end": (raw({**GOOD, "0.bias": entry((2,), 24, 32)}, bytes(30)), DAMAGED),
    "offsets of another length": (raw({**GOOD, "0.bias": entry((3,), 24, 32)}), DAMAGED),
    "more data than tensors": (raw(GOOD, bytes(40)), DAMAGED + ".*not fully covered"),
    "an unknown dtype": (raw({"0.weight": entry((2, 4), 0, 32, "F33")}), DAMAGED),
    "a float8 dtype": (
        raw({"0.weight": entry((4, 8), 0, 32, "F8_E4M3")}),
        "0.weight of .* has dtype F8_E4M3; accepted: F64, F32",
    ),
    "an integer dtype": (
        raw({"0.weight": entry((2, 4), 0, 32, "I32")}),
        "0.weight of .* has dtype I32; accepted: F64, F32",
    ),
    "a name twice": (raw(TWICE), "is damaged: its header has '0.weight' twice"),
    "NaN": (raw(GOOD, NAN), "0.weight has NaN or infinite numbers, 6 of 6"),
    "a normalization": (
        raw({"0.weight": entry((8,), 0, 32)}),
        r"0.weight of .* has shape \(8,\): it belongs to a normalization",
    ),
    "a convolution": (raw({"0.weight": entry((2, 2, 2), 0, 32)}), "it belongs to a convolution"),
    "a bias alone": (raw({"0.bias": entry((8,), 0, 32)}), "'0.bias' of .* has no weight beside it"),
    "a bias of another length": (
        raw({"0.weight": entry((3, 2), 0, 24), "0.bias": entry((2,), 24, 32)}),
        r"0.bias has shape \(2,\); beside 0.weight \(3, 2\) it needs \(3,\)",
    ),
    "a pickle": (pickle.dumps({"0.weight": 1}), PICKLE),
    "a file of torch.save": (torch_zip(), PICKLE + ".*safetensors.torch.save_file"),
    "metadata that is no text": (raw({"__metadata__": {"cupymlp": 1}, **GOOD}), DAMAGED),
    "a description that is no JSON": (
        raw({"__metadata__": {"cupymlp": "{"}, **GOOD}),
        "the metadata 'cupymlp' of .* is damaged: Expecting",
    ),
    "a description of brackets": (
        raw({"__metadata__": {"cupymlp": "[" * 100_000}, **GOOD}),
        "the metadata 'cupymlp' of .* is damaged: ",
    ),
    "a description of a later format": (
        raw(described(format=2)),
        "its format version is 2; this cupymlp reads version 1",
    ),
    "a description that is a list": (raw({"__metadata__": {"cupymlp": "[1]"}, **GOOD}), "its format version is None"),
    "activations that are none": (raw(described(activations=[])), r"is damaged: activations is \[\]"),
    "too many activations": (
        raw(described(activations=["relu", "identity"])),
        "activation has 1 entries for 0 hidden layers",
    ),
    "an unknown activation": (raw(described(activations=["wobble"])), "out_activation is 'wobble'; accepted"),
    "an unknown precision": (raw(described(precision="exact")), "is damaged: precision is 'exact'"),
    "a precision that is a list": (raw(described(precision=["ieee"])), "is damaged: precision is"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_broken_files_are_clear_errors(tmp_path, name):
    content, message = BAD_FILES[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            MLP.from_safetensors(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6
    if DAMAGED in message or PICKLE in message:
        assert str(path) in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        MLP.from_safetensors(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        MLP.from_safetensors(tmp_path)


@pytest.fixture
def written(rng, tmp_path):
    net = random_net(rng, (3, 4, 2), "float32", biases=[True, True]).mlp()
    net.to_safetensors(tmp_path / "good")
    return net, (tmp_path / "good").read_bytes(), tmp_path / "bad"


def test_a_file_cut_short_anywhere_is_a_clear_error(written):
    _, content, bad = written
    for length in range(0, len(content), 5):
        bad.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            MLP.from_safetensors(bad)


def test_a_flipped_byte_of_the_header_is_an_error_or_says_nothing(written):
    """The format has no checksum: a byte of the data makes another number. Never another exception, or another shape."""
    _, content, bad = written
    (length,) = struct.unpack("<Q", content[:8])
    for at in range(8 + length):
        for flip in (0x01, 0x20, 0x80):
            flipped = bytearray(content)
            flipped[at] ^= flip
            bad.write_bytes(flipped)
            try:
                found = MLP.from_safetensors(bad)
            except (ValueError, TypeError):
                continue
            assert found.network.depth <= 2
            assert found.network.sizes[0] in (2, 3, 4)


def test_numbers_that_are_stored_fit_the_dtype(rng, tmp_path):
    """The same numbers, whatever dtype is asked for."""
    net = random_net(rng, (3, 4, 2), "float32").mlp()
    net.to_safetensors(tmp_path / "net")
    wide = MLP.from_safetensors(tmp_path / "net", dtype="float64")
    assert all((a == b).all() for a, b in zip(wide.weights, net.weights))
    assert numpy_dtype(wide.network.dtype) == np.float64
