"""safetensors files: torch's names for linear layers, and, in files of `cupymlp.MLP.to_safetensors`, what is between them.

The package safetensors checks a file before anything is read: lengths, offsets, that they leave no holes and do not overlap.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .._files import replacing
from ..activations import ActivationSpec
from ..network import PRECISIONS, Network, numpy_dtype
from . import Found
from ._named import find_layers, read_layers
from .state_dict import NAMING, torch_paths

__all__ = ["read_safetensors", "write_safetensors"]

KEY = "cupymlp"  # of the metadata
FORMAT = 1
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write_safetensors(
    path: str | os.PathLike[str],
    prefix: str,
    network: Network,
    weights: Sequence[NDArray[np.floating]],
    biases: Sequence[NDArray[np.floating] | None],
) -> None:
    """Write a file; weights in_out. `cupymlp.MLP.to_safetensors` documents it."""
    numpy = _package().numpy
    begin = f"{prefix.rstrip('.')}." if prefix else ""
    tensors = {}
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        tensors[f"{begin}{2 * layer}.weight"] = np.ascontiguousarray(weight.T)
        if bias is not None:
            tensors[f"{begin}{2 * layer}.bias"] = np.ascontiguousarray(bias)
    description = {"format": FORMAT, "activations": network.activations, "precision": network.precision}
    with replacing(path) as temporary:
        numpy.save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(description)})


def read_safetensors(
    path: str | os.PathLike[str], prefix: str | Sequence[str], activation: Any, out_activation: Any
) -> tuple[Found, str]:
    """Read a file and its network's precision; `cupymlp.MLP.from_safetensors` documents the arguments and errors."""
    where = repr(os.fspath(path))
    package = _package()
    with open(path, "rb") as file:
        try:
            with package.safe_open(path, framework="np") as tensors:
                names = _names(file)
                views = {name: tensors.get_slice(name) for name in names}
                metadata = tensors.metadata() or {}
                return _read(where, tensors, views, metadata, prefix, activation, out_activation)
        except package.SafetensorError as error:
            _refuse_pickle(where, file)
            raise ValueError(f"{where} is not a safetensors file, or it is damaged: {error}") from error


def _read(
    where: str,
    tensors: Any,
    views: Mapping[str, Any],
    metadata: Mapping[str, str],
    prefix: str | Sequence[str],
    activation: Any,
    out_activation: Any,
) -> tuple[Found, str]:
    # torch's save_model leaves out what has two names, and says so in the metadata.
    kept = {name: name for name in views}
    kept |= {name: other for name, other in metadata.items() if name not in views and other in views}
    shapes = {name: tuple(views[other].get_shape()) for name, other in kept.items()}
    layers = find_layers(where, torch_paths(kept), shapes, prefix, NAMING)

    def get(name: str) -> Any:
        kind = views[kept[name]].get_dtype()
        if kind not in _DTYPES:
            raise ValueError(f"{name} of {where} has dtype {kind}; accepted: {', '.join(_DTYPES)}")
        numpy_dtype(_DTYPES[kind])  # bfloat16 needs a package
        return tensors.get_tensor(kept[name])

    precision = "ieee"
    if KEY in metadata:
        activations, precision = _description(where, metadata[KEY])
        activation = activations[:-1] if activation is None else activation
        out_activation = activations[-1] if out_activation is None else out_activation
    elif activation is None and len(layers) > 1:
        raise ValueError(
            f"activation is None, and {where} does not say what is between its {len(layers)} layers: pass activation=, as "
            "'relu', or one for each hidden layer"
        )
    found = read_layers(layers, get, activation, "identity" if out_activation is None else out_activation)
    return found, precision


def _description(where: str, text: str) -> tuple[list[ActivationSpec], str]:
    """What `write_safetensors` wrote of a network; the activations are checked where every network's are."""

    def wrong(what: str) -> ValueError:
        return ValueError(f"the metadata {KEY!r} of {where} is damaged: {what}")

    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(str(error)) from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        version = description.get("format") if isinstance(description, dict) else None
        raise wrong(f"its format version is {version!r}; this cupymlp reads version {FORMAT}")
    activations, precision = description.get("activations"), description.get("precision")
    if not isinstance(activations, list) or not activations:
        raise wrong(f"activations is {activations!r}")
    if precision not in PRECISIONS:
        raise wrong(f"precision is {precision!r}")
    return [tuple(a) if isinstance(a, list) else a for a in activations], precision


def _names(file: BinaryIO) -> list[str]:
    """The tensors' names; the package takes the last of two that are the same."""
    (length,) = struct.unpack("<Q", file.read(8))

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{file.name!r} is damaged: its header has {twice!r} twice")
        return dict(pairs)

    header = json.loads(file.read(length), object_pairs_hook=once)
    return [name for name in header if name != "__metadata__"]


def _refuse_pickle(where: str, file: BinaryIO) -> None:
    file.seek(0)
    head = file.read(4)
    if head == b"PK\x03\x04" or head[:1] == b"\x80":
        raise ValueError(
            f"{where} looks like a file of torch.save: a pickle, which can run any code when it is read, and is not read here. "
            "Convert it where it comes from: safetensors.torch.save_file(torch.load(path, weights_only=True), "
            "'net.safetensors'); or pass a state dict to MLP.from_state_dict"
        )


def _package() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f"safetensors files need the package safetensors, which cannot be imported ({error}): pip install safetensors"
        ) from error
    return safetensors
