"""MLP.save and MLP.load: one ``.npz`` of plain arrays, without pickle.

The archive holds ``header.npy``, a JSON text with the format version and the description of the network (an activation with a
parameter is a list of its name and that number, which JSON keeps to the bit), and
``weight_<layer>.npy`` and ``bias_<layer>.npy``; those of bfloat16 as uint16 with the same bits, since ``.npy`` has no
bfloat16. Everything that is read is compared with the header before memory is
taken for it.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ._files import replacing
from .activations import ActivationSpec, read_spec
from .network import DTYPES, PRECISIONS, Network, numpy_dtype, precision_takes

__all__ = ["FORMAT", "Saved", "load", "save"]

FORMAT = 2  # 1 had activations without parameters only
# What zipfile raises for a damaged archive: its fields are read before they are checked.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError, OverflowError)
_HEADER = "header.npy"
_HEADER_BYTES = 1 << 20  # at most: room for networks of tens of thousands of layers


@dataclass(frozen=True)
class Saved:
    """What a file holds; weights in the layout that it names."""

    network: Network
    weight_layout: str
    weights: list[NDArray[np.floating]]
    biases: list[NDArray[np.floating] | None]


def save(
    path: str | os.PathLike[str],
    network: Network,
    weight_layout: str,
    weights: Sequence[NDArray[np.floating]],
    biases: Sequence[NDArray[np.floating] | None],
) -> None:
    """Write the file under a temporary name beside its place, then move it there."""
    header = {
        "cupymlp": FORMAT,
        "sizes": network.sizes,
        "activations": network.activations,
        "biases": network.biases,
        "dtype": network.dtype,
        "precision": network.precision,
        "weight_layout": weight_layout,
    }
    arrays: dict[str, Any] = {"header": np.array(json.dumps(header))}
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        arrays[f"weight_{layer}"] = weight.view(_stored(network.dtype))
        if bias is not None:
            arrays[f"bias_{layer}"] = bias.view(_stored(network.dtype))
    with replacing(path) as temporary, open(temporary, "xb") as file:
        np.savez(file, **arrays)


def _stored(dtype: str) -> str:
    """The dtype of a network's arrays in the file."""
    return "uint16" if dtype == "bfloat16" else dtype


def load(path: str | os.PathLike[str]) -> Saved:
    """Read and check a file.

    Raises
    ------
    ValueError
        Naming the file and what is wrong with it.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive)
        except _ZIP_ERRORS as error:
            raise ValueError(
                f"{os.fspath(path)!r} is not a file that MLP.save wrote, or it is damaged: {error}"
            ) from error


class _WrongError(ValueError):
    """What is wrong with the file."""


def _read(archive: zipfile.ZipFile) -> Saved:
    network, weight_layout = _read_header(archive)
    wanted: dict[str, tuple[int, ...]] = {}
    for layer, (k, n) in enumerate(zip(network.sizes, network.sizes[1:], strict=False)):
        wanted[f"weight_{layer}.npy"] = (k, n) if weight_layout == "in_out" else (n, k)
        if network.biases[layer]:
            wanted[f"bias_{layer}.npy"] = (n,)
    names = [info.filename for info in archive.infolist()]
    if sorted(names) != sorted([_HEADER, *wanted]):
        missing, extra = sorted({*wanted} - {*names}), sorted({*names} - {_HEADER, *wanted})
        raise _WrongError(
            f"missing arrays: {missing or 'none'}; arrays that do not belong: {extra or 'none or a duplicate'}"
        )
    arrays = {name: _read_array(archive, name, shape, network.dtype) for name, shape in wanted.items()}
    return Saved(
        network,
        weight_layout,
        [arrays[f"weight_{layer}.npy"] for layer in range(network.depth)],
        [arrays.get(f"bias_{layer}.npy") for layer in range(network.depth)],
    )


def _read_header(archive: zipfile.ZipFile) -> tuple[Network, str]:
    try:
        info = archive.getinfo(_HEADER)
    except KeyError:
        raise _WrongError(f"it has no {_HEADER}") from None
    if info.file_size > _HEADER_BYTES:
        raise _WrongError(f"{_HEADER} has {info.file_size:,} bytes; at most {_HEADER_BYTES:,} are accepted")
    with archive.open(info) as file:
        try:
            text = str(npy.read_array(file, allow_pickle=False)[()])
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _WrongError(f"{_HEADER} cannot be read ({error})") from error
    if not isinstance(header, dict) or header.get("cupymlp") not in range(1, FORMAT + 1):
        version = header.get("cupymlp") if isinstance(header, dict) else None
        raise _WrongError(f"its format version is {version!r}; this cupymlp reads versions 1 to {FORMAT}")

    def field(name: str, ok: Any) -> Any:
        value = header.get(name)
        if not ok(value):
            raise _WrongError(f"{name} is {value!r}")
        return value

    def integer(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31

    sizes = field("sizes", lambda v: isinstance(v, list) and len(v) >= 2 and all(map(integer, v)))
    depth = len(sizes) - 1

    def one_a_layer(known: Any) -> Any:
        return lambda v: isinstance(v, list) and len(v) == depth and all(known(item) for item in v)

    dtype = field("dtype", lambda v: v in DTYPES)
    network = Network(
        tuple(sizes),
        _read_activations(field("activations", one_a_layer(lambda _: True)), dtype),
        tuple(field("biases", one_a_layer(lambda item: isinstance(item, bool)))),
        dtype,
        field("precision", lambda v: v in PRECISIONS and precision_takes(v, dtype)),
    )
    return network, field("weight_layout", lambda v: v in ("in_out", "out_in"))


def _read_activations(items: list[object], dtype: str) -> tuple[ActivationSpec, ...]:
    """One a layer: a name, or a list of a name and a number."""
    sums = "float64" if dtype == "float64" else "float32"
    try:
        return tuple(
            read_spec(f"activations[{i}]", v, last=i == len(items) - 1, dtype=sums) for i, v in enumerate(items)
        )
    except (TypeError, ValueError) as error:
        raise _WrongError(f"activations is {items!r}: {error}") from error


def _read_array(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[np.floating]:
    info = archive.getinfo(name)
    with archive.open(info) as file:
        try:
            version = npy.read_magic(file)
            read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
            found_shape, fortran, found_dtype = read_header(file)
        except (ValueError, KeyError) as error:
            raise _WrongError(f"{name} cannot be read ({error})") from error
        stored = np.dtype(_stored(dtype))
        if found_shape != shape or found_dtype != stored:
            says = dtype if stored == dtype else f"{dtype} ({stored})"
            raise _WrongError(f"{name} is {found_dtype} {found_shape}; the header says {says} {shape}")
        size = int(np.prod(shape, dtype=object)) * stored.itemsize
        if info.file_size - file.tell() != size:
            raise _WrongError(f"{name} has {info.file_size - file.tell():,} bytes of data; its shape needs {size:,}")
        data = np.frombuffer(file.read(size), dtype=numpy_dtype(dtype))
    return data.reshape(shape[::-1]).T if fortran else data.reshape(shape)
