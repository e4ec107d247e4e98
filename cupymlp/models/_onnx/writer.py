"""A network as an ONNX model: a Gemm a layer, and its activation as one node, or as several where ONNX has none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...activations import ActivationSpec
from ...network import Network, numpy_dtype
from .. import Found
from .file import MOST_BYTES, import_onnx
from .graph import FLOATS

__all__ = ["as_written", "make_model"]

_OLDEST_OPSET = 13  # the first one with bfloat16
_STATED = "cupymlp.activations"  # metadata: the activations with parameters that ONNX would round


class _NotThereError(Exception):
    """The opset does not have an operator for the dtype."""


class _Builder:
    """Nodes and tensors of a graph."""

    def __init__(self, onnx: Any, dtype: str, opset: int) -> None:
        self.onnx = onnx
        self.dtype = dtype
        self.opset = opset
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        if not _has(self.onnx, op, self.opset, self.dtype):
            raise _NotThereError(op)
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def tensor(self, name: str, array: NDArray[Any]) -> str:
        """Add a constant."""
        kind = next(number for number, dtype in FLOATS.items() if dtype == self.dtype)
        bits = np.ascontiguousarray(array, numpy_dtype(self.dtype)).view(f"u{array.dtype.itemsize}")
        data = bits.astype(bits.dtype.newbyteorder("<")).tobytes()
        self.tensors.append(self.onnx.helper.make_tensor(name, kind, array.shape, data, raw=True))
        return name

    def number(self, value: float) -> str:
        """Add a constant number."""
        return self.tensor(f"number_{len(self.tensors)}", np.array(value, numpy_dtype(self.dtype)))


def _has(onnx: Any, op: str, opset: int, dtype: str) -> bool:
    try:
        schema = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return False
    kind = {"float32": "float", "float64": "double"}.get(dtype, dtype)
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return f"tensor({kind})" in allowed[schema.inputs[0].type_str]


# --- Activations --------------------------------------------------------------------------------------------------------

_Way = Callable[[_Builder, str, float], str]


def _plain(op: str, **attributes: Any) -> _Way:
    return lambda b, v, _: b.node(op, v, **attributes)


def _with_alpha(op: str) -> _Way:
    def way(b: _Builder, v: str, alpha: float) -> str:
        name = b.node(op, v, alpha=0.0)
        with np.errstate(over="ignore"):
            rounded = float(np.float32(alpha))
        if not math.isfinite(rounded) or (rounded == 0) != (alpha == 0):
            raise ValueError(f"the parameter of {op} is {alpha!r}; ONNX keeps it as float32, which does not hold that")
        b.nodes[-1].attribute[0].f = rounded
        return name

    return way


def _celu(b: _Builder, v: str, alpha: float) -> str:
    number = b.number(alpha)
    return b.node("Mul", b.node("Elu", b.node("Div", v, number)), number)


def _half_of_one_and(b: _Builder, v: str, function: str) -> str:
    """0.5 v (1 + function)."""
    return b.node("Mul", b.node("Mul", v, b.node("Add", function, b.number(1.0))), b.number(0.5))


def _gelu(b: _Builder, v: str, _: float) -> str:
    return _half_of_one_and(b, v, b.node("Erf", b.node("Div", v, b.number(math.sqrt(2)))))


def _gelu_tanh(b: _Builder, v: str, _: float) -> str:
    cube = b.node("Mul", b.node("Mul", v, v), v)
    inner = b.node("Add", v, b.node("Mul", cube, b.number(0.044715)))
    return _half_of_one_and(b, v, b.node("Tanh", b.node("Mul", inner, b.number(math.sqrt(2 / math.pi)))))


def _silu(b: _Builder, v: str, _: float) -> str:
    return b.node("Mul", v, b.node("Sigmoid", v))


def _sin(b: _Builder, v: str, omega: float) -> str:
    return b.node("Sin", v if omega == 1 else b.node("Mul", v, b.number(omega)))


def _hard_swish(b: _Builder, v: str, _: float) -> str:
    return b.node("Mul", v, b.node("HardSigmoid", v, alpha=1 / 6, beta=0.5))


def _relu6(b: _Builder, v: str, _: float) -> str:
    return b.node("Clip", v, b.number(0.0), b.number(6.0))


def _squareplus(b: _Builder, v: str, _: float) -> str:
    root = b.node("Sqrt", b.node("Add", b.node("Mul", v, v), b.number(4.0)))
    return b.node("Mul", b.node("Add", v, root), b.number(0.5))


# The first way that the opset has for the dtype is taken. `operators` and `algebra` read all of them.
_WAYS: dict[str, list[_Way]] = {
    "identity": [lambda _b, v, _p: v],
    "relu": [_plain("Relu")],
    "leaky_relu": [_with_alpha("LeakyRelu")],
    "elu": [_with_alpha("Elu")],
    "celu": [_with_alpha("Celu"), _celu],
    "selu": [_plain("Selu")],
    "gelu": [_plain("Gelu"), _gelu],
    "gelu_tanh": [_plain("Gelu", approximate="tanh"), _gelu_tanh],
    "silu": [_silu],
    "tanh": [_plain("Tanh")],
    "sigmoid": [_plain("Sigmoid")],
    "softplus": [_plain("Softplus")],
    "softsign": [_plain("Softsign")],
    "sin": [_sin],
    "exp": [_plain("Exp")],
    "hard_sigmoid": [_plain("HardSigmoid", alpha=1 / 6, beta=0.5)],
    "hard_swish": [_plain("HardSwish"), _hard_swish],
    "relu6": [_relu6],
    "squareplus": [_squareplus],
    "softmax": [_plain("Softmax", axis=-1)],
    "log_softmax": [_plain("LogSoftmax", axis=-1)],
}


def _add_activation(builder: _Builder, spec: ActivationSpec, v: str) -> str:
    name, parameter = (spec, 0.0) if isinstance(spec, str) else spec
    for way in _WAYS[name]:
        nodes, tensors = len(builder.nodes), len(builder.tensors)
        try:
            return way(builder, v, parameter)
        except _NotThereError as error:
            missing = str(error)
            del builder.nodes[nodes:], builder.tensors[tensors:]
    newest = builder.onnx.defs.onnx_opset_version()
    since = next((o for o in range(builder.opset, newest + 1) if _has(builder.onnx, missing, o, builder.dtype)), None)
    advice = f"opset={since} or later has it" if since else "convert the network to another dtype"
    raise ValueError(
        f"opset is {builder.opset}, which has no {missing} of {builder.dtype} for the activation {name!r}: {advice}"
    )


# --- The model ------------------------------------------------------------------------------------------------------------


def make_model(
    network: Network, weights: Sequence[NDArray[Any]], biases: Sequence[NDArray[Any] | None], opset: int
) -> bytes:
    """The bytes of a model that onnx's checker has passed; weights in_out."""
    onnx = import_onnx()
    newest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or isinstance(opset, bool) or not _OLDEST_OPSET <= opset <= newest:
        raise ValueError(
            f"opset is {opset!r}; accepted: {_OLDEST_OPSET} to {newest}, the newest that the installed onnx knows"
        )
    size = sum(a.nbytes for a in (*weights, *biases) if a is not None)
    if size > MOST_BYTES - (1 << 20):
        raise ValueError(
            f"the network has {size:,} bytes; an ONNX file holds less than {MOST_BYTES:,}. MLP.save has no limit"
        )
    builder = _Builder(onnx, network.dtype, opset)
    h = "x"
    for i, (weight, bias, spec) in enumerate(zip(weights, biases, network.activations, strict=True)):
        inputs = [h, builder.tensor(f"weight_{i}", weight)]
        if bias is not None:
            inputs.append(builder.tensor(f"bias_{i}", bias))
        h = _add_activation(builder, spec, builder.node("Gemm", *inputs))
    builder.nodes[-1].output[0] = "y"
    kind = next(number for number, dtype in FLOATS.items() if dtype == network.dtype)
    ends = [
        onnx.helper.make_tensor_value_info(*end)
        for end in (("x", kind, ["rows", network.sizes[0]]), ("y", kind, ["rows", network.sizes[-1]]))
    ]
    graph = onnx.helper.make_graph(builder.nodes, "cupymlp", ends[:1], ends[1:], builder.tensors)
    opsets = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(
        graph, opset_imports=opsets, producer_name="cupymlp", ir_version=onnx.helper.find_min_ir_version_for(opsets)
    )
    onnx.helper.set_model_props(model, {_STATED: json.dumps(network.activations)})
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def as_written(model: Any, found: Found) -> Found:
    """With the parameters that `make_model` states as metadata, where those of the graph are the same ones, rounded."""
    stated = next((p.value for p in model.metadata_props if p.key == _STATED), None)
    specs = [*found.activations, found.out_activation]
    try:
        exact = [spec if isinstance(spec, str) else tuple(spec) for spec in json.loads(stated or "null")]
    except (ValueError, TypeError, RecursionError):
        return found
    if len(exact) != len(specs) or not all(
        _is_rounded(s, e, found.weights[0].dtype) for s, e in zip(specs, exact, strict=True)
    ):
        return found
    return replace(found, activations=exact[:-1], out_activation=exact[-1])


def _is_rounded(spec: ActivationSpec, exact: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a graph that says ``spec`` may have been made of ``exact``."""
    if spec == exact:
        return True
    if isinstance(spec, str) or not isinstance(exact, tuple) or len(exact) != 2 or type(exact[1]) is not float:
        return False
    if (spec, exact) == (("elu", 1.0), ("celu", 1.0)):  # the same function
        return True
    types = (np.float32, dtype.type)
    with np.errstate(over="ignore"):
        return spec[0] == exact[0] and any(t(spec[1]) == t(exact[1]) for t in types)
