"""MLP.from_onnx: matrix products, and what is no chain of layers."""

from __future__ import annotations

import numpy as np
import pytest

from cupymlp import MLP
from cupymlp.reference import error_in_bounds, forward_and_bound

onnx = pytest.importorskip("onnx")
from onnx_models import W2, B, W, X, checked, computed, model  # noqa: E402

C_SHAPES = [None, (), (1,), (3,), (1, 1), (1, 3)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", C_SHAPES, ids=str)
@pytest.mark.parametrize("beta", [None, 1.0, 0.75, 0.0])
@pytest.mark.parametrize("alpha", [None, 1.0, -0.3])
@pytest.mark.parametrize("trans_b", [None, 0, 1])
def test_every_combination_of_gemm(trans_b, alpha, beta, shape, dtype):
    attributes = {k: v for k, v in (("alpha", alpha), ("beta", beta), ("transB", trans_b)) if v is not None}
    weight = W.astype(dtype)
    constants = {"W": weight.T.copy() if trans_b else weight}
    if shape is not None:
        constants["C"] = B[: int(np.prod(shape))].reshape(shape).astype(dtype)
    proto = model([("Gemm", ["x", *constants], ["y"], attributes)], constants, dtype=dtype)
    net = MLP.from_onnx(checked(proto))
    assert net.dtype == dtype
    a, b = 1.0 if alpha is None else alpha, 1.0 if beta is None else beta
    want = a * (X.astype(dtype).astype("f8") @ weight.astype("f8"))
    if shape is not None:
        want = want + b * constants["C"].astype("f8")
    assert net.network.biases == (shape is not None and b != 0,)
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, X.astype(dtype))
    assert (error_in_bounds(net(X.astype(dtype), device="cpu"), want, bound) <= 2).all()
    if a == b == 1:
        assert np.array_equal(net.weights[0], weight)
        assert np.array_equal(reference, want)


