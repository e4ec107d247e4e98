"""Layers while an ONNX graph is read: weights as they are in the file, with the scales and shifts around them set apart.

These are folded into the weights at the end, in float64, and what comes of it is rounded once to the network's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...activations import ActivationSpec
from ...network import numpy_dtype
from .. import Found
from .algebra import Affine, Number, Terms
from .file import RefusedError, shown

__all__ = ["Base", "Data", "Input", "Layer", "Length", "found_layers"]

Length = int | str  # of an axis; a name if it is not fixed


@dataclass(frozen=True, eq=False)
class Input:
    """``scale * x + shift`` of the model's input x."""

    name: str
    lead: tuple[Length, ...]
    width: int | None
    scale: Number = 1.0
    shift: Number = 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """``scale * ((after.scale * f(source) + after.shift) @ weight + bias) + shift``, f the source's activation."""

    source: Input | Layer
    activation: ActivationSpec
    after: Affine
    tensor: str  # the weight's name
    weight: NDArray[Any]  # (in, out)
    bias: NDArray[np.float64] | None
    scale: Number = 1.0
    shift: Number = 0.0

    @property
    def width(self) -> int:
        """The number of outputs."""
        return int(self.weight.shape[1])


Base = Input | Layer


def folded(base: Base, affine: Affine) -> Base:
    """The same, with a scale and a shift after it."""
    if affine.is_trivial:
        return base
    return replace(base, scale=base.scale * affine.scale, shift=base.shift * affine.scale + affine.shift)


@dataclass(frozen=True, eq=False)
class Data:
    """A tensor that depends on the input: terms of what a layer gives, and the lengths of its axes but the last."""

    base: Base
    terms: Terms
    lead: tuple[Length, ...]

    @property
    def width(self) -> int | None:
        """The number of features, if it is known."""
        return self.base.width

    def of_width(self, width: int) -> Data:
        """With a number of features that the model's input does not tell itself; unchanged if it is known."""
        if isinstance(self.base, Input) and self.base.width is None:
            return replace(self, base=replace(self.base, width=width))
        return self

    @property
    def shape(self) -> tuple[Length, ...]:
        """All lengths."""
        return (*self.lead, "features" if self.width is None else self.width)


def found_layers(last: Layer, activation: ActivationSpec, after: Affine, dtype: str) -> Found:
    """All layers up to the last, and its activation, with a scale and a shift after that, in an additional layer.

    Parameters
    ----------
    dtype
        To round what is folded to.
    """
    layers = list(_back(last))[::-1]
    hidden = [layer.activation for layer in layers[1:]]
    arrays = [_arrays(layer, dtype) for layer in layers]
    if not after.is_trivial:
        n = last.width
        if n > _MOST_SCALED:
            raise RefusedError(
                f"the output is scaled after its activation, for which a layer of {n} x {n} would be needed; choose a tensor "
                "before that with output="
            )
        extra = Layer(last, activation, after, last.tensor, np.eye(n), None)
        hidden.append(activation)
        activation = "identity"
        arrays.append(_arrays(extra, dtype))
    return Found([w for w, _ in arrays], [b for _, b in arrays], hidden, activation)


_MOST_SCALED = 1024  # features, whose scale after the last activation makes a layer of its own


def _back(layer: Base) -> Iterator[Layer]:
    while isinstance(layer, Layer):
        yield layer
        layer = layer.source


def _arrays(layer: Layer, dtype: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Weight and bias with all scales and shifts in them."""
    source, before = layer.source, layer.after
    if isinstance(source, Input):
        before = Affine(source.scale, source.shift)
    weight, bias = layer.weight, layer.bias
    with np.errstate(all="ignore"):  # checked below
        if not _is(before.shift, 0) or not _is(layer.shift, 0):
            into = np.broadcast_to(np.asarray(before.shift, np.float64), len(weight)) @ weight.astype(np.float64)
            bias = (into if bias is None else into + bias) * layer.scale + layer.shift
        elif bias is not None:
            bias = bias * layer.scale
        if not _is(before.scale, 1) or not _is(layer.scale, 1):
            rows = np.asarray(before.scale, np.float64).reshape(-1, 1)
            weight = weight.astype(np.float64) * rows * layer.scale
        weight = weight.astype(numpy_dtype(dtype), copy=False)
        bias = None if bias is None else bias.astype(numpy_dtype(dtype), copy=False)
    if not np.isfinite(weight).all() or not (bias is None or np.isfinite(bias).all()):
        raise RefusedError(
            f"the scales and shifts around the weight {shown(layer.tensor)}, folded into it, are more than {weight.dtype} holds"
        )
    return weight, bias


def _is(number: Number, what: float) -> bool:
    return np.ndim(number) == 0 and bool(number == what)
