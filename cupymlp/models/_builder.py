"""Builder: layers, activations and elementwise scalings, one after another, made into the layers of a network.

Importers add what they find, in order. A scaling is folded into the weights beside it, or kept apart as a layer of its own
with a diagonal weight, so that the network is one launch all the same.

Folded before a dense layer, ``z = factor (x - center) + offset`` becomes ``W' = diag(factor) W`` and
``b' = b + (offset - factor center) @ W``. Where the center is large beside the spread of x, products and b' are large, cancel,
and leave their rounding errors. Kept apart it costs a layer of K x K weights, ``D (x - c)``: D has the powers of two next to
the factors, so that products are exact, and c is the center, rounded to the network's dtype. What is left of the factors and of
the center goes into the next layer, where nothing large cancels. `_fold_error` and `_apart_error` bound what either way adds to
the next layer's sums, and scalings are folded where that is at most `ACCEPTED_LOSS` times what it is apart.

Folded behind a dense layer, ``W' = W diag(factor)`` and ``b' = (b - center) factor + offset``: rounded sums get another size
and no more of them cancel than in the scaled result itself, so this is always done, unless everything is to be kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..activations import activation_of
from ..network import Network, numpy_dtype
from . import Found

__all__ = ["ACCEPTED_LOSS", "SCALINGS", "Affine", "Builder"]

Array = NDArray[np.float64]

SCALINGS = ("auto", "fold", "apart")
ACCEPTED_LOSS = 4.0  # two bits of a first layer's sums, against the price of one more layer
SPREAD = 3.0  # scaled inputs are taken to be within -3 and 3

_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
_OPERAND_UNITS = {"tf32": 2.0**-11, "split3": 2.0**-22}  # what rounds every operand before it is multiplied


@dataclass(frozen=True)
class Affine:
    """``factor * (x - center) + offset``, elementwise; each a float64 number or one a feature."""

    center: Array
    factor: Array
    offset: Array

    @staticmethod
    def of(center: ArrayLike = 0.0, factor: ArrayLike = 1.0, offset: ArrayLike = 0.0) -> Affine:
        """Of what NumPy takes for numbers."""
        return Affine(*(np.asarray(v, np.float64) for v in (center, factor, offset)))

    def then(self, other: Affine) -> Affine:
        """Both, this one first."""
        offset = other.factor * (self.offset - other.center) + other.offset
        return Affine(self.center, self.factor * other.factor, np.asarray(offset))

    def wide(self, features: int) -> Affine:
        """With one number a feature."""
        return Affine(*(np.broadcast_to(v, (features,)) for v in (self.center, self.factor, self.offset)))

    @property
    def shift(self) -> Array:
        """What it makes of zero."""
        return np.asarray(self.offset - self.factor * self.center)


class Builder:
    """Takes the parts of a network in order; `found` has its layers.

    Parameters
    ----------
    dtype, precision
        The network's, which say what rounding costs.
    scaling
        ``auto``, ``fold`` or ``apart``: what becomes of elementwise scalings.
    features
        How many the network takes; needed where something else than a dense layer may be the first, and the last.
    """

    def __init__(self, dtype: str, precision: str = "ieee", scaling: str = "auto", features: int = 0) -> None:
        self._dtype = dtype
        self._precision = precision
        self._scaling = scaling
        self._features = features
        self._weights: list[Array] = []
        self._biases: list[Array | None] = []
        self._activations: list[Any] = []
        self._pending: tuple[str, Affine] | None = None  # what the next layer's inputs pass first

    def dense(self, weight: ArrayLike, bias: ArrayLike | None = None) -> None:
        """``x @ weight + bias``; weight (in, out)."""
        W, b = _as_float64(weight), None if bias is None else _as_float64(bias)
        if self._pending is None:
            self._append(W, b)
            return
        name, affine = self._pending
        self._pending = None
        affine = affine.wide(len(W))
        with np.errstate(all="ignore"):  # what comes of it is checked
            fold = self._scaling == "fold" or (self._scaling == "auto" and self._should_fold(affine, W, b))
            layers = _fold(affine, W, b) if fold else _apart(affine, W, b, self._dtype)
        for layer in layers:
            self._check_range(name, *layer)
            self._append(*layer)

    def scale(self, name: str, affine: Affine) -> None:
        """An elementwise scaling; ``name`` is what errors call it."""
        if self._pending is not None:
            self._pending = name, self._pending[1].then(affine)
        elif self._weights and self._activations[-1] == "identity" and self._scaling != "apart":
            W, b = self._weights[-1], self._biases[-1]
            affine = affine.wide(W.shape[1])
            with np.errstate(all="ignore"):  # what comes of it is checked
                W = W * affine.factor
                bias = np.asarray(((0.0 if b is None else b) - affine.center) * affine.factor + affine.offset)
            if (
                self._scaling == "auto"
                and not self._holds(W, bias)
                and self._holds(np.diag(affine.factor), affine.shift)
            ):
                self._pending = name, affine
                return
            self._check_range(name, W, bias)
            self._weights[-1], self._biases[-1] = W, None if b is None and not bias.any() else bias
        else:
            self._pending = name, affine

    def activate(self, activation: Any) -> None:
        """An activation, as `cupymlp.MLP` takes them."""
        if activation == "identity":
            return
        self._close()
        if not self._weights or self._activations[-1] != "identity":
            self.dense(np.eye(self.width))
        self._activations[-1] = activation

    def found(self) -> Found:
        """What there is by now."""
        self._close()
        return Found(self._weights, self._biases, self._activations[:-1], self._activations[-1], self._dtype)

    @property
    def width(self) -> int:
        """The features that the last layer gives."""
        return self._weights[-1].shape[1] if self._weights else self._features

    def _close(self) -> None:
        """Make layers of a scaling that no dense layer follows."""
        if self._pending is None:
            return
        name, affine = self._pending
        if affine.center.any():
            self.dense(np.eye(self.width))
        else:
            self._pending = None
            affine = affine.wide(self.width)
            self._check_range(name, np.diag(affine.factor), affine.shift)
            self._append(np.diag(affine.factor), affine.shift)

    def _append(self, weight: Array, bias: Array | None) -> None:
        if self._weights and activation_of(self._activations[-1]).over_row:
            raise ValueError(
                f"a layer or a scaling follows {self._activations[-1]!r}, which is accepted at the end of a network alone: "
                "take the network up to it"
            )
        self._weights.append(weight)
        self._biases.append(bias)
        self._activations.append("identity")

    def _should_fold(self, affine: Affine, W: Array, b: Array | None) -> bool:
        """Whether folding is nearly as accurate as a layer apart, or there can be none."""
        folded, apart = _fold(affine, W, b), _apart(affine, W, b, self._dtype)
        if not all(_in_range(layer, self._dtype) for layer in apart):
            return True
        if not all(_in_range(layer, self._dtype) for layer in folded):
            return False
        numbers = _Numbers.of(self._dtype, self._precision, len(W) + 1)
        allowed = ACCEPTED_LOSS * _apart_error(affine, apart, numbers)
        return bool((_fold_error(affine, W, folded, numbers) <= allowed).all())

    def _holds(self, weight: Array, bias: Array) -> bool:
        """Whether the dtype has these numbers about as exactly as it has ordinary ones: few are too small for it."""
        if not _in_range((weight, bias), self._dtype):
            return False
        lost, size = (
            (np.abs(w).sum(0) + np.abs(b))
            for w, b in ((_rounded(weight, self._dtype) - weight, _rounded(bias, self._dtype) - bias), (weight, bias))
        )
        return bool((lost <= ACCEPTED_LOSS * _UNITS[self._dtype] * size).all())

    def _check_range(self, name: str, weight: Array, bias: Array | None) -> None:
        if not _in_range((weight, bias), self._dtype):
            raise ValueError(
                f"{name} makes weights or biases that {self._dtype} cannot hold: they would be infinite, or a scale of a layer "
                "of its own would vanish. Give the network a dtype with a larger range, or scale the data before"
            )


# --- The two ways -----------------------------------------------------------------------------------------------------


def _fold(affine: Affine, W: Array, b: Array | None) -> list[tuple[Array, Array | None]]:
    return [(affine.factor[:, None] * W, _shifted(b, affine.shift, W))]


def _apart(affine: Affine, W: Array, b: Array | None, dtype: str) -> list[tuple[Array, Array | None]]:
    power = _powers(affine)
    near = _rounded(power * affine.center, dtype) / power
    rest = Affine(affine.center - near, affine.factor, affine.offset)
    return [
        (np.diag(power), -power * near),
        ((affine.factor / power)[:, None] * W, _shifted(b, rest.shift, W)),
    ]


def _powers(affine: Affine) -> Array:
    """The power of two next to each factor's size; 1 for a factor of 0."""
    size = np.abs(affine.factor)
    return np.asarray(np.exp2(np.rint(np.log2(np.where(size > 0, size, 1.0)))))


