"""The activation table: one row an activation, for the kernels, the CPU path, the reference and its error bound alike.

To add one: a row here, a value of ``enum class Act`` and a branch of ``activation`` in ``cuda_src/activations.cuh``. The
planner, the importers, the saved files and the tests read this table.

An activation is written as its name, or, where it has a parameter, as ``(name, parameter)``; the name alone means the
default, which is filled in, so that a `cupymlp.network.Network` always says what it computes. float16 and bfloat16 networks
compute activations in float32, and a parameter is rounded to the dtype of the arithmetic once: in a float32 network 0.1 is
the float32 number nearest to it.

================  ==============================================  =========  =========  ======================
name              f(v)                                            f(-inf)    f(+inf)    parameter
================  ==============================================  =========  =========  ======================
identity          v                                               -inf       inf
relu              v, or +0 if v <= 0                              0          inf
leaky_relu        v, or slope v if v < 0                          -inf [1]_  inf        slope, 0.01
elu               v, or alpha (e^v - 1) if v <= 0                 -alpha     inf        alpha >= 0, 1
celu              v, or alpha (e^(v / alpha) - 1) if v <= 0       -alpha     inf        alpha >= 2^-126, 1
selu              1.0507 v, or 1.0507 1.6733 (e^v - 1) if v <= 0  -1.7581    inf
gelu              v (1 + erf(v / sqrt 2)) / 2                     0          inf
gelu_tanh         v (1 + tanh(sqrt(2 / pi)(v + 0.044715 v^3)))/2  0          inf
silu              v / (1 + e^-v)                                  0          inf
tanh              tanh v                                          -1         1
sigmoid           1 / (1 + e^-v)                                  0          1
softplus          log(1 + e^v)                                    0          inf
softsign          v / (1 + abs(v))                                -1         1
sin               sin(omega v)                                    NaN        NaN        omega, 1
exp               e^v                                             0          inf
hard_sigmoid      v / 6 + 1/2 between 0 and 1                     0          1
hard_swish        v hard_sigmoid(v)                               0          inf
relu6             v between 0 and 6                               0          6
squareplus        (v + sqrt(v^2 + 4)) / 2                         0          inf
softmax           e^(v_j - m) / sum_k e^(v_k - m), m = max v      [2]_       [2]_
log_softmax       v_j - m - log sum_k e^(v_k - m)                 [2]_       [2]_
================  ==============================================  =========  =========  ======================

.. [1] +inf for a negative slope, NaN for a slope of 0.
.. [2] Over the features of the output layer, the only one that takes them. -inf gives 0 and -inf; a row with +inf or NaN, or
   of -inf alone, is NaN throughout, as the formula has it.

NaN stays NaN in all of them. A limit that is 0 may be -0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ._normal_tail import normal_tail

__all__ = ["ACTIVATIONS", "Activation", "ActivationSpec", "activation_of", "parameter_of", "read_spec", "spec_text"]

Array = NDArray[np.floating]
ActivationSpec = str | tuple[str, float]


@dataclass(frozen=True)
class Parameter:
    """The parameter of an activation: its name and default, and which finite numbers it may be."""

    name: str
    default: float
    least: float = -math.inf

    def takes(self, value: float) -> bool:
        """Whether the number is accepted."""
        return math.isfinite(value) and value >= self.least

    @property
    def accepted(self) -> str:
        """For errors: ``a finite number, at least 0``."""
        if self.least == -math.inf:
            return "a finite number"
        return f"a finite number, at least {self.least:g}"


@dataclass(frozen=True)
class Activation:
    """One activation function.

    The last four fields are what `cupymlp.reference` needs of its implementations: computed in floating-point arithmetic with
    a unit roundoff u, all of them are off by at most ``u (relative |f| + |of_input|) + underflow n``, where n is the least
    normal number, or, if the activation is ``exact`` about small numbers, the least subnormal one.

    Attributes
    ----------
    name
        What users write, and the name in the kernels' ``enum class Act``.
    apply
        ``apply(v, out, parameter)``: the function of ``v`` in NumPy, written to ``out``, which may be ``v`` itself. Works in
        the dtype of ``v``: the CPU path calls it in the network's, the reference in float64. Infinities and NaN are ordinary
        numbers here: call it where NumPy's warnings are off.
    lipschitz
        Of the parameter: the least L with ``|f(a) - f(b)| <= L |a - b|``, rounded up, which is how much it can enlarge an
        error; None where there is none, or where it is too large: the reference has another way for these.
    parameter
        Its parameter, if it has one.
    over_row
        Whether it is a function of all features of a row, for the output layer only.
    long
        Whether it takes more than a few instructions, and so registers: what ``is_long`` of the kernels says.
    relative, of_input, underflow, exact
        See above. ``of_input(low, high, parameter)`` is a bound for all v between low and high.
    """

    name: str
    apply: Callable[[Array, Array, float], object]
    lipschitz: Callable[[float], float] | None
    parameter: Parameter | None = None
    over_row: bool = False
    long: bool = True
    relative: float = 0.0
    of_input: Callable[[Array, Array, float], Array] | None = None
    underflow: Callable[[float], float] = lambda _: 0.0
    exact: bool = False


# --- The functions in NumPy -----------------------------------------------------------------------------------------------


def _identity(v: Array, out: Array, _: float) -> None:
    if out is not v:
        out[...] = v


def _relu(v: Array, out: Array, _: float) -> None:
    np.maximum(v, 0, out=out)  # NaN stays NaN


def _relu6(v: Array, out: Array, _: float) -> None:
    np.clip(v, 0, 6, out=out)


def _leaky_relu(v: Array, out: Array, slope: float) -> None:
    out[...] = np.where(v < 0, v * slope, v)


def _elu(v: Array, out: Array, alpha: float) -> None:
    out[...] = np.where(v > 0, v, alpha * np.expm1(np.minimum(v, 0)))


def _celu(v: Array, out: Array, alpha: float) -> None:
    out[...] = np.where(v > 0, v, alpha * np.expm1(np.minimum(v, 0) / alpha))


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def _selu(v: Array, out: Array, _: float) -> None:
    out[...] = np.where(v > 0, _SELU_SCALE * v, (_SELU_SCALE * _SELU_ALPHA) * np.expm1(np.minimum(v, 0)))


def _gelu(v: Array, out: Array, _: float) -> None:
    size = np.minimum(np.abs(v), 50)  # beyond, the tail is 0
    size *= normal_tail(size)
    np.maximum(v, 0, out=out)
    out -= size


def _gelu_tanh(v: Array, out: Array, _: float) -> None:
    w = np.maximum(v, -30)  # where it is -0 already: -inf times 0 would be NaN
    out[...] = w / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * w * (1 + 0.044715 * (w * w))))


def _silu(v: Array, out: Array, _: float) -> None:
    w = np.maximum(v, -1000)  # where it is -0 already: -inf times 0 would be NaN
    out[...] = w / (1 + np.exp(-w))


def _tanh(v: Array, out: Array, _: float) -> None:
    np.tanh(v, out=out)


def _sigmoid(v: Array, out: Array, _: float) -> None:
    out[...] = 1 / (1 + np.exp(-v))


def _softplus(v: Array, out: Array, _: float) -> None:
    out[...] = np.maximum(v, 0) + np.log1p(np.exp(-np.abs(v)))


def _softsign(v: Array, out: Array, _: float) -> None:
    w = np.clip(v, -(2.0**100), 2.0**100)  # where it is -1 or 1 already: inf / inf would be NaN
    out[...] = w / (1 + np.abs(w))


def _sin(v: Array, out: Array, omega: float) -> None:
    np.sin(v * omega, out=out)


def _exp(v: Array, out: Array, _: float) -> None:
    np.exp(v, out=out)


def _hard_sigmoid(v: Array, out: Array, _: float) -> None:
    out[...] = np.clip(v + 3, 0, 6) * (1 / 6)


def _hard_swish(v: Array, out: Array, _: float) -> None:
    w = np.maximum(v, -3)  # where it is -0 already: -inf times 0 would be NaN
    out[...] = w * (np.clip(w + 3, 0, 6) * (1 / 6))


def _squareplus(v: Array, out: Array, _: float) -> None:
    a = np.abs(v)
    root = np.where(a < 2.0**60, np.sqrt(a * a + 4), a)  # no overflow of the square
    positive = 0.5 * a + 0.5 * root
    out[...] = np.where(v < 0, 1 / positive, positive)  # f(-v) = 1 / f(v), without cancellation


def _softmax(v: Array, out: Array, _: float) -> None:
    e = np.exp(v - v.max(-1, keepdims=True, initial=-np.inf))
    np.divide(e, e.sum(-1, keepdims=True), out=out)


def _log_softmax(v: Array, out: Array, _: float) -> None:
    d = v - v.max(-1, keepdims=True, initial=-np.inf)
    np.subtract(d, np.log(np.exp(d).sum(-1, keepdims=True)), out=out)


# --- The table --------------------------------------------------------------------------------------------------------------

# What is counted in `relative` and `of_input`, in units of u: 1 for each addition, multiplication, division and rounded
# constant, and FUNCTION for an elementary function. CUDA documents at most 2 ulp, which are 4 u, for expf, expm1f, log1pf,
# logf, tanhf, sinf and their double forms (CUDA C++ Programming Guide, Mathematical Functions: tested, not proven);
# NumPy documents nothing. benchmarks/activation-errors-*.json has what was measured of both.
FUNCTION = 8.0


def _up_to(factor: float, most: float, low: Array, high: Array, _: float) -> Array:
    """Factor times |v|, and no more than most."""
    return np.minimum(factor * np.maximum(-low, high), most)


def _all(value: float) -> Callable[[float], float]:
    return lambda _: value


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("identity", _identity, _all(1.0), long=False, exact=True),
        Activation("relu", _relu, _all(1.0), long=False, exact=True),
        Activation(
            "leaky_relu", _leaky_relu, lambda slope: max(1.0, abs(slope)), Parameter("slope", 0.01),
            long=False, relative=1, underflow=_all(1.0), exact=True,
        ),
        Activation(
            "elu", _elu, lambda alpha: max(1.0, alpha), Parameter("alpha", 1.0, 0.0),
            relative=FUNCTION + 2, underflow=lambda alpha: 2 + 2 * alpha,
        ),
        Activation(
            "celu", _celu, _all(1.0), Parameter("alpha", 1.0, 2.0**-126),
            relative=FUNCTION + 3, underflow=lambda alpha: 2 + 3 * alpha,
        ),
        Activation("selu", _selu, _all(1.7580994), relative=FUNCTION + 3, underflow=_all(4.0)),
        # |v| times its tail, which is 1/2 at most; their product is 0.17 at most. The tail is off by a factor of 1 + 15 u
        # (erfc: 5 ulp, by CUDA), and by another of 1 + 2 v^2 u, since e^(-v^2 / 2) is taken of a rounded v.
        Activation(
            "gelu", _gelu, _all(1.1289042), relative=2, of_input=partial(_up_to, 10.0, 4.0),
            underflow=_all(4.0),
        ),
        # 1 / (1 + e^-s), s = 1.6 v (1 + ..) with seven roundings: off by a factor of 1 + 7 s / (1 + e^s) u, where
        # 7 s / (1 + e^s) <= 2, and where v < 0 by |f| 7 |s| <= 2.2.
        Activation(
            "gelu_tanh", _gelu_tanh, _all(1.1289931), relative=FUNCTION + 6, of_input=partial(_up_to, 2.0, 3.0),
            underflow=_all(256.0),
        ),
        # Where e^-v overflows, at -88.7 (float32) or -709 (float64), it is 177 n at most.
        Activation("silu", _silu, _all(1.0998394), relative=FUNCTION + 5, underflow=_all(256.0)),
        Activation("tanh", _tanh, _all(1.0), relative=FUNCTION, underflow=_all(2.0)),
        Activation("sigmoid", _sigmoid, _all(0.25), relative=FUNCTION + 5, underflow=_all(4.0)),
        Activation("softplus", _softplus, _all(1.0), relative=2 * FUNCTION + 2, underflow=_all(4.0)),
        Activation("softsign", _softsign, _all(1.0), relative=2, underflow=_all(1.0), exact=True),
        Activation(
            "sin", _sin, abs, Parameter("omega", 1.0),
            relative=FUNCTION, of_input=lambda low, high, omega: abs(omega) * np.maximum(-low, high), underflow=_all(4.0),
        ),
        Activation("exp", _exp, None, relative=FUNCTION, underflow=_all(2.0)),
        Activation("hard_sigmoid", _hard_sigmoid, _all(1 / 6 * (1 + 2**-50)), relative=3, underflow=_all(1.0), exact=True),
        Activation("hard_swish", _hard_swish, _all(1.5), relative=4, underflow=_all(2.0), exact=True),
        Activation("relu6", _relu6, _all(1.0), long=False, exact=True),
        Activation("squareplus", _squareplus, _all(1.0), relative=5, underflow=_all(1.0), exact=True),
        Activation("softmax", _softmax, None, over_row=True, long=False),
        Activation("log_softmax", _log_softmax, None, over_row=True, long=False),
    )
}  # fmt: skip


# --- What users write -------------------------------------------------------------------------------------------------------


def activation_of(spec: ActivationSpec) -> Activation:
    """The row of the table."""
    return ACTIVATIONS[spec if isinstance(spec, str) else spec[0]]


def parameter_of(spec: ActivationSpec, dtype: str = "float64") -> float:
    """The parameter as arithmetic of this dtype, float32 or float64, has it; 0 where there is none."""
    value = 0.0 if isinstance(spec, str) else spec[1]
    with np.errstate(over="ignore"):
        return value if dtype == "float64" else float(np.float32(value))


def spec_text(spec: ActivationSpec) -> str:
    """``relu``, ``leaky_relu:0.25``: for people, and for the command line."""
    return spec if isinstance(spec, str) else f"{spec[0]}:{spec[1]!r}"


def read_spec(argument: str, value: object, *, last: bool, dtype: str = "float64") -> ActivationSpec:
    """What a user, or a file, gives for one layer's activation, checked and with its parameter filled in.

    Parameters
    ----------
    argument
        Its name in errors.
    value
        A name, or a pair (tuple or list) of a name and a number.
    last
        Whether it is the output layer's.
    dtype
        The dtype of the arithmetic, float32 or float64, which must hold the parameter.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    pair = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str)
    if not isinstance(value, str) and not pair:
        raise TypeError(
            f"{argument} is {_shown(value)}; accepted: one of {_names(last)}, or a name with its parameter, as "
            "('leaky_relu', 0.25)"
        )
    row = ACTIVATIONS.get(value if isinstance(value, str) else value[0])  # type: ignore[index]
    if row is None:
        raise ValueError(f"{argument} is {value!r}; accepted: one of {_names(last)}")
    name = row.name  # a plain str, whatever came
    if row.over_row and not last:
        raise ValueError(
            f"{argument} is {value!r}, which the output layer alone takes (out_activation); accepted: one of {_names(last)}"
        )
    if isinstance(value, str):
        return name if row.parameter is None else (name, row.parameter.default)
    if row.parameter is None:
        raise ValueError(f"{argument} is {value!r}, and {name} has no parameter; accepted: {name!r}")
    given = value[1]  # type: ignore[index]
    accepted = f"accepted: {row.parameter.accepted}, as ({name!r}, {row.parameter.default})"
    if isinstance(given, bool | np.bool_) or not isinstance(given, numbers.Real):
        raise TypeError(f"the {row.parameter.name} of {argument} is {_shown(given)}; {accepted}")
    try:
        number = float(given) + 0.0  # -0 becomes 0
    except OverflowError:  # an integer beyond float64
        number = math.inf
    if not row.parameter.takes(number) or not row.parameter.takes(parameter_of((name, number), dtype)):
        raise ValueError(
            f"the {row.parameter.name} of {argument} is {_number_text(given)} (arithmetic is {dtype}); {accepted}"
        )
    return name, number


def _names(last: bool) -> str:
    return ", ".join(repr(a.name) for a in ACTIVATIONS.values() if last or not a.over_row)


def _number_text(value: object) -> str:
    """A number in an error: Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1100:
        return "an integer beyond float64"
    return repr(value)


def _shown(value: object) -> str:
    """A value in an error: in full if it is short."""
    text = repr(value)
    kind = type(value).__qualname__
    return f"a {kind}" if len(text) > 40 else f"{text} (a {kind})"
