"""Parameter trees of Flax, Haiku and Equinox, without JAX: nested mappings, or modules that are dataclasses, of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._checks import type_name
from . import Found
from ._named import Naming, find_layers, path_of, read_layers

__all__ = ["read_params"]

NAMING = Naming(
    weights={"kernel": "in_out", "w": "in_out", "weight": "out_in"},
    biases=("bias", "b"),
    others={
        "mean|var|scale|offset|average|hidden|counter": "a normalization layer, or its statistics",
        "embeddings?": "an embedding",
        "(weight|bias|w|b)_[ih].*": "a recurrent layer",
        "key|count": "a random number generator; of flax.nnx pass nnx.state(module, nnx.Param)",
    },
    first_bare=True,
    advice="prefix= chooses a part; weights and biases of another kind: MLP(weights, biases)",
)
# Of Equinox: those that compute with their arrays alone, or nothing, or a function that the caller says.
EQUINOX = ("Dropout", "Identity", "Lambda", "Linear", "MLP", "Sequential")
_DEPTH = 64  # levels, at most
_ENTRIES = 10_000  # arrays, at most


def read_params(params: Any, prefix: str | Sequence[str], activation: Any, out_activation: Any) -> Found:
    """Read a tree; `cupymlp.MLP.from_params` documents the arguments and errors."""
    if not isinstance(params, Mapping | list | tuple) and not _is_module(params):
        hint = ""
        if hasattr(params, "state_dict"):
            hint = ". For torch: MLP.from_state_dict(module.state_dict())"
        elif any(c.__module__.startswith("flax.nnx") for c in type(params).__mro__):
            hint = ". Pass nnx.state(module, nnx.Param)"
        raise TypeError(
            f"params is a {type_name(params)}; accepted: nested mappings or lists of arrays, as of Flax and Haiku, or an "
            f"Equinox module{hint}"
        )
    arrays: dict[str, Any] = {}
    paths: dict[str, tuple[str, ...]] = {}
    unknown: dict[tuple[str, ...], str] = {}
    for path, value in _leaves(params, (), (), unknown):
        name = ".".join(path)
        if name in arrays:
            raise ValueError(f"params has two arrays of the name {name!r}")
        arrays[name], paths[name] = value, path
        if len(arrays) > _ENTRIES:
            raise ValueError(f"params has more than {_ENTRIES:,} arrays; accepted: those of a network")
    if not arrays:
        raise ValueError(
            f"params, a {type_name(params)}, has no arrays; accepted: a tree of parameters, in Flax what module.init returns"
        )
    shapes = {name: tuple(value.shape) for name, value in arrays.items()}
    layers = find_layers("params", paths, shapes, prefix, NAMING)
    begins = [path_of(part) for part in ([prefix] if isinstance(prefix, str) else prefix)]
    for path, name in unknown.items():
        if any(path[: len(begin)] == begin for begin in begins):
            raise ValueError(
                f"{'.'.join(path) or 'the whole'} of params is a {name} of equinox; accepted: {', '.join(EQUINOX)}, and "
                f"modules of your own. {NAMING.advice}"
            )
    return read_layers(layers, arrays.__getitem__, activation, out_activation)


def _leaves(
    tree: Any, path: tuple[str, ...], above: tuple[int, ...], unknown: dict[tuple[str, ...], str]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The arrays, and the parts of their names; layers of Equinox that are not known are noted in ``unknown``."""
    if id(tree) in above or len(above) > _DEPTH:
        raise ValueError(f"params contains itself, or has more than {_DEPTH} levels, at {'.'.join(path[:4])!r}...")
    below = (*above, id(tree))
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "weight" and _is_array(value):
                raise ValueError(
                    f"params has the name {'.'.join((*path, key))!r}, and Flax and Haiku have none like it: for torch's "
                    "names and layout, (out, in), MLP.from_state_dict"
                )
            yield from _leaves(value, (*path, *str(key).split("/")), below, unknown)
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, (*path, str(i)), below, unknown)
    elif _is_array(tree):
        yield path, tree.get_value() if hasattr(tree, "get_value") else tree  # a variable of flax.nnx
    elif _is_module(tree):
        if name := _unknown(tree):
            unknown[path] = name
        for field in dataclasses.fields(tree):
            yield from _leaves(getattr(tree, field.name, None), (*path, field.name), below, unknown)
    elif not (tree is None or callable(tree) or isinstance(tree, bool | int | float | str)):
        raise TypeError(f"{'.'.join(path)} of params is a {type_name(tree)}; accepted: arrays")


def _unknown(module: Any) -> str:
    """The name of a layer of Equinox that may compute something of which no array tells, as LayerNorm; else ``""``."""
    # Modules of one's own are in other modules; of their bases the nearest of Equinox counts.
    name = next((kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("equinox.nn.")), "")
    return "" if name in EQUINOX or name == "StatefulLayer" else name  # the latter is a base class without a call


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_module(value: object) -> bool:
    """A dataclass, as Equinox' modules are."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
