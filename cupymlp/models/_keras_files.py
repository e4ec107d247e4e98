"""Keras' files: the model's description and its arrays, read without Keras, and with nothing in them trusted.

A ``.keras`` file is a zip archive of ``config.json``, ``metadata.json`` and ``model.weights.h5``, where the arrays of a layer
are ``layers/<class>_<count>/vars/<number>``. An older ``.h5`` file has the description as an attribute, and the arrays as
``model_weights/<layer>/<name>``. Of HDF5, which can refer to other files and to itself, can compress, and can claim arrays that
are nowhere, only what Keras writes is accepted: arrays in one piece, reached by ordinary links. Their shapes are compared with
the description before memory is taken for them.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..network import numpy_dtype
from . import check_finite

__all__ = ["KerasFile", "open_keras", "shown"]

CONFIG, METADATA, WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_JSON_BYTES = 16 << 20  # at most: a description of tens of thousands of layers
_HEAP_OBJECTS = 1_000_000  # at most: a name of a layer or an array is one
_RATIO = 16  # of a member's size to the archive's, at most: Keras does not compress
# What zipfile and h5py raise for damaged files.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError, OverflowError)
_HDF5_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, OverflowError, EOFError)


Shapes = dict[str, tuple[int, ...] | None]  # None: it is there, and is not read


class WrongFileError(ValueError):
    """What is wrong with the file, in a finished message."""


class KerasFile:
    """A model's description and its arrays.

    Attributes
    ----------
    where
        What messages call it.
    config
        The model's description: ``class_name`` and ``config``.
    version
        Of the Keras that wrote it, ``""`` if it does not say.
    """

    def __init__(self, where: str, config: dict[str, Any], version: str, weights: Any) -> None:
        self.where = where
        self.config = config
        self.version = version
        self._weights = weights  # an h5py group
        self._counts: Counter[str] = Counter()

    @property
    def legacy(self) -> bool:
        """Whether Keras 2 wrote it, or nothing says who did."""
        return not re.match(r"[3-9]\.", self.version)

    def arrays(self, class_name: str, layer: str, shapes: Shapes) -> dict[str, NDArray[Any]]:
        """A layer's arrays by the names of ``shapes``; to be called for the layers that have some, in the model's order."""
        with _hdf5_errors(self):
            found = self._arrays(class_name, layer, shapes)
        for name, array in found.items():
            check_finite(f"{name} of layer {layer!r} of {self.where}", array)
        return found

    def _arrays(self, class_name: str, layer: str, shapes: Shapes) -> dict[str, NDArray[Any]]:
        raise NotImplementedError

    def _read(self, name: str, dataset: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array of this shape, or a ValueError that names it."""
        h5py = _h5py()
        if not isinstance(dataset, h5py.Dataset):
            raise self.wrong(f"{name} is not an array")
        if dataset.shape != shape:
            raise self.wrong(f"{name} has shape {dataset.shape}; the description says {shape}")
        bfloat16 = dataset.attrs.get("dtype") == "bfloat16"
        if dataset.dtype.kind != "f" and not (bfloat16 and dataset.dtype.itemsize == 2):
            raise self.wrong(f"{name} has dtype {dataset.dtype}; accepted: floating-point numbers")
        if dataset.is_virtual or dataset.external or dataset.chunks is not None:
            raise self.wrong(
                f"{name} is compressed, in chunks, or elsewhere; accepted: arrays in one piece, as Keras writes them"
            )
        size = int(np.prod(shape, dtype=object)) * dataset.dtype.itemsize
        if dataset.id.get_storage_size() != size:
            raise self.wrong(f"{name} takes {dataset.id.get_storage_size():,} bytes; its shape needs {size:,}")
        array = np.asarray(dataset[()])
        return array.view(numpy_dtype("bfloat16")) if bfloat16 else array

    def _group(self, group: Any, path: Sequence[str]) -> Any:
        """What lies under these names, one below the other, if all are ordinary links in this file."""
        h5py = _h5py()
        for i, name in enumerate(path):
            here = "/".join(path[: i + 1])
            if not isinstance(group, h5py.Group) or not name or "/" in name or name not in group:
                raise self.wrong(f"{here!r} is missing")
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise self.wrong(f"{here!r} is a link to another place; accepted: what lies in the file")
            group = group[name]
        return group

    def wrong(self, what: str) -> WrongFileError:
        """An error about the file."""
        return WrongFileError(f"{self.where} is not a model that Keras saved, or it is damaged: {what}")


