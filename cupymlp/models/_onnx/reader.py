"""From the nodes of a graph to layers.

The nodes that the output needs are gone through in their order. What they make is a constant, or `Data`: terms of what the last
layer gives. A matrix product turns terms into an activation and begins the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..._checks import dtype_name
from ...activations import ACTIVATIONS, ActivationSpec, read_spec
from ...network import DTYPES, numpy_dtype
from .. import Found
from .algebra import Match, Number, Terms, TooComplexError, match, value
from .constants import Budget, constant, evaluate
from .file import RefusedError, read_tensor, shown
from .graph import FLOATS, Graph, Node, declared_shape
from .layers import Data, Input, Layer, folded, found_layers
from .shapes import Shape, shape_node

__all__ = ["Above", "Operator", "Reader", "Value"]


@dataclass(frozen=True)
class Above:
    """Where data is greater than a threshold: the condition of a softplus that is cut off."""

    data: Data
    threshold: float


Value = NDArray[Any] | Data | Shape | Above
Operator = Callable[["Reader", Node, list[Any]], Value]


class Reader:
    """One reading of a graph.

    Parameters
    ----------
    operators
        What to do for each operator whose inputs depend on the model's input.
    size
        Bytes of the model.
    dtype
        That of the network, if it is asked for.
    """

    def __init__(self, graph: Graph, operators: Mapping[str, Operator], size: int, dtype: DTypeLike | None) -> None:
        self.graph = graph
        self.operators = operators
        self.asked = dtype
        self.values: dict[str, Value] = {}
        self.budget = Budget((1 << 24) + 4 * size)
        self.tolerance = 1e-6
        self.dtypes: dict[str, str] = {}  # of constants that meet data, with a tensor of each
        self.casts: list[tuple[Node, str]] = []
        self.float_types: dict[str, str] = {}  # of tensors of data, for nodes that cast like them
        self.input: str | None = None

    def read(self, output: str | None) -> Found:
        """All layers."""
        chosen = self.graph.choose(output)
        nodes = self.graph.needed(chosen)
        if not nodes:
            raise RefusedError(f"no node makes the output {shown(chosen)}")
        left = _last_uses(nodes, chosen)
        for node in nodes:
            arguments = [self.value(node, name) if name else None for name in node.inputs]
            made = self.made(node, arguments)
            for name in left.pop(node.index, ()):
                self.values.pop(name, None)  # what is not needed any more makes room
            if node.outputs:
                self.values[node.outputs[0]] = made
            if isinstance(made, Data) and node.op != "Cast":  # which says it itself
                self.float_types[node.outputs[0]] = next(
                    self.float_types[name] for name in node.inputs if name in self.float_types
                )
        result = self.values.get(chosen)
        if not isinstance(result, Data):
            raise nodes[-1].refuse("it is asked for as the output, and does not depend on the input as an MLP's does")
        return self.finish(nodes[-1], chosen, result)

    def value(self, node: Node, name: str) -> Value:
        """An input of a node."""
        known = self.values.get(name)
        if known is not None:
            return known
        if name in self.graph.initializers:
            array = read_tensor(self.graph.initializers[name], self.graph.source, f"tensor {shown(name)}")
            self.values[name] = array
            return array
        if name not in self.graph.inputs:
            raise self.graph.missing(node, name)
        if self.input is not None:
            raise node.refuse(
                f"it takes the model's input {shown(name)}, and another node takes {shown(self.input)}; accepted: models of "
                "one input"
            )
        self.input = name
        self.values[name] = data = self.data_of(node, name)
        return data

    def data_of(self, node: Node, name: str) -> Data:
        kind = self.graph.inputs[name]
        if kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.elem_type not in FLOATS:
            raise node.refuse(
                f"it takes the model's input {shown(name)}; accepted: a tensor of {', '.join(FLOATS.values())}"
            )
        self.float_types[name] = FLOATS[kind.tensor_type.elem_type]
        shape = declared_shape(kind)
        if shape is None:
            shape = ["rows", "features"]
        if not shape or any(isinstance(d, int) and d < 0 for d in shape):
            raise node.refuse(
                f"the model's input {shown(name)} has the shape {list(shape)}; accepted: (rows, features)"
            )
        width = shape[-1]
        return Data(
            Input(name, tuple(shape[:-1]), width if isinstance(width, int) else None), value(), tuple(shape[:-1])
        )

    # --- One node -----------------------------------------------------------------------------------------------------

    def made(self, node: Node, inputs: list[Value | None]) -> Value:
        """What a node makes of its inputs."""
        if node.proto.domain not in ("", "ai.onnx") and node.op not in self.operators:
            if (node.proto.domain, node.proto.op_type) in self.graph.functions:
                raise node.refuse("it calls a function in the model; see onnx.inliner.inline_local_functions")
            raise node.refuse("its operator is not ONNX's own; accepted of others: ai.onnx.ml's Scaler and ZipMap")
        if node.op == "Constant":
            return constant(node, self.graph.source)
        given = [v for v in inputs if v is not None]
        if all(isinstance(v, np.ndarray) for v in given) and node.op != "Concat":
            return evaluate(node, given, self.budget)  # type: ignore[arg-type]
        made = shape_node(node, inputs)
        if made is not None:
            return made
        handler = self.operators.get(node.op)
        if handler is None:
            raise node.refuse(
                f"no MLP is made of this operator; accepted: {', '.join(sorted(self.operators))}, and those of constants"
            )
        try:
            return handler(self, node, inputs)
        except TooComplexError as error:
            raise node.refuse(f"it makes more than an activation of its inputs ({error})") from error

    def data(self, node: Node, given: Value | None) -> Data:
        """An input that must depend on the model's input."""
        if not isinstance(given, Data):
            kind = "a constant" if isinstance(given, np.ndarray) else "no tensor of real numbers"
            raise node.refuse(f"one of its inputs is {kind}, where what the layers before make was expected")
        return given

    def numbers(self, node: Node, given: Value | None, what: str) -> NDArray[Any]:
        """An input that must be constant, finite and of a floating-point type."""
        if not isinstance(given, np.ndarray):
            raise node.refuse(f"its {what} depends on the input; accepted: a constant")
        if dtype_name(given.dtype) not in DTYPES:
            raise node.refuse(f"its {what} is {given.dtype}; accepted: {', '.join(DTYPES)}")
        if not np.isfinite(given).all():
            raise node.refuse(f"its {what} has numbers that are not finite")
        return given

    def feature_numbers(self, node: Node, given: Value | None, data: Data, what: str) -> Number:
        """A constant that meets data: one number, or one a feature."""
        array = self.numbers(node, given, what)
        self.saw(node, array, what)
        if any(d != 1 for d in array.shape[:-1]) or array.ndim > len(data.lead) + 1:
            raise node.refuse(f"its {what} has the shape {list(array.shape)}, which is more than one number a feature")
        if array.ndim == 0 or (array.size == 1 and data.width != 1):
            return float(array.reshape(()))
        if data.width is not None and array.size != data.width:
            raise node.refuse(f"its {what} has the shape {list(array.shape)}, for {data.width} features")
        return array.reshape(-1).astype(np.float64)

    def saw(self, node: Node, array: NDArray[Any], what: str) -> None:
        name = dtype_name(array.dtype)
        self.dtypes.setdefault(name, f"the {what} of {node.label}")
        self.tolerance = max(self.tolerance, {"float16": 2.0**-9, "bfloat16": 2.0**-6}.get(name, 0.0))

    def weight(self, node: Node, given: Value | None, name: str) -> NDArray[Any]:
        """A constant matrix."""
        what = f"weight {shown(name)}"
        array = self.numbers(node, given, what)
        self.saw(node, array, what)
        if array.ndim != 2:
            raise node.refuse(f"its {what} has the shape {list(array.shape)}; accepted: a matrix")
        return array

    # --- Layers -------------------------------------------------------------------------------------------------------

    def resolved(self, node: Node, data: Data, name: str) -> Match:
        """The activation that the tensor of this name is."""
        found = match(data.terms, self.dtypes) if data.terms.depends else None
        maker = self.graph.makers.get(name, node)
        if found is None:
            raise maker.refuse(f"this is {data.terms.text} of a layer's sums v, which is none of cupymlp's activations")
        if found.activation != "identity" and isinstance(data.base, Input):
            raise maker.refuse(
                f"this is {data.terms.text} of the model's input v: an activation before the first layer"
            )
        try:
            read_spec("the activation", self.spec(found), last=True)
        except ValueError as error:
            raise maker.refuse(f"{error}") from error
        return found

    def layer(
        self, node: Node, at: int, data: Data, weight: NDArray[Any], bias: NDArray[np.float64] | None = None
    ) -> Data:
        """What a layer makes of data, the node's input number ``at``."""
        name = node.inputs[1 - at]
        data = data.of_width(len(weight))
        if len(weight) != data.width:
            raise node.refuse(
                f"the weight {shown(name)} takes {len(weight)} features, and the tensor before it has {data.width}"
            )
        found = self.resolved(node, data, node.inputs[at])
        if ACTIVATIONS[found.activation].over_row:
            raise node.refuse(f"{found.activation} comes before this layer; accepted: after the last one")
        base = folded(data.base, found.before)
        return Data(Layer(base, self.spec(found), found.after, name, weight, bias), value(), data.lead)

    def spec(self, found: Match) -> ActivationSpec:
        if found.parameter is None:
            return found.activation
        return found.activation, self.shortest(found.parameter)

    def shortest(self, number: float) -> float:
        """The decimal number that rounds to this one in the model's dtype: 0.1 for the float32 number nearest to it."""
        rounded = numpy_dtype(min(self.dtypes, key=DTYPES.index, default="float64")).type(number)
        return float(str(rounded)) if float(rounded) == number else number

    def affine(self, data: Data, terms: Terms, number: Number) -> Data:
        """Terms after an operation with ``number``: numbers that differ between features become the layer's own."""
        affine = terms.affine
        if np.ndim(number) == 0 or affine is None:
            return replace(data, terms=terms)
        data = data.of_width(np.size(number))
        return replace(data, base=folded(data.base, affine), terms=value())

    # --- The end ------------------------------------------------------------------------------------------------------

    def finish(self, node: Node, chosen: str, result: Data) -> Found:
        if not isinstance(result.base, Layer):
            raise RefusedError(
                f"no layer leads to the output {shown(chosen)}: there is no matrix product with a weight"
            )
        found = self.resolved(node, result, chosen)
        first: Any = result.base
        while isinstance(first, Layer):
            first = first.source
        if result.lead != first.lead:
            raise node.refuse(
                f"the output has the axes {list(result.lead)} before the features, and the input {list(first.lead)}"
            )
        if self.asked is None and len(self.dtypes) > 1:
            where = ", ".join(f"{name} ({place})" for name, place in self.dtypes.items())
            raise RefusedError(f"its weights have several dtypes: {where}; choose one with dtype=")
        (dtype, *_) = self.dtypes
        if self.asked is None:
            for caster, to in self.casts:
                if not _holds(to, dtype):
                    raise caster.refuse(
                        f"it rounds data to {to} in a network of {dtype}; choose what to compute in with dtype="
                    )
        if ACTIVATIONS[found.activation].over_row and not found.after.is_trivial:
            raise node.refuse(f"the output is scaled after {found.activation}, which comes last in an MLP")
        base = folded(result.base, found.before)
        rounded_to = dtype if self.asked is None else "float64"  # which the network rounds to what was asked for
        return found_layers(base, self.spec(found), found.after, rounded_to)  # type: ignore[arg-type]


def _last_uses(nodes: list[Node], chosen: str) -> dict[int, list[str]]:
    """For each node, by its index, the tensors that no later one needs."""
    last = {name: node.index for node in nodes for name in node.inputs}
    last.pop(chosen, None)
    at: dict[int, list[str]] = {}
    for name, index in last.items():
        at.setdefault(index, []).append(name)
    return at


def _holds(dtype: str, other: str) -> bool:
    """Whether one dtype holds the numbers of another."""
    return dtype == other or (DTYPES.index(dtype) > DTYPES.index(other) and dtype in ("float32", "float64"))