def _shifted(b: Array | None, shift: Array, W: Array) -> Array | None:
    if not shift.any():
        return b
    return np.asarray((0.0 if b is None else b) + shift @ W)


def _as_float64(array: ArrayLike) -> Array:
    return np.asarray(array).astype(np.float64)


def _rounded(array: Array, dtype: str) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(numpy_dtype(dtype)).astype(np.float64)


def _in_range(layer: tuple[Array, Array | None], dtype: str) -> bool:
    """Whether the dtype holds all numbers, and does not take for zero what stands alone on a diagonal."""
    weight = layer[0]
    if not all(v is None or np.isfinite(_rounded(v, dtype)).all() for v in layer):
        return False
    diagonal = weight.shape[0] == weight.shape[1] and np.count_nonzero(weight) == np.count_nonzero(weight.diagonal())
    return not diagonal or np.count_nonzero(_rounded(weight, dtype)) == np.count_nonzero(weight)


# --- What they cost ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Numbers:
    """What computing costs: units of rounding, of the dtype, of operands, and of sums of K products and a bias."""

    dtype: str
    unit: float
    operand: float
    sums: float

    @staticmethod
    def of(dtype: str, precision: str, terms: int) -> _Numbers:
        sum_unit = _UNITS[Network((1, 1), ("identity",), (True,), dtype).sum_dtype]
        n = terms * sum_unit
        return _Numbers(dtype, _UNITS[dtype], _OPERAND_UNITS.get(precision, 0.0), n / (1 - n) if n < 1 else np.inf)

    def layer(self, size: Array, weight: Array, bias: Array | None) -> Array:
        """What the sums of inputs of this size can be off: as in `cupymlp.reference`, and for rounding the weights."""
        held = np.abs(_rounded(weight, self.dtype))
        b = np.zeros(weight.shape[1]) if bias is None else bias
        lost = size @ np.abs(_rounded(weight, self.dtype) - weight) + np.abs(_rounded(b, self.dtype) - b)
        return np.asarray(lost + (self.sums + 2 * self.operand) * (size @ held) + self.sums * np.abs(b))


