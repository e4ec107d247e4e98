"""What a chain of elementwise ONNX nodes computes: sums of products of functions of one value, and which activation that is.

Exporters write one activation in many ways: gelu as a node, or as ``0.5 v (1 + erf(v / sqrt 2))`` in five nodes whose order,
and whose divisions and multiplications, are the exporter's choice. Here all of these become the same `Terms`, which are
compared with the formulas in `_FORMULAS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...network import numpy_dtype

__all__ = ["NUMBER", "VALUE", "Affine", "Atom", "Match", "Number", "Terms", "TooComplexError", "match", "value"]

Number = float | NDArray[np.float64]  # of all features, or one a feature

_MOST_NESTED, _MOST_TERMS, _MOST_FACTORS = 6, 12, 4  # of any formula here, with room


class TooComplexError(ValueError):
    """More than any activation is made of."""


@dataclass(frozen=True)
class Atom:
    """The value v itself, or a function of `Terms` of it.

    Attributes
    ----------
    function
        ``v``, the name of one of cupymlp's activations, or of a helper of formulas: erf, sqrt, abs, reciprocal, log.
    parameters
        Of the function.
    argument
        The terms, sorted, so that equal ones have equal atoms.
    """

    function: str
    parameters: tuple[float, ...] = ()
    argument: tuple[tuple[tuple[Atom, ...], float], ...] = ()
    nested: int = field(default=0, compare=False)

    @cached_property
    def skeleton(self) -> str:
        """The formula without the coefficients in it."""
        if self.function == "v":
            return "v"
        parameters = "".join(f"{p!r};" for p in self.parameters)
        return f"{self.function}({parameters}{'+'.join(_product(key) for key, _ in self.argument)})"

    @cached_property
    def coefficients(self) -> tuple[float, ...]:
        """Those in the argument, in the order of the skeleton."""
        return tuple(c for key, number in self.argument for c in (number, *_inner(key)))

    @cached_property
    def text(self) -> str:
        """For errors."""
        if self.function == "v":
            return "v"
        return f"{self.function}({', '.join([_sum_text(self.argument), *(f'{p:.4g}' for p in self.parameters)])})"


Key = tuple[Atom, ...]  # a product; () is 1
VALUE = Atom("v")
NUMBER: Key = ()


def _product(key: Key) -> str:
    return "*".join(atom.skeleton for atom in key) or "1"


def _inner(key: Key) -> Iterator[float]:
    return (c for atom in key for c in atom.coefficients)


def _sum_text(terms: Any) -> str:
    parts = []
    for key, number in terms:
        factors = [atom.text for atom in key]
        if np.ndim(number):
            factors.insert(0, "c")
        elif number != 1 or not key:
            factors.insert(0, f"{number:.4g}")
        parts.append(" ".join(factors))
    return " + ".join(parts)


@dataclass(frozen=True)
class Affine:
    """scale * v + shift."""

    scale: Number
    shift: Number

    @property
    def is_trivial(self) -> bool:
        """Whether it is v itself."""
        return np.ndim(self.scale) == 0 and np.ndim(self.shift) == 0 and (self.scale, self.shift) == (1.0, 0.0)


class Terms:
    """A sum of products with coefficients; never changed."""

    def __init__(self, numbers: dict[Key, Number]) -> None:
        self.numbers = {key: n for key, n in numbers.items() if np.ndim(n) or n != 0}
        if len(self.numbers) > _MOST_TERMS or any(len(key) > _MOST_FACTORS for key in self.numbers):
            raise TooComplexError("more terms or factors than any activation has")

    def __add__(self, other: Terms | Number) -> Terms:
        sums = dict(self.numbers)
        for key, number in _as_terms(other).numbers.items():
            sums[key] = sums[key] + number if key in sums else number
        return Terms(sums)

    def __mul__(self, other: Terms | Number) -> Terms:
        sums: dict[Key, Number] = {}
        for a, p in self.numbers.items():
            for b, q in _as_terms(other).numbers.items():
                key = tuple(sorted((*a, *b), key=lambda atom: (atom.skeleton, atom.coefficients)))
                sums[key] = sums[key] + p * q if key in sums else p * q
        return Terms(sums)

    def of(self, function: str, *parameters: float) -> Terms:
        """A function of these terms."""
        if any(np.ndim(number) for number in self.numbers.values()):
            raise TooComplexError("coefficients that differ between features, inside a function")
        nested = 1 + max((atom.nested for key in self.numbers for atom in key), default=0)
        if nested > _MOST_NESTED:
            raise TooComplexError("functions of functions")
        ordered = sorted(self.numbers.items(), key=lambda item: (_product(item[0]), tuple(_inner(item[0]))))
        return Terms({(Atom(function, parameters, tuple((key, float(n)) for key, n in ordered), nested),): 1.0})

    @property
    def affine(self) -> Affine | None:
        """If these are a v + c."""
        if not self.numbers.keys() <= {(VALUE,), NUMBER}:
            return None
        return Affine(self.numbers.get((VALUE,), 0.0), self.numbers.get(NUMBER, 0.0))

    def is_close(self, other: Terms, tolerance: float = 0.0) -> bool:
        """Whether these are the same terms, up to a relative difference between the coefficients."""
        skeletons, inner, outer = _taken_apart(self.numbers)
        others, other_inner, other_outer = _taken_apart(other.numbers)
        if skeletons != others or not np.allclose(inner, other_inner, tolerance, 0):
            return False
        return all(
            np.size(a) == np.size(b) and np.allclose(a, b, tolerance, 0)
            for a, b in zip(outer, other_outer, strict=True)
        )

    @property
    def depends(self) -> bool:
        """Whether there is a v in it."""
        return not self.numbers.keys() <= {NUMBER}

    @property
    def text(self) -> str:
        """For errors; short."""
        text = _sum_text(self.numbers.items()) or "0"
        return text if len(text) <= 100 else text[:97] + "..."


def _as_terms(other: Terms | Number) -> Terms:
    return other if isinstance(other, Terms) else Terms({NUMBER: other})


def value() -> Terms:
    """The terms of v itself."""
    return Terms({(VALUE,): 1.0})


# --- Formulas of activations ------------------------------------------------------------------------------------------


def _formulas() -> list[tuple[str, Terms]]:
    v = value()

    def gelu(inner: Terms) -> Terms:
        return v * (inner + 1.0) * 0.5

    clipped = (v + 3.0).of("relu6") * (1 / 6)
    return [
        ("gelu", gelu((v * math.sqrt(0.5)).of("erf"))),
        ("gelu_tanh", gelu(((v + v * v * v * 0.044715) * math.sqrt(2 / math.pi)).of("tanh"))),
        ("silu", v * v.of("sigmoid")),
        ("silu", v * (((v * -1.0).of("exp") + 1.0).of("reciprocal"))),
        ("sigmoid", ((v * -1.0).of("exp") + 1.0).of("reciprocal")),
        ("softsign", v * (v.of("abs") + 1.0).of("reciprocal")),
        ("softplus", (v.of("exp") + 1.0).of("log")),
        ("squareplus", (v + (v * v + 4.0).of("sqrt")) * 0.5),
        ("hard_sigmoid", clipped),
        ("hard_swish", v * clipped),
        ("hard_swish", v * v.of("hard_sigmoid")),
        ("log_softmax", v.of("softmax").of("log")),
    ]


@dataclass(frozen=True)
class _Formula:
    name: str
    skeletons: list[str]
    inner: list[float]
    outer: list[float]
    inner_degrees: list[int]  # what v -> s v multiplies each number by is s to this power
    outer_degrees: list[int]


def _sorted_terms(numbers: dict[Key, Number]) -> list[tuple[Key, Number]]:
    return sorted(numbers.items(), key=lambda item: (_product(item[0]), tuple(_inner(item[0]))))


def _taken_apart(numbers: dict[Key, Number]) -> tuple[list[str], list[float], list[Number]]:
    ordered = _sorted_terms(numbers)
    return (
        [_product(key) for key, _ in ordered],
        [c for key, _ in ordered for c in _inner(key)],
        [n for _, n in ordered],
    )


def _degree(key: Key) -> int:
    return sum(atom == VALUE for atom in key)


def _inner_degrees(key: Key) -> Iterator[int]:
    return (d for atom in key for inside, _ in atom.argument for d in (_degree(inside), *_inner_degrees(inside)))


def _formula(name: str, terms: Terms) -> _Formula:
    skeletons, inner, outer = _taken_apart(terms.numbers)
    keys = [key for key, _ in _sorted_terms(terms.numbers)]
    inner_degrees = [d for key in keys for d in _inner_degrees(key)]
    return _Formula(name, skeletons, inner, outer, inner_degrees, [_degree(key) for key in keys])  # type: ignore[arg-type]


_FORMULAS = [_formula(name, terms) for name, terms in _formulas()]
_EXACT = 1e-12  # relative: what the float64 arithmetic on coefficients, here, leaves
_DIGITS = 1e-6  # relative: of constants that no dtype holds, written with as many decimal digits
_PRODUCT = {"float16": 2.0**-9, "bfloat16": 2.0**-6}  # relative: of a product of some rounded constants
_HELPERS = ("erf", "sqrt", "abs", "reciprocal", "log")


@dataclass(frozen=True)
class Match:
    """``after.scale * activation(before.scale * v + before.shift) + after.shift``."""

    activation: str
    parameter: float | None
    before: Affine
    after: Affine


def _roundings(number: float, dtypes: Collection[str]) -> list[float]:
    """A constant as a file may have it: exporters write float32 in float64 models, too."""
    return [float(numpy_dtype(name).type(number)) for name in dict.fromkeys(("float64", "float32", *dtypes))]


def _close(a: Number, b: Number, tolerance: float) -> bool:
    return np.size(a) == np.size(b) and bool(np.allclose(a, b, tolerance, 0))


def _is_exact(constant: float) -> bool:
    """Whether each dtype holds a formula's constant, so that another number in a file is meant to be another one."""
    return float(np.float16(constant)) == constant


