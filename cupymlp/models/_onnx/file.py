"""An ONNX file as a checked model, and its tensors as arrays.

Nothing in a file is believed: sizes are compared with the bytes that are there before memory is taken for them, and external
data is read from regular files in the model's own folder only.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._checks import type_name
from ...network import numpy_dtype

__all__ = ["MOST_BYTES", "RefusedError", "Source", "import_onnx", "open_model", "read_tensor", "shown", "text"]

MOST_BYTES = 2**31 - 1  # of a protobuf message
_OLDEST_OPSET = 7  # the first one whose arithmetic broadcasts as NumPy does

# TensorProto.DataType: the dtype, and the field for data that is not raw.
_TYPES = {
    1: ("float32", "float_data"),
    6: ("int32", "int32_data"),
    7: ("int64", "int64_data"),
    9: ("bool", "int32_data"),
    10: ("float16", "int32_data"),  # its bits
    11: ("float64", "double_data"),
    16: ("bfloat16", "int32_data"),  # its bits
}
_MAGIC = {b"\x1f\x8b": "gzip data", b"PK\x03\x04": "a zip archive", b"\x80": "a pickle", b"\x89HDF": "an HDF5 file"}


class RefusedError(ValueError):
    """What is wrong with the model; the caller adds which."""


class Source:
    """Where a model comes from.

    Attributes
    ----------
    name
        For errors.
    folder
        Where its external data may lie; None for a model that comes from no file.
    """

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name = name
        self.folder = folder


def import_onnx() -> Any:
    """The package onnx."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            f"ONNX files need the package onnx, which cannot be imported ({error}): pip install 'cupymlp[onnx]'"
        ) from error
    return onnx


def shown(name: str | bytes) -> str:
    """A name of a file's making: in quotes, and not longer than a line. Bytes: protobuf's for what is no UTF-8."""
    return repr(name) if len(name) <= 80 else f"{name[:77]!r}..."


def text(name: str | bytes) -> str:
    """A name of a file's making as a str."""
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")


# --- The model --------------------------------------------------------------------------------------------------------


def open_model(model: Any) -> tuple[Any, Source]:
    """The ModelProto of a path, of bytes, or the one given, with a graph and an opset."""
    onnx = import_onnx()
    if isinstance(model, onnx.ModelProto):
        source = Source("the ONNX model", None)
        return _checked(model), source
    if isinstance(model, bytes | bytearray | memoryview):
        data, source = bytes(model), Source("the ONNX data", None)
    elif isinstance(model, str | os.PathLike):
        path = Path(model)
        source = Source(repr(os.fspath(model)), path.parent)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise RefusedError(
                    f"it has {size:,} bytes; an ONNX file has at most {MOST_BYTES:,}, others keep data apart"
                )
            data = file.read(size)
    else:
        advice = ". Of a torch.onnx.ONNXProgram, pass its model_proto" if hasattr(model, "model_proto") else ""
        raise TypeError(
            f"model is a {type_name(model)}; accepted: the path of an ONNX file, its bytes, or an onnx.ModelProto{advice}"
        )
    return _parsed(onnx, data), source


def _parsed(onnx: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError

    kind = next((text for magic, text in _MAGIC.items() if data.startswith(magic)), None)
    if kind is not None:
        raise RefusedError(f"it is {kind}, not an ONNX file")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RuntimeError) as error:  # RuntimeError: protobuf's, for a text that is no UTF-8
        raise RefusedError(
            f"it is not an ONNX file, or is damaged: its {len(data):,} bytes are no protobuf message"
        ) from error
    return _checked(model)


def _checked(model: Any) -> Any:
    if not model.HasField("graph") or not model.graph.node:
        raise RefusedError("it is not an ONNX file, or is damaged: it has no graph with nodes")
    opset = opset_of(model)
    if opset is None:
        raise RefusedError("it is damaged: it does not say which version of the ONNX operators (opset) it uses")
    if opset < _OLDEST_OPSET:
        raise RefusedError(
            f"it uses opset {opset}; accepted: {_OLDEST_OPSET} and later. Export it again, or see onnx.version_converter"
        )
    if model.graph.sparse_initializer:
        name = shown(model.graph.sparse_initializer[0].values.name)
        raise RefusedError(f"tensor {name} is a sparse initializer; accepted: dense ones")
    return model


