"""The network in float64, straight from the formula, and a proven bound on how far a right answer can be from it.

The bound is a componentwise forward error bound, carried from layer to layer (N. J. Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., chapter 3). A layer that gets inputs h with an error of at most e, and adds up terms t_k whose
sizes sum to T, is off by at most::

    e @ |W|  +  D  +  gamma_n T,        gamma_n = n u / (1 - n u)

D is what the terms are off together: products rounded, or underflown. gamma_n T is what summing them loses, where each term
passes at most n roundings of relative size u. |h| is at most |reference| + e. What activations do to errors, and their own
arithmetic, is in _activation_bounds.py. The reference is rounded too, in float64: its own bound, by the same recursion, is
added.

With K products of an output, a bias (1) or none (0), s the least subnormal number of the sums' dtype, `dtype` that of the
network:

float32, float64, in any order (NumPy's BLAS, cuBLAS)
    u = 2^-24, 2^-53; n = K + bias, with or without fused multiply-add; D = K s.
the same, in blocks (``order="blocks"``: the order of the ieee kernels)
    A product passes at most min(K, 16) roundings in its block and ceil(K / 16) as a part of its block's sum, one less
    without a bias: n = min(K, 16) + ceil(K / 16) - 1 + bias.
tensor cores
    Products are exact. A step adds q >= 4 of them to the accumulator: each but the largest of these q + 1 may be cut off at
    the last of 24 bits of the largest one, and so may the sum (M. Fasi et al., Numerical behavior of NVIDIA tensor cores,
    PeerJ Comput. Sci. 7:e330, 2021). With u = 2^-23 that is q + 1 units of the sizes' sum a step: n = K + ceil(K / 4), and 2
    more for adding a bias and for joining two accumulators.
float16, bfloat16
    Sums on tensor cores, whose bound covers float32 sums in any order, too; ``order="blocks"``: float32 sums in blocks. Then
    one rounding a layer to the dtype, after the activation: u = 2^-11, 2^-8 of the result, and half the dtype's least subnormal
    number. D = K 2^-126 for products of bfloat16 numbers that tensor cores may flush, K s in blocks; those of float16 numbers
    are normal.
tf32
    Operands are rounded to 11 bits, so products are off by (1 + 2^-11)^2 - 1; sums as on tensor cores. Operands and products
    below f = 2^-126 may be flushed: D also has f (1 + 2^-11) (sum |h| + sum |W|) + K f.
split3
    A row of h is scaled by a power of two so that its largest element, m, is in [2^14, 2^15); W so that its largest, M, is in
    [1, 2): exact. Then hi = float16(v) and lo = float16(v - hi), with 5 exponent bits, so that in units of the unscaled
    values, with a = 2^-40 c for h, where c = 2 m or what stands for 2^15, and a = 2^-25 M for W::

        |lo| <= l = 2^-11 |v| + a        |v - hi - lo| <= r = 2^-22 |v| + a        |hi| <= |v| + l

    After a hidden layer of K inputs without a bias, whose activation commutes with positive factors, rows may be scaled by
    what its sums can be at most: c = 2^(1 + ceil(log2 K)) M c of the layer before; two such layers in a row, then it is 2 m.
    hi*hi + hi*lo + lo*hi leaves lo*lo out of h W, and what hi + lo leave out of h and W (an index tells whose)::

        D = l_h @ l_W  +  r_h @ (|W| + r_W)  +  |h| @ r_W

    The sizes of these 3 K terms sum to (|h| + l_h) @ (|W| + 2 l_W) + l_h @ (|W| + l_W) at most; n is three times that of tensor
    cores. D has K s, too, for scaling back. This is normwise: a row's and the matrix' largest elements are in the bounds of
    all. Rows with infinities or NaN, and all rows if W has some, are summed as ieee ones, which the bound covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._activation_bounds import activated
from ._formats import FORMATS, Format
from .activations import activation_of, parameter_of
from .network import Network

__all__ = ["Order", "error_in_bounds", "forward_and_bound"]

Order = Literal["any", "blocks"]
Array = NDArray[np.float64]

_SLACK = 1 + 1e-9  # the bound itself is computed in float64, of non-negative terms: far less than this is lost
_FLUSH = 2.0**-126  # the least normal float32 number


def forward_and_bound(
    network: Network,
    weights: Sequence[ArrayLike],
    biases: Sequence[ArrayLike | None],
    x: ArrayLike,
    *,
    order: Order = "any",
) -> tuple[Array, Array]:
    """The network of x in float64, and the most by which a result of its dtype and precision may differ from it.

    Parameters
    ----------
    weights, biases
        One (K, N) array a layer and one (N,) array or None.
    x
        Shape (..., K).
    order
        ``"any"``: holds for the CPU path and for every schedule. ``"blocks"``: sharper, for sums in the order of the ieee
        kernels: float32 and float64 with ``precision="ieee"`` on a GPU, and float16 and bfloat16 in the schedules row, tile and
        layer. Other precisions have but one bound.

    Returns
    -------
    y, bound
        Shape (..., N), float64. The bound is infinite where a sum, or a result, can exceed the dtype's range, where nothing is
        claimed. Where y is infinite or NaN the result must be the same, and the bound says nothing.
    """
    if order not in ("any", "blocks"):
        raise ValueError(f"order is {order!r}; accepted: 'any' or 'blocks'")
    sums = _sums_of(network, order)
    own_sums = _Sums(FORMATS["float64"], "any")
    storage = None if network.dtype == network.sum_dtype else FORMATS[network.dtype]
    h = np.asarray(x, dtype=np.float64)
    ceiling: Any = 0.0  # split3's c
    # Against the exact value: what a result in the network's dtype may be off, and what the reference may be off.
    error = own = np.zeros_like(h)
    with np.errstate(all="ignore"):
        for layer, spec in enumerate(network.activations):
            weight = np.asarray(weights[layer], dtype=np.float64)
            bias = None if biases[layer] is None else np.asarray(biases[layer], dtype=np.float64)
            unclear = _unclear(h, error + own, weight, sums.flush)
            # Infinite and NaN terms make infinite and NaN results; the bound is about the others.
            finite = np.isfinite(h)
            size = np.where(finite, np.abs(h) + own, 0)  # at least the exact |h|
            error = np.where(finite | np.isinf(error), error, 0)  # what was not claimed stays so
            own = np.where(finite, own, 0)
            absolute = _finite_size(weight)
            offset = None if bias is None else _finite_size(bias)
            if sums.way == "split3":
                commutes = bias is None and spec in ("identity", "relu") and layer % 3 != 2
                ceiling = _ceiling(size + error, ceiling)
                sums = replace(sums, ceiling=ceiling)
                ceiling = (
                    2.0 ** (1 + max(len(weight) - 1, 0).bit_length()) * absolute.max(initial=0) * ceiling * commutes
                )
            error = np.where(unclear, np.inf, sums.carry(error, size, absolute, offset))
            own = own_sums.carry(own, size, absolute, offset)
            v = h @ weight
            if bias is not None:
                v += bias
            h = np.empty_like(v)
            activation, parameter = activation_of(spec), parameter_of(spec, network.sum_dtype)
            activation.apply(v, h, parameter)
            error, own = activated(activation, parameter, v, h, error, own, FORMATS[network.sum_dtype])
            if storage is not None:
                largest = np.where(np.isfinite(h), np.abs(h) + own, 0) + error
                error = error + storage.unit * largest + storage.subnormal / 2
                error = np.where(largest + error < storage.most, error, np.inf)
        bound = (error + own) * _SLACK
        return h, np.where(np.isnan(bound), np.inf, bound)


def _unclear(h: Array, error: Array, weight: Array, flush: float) -> NDArray[np.bool_]:
    """Where an infinity meets a number whose sign, or being zero, is not certain: infinity or NaN may come of it."""
    doubtful = (np.abs(h) <= error + flush) & (error + flush > 0) & ((h != 0) | (error > 0))
    flushed = (np.abs(weight) < flush) & (weight != 0)
    count = doubtful.astype(np.float64) @ np.isinf(weight) + np.isinf(h).astype(np.float64) @ flushed
    return np.asarray(count > 0)


def _finite_size(array: Array) -> Array:
    return np.where(np.isfinite(array), np.abs(array), 0)


# --- Ways to sum ------------------------------------------------------------------------------------------------------


def _blocks(k: int, bias: int) -> int:
    return max(0, min(k, 16) + -(-k // 16) - 1 + bias)


def _tensor_core(k: int) -> int:
    return k + -(-k // 4) + 2


@dataclass(frozen=True)
class _Sums:
    """An arithmetic of a layer's sums."""

    dtype: Format
    way: str  # any, blocks, half, tf32, split3
    flush: float = 0.0  # operands below it may be taken for zero
    underflow: float = 0.0  # what a product may lose; 0: the least subnormal number
    ceiling: Any = 0.0  # split3: the c of each row of the inputs

    def carry(self, error: Array, size: Array, absolute: Array, offset: Array | None) -> Array:
        """The error bound of a layer's sums from that of its inputs: both parts of it, and of what they are made."""
        inputs = size + error  # at least |h| as it was computed
        k, bias = len(absolute), int(offset is not None)
        lost, total = self._terms(inputs, absolute)
        lost = lost + k * (self.underflow or self.dtype.subnormal)
        total = total + lost + (0.0 if offset is None else offset)
        bound = lost + self._gamma(k, bias) * total + error @ absolute
        in_range = total + bound < self.dtype.most  # false, too, for the NaN of an infinite error times a zero weight
        return np.where(in_range, bound, np.inf)

    def _gamma(self, k: int, bias: int) -> float:
        n, unit = {
            "any": (k + bias, self.dtype.unit),
            "blocks": (_blocks(k, bias), self.dtype.unit),
            "half": (_tensor_core(k), 2.0**-23),
            "tf32": (_tensor_core(k), 2.0**-23),
            "split3": (3 * _tensor_core(k), 2.0**-23),
        }[self.way]
        return n * unit / (1 - n * unit) if n * unit < 1 else np.inf

    def _terms(self, h: Array, w: Array) -> tuple[Any, Array]:
        """What the products of non-negative h and w are off in sum, and what their sizes sum to."""
        if self.way == "tf32":
            u = 2.0**-11
            products = h @ w
            lost = ((1 + u) ** 2 - 1) * products
            lost += self.flush * (1 + u) * (h.sum(-1, keepdims=True) + w.sum(0))
            # Rounded up, the largest numbers are infinite.
            most = self.dtype.most
            lost = np.where((h * (1 + u) > most).any(-1, keepdims=True) | (w * (1 + u) > most).any(0), np.inf, lost)
            return lost, products
        if self.way == "split3":
            low_h, left_h = _split(h, 2.0**-40 * self.ceiling)
            low_w, left_w = _split(w, 2.0**-25 * w.max(initial=0))
            lost = low_h @ low_w + left_h @ (w + left_w) + h @ left_w
            return lost, (h + low_h) @ (w + 2 * low_w) + low_h @ (w + low_w)
        return 0.0, h @ w