def _ratios(constant: float, dtypes: Collection[str]) -> list[float]:
    """What files may have for a formula's constant, multiplied by or divided by, over what it is."""
    if _is_exact(constant):
        return [1.0]
    divided = [1 / c for c in _roundings(1 / constant, dtypes)]
    return [c / constant for c in (*_roundings(constant, dtypes), *divided)]


def _fitted(
    formula: _Formula, inner: list[float], outer: list[Number], dtypes: Collection[str]
) -> tuple[float, Number] | None:
    """The s and the a of which these are the coefficients of ``a * formula(s * v)``.

    s and a are what the file says, to the last bit, except where the rounding of the formula's own constants explains them.
    """
    at = next(i for i, degree in enumerate(formula.inner_degrees) if degree)
    constant, degree = formula.inner[at], formula.inner_degrees[at]
    ratios, within = _ratios(constant, dtypes), _EXACT if _is_exact(constant) else _DIGITS
    first, first_degree = outer[0] / np.float64(formula.outer[0]), formula.outer_degrees[0]
    power = np.float64(inner[at]) / constant
    root = power if degree == 1 else np.sqrt(power)
    tried: list[np.float64] = []
    if any(_close(power, r, within) for r in ratios):
        tried.append(np.float64(1))
    if np.ndim(first) == 0 and first_degree == 1 and any(_close(power, first**degree * r, within) for r in ratios):
        tried.append(np.float64(first))  # a is 1: the coefficients outside tell s without the constant's rounding
    tried += [root] if degree == 1 else [root, -root]
    product = max(_DIGITS, *(_PRODUCT.get(name, 0.0) for name in dtypes), 0.0)
    for s in tried:
        scale = first / s**first_degree
        inside = (
            i == at or _close(n, c * s**d, _EXACT if _is_exact(c) else product)
            for i, (n, c, d) in enumerate(zip(inner, formula.inner, formula.inner_degrees, strict=True))
        )
        outside = (
            _close(n, scale * c * s**d, _EXACT)
            for n, c, d in zip(outer, formula.outer, formula.outer_degrees, strict=True)
        )
        if np.isfinite(s) and np.isfinite(scale).all() and all(inside) and all(outside):
            is_one = np.ndim(scale) == 0 and any(_close(scale, r, _EXACT) for r in _ratios(formula.outer[0], dtypes))
            return float(s), 1.0 if is_one else scale
    return None