def _spread(affine: Affine) -> Array:
    """How far typical inputs are from the center; 0 where the factor is, and so what they do."""
    size = np.abs(affine.factor)
    return np.asarray(np.where(size > 0, SPREAD / np.where(size > 0, size, 1.0), 0.0))


def _fold_error(affine: Affine, W: Array, folded: list[Any], numbers: _Numbers) -> Array:
    ((weight, bias),) = folded
    size = np.abs(affine.center) + _spread(affine)
    # b' is a sum of float64 products, which float64 networks feel.
    in_float64 = (len(W) + 3) * _UNITS["float64"] * (np.abs(affine.shift) @ np.abs(W))
    return np.asarray(numbers.layer(size, weight, bias) + in_float64)


def _apart_error(affine: Affine, apart: list[Any], numbers: _Numbers) -> Array:
    (diagonal, offset), (weight, bias) = apart
    power = diagonal.diagonal()
    size = power * _spread(affine) + np.abs(power * affine.center + offset)
    # Other products of its sums are zero, and so the one sum is rounded once; operands, and the sums of tensor cores, more.
    before = np.abs(affine.center) + _spread(affine)
    error = numbers.unit * size + (2 * numbers.operand + (numbers.operand > 0) * numbers.sums) * power * before
    return np.asarray(numbers.layer(size, weight, bias) + error @ np.abs(weight))
