"""Nodes of an ONNX graph that compute with constants alone, in NumPy, within a budget of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...network import numpy_dtype
from .file import RefusedError, Source, read_tensor
from .graph import FLOATS, Node

__all__ = ["Budget", "cast", "checked_axes", "constant", "evaluate", "given_axes"]

Array = NDArray[Any]


class Budget:
    """The bytes that constants may still take which are not in the file themselves."""

    def __init__(self, bytes_: int) -> None:
        self._left = bytes_

    def spend(self, node: Node, shape: Sequence[int], itemsize: int) -> None:
        """Refuse an array that is too large, before it is made."""
        size = math.prod(shape) * itemsize
        if size > self._left or math.prod(max(d, 1) for d in shape) > 2**48:
            raise node.refuse(f"it makes a constant of the shape {list(shape)}, far larger than the file itself")
        self._left -= size


def constant(node: Node, source: Source) -> Array:
    """The node Constant."""
    tensor = node.attribute("value", "t", None)
    made: Array | None = None
    if tensor is not None:
        made = read_tensor(tensor, source, f"the value of {node.label}")
    for name, kind, dtype in (
        ("value_float", "f", np.float32),
        ("value_floats", "floats", np.float32),
        ("value_int", "i", np.int64),
        ("value_ints", "ints", np.int64),
    ):
        value = node.attribute(name, kind, None)
        if value is not None:
            made = np.array(value, dtype)
    node.finish(0, 0)
    if made is None:
        raise node.refuse("it has no value")
    return made


def cast(node: Node) -> str:
    """The floating-point type that the node Cast casts to; other types are named in the error."""
    to = node.attribute("to", "i", 0)
    node.attribute("saturate", "i", 1)
    node.attribute("round_mode", "s", "up")
    if to == 7:
        return "int64"
    if to not in FLOATS:
        raise node.refuse(
            f"it casts to type {to}, accepted: {', '.join(f'{n} ({name})' for n, name in FLOATS.items())}"
        )
    return FLOATS[to]


def given_axes(node: Node, inputs: Sequence[Any]) -> list[int]:
    """The axes of Squeeze and Unsqueeze: an attribute before opset 13, later an input."""
    axes = node.attribute("axes", "ints", [])
    node.finish(1, 2)
    if len(inputs) > 1:
        if not isinstance(inputs[1], np.ndarray) or inputs[1].dtype.kind != "i" or inputs[1].size > 8:
            raise node.refuse("its axes are no constant integers")
        axes = inputs[1].ravel().tolist()
    return [int(a) for a in axes]


def checked_axes(node: Node, axes: list[int], rank: int) -> list[int]:
    """Counted from the front, sorted."""
    if not axes or any(not -rank <= a < rank for a in axes) or len({a % rank for a in axes}) != len(axes):
        raise node.refuse(f"its axes are {axes[:8]}; accepted: some of {rank} axes, each once")
    return sorted(a % rank for a in axes)


def evaluate(node: Node, arrays: list[Array], budget: Budget) -> Array:
    """A node of constants."""
    handler = _OPS.get(node.op)
    if handler is None:
        raise node.refuse("it computes with constants alone, which this operator does not do here")
    try:
        with np.errstate(all="ignore"):  # infinities and NaN are refused where they are used
            return handler(node, arrays, budget)
    except RefusedError:
        raise
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        shapes = ", ".join(f"{a.dtype} {list(a.shape)}" for a in arrays)
        raise node.refuse(f"it does not suit its constants, {shapes}") from error


def _identity(node: Node, arrays: list[Array], _: Budget) -> Array:
    node.finish(1, 1)
    return arrays[0]


def _cast(node: Node, arrays: list[Array], budget: Budget) -> Array:
    dtype = numpy_dtype(name) if (name := cast(node)) in FLOATS.values() else np.dtype(name)
    node.finish(1, 1)
    budget.spend(node, arrays[0].shape, dtype.itemsize)
    return arrays[0].astype(dtype)


def _transpose(node: Node, arrays: list[Array], _: Budget) -> Array:
    permutation = node.attribute("perm", "ints", None)
    node.finish(1, 1)
    return arrays[0].transpose(permutation)


def _reshape(node: Node, arrays: list[Array], _: Budget) -> Array:
    zero_is_zero = node.flag("allowzero")
    node.finish(2, 2)
    array, target = arrays
    shape = [int(d) for d in target.ravel()[:9]]
    if not zero_is_zero:
        shape = [array.shape[i] if d == 0 else d for i, d in enumerate(shape)]
    return array.reshape(shape)


def _flatten(node: Node, arrays: list[Array], _: Budget) -> Array:
    axis = node.attribute("axis", "i", 1)
    node.finish(1, 1)
    array = arrays[0]
    axis += array.ndim if axis < 0 else 0
    return array.reshape(math.prod(array.shape[:axis]), math.prod(array.shape[axis:]))


def _squeeze(node: Node, arrays: list[Array], _: Budget) -> Array:
    return arrays[0].squeeze(tuple(checked_axes(node, given_axes(node, arrays), arrays[0].ndim)))


def _unsqueeze(node: Node, arrays: list[Array], _: Budget) -> Array:
    axes = given_axes(node, arrays)
    return np.expand_dims(arrays[0], tuple(checked_axes(node, axes, arrays[0].ndim + len(axes))))


def _concat(node: Node, arrays: list[Array], budget: Budget) -> Array:
    axis = node.attribute("axis", "i", 0)
    node.finish(1, 16)
    for array in arrays:
        budget.spend(node, array.shape, array.itemsize)
    return np.concatenate(arrays, axis)


def _constant_of_shape(node: Node, arrays: list[Array], budget: Budget) -> Array:
    tensor = node.attribute("value", "t", None)
    node.finish(1, 1)
    fill = (
        np.zeros(1, np.float32)
        if tensor is None
        else read_tensor(tensor, Source("", None), f"the value of {node.label}")
    )
    shape = [int(d) for d in arrays[0].ravel()[:9]]
    if arrays[0].dtype != np.int64 or len(shape) > 8 or any(d < 0 for d in shape) or fill.size != 1:
        raise node.refuse(f"its shape is {shape}; accepted: int64 lengths of 0 or more, and one value")
    budget.spend(node, shape, fill.itemsize)
    return np.full(shape, fill.ravel()[0], fill.dtype)


def _elementwise(function: Callable[..., Array], inputs: int) -> Callable[[Node, list[Array], Budget], Array]:
    def handler(node: Node, arrays: list[Array], budget: Budget) -> Array:
        node.finish(inputs, inputs)
        if len({a.dtype for a in arrays}) > 1 or arrays[0].dtype.kind in "ib":
            raise node.refuse(
                f"its constants are {', '.join(str(a.dtype) for a in arrays)}; accepted: one floating-point type"
            )
        budget.spend(node, np.broadcast_shapes(*(a.shape for a in arrays)), arrays[0].itemsize)
        return function(*arrays)

    return handler


_OPS: dict[str, Callable[[Node, list[Array], Budget], Array]] = {
    "Identity": _identity,
    "Cast": _cast,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Add": _elementwise(np.add, 2),
    "Sub": _elementwise(np.subtract, 2),
    "Mul": _elementwise(np.multiply, 2),
    "Div": _elementwise(np.divide, 2),
    "Neg": _elementwise(np.negative, 1),
    "Sqrt": _elementwise(np.sqrt, 1),
    "Reciprocal": _elementwise(np.reciprocal, 1),
}
