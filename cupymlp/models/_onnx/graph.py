"""The graph of an ONNX model: which nodes an output needs, in order; names that are what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .file import RefusedError, Source, opset_of, shown, text

__all__ = ["FLOATS", "Graph", "Node", "declared_shape"]

FLOATS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # of TensorProto.DataType


class Node:
    """One node: its label in errors, inputs, outputs and attributes. Every attribute must be asked for: see `finish`."""

    def __init__(self, proto: Any, index: int) -> None:
        self.proto = proto
        self.index = index
        domain, op = text(proto.domain), text(proto.op_type)
        self.op = op if domain in ("", "ai.onnx") else f"{domain}.{op}"
        self.inputs: list[str] = list(proto.input)
        while self.inputs and not self.inputs[-1]:
            self.inputs.pop()  # left out
        self.outputs: list[str] = list(proto.output)
        self._attributes: dict[str, Any] = {}
        for attribute in proto.attribute:
            if attribute.name in self._attributes:
                raise RefusedError(f"{self.label} has the attribute {shown(attribute.name)} twice")
            self._attributes[attribute.name] = attribute

    @property
    def label(self) -> str:
        """``node 'fc1' (Gemm)``, or by its number if it has no name."""
        name = shown(self.proto.name) if self.proto.name else f"{self.index}"
        return f"node {name} ({self.op if len(self.op) <= 60 else self.op[:57] + '...'})"

    def refuse(self, why: str) -> RefusedError:
        """The error about this node and its tensor."""
        tensor = f", which makes tensor {shown(self.outputs[0])}" if self.outputs else ""
        return RefusedError(f"{self.label}{tensor}: {why}")

    def attribute(self, name: str, kind: str, default: Any) -> Any:
        """An attribute's value; ``kind``: the field of AttributeProto, such as f, i, s, t, floats, ints."""
        proto = self._attributes.pop(name, None)
        if proto is None:
            return default
        kinds = {"f": 1, "i": 2, "s": 3, "t": 4, "floats": 6, "ints": 7, "strings": 8}
        if proto.type != kinds[kind] or proto.ref_attr_name:
            raise self.refuse(f"its attribute {name} is of another type than {kind!r}")
        value = getattr(proto, kind)
        if kind == "s":
            return value.decode("utf-8", "replace")
        return list(value) if kind in ("floats", "ints") else value

    def number(self, name: str, default: float) -> float:
        """A finite number, as the decimal number that it was before it was rounded to ONNX's float32."""
        value = self.attribute(name, "f", None)
        if value is None:
            return default
        if not np.isfinite(value):
            raise self.refuse(f"its attribute {name} is {value}")
        return float(str(np.float32(value)))

    def flag(self, name: str) -> bool:
        """An integer that stands for a truth value."""
        return bool(self.attribute(name, "i", 0))

    def finish(self, least: int, most: int) -> None:
        """Refuse attributes that nobody asked for, and another number of inputs."""
        if self._attributes:
            raise self.refuse(
                f"its attribute {shown(next(iter(self._attributes)))} is not known here, so it is not ignored"
            )
        if not least <= len(self.inputs) <= most:
            accepted = f"{least}" if least == most else f"{least} to {most}"
            raise self.refuse(f"it has {len(self.inputs)} inputs; accepted: {accepted}")
        for i, name in enumerate(self.inputs[:least]):
            if not name:
                raise self.refuse(f"its input {i + 1} is missing")


class Graph:
    """A model's graph, after checks of all names in it."""

    def __init__(self, model: Any, source: Source) -> None:
        proto = model.graph
        self.source = source
        self.opset = opset_of(model) or 0
        self.functions = {(f.domain, f.name) for f in model.functions}
        self.nodes = [Node(n, i) for i, n in enumerate(proto.node)]
        self.initializers: dict[str, Any] = {}
        self.makers: dict[str, Node] = {}
        for tensor in proto.initializer:
            if tensor.name in self.initializers:
                raise RefusedError(f"two initializers have the name {shown(tensor.name)}")
            self.initializers[tensor.name] = tensor
        for node in self.nodes:
            for name in filter(None, node.outputs):
                if name in self.makers or name in self.initializers:
                    other = self.makers[name].label if name in self.makers else "an initializer"
                    raise node.refuse(f"the tensor {shown(name)} has the same name as that of {other}")
                self.makers[name] = node
        self.inputs: dict[str, Any] = {}
        for value in proto.input:
            if value.name in self.inputs or value.name in self.makers:
                raise RefusedError(f"the input {shown(value.name)} has a name that another tensor has, too")
            if value.name not in self.initializers:  # else a weight that may be replaced, as older files have them
                self.inputs[value.name] = value.type
        self.outputs: dict[str, Any] = {value.name: value.type for value in proto.output}
        if len(self.outputs) != len(proto.output):
            raise RefusedError("two outputs have the same name")
        self.takers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                self.takers.setdefault(name, []).append(node)

    def choose(self, output: str | None) -> str:
        """The tensor that is asked for; by default the one output with real numbers, or probabilities."""
        if output is not None:
            if output not in self.makers:
                raise RefusedError(
                    f"output is {output!r}, which no node makes; the model's outputs are {self._outputs()}"
                )
            return output
        if len(self.outputs) == 1:
            return next(iter(self.outputs))
        candidates = [name for name, kind in self.outputs.items() if _is_real(kind)]
        if len(candidates) == 1:
            return candidates[0]
        raise RefusedError(
            f"it has {'several outputs' if candidates else 'no output'} of real numbers; choose with output=, by its name, "
            f"one of {self._outputs()}, or any tensor in the graph"
        )

    def _outputs(self) -> str:
        names = [shown(name) for name in self.outputs]
        return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "none"

    def needed(self, output: str) -> list[Node]:
        """The nodes that an output needs, in the file's order, which must be one in which they can be computed."""
        wanted, chosen = {output}, []
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.outputs):
                chosen.append(node)
                wanted.update(node.inputs)
        return chosen[::-1]

    def missing(self, node: Node, name: str) -> RefusedError:
        """The error about an input that is not there when the node is reached."""
        maker = self.makers.get(name)
        if maker is None:
            return node.refuse(f"its input {shown(name)} is no input of the model, no initializer and made by no node")
        if maker.index < node.index:
            return node.refuse(
                f"its input {shown(name)} is not the first output of {maker.label}, the only one that is read"
            )
        return node.refuse(
            f"its input {shown(name)} is made by {maker.label}, which comes later: the graph has a cycle or is not sorted"
        )


def _is_real(kind: Any) -> bool:
    """Whether a declared type is one of floating-point numbers: a tensor, or ZipMap's sequence of maps."""
    if kind.WhichOneof("value") == "sequence_type":
        element = kind.sequence_type.elem_type
        return element.WhichOneof("value") == "map_type" and element.map_type.value_type.tensor_type.elem_type in FLOATS
    return kind.WhichOneof("value") == "tensor_type" and kind.tensor_type.elem_type in FLOATS


def declared_shape(kind: Any) -> Sequence[int | str] | None:
    """The lengths of a tensor type, those that are not numbers as names; None if it says nothing."""
    if not kind.tensor_type.HasField("shape"):
        return None
    lengths: list[int | str] = []
    for i, dim in enumerate(kind.tensor_type.shape.dim):
        fixed = dim.WhichOneof("value") == "dim_value"
        lengths.append(int(dim.dim_value) if fixed else f"{dim.dim_param or '?'}#{i}")
    return lengths