class _Archive(KerasFile):
    """Of a ``.keras`` file."""

    def _arrays(self, class_name: str, layer: str, shapes: Shapes) -> dict[str, NDArray[Any]]:
        count = self._counts[class_name]
        self._counts[class_name] += 1
        folder = _snake_case(class_name) + (f"_{count}" if count else "")
        group = self._group(self._weights, ["layers", folder, "vars"])
        named = group.attrs.get("name", layer)  # older versions do not write it
        if named != layer:
            raise self.wrong(f"layers/{folder} holds the arrays of {named!r}; the description has {layer!r} there")
        if sorted(group) != [str(i) for i in range(len(shapes))]:
            raise self.wrong(
                f"layer {layer!r} has {len(group)} arrays; a {class_name} like this has {', '.join(shapes)}"
            )
        return {
            name: self._read(f"{name} of layer {layer!r}", self._group(group, [str(i)]), shape)
            for i, (name, shape) in enumerate(shapes.items())
            if shape is not None
        }


class _Legacy(KerasFile):
    """Of an ``.h5`` file."""

    def _arrays(self, class_name: str, layer: str, shapes: Shapes) -> dict[str, NDArray[Any]]:
        group = self._group(self._weights, ["model_weights", *layer.split("/")])
        paths = [
            _text(name).split("/") for name in np.asarray(group.attrs.get("weight_names", ())).reshape(-1).tolist()
        ]
        by_name = {path[-1].partition(":")[0]: path for path in paths}
        if sorted(by_name) != sorted(shapes) or len(paths) != len(shapes):
            raise self.wrong(
                f"layer {layer!r} has {', '.join(sorted(by_name)) or 'no arrays'}; a {class_name} like this has "
                f"{', '.join(shapes)}"
            )
        return {
            name: self._read(f"{name} of layer {layer!r}", self._group(group, by_name[name]), shape)
            for name, shape in shapes.items()
            if shape is not None
        }


@contextmanager
def open_keras(path: str | os.PathLike[str]) -> Iterator[KerasFile]:
    """A ``.keras`` or ``.h5`` file, by what is in it.

    Raises
    ------
    ValueError
        Naming the file and what is wrong with it.
    ImportError
        Without h5py.
    """
    h5py = _h5py()
    where = repr(os.fspath(path))
    blank = KerasFile(where, {}, "", None)
    with open(path, "rb") as file:
        magic = file.read(8)
        file.seek(0)
        if magic[:4] == b"PK\x03\x04":
            config, version, weights = _unpack(blank, file)
            _check_heaps(blank, weights)
            with _hdf5_errors(blank):
                opened = h5py.File(io.BytesIO(weights), "r")
            with opened:
                yield _Archive(where, config, version, opened)
        elif magic == HDF5_MAGIC:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _check_heaps(blank, content)
            with _hdf5_errors(blank):
                opened = h5py.File(file, "r")
            with opened:
                with _hdf5_errors(blank):
                    text, version = (opened.attrs.get(name) for name in ("model_config", "keras_version"))
                if text is None:
                    raise blank.wrong(
                        "it has no description (model_config), weights at most; save all of it, with model.save"
                    )
                yield _Legacy(where, _json(blank, "model_config", _text(text)), _text(version or ""), opened)
        else:
            raise blank.wrong("it is neither a zip archive (.keras) nor an HDF5 file (.h5)")


