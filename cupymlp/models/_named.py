"""Layers out of named arrays: which belong together, in which order, and whether they make a chain.

Names do not say what follows what. They do where they are the same but for a number: ``net.0``, ``net.2``, ``net.10``. Where
they differ in words (``actor`` and ``critic``, ``hidden`` and ``out``) it takes someone who knows, and ``prefix`` to say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._checks import as_numpy, library_of, to_host, type_name
from ..network import numpy_dtype
from . import Found, check_finite

__all__ = ["Naming", "find_layers", "host_array", "path_of", "read_layers"]

_SHOWN = 8  # names in a message, at most


@dataclass(frozen=True)
class Naming:
    """How a library names its arrays.

    Attributes
    ----------
    weights
        The last part of a weight's name, and its layout: ``{"weight": "out_in"}``.
    biases
        The last part of a bias' name.
    others
        Last parts (regular expressions) of arrays that are known, and what they belong to.
    first_bare
        Whether a name without a number comes before those with one, as Haiku's ``linear``, ``linear_1``.
    advice
        What to do about arrays that belong to no dense layer.
    """

    weights: Mapping[str, str]
    biases: Sequence[str]
    others: Mapping[str, str]
    first_bare: bool
    advice: str


@dataclass(frozen=True)
class Layer:
    """A dense layer: the names of its arrays and where it is in the tree of names."""

    path: tuple[str, ...]
    weight: str
    bias: str | None
    layout: str


Paths = Mapping[str, tuple[str, ...]]
Shapes = Mapping[str, tuple[int, ...]]


def find_layers(where: str, paths: Paths, shapes: Shapes, prefix: str | Sequence[str], naming: Naming) -> list[Layer]:
    """The dense layers in order.

    Parameters
    ----------
    where
        What messages call the whole: ``the state dict``.
    paths
        The parts of each array's name.
    shapes
        Each array's.
    prefix
        The leading parts, with dots or slashes between, of the names that count; or several, whose layers follow one another
        in this order.

    Raises
    ------
    ValueError
        For arrays that belong to no dense layer, that are missing, or whose order is not clear; the message names them.
    """
    if not isinstance(prefix, str) and not (isinstance(prefix, Sequence) and all(isinstance(p, str) for p in prefix)):
        raise TypeError(f"prefix is a {type_name(prefix)}; accepted: a text, or a sequence of texts")
    layers: list[Layer] = []
    for part in [prefix] if isinstance(prefix, str) else list(prefix):
        begin = path_of(part)
        chosen = {name: path for name, path in paths.items() if path[: len(begin)] == begin}
        if not chosen:
            tops = sorted({path[0] for path in paths.values()}, key=_natural)
            raise ValueError(
                f"no array of {where} has a name that begins with prefix {part!r}; they begin with {_list(tops)}"
            )
        layers += _in_order(where, begin, _pair(where, chosen, shapes, naming), naming)
    twice = sorted({layer.weight for layer in layers if [other.weight for other in layers].count(layer.weight) > 1})
    if twice:
        raise ValueError(f"prefix {prefix!r} takes {_list(twice)} twice; accepted: parts that have no layer in common")
    if not layers:
        raise ValueError(f"{where} has no weights; accepted: at least one dense layer")
    _check_chain(layers, shapes)
    return layers


def path_of(prefix: str) -> tuple[str, ...]:
    """The parts of a prefix."""
    return tuple(piece for piece in re.split(r"[./]", prefix) if piece)


def read_layers(layers: Sequence[Layer], get: Callable[[str], Any], activation: Any, out_activation: Any) -> Found:
    """Their arrays, as ``get`` gives them by name, and the activations that the caller says."""
    if activation is None and len(layers) > 1:
        raise ValueError(
            f"activation is None, and nothing but the caller knows what is between the {len(layers)} layers: pass activation=, "
            "as 'relu', or one for each hidden layer"
        )
    weights, biases = [], []
    for layer in layers:
        weight = _checked(layer.weight, get(layer.weight))
        weights.append(weight.T if layer.layout == "out_in" else weight)
        biases.append(None if layer.bias is None else _checked(layer.bias, get(layer.bias)))
    return Found(weights, biases, "relu" if activation is None else activation, out_activation)


def host_array(name: str, value: Any) -> NDArray[Any]:
    """A NumPy array of what another library holds; torch's and JAX' arrays, too, without importing these."""
    try:
        if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
            return np.asarray(value)  # wherever it lies
        if hasattr(value, "detach") and hasattr(value, "cpu"):
            value = value.detach().cpu()
            if (
                str(value.dtype) == "torch.bfloat16"
            ):  # torch gives NumPy no such array; float32 holds all of its numbers
                return np.asarray(value.float().numpy().astype(numpy_dtype("bfloat16")))
        return to_host(value, name) if library_of(name, value) == "gpu" else as_numpy(name, value)
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"{name} is a {type_name(value)} that has no numbers to read ({error})") from error


def _checked(name: str, array: Any) -> NDArray[Any]:
    found = host_array(name, array)
    if found.dtype.kind not in "fV" and found.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {found.dtype}; accepted: floating-point numbers")
    check_finite(name, found)
    return found


# --- Which belong together ----------------------------------------------------------------------------------------------


def _pair(where: str, paths: Paths, shapes: Shapes, naming: Naming) -> list[Layer]:
    """Weights with their biases; everything that is neither is refused."""
    weights: dict[tuple[str, ...], str] = {}
    biases: dict[tuple[str, ...], str] = {}
    for name, (*path, last) in paths.items():
        rank = len(shapes[name])
        if last in naming.weights:
            if rank != 2:
                kind = (
                    "a normalization or another elementwise layer"
                    if rank < 2
                    else "a convolution or a layer with more axes"
                )
                raise ValueError(
                    f"{name} of {where} has shape {shapes[name]}: it belongs to {kind}; accepted: 2-D weights of dense layers. "
                    f"{naming.advice}"
                )
            if tuple(path) in weights:
                raise ValueError(
                    f"{weights[tuple(path)]} and {name} of {where} are weights of one layer; accepted: one"
                )
            weights[tuple(path)] = name
        elif last in naming.biases:
            biases[tuple(path)] = name
        else:
            kind = next((what for pattern, what in naming.others.items() if re.fullmatch(pattern, last)), "")
            raise ValueError(
                f"{name} of {where} is no {' or '.join((*naming.weights, *naming.biases))} of a dense layer"
                f"{kind and f': it belongs to {kind}'}. {naming.advice}"
            )
    lonely = [name for path, name in biases.items() if path not in weights]
    if lonely:
        raise ValueError(
            f"{_list(lonely)} of {where} has no weight beside it ({', '.join(naming.weights)}): it is missing, or was left out "
            "as another name of a weight that layers share"
        )
    return [
        Layer(path, weight, biases.get(path), naming.weights[paths[weight][-1]]) for path, weight in weights.items()
    ]


# --- In which order -----------------------------------------------------------------------------------------------------


def _in_order(where: str, begin: tuple[str, ...], layers: list[Layer], naming: Naming) -> list[Layer]:
    """Sorted by the numbers in names that are otherwise the same, level by level."""
    depth = len(begin)
    if len(layers) < 2:
        return layers
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.path[depth] if len(layer.path) > depth else "", []).append(layer)
    ranks = {name: _word_and_number(name, naming.first_bare) for name in groups}
    numbers = [number for _, number in ranks.values()]
    clear = len(groups) == 1 or (
        len({word for word, _ in ranks.values()}) == 1 and None not in numbers and len({*numbers}) == len(numbers)
    )
    if not clear:
        names = sorted((".".join((*begin, name)) for name in groups), key=_natural)
        raise ValueError(
            f"{where} has layers under {_list(names)}, and their names do not say which comes first, or whether they are one "
            f"network: choose one with prefix={names[-1]!r}, or give the order, as prefix={names[-2:]!r}"
        )
    ordered = sorted(groups, key=lambda name: ranks[name][1] or 0)
    return [layer for name in ordered for layer in _in_order(where, (*begin, name), groups[name], naming)]


def _word_and_number(name: str, first_bare: bool) -> tuple[str, int | None]:
    """``linear_10``: linear_, 10. Without a number None; where names without one come first, -1."""
    word, digits = re.fullmatch(r"(.*?)(\d{0,9})", name, re.DOTALL).groups()  # type: ignore[union-attr]
    if first_bare:
        return word.rstrip("_"), int(digits) if digits else -1
    return word, int(digits) if digits else None


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d{1,9})", name)]


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


# --- Whether they make a chain ------------------------------------------------------------------------------------------


def _check_chain(layers: Sequence[Layer], shapes: Shapes) -> None:
    before: tuple[str, int] | None = None
    for layer in layers:
        shape = shapes[layer.weight]
        k, n = shape if layer.layout == "in_out" else shape[::-1]
        if before is not None and before[1] != k:
            raise ValueError(
                f"{before[0]} {shapes[before[0]]} and {layer.weight} {shape} do not chain as "
                f"({layer.layout.replace('_', ', ')}) weights: the one gives {before[1]} features, the other takes {k}"
            )
        if layer.bias is not None and shapes[layer.bias] != (n,):
            raise ValueError(
                f"{layer.bias} has shape {shapes[layer.bias]}; beside {layer.weight} {shape} it needs ({n},)"
            )
        before = layer.weight, n