def opset_of(model: Any) -> int | None:
    """The version of ONNX's own operators."""
    versions = [int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if len(set(versions)) > 1:
        raise RefusedError(f"it is damaged: it names several versions of the ONNX operators: {versions}")
    return versions[0] if versions else None


# --- Tensors ----------------------------------------------------------------------------------------------------------


def read_tensor(tensor: Any, source: Source, what: str) -> NDArray[Any]:
    """The array of a TensorProto, without trust in what it says of itself; ``what`` names it in errors."""
    known = _TYPES.get(tensor.data_type)
    if known is None:
        names = {number: name for name, number in type(tensor).DataType.items()}
        kind = names.get(tensor.data_type, f"the unknown type {tensor.data_type}")
        raise RefusedError(
            f"{what} holds {kind}; accepted: FLOAT, DOUBLE, FLOAT16 or BFLOAT16, and integers for shapes"
        )
    dims = tuple(int(d) for d in tensor.dims)
    if any(d < 0 for d in dims):
        raise RefusedError(f"{what} has the shape {list(dims)[:8]}, with a negative length")
    if len(dims) > 8 or math.prod(max(d, 1) for d in dims) > 2**48:
        raise RefusedError(
            f"{what} has the shape {list(dims)[:9]}; accepted: at most 8 axes, and sizes that fit in memory"
        )
    name, field = known
    dtype = numpy_dtype(name)
    count = math.prod(dims)
    if tensor.data_location == type(tensor).EXTERNAL:
        data = _external(tensor, source, what, count * dtype.itemsize)
    elif tensor.HasField("raw_data"):
        data = tensor.raw_data
        if len(data) != count * dtype.itemsize:
            raise RefusedError(
                f"{what} has {len(data):,} bytes of data; {name} of the shape {list(dims)} needs {count * dtype.itemsize:,}"
            )
    else:
        numbers = getattr(tensor, field)
        if len(numbers) != count:
            raise RefusedError(f"{what} has {len(numbers):,} numbers; the shape {list(dims)} needs {count:,}")
        return _of_numbers(numbers, name, what).reshape(dims)
    array = np.frombuffer(data, np.dtype(f"<u{dtype.itemsize}")).astype(
        f"u{dtype.itemsize}"
    )  # raw data is little-endian
    return (array != 0 if name == "bool" else array.view(dtype)).reshape(dims)


def _of_numbers(numbers: Any, name: str, what: str) -> NDArray[Any]:
    if name not in ("float16", "bfloat16"):
        return np.array(numbers, numpy_dtype(name))
    bits = np.array(numbers, np.int64)
    if np.any((bits < 0) | (bits > 0xFFFF)):
        raise RefusedError(f"{what} has numbers that are no bits of a {name}")
    return bits.astype(np.uint16).view(numpy_dtype(name))


def _external(tensor: Any, source: Source, what: str, size: int) -> bytes:
    """Data in a file of its own, of which the model gives the place: accepted below the model's folder, nowhere else."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if source.folder is None:
        raise RefusedError(
            f"{what} keeps its data in another file, {shown(location)}: give the path of the model, not its bytes"
        )
    where = f"{what} keeps its data in the file {shown(location)}"
    if not isinstance(location, str):
        raise RefusedError(f"{where}, which is no text")
    path = Path(location)
    if (
        not location
        or "\0" in location
        or path.is_absolute()
        or ".." in path.parts
        or "\\" in location
        or ":" in location
    ):
        raise RefusedError(f"{where}; accepted: a relative path below the model's folder")
    try:
        offset, length = (int(entries.get(key, missing)) for key, missing in (("offset", 0), ("length", size)))
    except ValueError as error:
        raise RefusedError(f"{where}, with an offset or a length that is no number") from error
    try:
        real = (source.folder / path).resolve(strict=True)
        if not real.is_relative_to(source.folder.resolve(strict=True)):
            raise RefusedError(f"{where}, which leads out of the model's folder")
        if not stat.S_ISREG(real.stat().st_mode):
            raise RefusedError(f"{where}, which is no regular file")
        with open(real, "rb") as file:
            there = os.fstat(file.fileno()).st_size
            if length != size or offset < 0 or offset + length > there:
                raise RefusedError(
                    f"{where} of {there:,} bytes: {length:,} from {offset:,} on; its shape needs {size:,}"
                )
            file.seek(offset)
            data = file.read(length)
    except OSError as error:
        raise RefusedError(f"{where}, which cannot be read ({error.strerror or error})") from error
    if len(data) != size:
        raise RefusedError(f"{where}, which was cut short while it was read")
    return data