def _split(v: Array, absolute: Any) -> tuple[Array, Array]:
    """The most that the low part of v is, and that both parts leave out."""
    return 2.0**-11 * v + absolute, 2.0**-22 * v + absolute


def _ceiling(h: Array, fixed: Any) -> Array:
    """What 2^15 stands for in each scaled row of h, at most; 2^-126 is the least power of two that a row is divided by."""
    return np.asarray(np.maximum(np.maximum(2 * h.max(-1, keepdims=True, initial=0), 2.0**-111), fixed))


def _sums_of(network: Network, order: Order) -> _Sums:
    dtype = FORMATS[network.sum_dtype]
    if network.precision == "tf32":
        return _Sums(dtype, "tf32", flush=_FLUSH, underflow=_FLUSH)
    if network.precision == "split3":
        return _Sums(dtype, "split3")
    if order == "blocks" and network.precision == "ieee":
        return _Sums(dtype, "blocks")
    if network.dtype == "float16":
        return _Sums(dtype, "half")
    if network.dtype == "bfloat16":
        return _Sums(dtype, "half", underflow=_FLUSH)
    return _Sums(dtype, "any")


# --- Comparing --------------------------------------------------------------------------------------------------------


def error_in_bounds(result: ArrayLike, reference: Array, bound: Array) -> Array:
    """How far a result is from the reference, in units of the bound: right if at most 1, elementwise.

    An infinite or NaN reference wants the same of the result (any NaN will do): 0 if so, else infinity.
    """
    y = np.asarray(result, dtype=np.float64)
    with np.errstate(all="ignore"):
        same = (y == reference) | (np.isnan(y) & np.isnan(reference))
        ratio = np.abs(y - reference) / bound  # NaN where y is NaN, or where y and the bound are infinite
        ratio = np.where(np.isnan(ratio) & ~np.isnan(y) & ~np.isnan(bound), 0.0, ratio)
        wrong = np.where(np.isfinite(reference) & ~np.isnan(ratio), ratio, np.where(np.isinf(bound), 0.0, np.inf))
        return np.where(same, 0.0, wrong)