def match(terms: Terms, dtypes: Collection[str]) -> Match | None:
    """The activation that these terms are, up to a scale and a shift before and after it; None if they are none.

    Parameters
    ----------
    dtypes
        Those of the file's constants, to which the constants of formulas may have been rounded.
    """
    if (affine := terms.affine) is not None:
        return Match("identity", None, affine, Affine(1.0, 0.0))
    numbers = dict(terms.numbers)
    shift = numbers.pop(NUMBER, 0.0)
    skeletons, inner, outer = _taken_apart(numbers)
    for formula in _FORMULAS:
        if skeletons == formula.skeletons:
            with np.errstate(all="ignore"):  # numbers that are not finite fit nothing
                fitted = _fitted(formula, inner, outer, dtypes)
            if fitted is not None:
                return Match(formula.name, None, Affine(fitted[0], 0.0), Affine(fitted[1], shift))
    if len(numbers) > 1:
        return None
    ((key, scale),) = numbers.items()
    if len(key) != 1 or key[0].function in (*_HELPERS, "v"):
        return None
    (atom,) = key
    before = Terms(dict(atom.argument)).affine
    if before is None or np.ndim(before.scale) or before.scale == 0:
        return None
    after = Affine(scale, shift)
    if atom.function == "sin" and before.shift == 0:
        return Match("sin", float(before.scale), Affine(1.0, 0.0), after)
    if atom.function == "sin":
        return Match("sin", 1.0, before, after)
    if atom.function == "elu" and _is_celu(before, scale, atom.parameters[0], dtypes):
        return Match("celu", float(scale), Affine(1.0, 0.0), Affine(1.0, shift))
    return Match(atom.function, atom.parameters[0] if atom.parameters else None, before, after)


def _is_celu(before: Affine, scale: Number, alpha: float, dtypes: Collection[str]) -> bool:
    """Celu with alpha a is a elu(v / a), written so where ONNX has no Celu of the dtype."""
    if np.ndim(scale) or np.ndim(before.scale) or scale == 1 or not scale > 0 or (alpha, before.shift) != (1, 0):
        return False
    with np.errstate(all="ignore"):
        inverses = [
            (before.scale, _roundings(1 / np.float64(scale), dtypes)),
            (scale, _roundings(1 / np.float64(before.scale), dtypes)),
        ]
    return any(_close(number, r, _EXACT) for number, rounded in inverses for r in rounded)
