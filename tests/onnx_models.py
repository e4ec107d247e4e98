"""ONNX models made by hand, for the tests of the reader."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

KINDS = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}

RNG = np.random.default_rng(5)
W, W2, B, X = (RNG.standard_normal(shape) for shape in [(4, 3), (3, 2), 3, (6, 4)])


def tensor(name, array):
    """A TensorProto of an array, raw."""
    array = np.asarray(array)
    kind = KINDS.get(array.dtype.name) or helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)


def model(nodes, constants, *, x=("rows", 4), y=("rows", 3), dtype="float32", opset=20, outputs=("y",), domains=()):
    """A model of nodes, each (op, inputs, outputs) and attributes, and constants by their names."""
    made = []
    for i, (op, inputs, results, *attributes) in enumerate(nodes):
        domain, _, kind = op.rpartition(".")
        options = attributes[0] if attributes else {}
        made.append(helper.make_node(kind, inputs, results, name=f"n{i}", domain=domain, **options))
    graph = helper.make_graph(
        made,
        "made by hand",
        [helper.make_tensor_value_info("x", KINDS[dtype], x)],
        [helper.make_tensor_value_info(name, KINDS[dtype], y) for name in outputs],
        [tensor(name, array) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def chain(*middle, **constants):
    """Nodes of a layer, of what is in the middle, from "h" to "g", and of another layer; with all constants."""
    nodes = [("Gemm", ["x", "W", "B"], ["h"]), *middle, ("MatMul", ["g", "W2"], ["y"])]
    return nodes, {"W": W, "B": B, "W2": W2, **{name: np.asarray(value) for name, value in constants.items()}}


def computed(proto, x):
    """What onnx's own reference implementation makes of a model."""
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(proto).run(None, {"x": x})[0]


def checked(proto):
    """The model, if onnx's checker finds nothing wrong with it."""
    onnx.checker.check_model(proto, full_check=True)
    return proto
