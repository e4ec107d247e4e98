"""torch's state dicts, without torch: the linear layers of an ``nn.Sequential``, or of any module that chains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._checks import type_name
from . import Found
from ._named import Naming, find_layers, read_layers

__all__ = ["NAMING", "read_state_dict", "torch_paths"]

NAMING = Naming(
    weights={"weight": "out_in"},
    biases=("bias",),
    others={
        "running_mean|running_var|num_batches_tracked": "a BatchNorm layer",
        "weight_g|weight_v|original\\d*|weight_orig|weight_u|weight_mask|parametrizations": "a parametrized (weight_norm, "
        "spectral_norm, pruned) layer; remove the parametrization first, with torch.nn.utils",
        "(weight|bias)_[ih]h(_l\\d+.*)?": "a recurrent layer",
        "in_proj_.*|bias_[kv]": "an attention layer",
    },
    first_bare=False,
    advice="prefix= chooses a part, and torch.nn.utils.fusion.fuse_linear_bn_eval folds a BatchNorm1d into the layer before",
)


def read_state_dict(state_dict: Any, prefix: str | Sequence[str], activation: Any, out_activation: Any) -> Found:
    """Read a state dict; `cupymlp.MLP.from_state_dict` documents the arguments and errors."""
    if not isinstance(state_dict, Mapping):
        hint = ""
        if hasattr(state_dict, "state_dict"):
            hint = ". Pass its state_dict()"
        elif isinstance(state_dict, str) or hasattr(state_dict, "__fspath__"):
            hint = ". For a file: MLP.from_safetensors"
        raise TypeError(f"state_dict is a {type_name(state_dict)}; accepted: a mapping of names to tensors{hint}")
    shapes = {}
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise TypeError(f"state_dict has the key {name!r}; accepted: names, as '0.weight'")
        if isinstance(value, Mapping):
            raise TypeError(
                f"state_dict[{name!r}] is a mapping; accepted: a tensor. Is it the state dict? Then pass it alone"
            )
        try:
            shapes[name] = tuple(value.shape) if hasattr(value, "shape") else np.shape(value)
        except ValueError as error:  # NumPy's, for lists of different lengths
            raise TypeError(
                f"state_dict[{name!r}] is a {type_name(value)} that makes no array ({error}); accepted: a tensor or an array"
            ) from error
    layers = find_layers("the state dict", torch_paths(state_dict), shapes, prefix, NAMING)
    return read_layers(layers, state_dict.__getitem__, activation, out_activation)


def torch_paths(names: Any) -> dict[str, tuple[str, ...]]:
    """The parts of torch's names: those between dots."""
    return {name: tuple(name.split(".")) for name in names}
