"""The network in float64, straight from the formula, and a proven bound on how far a right answer can be from it.

The bound is a componentwise forward error bound, carried from layer to layer (N. J. Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., chapter 3). With unit roundoff u and gamma_n = n u / (1 - n u), a sum of K products and a
bias, in any order, with or without fused multiply-add, satisfies::

    |computed - exact| <= gamma_n (|h| @ |W| + |b|),    n = K, or K + 1 with a bias

An error e that h already carries adds ``e @ |W|``, and makes ``|h| + e`` out of ``|h|``. A product that underflows adds
at most the least subnormal number. An activation multiplies the error by its Lipschitz constant at most. The reference
is rounded too, in float64: its own bound, by the same recursion, is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .activations import ACTIVATIONS
from .network import Network

__all__ = ["error_in_bounds", "forward_and_bound"]

_SLACK = 1 + 1e-9  # the bound itself is computed in float64, of non-negative terms: far less than this is lost


def forward_and_bound(
    network: Network, weights: Sequence[ArrayLike], biases: Sequence[ArrayLike | None], x: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The network of x in float64, and the most by which a result in the network's dtype may differ from it.

    Parameters
    ----------
    weights, biases
        One (K, N) array a layer and one (N,) array or None.
    x
        Shape (..., K).

    Returns
    -------
    y, bound
        Shape (..., N), float64. The bound is infinite where a sum can exceed the dtype's range, where nothing is claimed.
        Where y is infinite or NaN the result must be the same, and the bound says nothing.
    """
    result, float64 = np.finfo(network.dtype), np.finfo(np.float64)
    h = np.asarray(x, dtype=np.float64)
    # Against the exact value: what a result in the network's dtype may be off, and what the reference may be off.
    error = own = np.zeros_like(h)
    with np.errstate(all="ignore"):
        for layer, name in enumerate(network.activations):
            weight = np.asarray(weights[layer], dtype=np.float64)
            bias = biases[layer]
            # Infinite and NaN terms make infinite and NaN results; the bound is about the others.
            finite = np.isfinite(h)
            size = np.where(finite, np.abs(h) + own, 0)  # at least the exact |h|
            error, own = np.where(finite, error, 0), np.where(finite, own, 0)
            absolute = _finite_size(weight)
            offset = 0.0 if bias is None else _finite_size(np.asarray(bias, dtype=np.float64))
            terms = len(weight) + (bias is not None)
            error = _carry(error, size, absolute, offset, terms, result)
            own = _carry(own, size, absolute, offset, terms, float64)
            v = h @ weight
            if bias is not None:
                v += np.asarray(bias, dtype=np.float64)
            h = np.empty_like(v)
            activation = ACTIVATIONS[name]
            activation.apply(v, h)
            error, own = activation.lipschitz * error, activation.lipschitz * own
        return h, (error + own) * _SLACK


def _carry(
    error: NDArray[np.float64],
    size: NDArray[np.float64],
    absolute: NDArray[np.float64],
    offset: Any,
    terms: int,
    info: Any,
) -> NDArray[np.float64]:
    """The error bound of a layer's sums from that of its inputs."""
    u = float(info.eps) / 2
    gamma = terms * u / (1 - terms * u)
    total = (size + error) @ absolute + offset
    bound = gamma * total + error @ absolute + terms * float(info.smallest_subnormal)
    in_range = total + bound < float(info.max)  # false, too, for the NaN of an infinite error times a zero weight
    return np.where(in_range, bound, np.inf)


def _finite_size(array: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(array), np.abs(array), 0)


def error_in_bounds(
    result: ArrayLike, reference: NDArray[np.float64], bound: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How far a result is from the reference, in units of the bound: right if at most 1, elementwise.

    An infinite or NaN reference wants the same of the result (any NaN will do): 0 if so, else infinity.
    """
    y = np.asarray(result, dtype=np.float64)
    with np.errstate(all="ignore"):
        same = (y == reference) | (np.isnan(y) & np.isnan(reference))
        ratio = np.abs(y - reference) / bound  # NaN where y is NaN, or where y and the bound are infinite
        ratio = np.where(np.isnan(ratio) & ~np.isnan(y), 0.0, ratio)
        wrong = np.where(np.isfinite(reference) & ~np.isnan(ratio), ratio, np.where(np.isinf(bound), 0.0, np.inf))
        return np.where(same, 0.0, wrong)