@contextmanager
def _hdf5_errors(keras_file: KerasFile) -> Iterator[None]:
    try:
        yield
    except WrongFileError:
        raise
    except _HDF5_ERRORS as error:
        raise keras_file.wrong(str(error)) from error


def _check_heaps(blank: KerasFile, content: bytes | mmap.mmap) -> None:
    """Raise unless the global heaps, where HDF5 keeps texts, have an end: its library walks around in others for ever.

    A heap begins with GCOL, a version of 1, 3 bytes and its size; its objects with an index, 6 bytes and a size. For index 0,
    free space, the size includes these 16 bytes; for others it does not, nor what fills them up to a multiple of 8 (HDF5 File
    Format Specification 3.0, III.E).
    """
    widths = content[13:15] if content[8:9] < b"\x02" else content[9:11]  # by the superblock's version
    if content[:8] != HDF5_MAGIC or widths != b"\x08\x08":
        raise blank.wrong("its HDF5 has no superblock at its beginning with addresses of 8 bytes, as Keras writes it")
    steps = 0
    at = content.find(b"GCOL\x01")
    while at >= 0:
        (size,) = struct.unpack("<Q", content[at + 8 : at + 16].ljust(8, b"\xff"))
        place, end = at + 16, at + size
        while place + 16 <= end <= len(content):
            index, length = struct.unpack_from("<H6xQ", content, place)
            place += length if index == 0 else 16 + -(-length // 8) * 8
            steps += 1
            if (index == 0 and length < 16) or steps > _HEAP_OBJECTS:
                end = -1
        if not at + 16 <= place <= end <= len(content):
            raise blank.wrong("a global heap of its HDF5 is damaged")
        at = content.find(b"GCOL\x01", at + 1)


# --- The archive ------------------------------------------------------------------------------------------------------


def _unpack(blank: KerasFile, file: BinaryIO) -> tuple[dict[str, Any], str, bytes]:
    """The description, the version and the weights of a .keras file. Nothing is extracted to a disk."""
    size = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(file) as archive:
            infos = {info.filename: info for info in archive.infolist()}
            if len(infos) < len(archive.infolist()):
                raise blank.wrong("a member is there twice")
            strange = [
                n for n in infos if n not in (CONFIG, METADATA, WEIGHTS) and (not n.startswith("assets/") or ".." in n)
            ]
            if strange:
                raise blank.wrong(f"it has a member {shown(strange[0])}; accepted: {CONFIG}, {METADATA} and {WEIGHTS}")

            def read(name: str, limit: int) -> bytes:
                if name not in infos:
                    raise blank.wrong(f"it has no {name}")
                if infos[name].file_size > limit:
                    raise blank.wrong(
                        f"{name} has {infos[name].file_size:,} bytes; at most {limit:,} are accepted here"
                    )
                with archive.open(infos[name]) as member:
                    return member.read(
                        infos[name].file_size
                    )  # all that there is would be decompressed without the number

            limit = min(_JSON_BYTES, _RATIO * size)
            config = _json(blank, CONFIG, read(CONFIG, limit))
            metadata = _json(blank, METADATA, read(METADATA, limit)) if METADATA in infos else {}
            return config, str(metadata.get("keras_version", "")), read(WEIGHTS, _RATIO * size)
    except WrongFileError:
        raise
    except _ZIP_ERRORS as error:
        raise blank.wrong(str(error)) from error


def _json(blank: KerasFile, name: str, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise blank.wrong(f"{name} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise blank.wrong(f"{name} is {shown(found)}; accepted: an object")
    return found


# --- Small things -----------------------------------------------------------------------------------------------------


def _snake_case(class_name: str) -> str:
    """As Keras names the folders of layers: BatchNormalization is batch_normalization."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name).lower()


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def shown(value: object) -> str:
    """A value in an error, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"Keras' files need the package h5py, which cannot be imported ({error}): pip install h5py"
        ) from error
    return h5py
