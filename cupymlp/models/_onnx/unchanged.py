"""Operators that change nothing for rows of features: shapes that stay the same, casts, dropout."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..._checks import dtype_name
from ...network import numpy_dtype
from . import constants
from .algebra import value
from .constants import checked_axes, given_axes
from .graph import FLOATS, Node
from .layers import Data, Input, Length
from .reader import Reader, Value
from .shapes import kept, lengths_of

__all__ = [
    "cast",
    "cast_like",
    "dropout",
    "flatten",
    "identity",
    "reshape",
    "squeeze",
    "transpose",
    "unsqueeze",
    "zip_map",
]


def identity(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.finish(1, 1)
    return reader.data(node, inputs[0])


def dropout(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.attribute("ratio", "f", 0.5)
    node.attribute("seed", "i", 0)
    node.finish(1, 3)
    training = inputs[2] if len(inputs) > 2 else None
    if training is not None and (not isinstance(training, np.ndarray) or training.any()):
        raise node.refuse("its training_mode is not false: export the model in evaluation mode")
    return reader.data(node, inputs[0])


def zip_map(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.attribute("classlabels_int64s", "ints", None)
    node.attribute("classlabels_strings", "strings", None)
    node.finish(1, 1)
    return reader.data(node, inputs[0])


def cast(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    to = constants.cast(node)
    node.finish(1, 1)
    if to not in FLOATS.values():
        raise node.refuse(f"it casts data to {to}; accepted: {', '.join(FLOATS.values())}")
    reader.float_types[node.outputs[0]] = to
    takers = reader.graph.takers.get(node.outputs[0], [])
    if not takers or any(taker.op != "Celu" for taker in takers):  # before opset 28 there is a Celu of float32 only
        reader.casts.append((node, to))
    return reader.data(node, inputs[0])


def cast_like(reader: Reader, node: Node, inputs: list[Value]) -> Value:
    """A constant in the dtype of data, or data in the dtype it has."""
    node.attribute("saturate", "i", 1)
    node.attribute("round_mode", "s", "up")
    node.finish(2, 2)
    given, like = inputs
    to = dtype_name(like.dtype) if isinstance(like, np.ndarray) else reader.float_types.get(node.inputs[1])
    if to is None:
        raise node.refuse("it casts to the type of what is no tensor of real numbers; accepted: a constant, or data")
    if isinstance(given, np.ndarray):
        reader.budget.spend(node, given.shape, numpy_dtype(to).itemsize)
        with np.errstate(all="ignore"):  # infinities are refused where they are used
            return given.astype(numpy_dtype(to))
    data = reader.data(node, given)
    if (of := reader.float_types[node.inputs[0]]) != to:
        raise node.refuse(f"it casts data of {of} like {to}; accepted: of the same dtype, or a constant")
    return data


def transpose(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    permutation = node.attribute("perm", "ints", None)
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    rank = len(data.shape)
    if (permutation or list(range(rank))[::-1]) != list(range(rank)):
        raise node.refuse("it transposes data; accepted: constants, or a permutation that changes nothing")
    return data


def _flattened_input(data: Data) -> Data | None:
    """The model's input as rows, if nothing was done to it before."""
    base = data.base
    if not isinstance(base, Input) or not data.terms.is_close(value()) or np.ndim(base.scale) or np.ndim(base.shift):
        return None
    others = (*data.lead[1:], *(() if data.width is None else (data.width,)))
    width = math.prod(d for d in others if isinstance(d, int))
    known = data.width is not None and all(isinstance(d, int) for d in others)
    rows = data.lead[:1] or ("rows",)
    return Data(replace(base, lead=rows, width=width if known else None), data.terms, rows)


def flatten(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    axis = node.attribute("axis", "i", 1)
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    rank = len(data.shape)
    if rank == 2 and axis in (1, -1):
        return data
    if rank > 2 and axis == 1 and (rows := _flattened_input(data)) is not None:
        return rows
    raise node.refuse(
        f"it flattens {list(data.shape)} from axis {axis} on; accepted: (rows, features), or the model's input, to rows"
    )


def reshape(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    zero_is_zero = node.flag("allowzero")
    node.finish(2, 2)
    data = reader.data(node, inputs[0])
    target: tuple[Length, ...] | None = lengths_of(inputs[1])
    if target is None:
        raise node.refuse("its shape is neither constant nor made of lengths of the input")
    if kept(data.shape, target, zero_is_zero=zero_is_zero):
        return data
    fixed = target[-1] if target else None
    if (
        len(target) == 2 == len(data.shape)
        and data.width is None
        and target[0] in (-1, 0, data.lead[0])
        and isinstance(fixed, int)
        and fixed > 0
    ):
        return data.of_width(fixed)
    rows = _flattened_input(data) if len(target) == 2 < len(data.shape) else None
    if (
        rows is not None
        and kept(rows.shape, target, zero_is_zero=zero_is_zero)
        and (rows.width is not None or target[0] != -1)
    ):
        return rows
    raise node.refuse(
        f"it makes {list(target)} of {list(data.shape)}; accepted: what leaves rows of features as they are"
    )


def squeeze(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    axes = given_axes(node, inputs)
    data = reader.data(node, inputs[0])
    if not axes and len(inputs) < 2:
        axes = [i for i, d in enumerate(data.shape) if d == 1]
    chosen = checked_axes(node, axes, len(data.shape))
    if chosen[-1] == len(data.lead) or any(data.lead[a] != 1 for a in chosen):
        raise node.refuse(
            f"it takes the axes {axes} out of {list(data.shape)}; accepted: axes of length 1 before the features. To leave "
            f"it out, use output={node.inputs[0]!r}"
        )
    return replace(data, lead=tuple(d for i, d in enumerate(data.lead) if i not in chosen))


def unsqueeze(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    axes = given_axes(node, inputs)
    data = reader.data(node, inputs[0])
    chosen = checked_axes(node, axes, len(data.shape) + len(axes))
    lead: list[Length] = list(data.lead)
    if chosen[-1] == len(lead) + len(axes):
        raise node.refuse(f"it adds an axis after the features of {list(data.shape)}; accepted: before them")
    for axis in chosen:
        lead.insert(axis, 1)
    return replace(data, lead=tuple(lead))
