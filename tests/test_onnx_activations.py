"""MLP.from_onnx: every way in which exporters write an activation."""

from __future__ import annotations

import numpy as np
import pytest
from support import same_bits

from cupymlp import MLP
from cupymlp.network import numpy_dtype

onnx = pytest.importorskip("onnx")
from onnx_models import KINDS, W2, B, W, X, chain, checked, computed, model  # noqa: E402

HALF, ROOT = np.array(0.5), np.array(np.sqrt(2))
FORMS = {
    "leaky_relu by its default": (("leaky_relu", 0.01), [("LeakyRelu", ["h"], ["g"])], {}),
    "leaky_relu": (("leaky_relu", 0.2), [("LeakyRelu", ["h"], ["g"], {"alpha": 0.2})], {}),
    "leaky_relu of a tensor": (("leaky_relu", 0.3), [("PRelu", ["h", "s"], ["g"])], {"s": np.full(3, 0.3)}),
    "elu": (("elu", 0.7), [("Elu", ["h"], ["g"], {"alpha": 0.7})], {}),
    "celu": (
        ("celu", 1.3),
        [("Div", ["h", "a"], ["t"]), ("Elu", ["t"], ["e"]), ("Mul", ["e", "a"], ["g"])],
        {"a": 1.3},
    ),
    "selu": ("selu", [("Selu", ["h"], ["g"])], {}),
    "relu by Max": ("relu", [("Max", ["zero", "h"], ["g"])], {"zero": 0.0}),
    "relu by Clip": ("relu", [("Clip", ["h", "zero"], ["g"])], {"zero": 0.0}),
    "relu6": ("relu6", [("Clip", ["h", "zero", "six"], ["g"])], {"zero": 0.0, "six": 6.0}),
    "gelu": ("gelu", [("Gelu", ["h"], ["g"])], {}),
    "gelu, the half first": (
        "gelu",
        [
            ("Mul", ["h", "half"], ["a"]),
            ("Div", ["h", "root"], ["b"]),
            ("Erf", ["b"], ["c"]),
            ("Add", ["c", "one"], ["d"]),
            ("Mul", ["a", "d"], ["g"]),
        ],
        {"half": HALF, "root": ROOT, "one": 1.0},
    ),
    "gelu, multiplied out": (
        "gelu",
        [
            ("Mul", ["h", "r"], ["b"]),
            ("Erf", ["b"], ["c"]),
            ("Mul", ["c", "h"], ["d"]),
            ("Add", ["h", "d"], ["e"]),
            ("Div", ["e", "two"], ["g"]),
        ],
        {"r": np.sqrt(0.5), "two": 2.0},
    ),
    "gelu_tanh": ("gelu_tanh", [("Gelu", ["h"], ["g"], {"approximate": "tanh"})], {}),
    "gelu_tanh by a power": (
        "gelu_tanh",
        [
            ("Pow", ["h", "three"], ["a"]),
            ("Mul", ["a", "k"], ["b"]),
            ("Add", ["h", "b"], ["c"]),
            ("Mul", ["r", "c"], ["d"]),
            ("Tanh", ["d"], ["e"]),
            ("Add", ["one", "e"], ["f"]),
            ("Mul", ["half", "f"], ["i"]),
            ("Mul", ["i", "h"], ["g"]),
        ],
        {"three": 3.0, "k": 0.044715, "r": np.sqrt(2 / np.pi), "one": 1.0, "half": 0.5},
    ),
    "silu": ("silu", [("Sigmoid", ["h"], ["a"]), ("Mul", ["a", "h"], ["g"])], {}),
    "silu by exp": (
        "silu",
        [("Neg", ["h"], ["a"]), ("Exp", ["a"], ["b"]), ("Add", ["one", "b"], ["c"]), ("Div", ["h", "c"], ["g"])],
        {"one": 1.0},
    ),
    "sigmoid by exp": (
        "sigmoid",
        [("Neg", ["h"], ["a"]), ("Exp", ["a"], ["b"]), ("Add", ["b", "one"], ["c"]), ("Reciprocal", ["c"], ["g"])],
        {"one": 1.0},
    ),
    "softplus by exp": (
        "softplus",
        [("Exp", ["h"], ["a"]), ("Add", ["a", "one"], ["b"]), ("Log", ["b"], ["g"])],
        {"one": 1.0},
    ),
    "softplus, cut off": (
        "softplus",
        [("Softplus", ["h"], ["a"]), ("Greater", ["h", "c"], ["b"]), ("Where", ["b", "h", "a"], ["g"])],
        {"c": 20.0},
    ),
    "softsign": (
        "softsign",
        [("Abs", ["h"], ["a"]), ("Add", ["one", "a"], ["b"]), ("Div", ["h", "b"], ["g"])],
        {"one": 1.0},
    ),
    "sin": (("sin", 1.0), [("Sin", ["h"], ["g"])], {}),
    "sin of more": (("sin", 30.0), [("Mul", ["w", "h"], ["a"]), ("Sin", ["a"], ["g"])], {"w": 30.0}),
    "hard_sigmoid": ("hard_sigmoid", [("HardSigmoid", ["h"], ["g"], {"alpha": 1 / 6, "beta": 0.5})], {}),
    "hard_sigmoid by clip": (
        "hard_sigmoid",
        [("Add", ["h", "three"], ["a"]), ("Clip", ["a", "zero", "six"], ["b"]), ("Div", ["b", "six"], ["g"])],
        {"three": 3.0, "zero": 0.0, "six": 6.0},
    ),
    "hard_swish": ("hard_swish", [("HardSwish", ["h"], ["g"])], {}),
    "hard_swish by hard_sigmoid": (
        "hard_swish",
        [("HardSigmoid", ["h"], ["a"], {"alpha": 1 / 6}), ("Mul", ["h", "a"], ["g"])],
        {},
    ),
    "hard_swish by clip": (
        "hard_swish",
        [
            ("Add", ["h", "three"], ["a"]),
            ("Clip", ["a", "zero", "six"], ["b"]),
            ("Mul", ["h", "b"], ["c"]),
            ("Div", ["c", "six"], ["g"]),
        ],
        {"three": 3.0, "zero": 0.0, "six": 6.0},
    ),
    "squareplus": (
        "squareplus",
        [
            ("Pow", ["h", "two"], ["a"]),
            ("Add", ["four", "a"], ["b"]),
            ("Sqrt", ["b"], ["c"]),
            ("Add", ["c", "h"], ["d"]),
            ("Mul", ["d", "half"], ["g"]),
        ],
        {"two": 2.0, "four": 4.0, "half": 0.5},
    ),
    "exp": ("exp", [("Exp", ["h"], ["g"])], {}),
    "tanh, sums scaled": (
        "tanh",
        [("Mul", ["h", "two"], ["a"]), ("Sub", ["a", "one"], ["b"]), ("Tanh", ["b"], ["g"])],
        {"two": 2.0, "one": 1.0},
    ),
    "tanh, scaled": (
        "tanh",
        [("Tanh", ["h"], ["a"]), ("Mul", ["a", "two"], ["b"]), ("Sub", ["one", "b"], ["g"])],
        {"two": 2.0, "one": 1.0},
    ),
    "relu, features scaled": (
        "relu",
        [("Relu", ["h"], ["a"]), ("Mul", ["a", "s"], ["b"]), ("Add", ["t", "b"], ["g"])],
        {"s": B, "t": B[None]},
    ),
    "softplus with a beta": (
        "softplus",
        [("Mul", ["h", "b"], ["a"]), ("Softplus", ["a"], ["c"]), ("Div", ["c", "b"], ["g"])],
        {"b": 3.0},
    ),
    "hard_sigmoid of another slope": ("hard_sigmoid", [("HardSigmoid", ["h"], ["g"])], {}),
    "dropout": ("tanh", [("Tanh", ["h"], ["a"]), ("Dropout", ["a"], ["b"]), ("Identity", ["b"], ["g"])], {}),
    "batch normalization before": (
        "relu",
        [("BatchNormalization", ["h", "s", "t", "m", "v"], ["a"], {"epsilon": 0.001}), ("Relu", ["a"], ["g"])],
        {"s": B, "t": B + 1, "m": B * 2, "v": B**2},
    ),
    "batch normalization after": (
        "gelu",
        [("Gelu", ["h"], ["a"]), ("BatchNormalization", ["a", "s", "t", "m", "v"], ["g"])],
        {"s": B, "t": B + 1, "m": B * 2, "v": B**2},
    ),
    "nothing": ("identity", [("Identity", ["h"], ["g"])], {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_an_activation(form):
    spec, nodes, constants = FORMS[form]
    proto = checked(model(*chain(*nodes, **constants), y=("rows", 2), dtype="float64"))
    net = MLP.from_onnx(proto)
    assert net.network.activations == (spec, "identity")
    assert net.network.sizes == (4, 3, 2)
    if not any(word in form for word in ("scaled", "beta", "slope", "batch")):  # nothing is folded
        want = MLP([W, W2], [B, None], [spec])
        assert net.network == want.network
        assert all(np.array_equal(a, b) for a, b in zip(net.weights, want.weights, strict=True))
    # onnx's reference implementation has these, or their attributes, in float32.
    rough = {"Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Elu", "Selu", "BatchNormalization"}
    close = 1e-11 if rough.isdisjoint(node[0] for node in nodes) else 1e-5
    np.testing.assert_allclose(net(X, device="cpu"), computed(proto, X), rtol=close, atol=close)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("opset", [7, 11, 13, 20])
def test_softmax_last(name, opset):
    op = "Softmax" if name == "softmax" else "LogSoftmax"
    for axis in ({}, {"axis": 1}, {"axis": -1}):
        proto = model([("MatMul", ["x", "W"], ["a"]), (op, ["a"], ["y"], axis)], {"W": W}, dtype="float64", opset=opset)
        net = MLP.from_onnx(proto)
        assert net.network.activations == (name,)
        if opset >= 13:
            np.testing.assert_allclose(net(X, device="cpu"), computed(proto, X), rtol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_constants_of_half_precision_are_recognized(dtype):
    for form in ("gelu, the half first", "gelu_tanh by a power", "hard_swish by clip"):
        spec, nodes, constants = FORMS[form]
        nodes, arrays = chain(*nodes, **constants)
        arrays = {name: np.asarray(a).astype(numpy_dtype(dtype)) for name, a in arrays.items()}
        net = MLP.from_onnx(model(nodes, arrays, dtype=dtype, y=("rows", 2)))
        assert (net.dtype, net.network.activations) == (dtype, (spec, "identity"))
        assert same_bits(net.weights[0], arrays["W"])


def made_of(dtype, nodes, **constants):
    """What is read of a layer, these nodes, and another layer, of constants of the dtype."""
    nodes, arrays = chain(*nodes, **constants)
    arrays = {name: np.asarray(a).astype(numpy_dtype(dtype)) for name, a in arrays.items()}
    return MLP.from_onnx(model(nodes, arrays, dtype=dtype, y=("rows", 2)), dtype="float64"), arrays


NEAR_1 = [
    ("bfloat16", 1 + 3 * 2.0**-7),
    ("bfloat16", 1 + 2.0**-7),
    ("bfloat16", 1 - 2.0**-8),
    ("float16", 1 + 3 * 2.0**-10),
    ("float16", 1 - 2.0**-11),
    ("float32", 1 + 2.0**-23),
    ("float64", 1 + 9e-7),
]


@pytest.mark.parametrize(("dtype", "scale"), NEAR_1)
@pytest.mark.parametrize("form", ["silu", "hard_swish by clip", "gelu, multiplied out", "gelu_tanh by a power", "elu"])
def test_a_scale_near_1_after_an_activation_is_kept(form, dtype, scale):
    spec, nodes, constants = FORMS[form]
    spec = ("elu", 1.0) if form == "elu" else spec
    nodes = [("Elu", ["h"], ["u"])] if form == "elu" else [*nodes[:-1], (*nodes[-1][:2], ["u"])]
    net, arrays = made_of(dtype, [*nodes, ("Mul", ["u", "factor"], ["g"])], factor=scale, **constants)
    assert net.network.activations == (spec, "identity")
    assert np.array_equal(net.weights[0], arrays["W"].astype("f8"))
    np.testing.assert_allclose(net.weights[1], arrays["W2"].astype("f8") * scale, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "scale"), [*NEAR_1, *((d, s) for d in KINDS for s in (0.5, 2.0, -0.75, 1.7, 0.3535))]
)
@pytest.mark.parametrize("form", ["silu", "silu by exp", "sigmoid by exp", "softplus by exp", "softsign", "squareplus"])
def test_a_scale_before_an_activation_in_pieces(form, dtype, scale):
    spec, nodes, constants = FORMS[form]
    nodes = [
        ("Mul", ["h", "factor"], ["hc"]),
        *((op, ["hc" if i == "h" else i for i in ins], outs) for op, ins, outs in nodes),
    ]
    net, arrays = made_of(dtype, nodes, factor=scale, **constants)
    scale = float(arrays["factor"])
    assert net.network.activations == (spec, "identity")
    np.testing.assert_allclose(net.weights[0], arrays["W"].astype("f8") * scale, 1e-12)
    np.testing.assert_allclose(net.biases[0], arrays["B"].astype("f8") * scale, 1e-12)
    np.testing.assert_allclose(net.weights[1], arrays["W2"].astype("f8"), 1e-12)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("scale", [0.5, 1.7, -0.75])
@pytest.mark.parametrize(
    "form", ["gelu, the half first", "gelu, multiplied out", "gelu_tanh by a power", "hard_swish by clip"]
)
def test_a_scale_before_constants_that_no_dtype_holds(form, scale, dtype):
    spec, nodes, constants = FORMS[form]
    nodes = [
        ("Mul", ["h", "factor"], ["hc"]),
        *((op, ["hc" if i == "h" else i for i in ins], outs) for op, ins, outs in nodes),
    ]
    net, arrays = made_of(dtype, nodes, factor=scale, **constants)
    assert net.network.activations == (spec, "identity")
    np.testing.assert_allclose(net.weights[0], arrays["W"].astype("f8") * float(arrays["factor"]), 1e-12)
    np.testing.assert_allclose(net.weights[1], arrays["W2"].astype("f8"), 1e-12)


@pytest.mark.parametrize(("dtype", "scale"), [*NEAR_1, ("float32", 1.702), ("float64", 1.702)])
def test_a_scale_inside_an_activation(dtype, scale):
    """v sigmoid(c v), the quick gelu of c = 1.702, is silu(c v) / c."""
    nodes = [("Mul", ["h", "factor"], ["a"]), ("Sigmoid", ["a"], ["b"]), ("Mul", ["h", "b"], ["g"])]
    net, arrays = made_of(dtype, nodes, factor=scale)
    scale = float(arrays["factor"])
    assert net.network.activations == ("silu", "identity")
    np.testing.assert_allclose(net.weights[0], arrays["W"].astype("f8") * scale, 1e-12)
    np.testing.assert_allclose(net.weights[1], arrays["W2"].astype("f8") / scale, 1e-12)


def test_a_negative_elu_of_a_negative_is_no_celu():
    net, arrays = made_of("float64", [("Neg", ["h"], ["a"]), ("Elu", ["a"], ["b"]), ("Neg", ["b"], ["g"])])
    assert net.network.activations == (("elu", 1.0), "identity")
    assert np.array_equal(net.weights[0], -arrays["W"])
    assert np.array_equal(net.weights[1], -arrays["W2"])


@pytest.mark.parametrize("dtype", KINDS)
def test_celu_by_the_inverse(dtype):
    inverse = 1 / float(np.asarray(1.3).astype(numpy_dtype(dtype)))
    nodes = [("Mul", ["h", "i"], ["a"]), ("Elu", ["a"], ["b"]), ("Mul", ["b", "c"], ["g"])]
    assert made_of(dtype, nodes, i=inverse, c=1.3)[0].network.activations[0][0] == "celu"


@pytest.mark.parametrize("dtype", KINDS)
def test_a_constant_is_cast_like_the_data(dtype):
    """As PyTorch's exporter writes a bfloat16 softplus."""
    nodes = [("Softplus", ["h"], ["a"]), ("CastLike", ["one", "a"], ["b"]), ("Div", ["a", "b"], ["g"])]
    nodes, arrays = chain(*nodes)
    arrays = {name: a.astype(numpy_dtype(dtype)) for name, a in arrays.items()}
    arrays["one"] = np.float32(1.001953125)
    net = MLP.from_onnx(model(nodes, arrays, dtype=dtype, y=("rows", 2)))
    assert (net.dtype, net.network.activations) == (dtype, ("softplus", "identity"))
    rounded = float(arrays["one"].astype(numpy_dtype(dtype)))
    want = arrays["W2"].astype("f8") * (1 / rounded)
    assert same_bits(net.weights[1], want.astype(numpy_dtype(dtype)))


def test_data_is_not_cast_like_a_constant_of_another_dtype():
    nodes, arrays = chain(("CastLike", ["h", "one"], ["a"]), ("Relu", ["a"], ["g"]), one=1.0)
    arrays = {name: a.astype("f4") for name, a in arrays.items()}
    assert MLP.from_onnx(model(nodes, arrays, y=("rows", 2))).network.activations[0] == "relu"
    arrays["one"] = np.float16(1)
    with pytest.raises(ValueError, match=r"n1.*it casts data of float32 like float16; accepted: of the same dtype"):
        MLP.from_onnx(model(nodes, arrays, y=("rows", 2)))
