"""Lengths of axes as tensors: ``x.view(x.size(0), -1)`` is four nodes in some exporters' files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .constants import given_axes
from .graph import Node
from .layers import Data, Length

__all__ = ["Shape", "kept", "lengths_of", "shape_node"]

_OPS = ("Shape", "Gather", "Unsqueeze", "Squeeze", "Concat", "Cast", "Identity")


@dataclass(frozen=True)
class Shape:
    """Some lengths of axes, as a tensor of rank 1; of rank 0 if it is ``scalar``."""

    lengths: tuple[Length, ...]
    scalar: bool = False


def shape_node(node: Node, inputs: Sequence[Any]) -> Shape | None:
    """What a node makes of lengths; None if it is no such node, or uses them (Reshape)."""
    takes_data = node.op == "Shape" and isinstance(inputs[0] if inputs else None, Data)
    if node.op == "Reshape" or not (takes_data or any(isinstance(v, Shape) for v in inputs)):
        return None
    first = inputs[0]
    if node.op == "Shape":
        start, end = node.attribute("start", "i", 0), node.attribute("end", "i", None)
        node.finish(1, 1)
        return Shape(first.shape[start:end]) if isinstance(first, Data) else Shape((len(first.lengths),))
    if node.op == "Gather" and isinstance(first, Shape) and not first.scalar:
        axis = node.attribute("axis", "i", 0)
        node.finish(2, 2)
        index, n = inputs[1], len(first.lengths)
        if axis == 0 and isinstance(index, np.ndarray) and index.dtype.kind == "i" and index.ndim <= 1:
            wanted = [int(i) for i in index.ravel()[:9]]
            if all(-n <= i < n for i in wanted):
                return Shape(tuple(first.lengths[i] for i in wanted), scalar=index.ndim == 0)
    if node.op in ("Unsqueeze", "Squeeze") and isinstance(first, Shape):
        opposite = first.scalar == (node.op == "Unsqueeze")
        if given_axes(node, inputs) in ([0], [-1]) and opposite and len(first.lengths) == 1:
            return Shape(first.lengths, scalar=node.op == "Squeeze")
    if node.op == "Concat":
        axis = node.attribute("axis", "i", 0)
        node.finish(1, 16)
        parts = [lengths_of(v) for v in inputs]
        if axis in (0, -1) and all(part is not None for part in parts):
            return Shape(tuple(length for part in parts for length in part or ()))
    if node.op in ("Cast", "Identity") and isinstance(first, Shape) and node.attribute("to", "i", 7) in (6, 7):
        node.finish(1, 1)
        return first
    raise node.refuse(f"it computes with lengths of axes in a way that is not known here; accepted: {', '.join(_OPS)}")


def lengths_of(given: Any) -> tuple[Length, ...] | None:
    """A tensor of rank 1 as lengths of axes."""
    if isinstance(given, Shape) and not given.scalar:
        return given.lengths
    if isinstance(given, np.ndarray) and given.dtype.kind == "i" and given.ndim == 1 and given.size <= 8:
        return tuple(int(d) for d in given)
    return None


def kept(shape: Sequence[Length], target: Sequence[Length], *, zero_is_zero: bool) -> bool:
    """Whether a Reshape to this target keeps the shape as it is."""
    if len(target) != len(shape) or (zero_is_zero and 0 in target):
        return False
    free = [i for i, d in enumerate(target) if d == -1]
    return len(free) <= 1 and all(d == there or d in (0, -1) for there, d in zip(shape, target, strict=True))
