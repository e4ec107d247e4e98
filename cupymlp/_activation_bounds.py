"""What an activation makes of an error, and what its own arithmetic adds: the part of `cupymlp.reference` that is about f.

Three numbers: the exact v, the reference's, off by at most ``own``, and the computed one, off by at most ``error``. With a
Lipschitz constant L, f multiplies both by L at most. Others are taken for what they are between v - e and v + e::

    exp          e^v is off by at most e^v (e^e - 1)
    softmax      y_j changes by a factor between e^-(e_j + E) and e^(e_j + E), since the sum of s_k = e^(v_k) changes by one
                 between e^-E and e^E with E = log(sum_k s_k e^(e_k) / sum_k s_k)
    log_softmax  hence, by e_j + E at most

The arithmetic adds u (relative |f| + |of_input|) + underflow n (`cupymlp.activations.Activation`). Of softmax's: v_j - m is
rounded, so that e^(v_j - m) is off by a factor of 1 + r_j, r_j = u (|v_j - m| + FUNCTION); terms below n may be 0; the sum of N
such terms, one of which is 1, is off by a factor of 1 + R, R = sum_k s_k r_k + u N + n N; and the quotient is rounded.

An infinite v is computed as one, and f of it is a limit: no error is carried then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ._formats import FORMATS, Format
from .activations import FUNCTION, Activation

__all__ = ["activated"]

Array = NDArray[np.float64]
_OWN = FORMATS["float64"]
_FAR = 1000.0  # e^-1000 is less than n in every format, so that what it is off does not matter


def activated(
    activation: Activation, parameter: float, v: Array, h: Array, error: Array, own: Array, sums: Format
) -> tuple[Array, Array]:
    """The errors of h = f(v), computed in the format ``sums``, from those of v."""
    finite = np.isfinite(v)
    error = np.where(finite | np.isinf(error), error, 0)
    own = np.where(finite | np.isinf(own), own, 0)
    if activation.over_row:
        error, own = _of_row(activation.name == "log_softmax", v, h, error, own, sums)
    else:
        reach, own_reach = error + own, own
        if activation.lipschitz is None:
            error, own = _grown(v + own, error, finite), _grown(v, own, finite)
        else:
            slope = activation.lipschitz(parameter)
            error, own = slope * error, slope * own
        # 0 times infinity: nothing is known of it.
        error, own = np.where(np.isnan(error), np.inf, error), np.where(np.isnan(own), np.inf, own)
        size = np.where(np.isfinite(h), np.abs(h), 0) + own
        own = own + _rounding(activation, parameter, v, own_reach, size, _OWN)
        error = error + _rounding(activation, parameter, v, reach, size + error, sums)
    # What overflows: a result that is infinite in float64, too, or that can be in the network's arithmetic.
    largest = np.where(np.isfinite(h), np.abs(h) + own, np.where(np.isinf(h) & finite, np.inf, 0)) + error
    return np.where(largest < sums.most, error, np.inf), own


def _rounding(activation: Activation, parameter: float, v: Array, reach: Array, size: Array, of: Format) -> Array:
    """What computing f adds. reach: how far v may be from the v that it is computed of; size: at least abs(f)."""
    least = of.subnormal if activation.exact else of.normal
    rounding = np.full_like(size, least * activation.underflow(parameter))
    if activation.relative:  # 0 times an infinite size would be NaN
        rounding = rounding + of.unit * activation.relative * size
    if activation.of_input is None:
        return rounding
    inputs = np.where(np.isfinite(v), activation.of_input(v - reach, v + reach, parameter), 0)
    return np.where(inputs < of.most, rounding + of.unit * inputs, np.inf)


def _grown(v: Array, e: Array, finite: NDArray[np.bool_]) -> Array:
    """e^(v + e) - e^v, or a little more where e^v may be too small a number."""
    return np.where(finite, np.where(e < 1, np.exp(v) * np.expm1(e), np.exp(v + e)), 0)


def _of_row(logarithm: bool, v: Array, h: Array, error: Array, own: Array, sums: Format) -> tuple[Array, Array]:
    unknown = ~np.isfinite(error + own).all(-1, keepdims=True)
    error, own = np.where(unknown, 0, error), np.where(unknown, 0, own)
    share = np.where(np.isnan(h), 0, np.exp(h) if logarithm else h) + _OWN.normal
    factor = own + _log_mean_exp(share, own)  # of the exact result to the reference's, its logarithm
    exact = np.minimum(share * np.exp(factor), 1)
    changed = error + _log_mean_exp(exact, error)
    carried = (changed, factor)
    if not logarithm:  # results are between 0 and 1, and so is what they are off
        carried = np.minimum(exact * np.expm1(changed), 1), np.minimum(share * np.expm1(factor), 1)
    computed = np.minimum(exact * np.exp(changed), 1)
    off = error + own
    distance = np.where(np.isfinite(v), v.max(-1, keepdims=True, initial=-np.inf) - v, 0)
    distance = np.where(np.isfinite(distance), distance, 0) + off + off.max(-1, keepdims=True, initial=0)
    size = np.where(np.isfinite(h), np.abs(h), 0)
    own = carried[1] + _rounding_of_row(logarithm, exact, distance, size + carried[1], _OWN)
    error = carried[0] + _rounding_of_row(logarithm, computed, distance, size + carried[1] + carried[0], sums)
    return np.where(unknown | np.isnan(error), np.inf, error), np.where(np.isnan(own), np.inf, own)


def _log_mean_exp(share: Array, e: Array) -> Array:
    """log(sum_k s_k e^(e_k)), where the s_k sum to 1, or to more."""
    most = e.max(-1, keepdims=True, initial=0)
    small = np.log1p((share * np.expm1(np.minimum(e, 1))).sum(-1, keepdims=True))
    large = most + np.log((share * np.exp(e - most)).sum(-1, keepdims=True))
    return np.asarray(np.where(most < 1, small, np.maximum(large, 0)))


def _rounding_of_row(logarithm: bool, share: Array, distance: Array, size: Array, of: Format) -> Array:
    """share: at least the s_k that are computed; distance: at least abs(v_k - m); size: at least abs(f)."""
    count = share.shape[-1]
    terms = of.unit * (np.minimum(distance, _FAR) + FUNCTION + 1)
    total = (share * terms).sum(-1, keepdims=True) + (of.unit + of.normal) * (count + 1)
    if logarithm:
        # 1.5 R >= -log(1 - R) up to R = 1/2
        off = of.unit * (distance + (FUNCTION + 1) * (np.log(count + 1) + 1) + size) + 1.5 * total + 2 * of.normal
        off = np.where(distance < of.most, off, np.inf)
    else:
        off = size * np.expm1(1.5 * (terms + total + of.unit)) + 2 * of.normal
    return np.where(total < 0.5, off, np.inf)