BAD_LAYERS = {
    "transA": (
        [("Gemm", ["x", "W"], ["y"], {"transA": 1})],
        {"W": W},
        r"node 'n0' \(Gemm\), which makes tensor 'y': transA is 1: samples are in columns",
    ),
    "a constant A": ([("Gemm", ["W", "x"], ["y"])], {"W": W}, r"n0.*its input A is a constant"),
    "a C for each row": (
        [("Gemm", ["x", "W", "C"], ["y"])],
        {"W": W, "C": np.ones((6, 3))},
        r"n0.*input C, 'C', has the shape \[6, 3\]; accepted: one number, or one for each of the 3 outputs",
    ),
    "a C of a column": (
        [("Gemm", ["x", "W", "C"], ["y"])],
        {"W": W, "C": np.ones((6, 1))},
        r"input C, 'C', has the shape \[6, 1\]",
    ),
    "a C of another width": (
        [("Gemm", ["x", "W", "C"], ["y"])],
        {"W": W, "C": np.ones(2)},
        r"input C, 'C', has the shape \[2\]",
    ),
    "a C that depends on x": (
        [("MatMul", ["x", "W"], ["c"]), ("Gemm", ["x", "W", "c"], ["y"])],
        {"W": W},
        r"'n1' \(Gemm\).*its input C depends on the input; accepted: a constant",
    ),
    "a weight that depends on x": (
        [("Gemm", ["x", "x"], ["y"], {"transB": 1})],
        {},
        "its weight 'x' depends on the input",
    ),
    "two data": ([("MatMul", ["x", "x"], ["y"])], {}, r"\(MatMul\).*both its inputs depend on the model's input"),
    "a weight on the left": (
        [("MatMul", ["W", "x"], ["y"])],
        {"W": W.T.copy()},
        "its weight is on the left of data with several axes",
    ),
    "a vector for a weight": (
        [("MatMul", ["x", "W"], ["y"])],
        {"W": W[:, 0].copy()},
        r"its weight 'W' has the shape \[4\]; accepted: a matrix",
    ),
    "a stack of weights": (
        [("MatMul", ["x", "W"], ["y"])],
        {"W": W[None]},
        r"its weight 'W' has the shape \[1, 4, 3\]; accepted: a matrix",
    ),
    "a weight of integers": (
        [("MatMul", ["x", "W"], ["y"])],
        {"W": np.ones((4, 3), "i8")},
        "its weight 'W' is int64; accepted: float16",
    ),
    "a width that does not chain": (
        [("MatMul", ["x", "W"], ["h"]), ("MatMul", ["h", "W"], ["y"])],
        {"W": W},
        r"'n1' \(MatMul\).*the weight 'W' takes 4 features, and the tensor before it has 3",
    ),
    "a width that x does not have": (
        [("MatMul", ["x", "W"], ["y"])],
        {"W": W[:3]},
        "the weight 'W' takes 3 features, and the tensor before it has 4",
    ),
    "no layer": ([("Relu", ["x"], ["y"])], {}, "no layer leads to the output 'y'"),
    "an activation first": (
        [("Relu", ["x"], ["h"]), ("MatMul", ["h", "W"], ["y"])],
        {"W": W},
        r"n0.*\(Relu\).*this is relu\(v\) of the model's input v",
    ),
    "two branches": (
        [("MatMul", ["x", "W"], ["a"]), ("MatMul", ["x", "W"], ["b"]), ("Add", ["a", "b"], ["y"])],
        {"W": W},
        r"'n2' \(Add\).*it joins two branches, 'a' and 'b'",
    ),
    "a residual": (
        [("MatMul", ["x", "W"], ["a"]), ("Relu", ["a"], ["b"]), ("Add", ["a", "b"], ["y"])],
        {"W": W},
        r"'n2' \(Add\), which makes tensor 'y': this is v \+ relu\(v\) of a layer's sums v, which is none of cupymlp's",
    ),
    "softmax in the middle": (
        [("MatMul", ["x", "W"], ["a"]), ("Softmax", ["a"], ["b"]), ("MatMul", ["b", "W2"], ["y"])],
        {"W": W, "W2": W2},
        r"'n2' \(MatMul\).*softmax comes before this layer; accepted: after the last one",
    ),
    "softmax over the rows": (
        [("MatMul", ["x", "W"], ["a"]), ("Softmax", ["a"], ["y"], {"axis": 0})],
        {"W": W},
        "its axis is 0; accepted: the last one",
    ),
    "a scaled softmax": (
        [("MatMul", ["x", "W"], ["a"]), ("Softmax", ["a"], ["b"]), ("Mul", ["b", "c"], ["y"])],
        {"W": W, "c": np.array(2.0)},
        "the output is scaled after softmax, which comes last in an MLP",
    ),
    "a shift for each row": (
        [("MatMul", ["x", "W"], ["a"]), ("Add", ["a", "c"], ["y"])],
        {"W": W, "c": np.ones((6, 1))},
        r"its constant 'c' has the shape \[6, 1\], which is more than one number a feature",
    ),
    "a shift of another width": (
        [("MatMul", ["x", "W"], ["a"]), ("Add", ["a", "c"], ["y"])],
        {"W": W, "c": np.ones(2)},
        r"'c' has the shape \[2\], for 3 features",
    ),
    "a shift that adds an axis": (
        [("MatMul", ["x", "W"], ["a"]), ("Add", ["a", "c"], ["y"])],
        {"W": W, "c": np.ones((1, 1, 3))},
        r"'c' has the shape \[1, 1, 3\], which is more than",
    ),
    "division by zero": (
        [("MatMul", ["x", "W"], ["a"]), ("Div", ["a", "c"], ["y"])],
        {"W": W, "c": np.array([1.0, 0, 1])},
        "with its constant 'c' it makes numbers that are not finite",
    ),
    "a subgraph": (
        [("Loop", ["", "", "x"], ["y"], {"body": onnx.GraphProto()})],
        {},
        r"'n0' \(Loop\), which makes tensor 'y': no MLP is made of this operator; accepted: Abs, Add",
    ),
    "an unknown domain": (
        [("com.microsoft.FusedMatMul", ["x", "W"], ["y"])],
        {"W": W},
        r"\(com.microsoft.FusedMatMul\).*its operator is not ONNX's own",
    ),
    "an unknown attribute": (
        [("Gemm", ["x", "W"], ["y"], {"activation": "Relu"})],
        {"W": W},
        "its attribute 'activation' is not known here, so it is not ignored",
    ),
    "an attribute of another type": (
        [("Gemm", ["x", "W"], ["y"], {"alpha": 1})],
        {"W": W},
        "its attribute alpha is of another type than 'f'",
    ),
    "an alpha that is not finite": (
        [("Gemm", ["x", "W"], ["y"], {"alpha": np.nan})],
        {"W": W},
        "its attribute alpha is nan",
    ),
    "too few inputs": ([("Gemm", ["x"], ["y"])], {}, "it has 1 inputs; accepted: 2 to 3"),
    "a missing input": ([("Gemm", ["x", "", "W"], ["y"])], {"W": W}, "its input 2 is missing"),
    "another clip": (
        [("MatMul", ["x", "W"], ["a"]), ("Clip", ["a", "c"], ["y"])],
        {"W": W, "c": np.array(-1.0)},
        r"\(Clip\).*it clips to -1.0 and None; accepted: 0 and 6",
    ),
    "an activation of one": (
        [("MatMul", ["x", "W"], ["a"]), ("Tanh", ["a"], ["b"]), ("Relu", ["b"], ["y"])],
        {"W": W},
        r"'n2' \(Relu\).*this is relu\(tanh\(v\)\) of a layer's sums v",
    ),
    "mish": (
        [("MatMul", ["x", "W"], ["a"]), ("Softplus", ["a"], ["b"]), ("Tanh", ["b"], ["c"]), ("Mul", ["a", "c"], ["y"])],
        {"W": W},
        r"'n3' \(Mul\).*this is tanh\(softplus\(v\)\) v of a layer's sums v",
    ),
    "slopes that differ": (
        [("MatMul", ["x", "W"], ["a"]), ("PRelu", ["a", "c"], ["y"])],
        {"W": W, "c": np.array([0.1, 0.2, 0.1])},
        "its slopes differ between features",
    ),
    "a parameter that is none": (
        [("MatMul", ["x", "W"], ["a"]), ("Elu", ["a"], ["y"], {"alpha": -1.0})],
        {"W": W},
        r"\(Elu\).*alpha of the activation is -1.0",
    ),
    "a constant output": ([("Relu", ["W"], ["y"])], {"W": W}, r"\(Relu\).*it computes with constants alone"),
    "an output that is a weight": (
        [("Identity", ["W"], ["y"])],
        {"W": W},
        "does not depend on the input as an MLP's does",
    ),
    "a factor of zero": (
        [("MatMul", ["x", "W"], ["a"]), ("Mul", ["a", "c"], ["y"])],
        {"W": W, "c": np.array(0.0)},
        r"this is 0 of a layer's sums",
    ),
    "columns": (
        [("Transpose", ["x"], ["h"]), ("MatMul", ["h", "W"], ["y"])],
        {"W": W},
        r"\(Transpose\).*it transposes data",
    ),
    "another grouping": (
        [("Reshape", ["x", "s"], ["h"]), ("MatMul", ["h", "W"], ["y"])],
        {"W": W[:2], "s": np.array([-1, 2])},
        r"\(Reshape\).*it makes \[-1, 2\] of \['rows#0', 4\]",
    ),
    "no feature axis": (
        [("MatMul", ["x", "W"], ["a"]), ("Squeeze", ["a", "s"], ["y"])],
        {"W": W[:, :1], "s": np.array([1])},
        "use output='a'",
    ),
    "an axis that stays": (
        [("MatMul", ["x", "W"], ["a"]), ("Unsqueeze", ["a", "s"], ["y"])],
        {"W": W, "s": np.array([0])},
        r"the output has the axes \[1, 'rows#0'\] before",
    ),
    "a cast to integers": (
        [("MatMul", ["x", "W"], ["a"]), ("Cast", ["a"], ["y"], {"to": 7})],
        {"W": W},
        "it casts data to int64",
    ),
    "a cast to less": (
        [("MatMul", ["x", "W"], ["a"]), ("Cast", ["a"], ["y"], {"to": 1})],
        {"W": W},
        r"\(Cast\).*it rounds data to float32 in a network of float64; choose .* dtype=",
    ),
    "several dtypes": (
        [("MatMul", ["x", "W"], ["a"]), ("Cast", ["a"], ["b"], {"to": 1}), ("MatMul", ["b", "W2"], ["y"])],
        {"W": W, "W2": W2.astype("f4")},
        r"its weights have several dtypes: float64 \(the weight 'W' of node 'n0' \(MatMul\)\), float32 .*dtype=",
    ),
    "dropout that trains": (
        [("MatMul", ["x", "W"], ["a"]), ("Dropout", ["a", "", "t"], ["y"])],
        {"W": W, "t": np.array(True)},
        "export the model in evaluation mode",
    ),
    "the mask of a dropout": (
        [("MatMul", ["x", "W"], ["a"]), ("Dropout", ["a"], ["b", "m"]), ("Relu", ["m"], ["y"])],
        {"W": W},
        r"its input 'm' is not the first output of node 'n1' \(Dropout\)",
    ),
    "a variance below zero": (
        [("MatMul", ["x", "W"], ["a"]), ("BatchNormalization", ["a", "B", "B", "B", "v"], ["y"])],
        {"W": W, "B": B, "v": -np.ones(3)},
        "its variance and epsilon make a scale that is not finite",
    ),
    "far too much in a fold": (
        [("MatMul", ["x", "W"], ["a"]), ("Mul", ["a", "c"], ["b"]), ("Mul", ["b", "c"], ["y"])],
        {"W": W, "c": np.array(1e300)},
        "not finite|more than float64 holds",
    ),
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_what_is_no_chain_of_layers_is_refused(case):
    nodes, constants, message = BAD_LAYERS[case]
    with pytest.raises(ValueError, match="the ONNX model cannot be read as an MLP: .*" + message):
        MLP.from_onnx(model(nodes, constants, dtype="float64", domains=["com.microsoft"]))


def test_a_weight_on_the_left_of_a_vector_is_a_layer():
    proto = checked(model([("MatMul", ["W", "x"], ["y"])], {"W": W.T.copy()}, x=(4,), y=(3,), dtype="float64"))
    net = MLP.from_onnx(proto)
    assert np.array_equal(net.weights[0], W)
    np.testing.assert_allclose(net(X[0], device="cpu"), computed(proto, X[0]), rtol=1e-12)


def test_the_classes_of_skl2onnx_are_two_outputs():
    nodes = [
        ("MatMul", ["x", "W"], ["a"]), ("Add", ["a", "B"], ["b"]), ("Sigmoid", ["b"], ["p"]),
        ("Sub", ["one", "p"], ["q"]), ("Concat", ["q", "p"], ["y"], {"axis": 1}),
    ]  # fmt: skip
    proto = model(nodes, {"W": W[:, :1], "B": B[:1], "one": np.array(1.0)}, y=("rows", 2), dtype="float64")
    net = MLP.from_onnx(checked(proto))
    assert np.array_equal(net.weights[0], np.hstack([-W[:, :1], W[:, :1]]))
    assert np.array_equal(net.biases[0], [-B[0], B[0]])
    np.testing.assert_allclose(net(X, device="cpu"), computed(proto, X), rtol=1e-11)
    nodes[-1] = ("Concat", ["p", "q"], ["y"], {"axis": 1})
    with pytest.raises(ValueError, match=r"\(Concat\).*it joins several tensors; accepted: 1 - p and p"):
        MLP.from_onnx(model(nodes, {"W": W[:, :1], "B": B[:1], "one": np.array(1.0)}, dtype="float64"))
