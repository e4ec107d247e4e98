"""What MLP.map reads: arrays of any strides, ``.npy`` files, and objects that give rows by slices, such as zarr arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ._checks import as_numpy, library_of, type_name
from ._map_engine import Source

__all__ = ["ArraySource", "is_sliced", "open_source", "open_zarr", "row_blocks", "row_view", "sliced_unit"]

ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")  # one of them is in the folder of every zarr array or group
SLICED_BYTES = 512 << 20  # what one index along the first axis of a sliced object may take: it cannot be cut


def open_source(x: Any) -> Source:
    """The source for what a user passed as x."""
    if isinstance(x, str | os.PathLike):
        return _open_path(Path(x))
    if library_of("x", x) == "gpu":
        raise TypeError(
            f"x is a {type_name(x)}, on a GPU already; accepted: arrays in host memory, .npy files, zarr arrays. Call "
            "net(x, out=out)"
        )
    if is_sliced(x):
        return _SlicedSource(x)
    return ArraySource(as_numpy("x", x))


def _open_path(path: Path) -> Source:
    if path.is_dir():
        return _SlicedSource(open_zarr("x", path))
    file = _NpyFile(path)
    if file.fortran_order:  # a row is spread over the whole file: let the system's pages sort that out
        file.close()
        return ArraySource(np.load(path, mmap_mode="r", allow_pickle=False))
    return file


# --- Arrays ---------------------------------------------------------------------------------------------------------


def row_view(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory with two axes or more: (rows, features) if that needs no copy."""
    plain = array.view(np.ndarray)  # a memmap's slices are slow
    if plain.ndim == 1:
        return plain[np.newaxis]
    if plain.ndim > 2 and plain.flags.c_contiguous:
        return plain.reshape(math.prod(plain.shape[:-1]), plain.shape[-1])
    return plain


def row_blocks(array: NDArray[Any], start: int, stop: int) -> Iterator[NDArray[Any]]:
    """Views of rows start to stop, in C order of the leading axes; as few as the axes allow, each with two or more."""
    if array.ndim == 2:
        yield array[start:stop]
        return
    inner = math.prod(array.shape[1:-1])
    first, last = -(-start // inner), stop // inner  # what lies between is wanted as a whole
    if first > last:
        yield from row_blocks(array[last], start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from row_blocks(array[first - 1], start - (first - 1) * inner, inner)
    if first < last:
        yield array[first:last]
    if last * inner < stop:
        yield from row_blocks(array[last], 0, stop - last * inner)


class ArraySource:
    """A NumPy array: any strides and byte order."""

    unit = step = 1
    parallel = True

    def __init__(self, array: NDArray[Any]) -> None:
        self.shape = array.shape
        self.dtype = array.dtype.newbyteorder("=")
        self._rows = row_view(array) if array.ndim else array  # a 0-d array is refused by the checks

    def read(self, start: int, stop: int, into: NDArray[Any]) -> None:
        """Copy; NumPy lets other threads run meanwhile."""
        if self._rows.ndim == 2:
            into[...] = self._rows[start:stop]
            return
        done = 0
        for block in row_blocks(self._rows, start, stop):
            count = math.prod(block.shape[:-1])
            into[done : done + count].reshape(block.shape)[...] = block
            done += count

    def close(self) -> None:
        """The array is the user's."""


# --- .npy files -----------------------------------------------------------------------------------------------------


class _NpyFile:
    """A ``.npy`` file, read by calls: unlike a memory map's, its errors are exceptions and not SIGBUS."""

    unit = step = 1
    parallel = True

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "rb") as file:
            try:
                version = npy.read_magic(file)
                read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
                if read_header is None:
                    raise ValueError(f"its format version is {version}; accepted: (1, 0) and (2, 0)")
                self.shape, self.fortran_order, stored = read_header(file)
                if stored.hasobject:
                    raise ValueError("it holds Python objects; accepted: numbers")
            except ValueError as error:
                raise ValueError(
                    f"x is {os.fspath(path)!r}, which is not a .npy file, or a damaged one: {error}. Accepted: a file that "
                    "numpy.save wrote, or a folder that is a zarr array"
                ) from error
            self._offset = file.tell()
            data, found = math.prod(self.shape) * stored.itemsize, os.fstat(file.fileno()).st_size - self._offset
            if found < data:
                raise ValueError(
                    f"x is {os.fspath(path)!r}, which is truncated: its header promises {data:,} bytes of data, {stored} "
                    f"{self.shape}, and it has {found:,}. Write it again"
                )
            self.dtype = stored.newbyteorder("=")
            self._swapped = stored != self.dtype
            self._descriptor = os.dup(file.fileno())

    def read(self, start: int, stop: int, into: NDArray[Any]) -> None:
        """Read; the system lets other threads run meanwhile."""
        row_bytes = into.shape[-1] * into.itemsize
        left = into.reshape(-1).view(np.uint8).data
        at, end = (self._offset + row * row_bytes for row in (start, stop))
        while at < end:
            count = os.preadv(self._descriptor, [left], at)
            if count == 0:
                raise OSError(f"{os.fspath(self._path)!r} has shrunk while it was read: it ends before byte {at:,}")
            left, at = left[count:], at + count
        if self._swapped:
            into.byteswap(inplace=True)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


# --- Objects that give rows by slices -----------------------------------------------------------------------------------


def is_sliced(array: object) -> bool:
    """Whether this is an array that is read by slices, as zarr's and h5py's are: NumPy would read it whole."""
    if isinstance(array, np.ndarray | np.generic) or hasattr(array, "__array_interface__"):
        return False
    return (
        isinstance(getattr(array, "dtype", None), np.dtype)
        and isinstance(getattr(array, "shape", None), tuple)
        and hasattr(array, "__getitem__")
    )


def sliced_unit(argument: str, array: Any) -> tuple[int, int]:
    """Rows that are stored together, and rows of one index along the first axis."""
    step = math.prod(array.shape[1:-1])
    item_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    if len(array.shape) > 2 and item_bytes > SLICED_BYTES:
        raise ValueError(
            f"{argument} is a {type_name(array)} {array.shape}, of which {argument}[0] alone takes {item_bytes:,} bytes; "
            f"accepted: at most {SLICED_BYTES:,}, since it is read and written by slices of its first axis. Store it as (rows, "
            "features)"
        )
    # A shard is what zarr writes at once, where there are shards.
    for stored in (getattr(array, "shards", None), getattr(array, "chunks", None)):
        if isinstance(stored, tuple) and len(stored) == len(array.shape) >= 2 and isinstance(stored[0], int):
            return max(1, stored[0]) * max(1, step), max(1, step)
    return max(1, step), max(1, step)


def open_zarr(argument: str, path: Path) -> Any:
    """The zarr array in a folder."""
    if not any((path / name).exists() for name in ZARR_FILES):
        raise ValueError(
            f"{argument} is {os.fspath(path)!r}, a folder that is no zarr array (it has none of {', '.join(ZARR_FILES)}); "
            "accepted: a .npy file, or the folder of a zarr array"
        )
    array = import_zarr(argument).open(os.fspath(path), mode="r")
    if not is_sliced(array):
        raise ValueError(
            f"{argument} is {os.fspath(path)!r}, a zarr {type_name(array)}; accepted: an array. Name the array in it, as in "
            f"{os.fspath(path / 'x')!r}"
        )
    return array


def import_zarr(argument: str) -> Any:
    """The package zarr."""
    try:
        import zarr
    except ImportError as error:
        raise ImportError(
            f"{argument} is a zarr array, and the package zarr cannot be imported ({error}): pip install 'cupymlp[zarr]', or "
            "use .npy files"
        ) from error
    return zarr


class _SlicedSource:
    """Rows by slices of the first axis."""

    parallel = False  # zarr has threads of its own, h5py one lock

    def __init__(self, array: Any) -> None:
        self.shape = tuple(array.shape)
        self.dtype = array.dtype.newbyteorder("=")
        self.unit, self.step = sliced_unit("x", array)
        self._array = array

    def read(self, start: int, stop: int, into: NDArray[Any]) -> None:
        """One slice."""
        one_row = len(self.shape) == 1
        found = np.asarray(self._array[:] if one_row else self._array[start // self.step : stop // self.step])
        wanted = self.shape if one_row else ((stop - start) // self.step, *self.shape[1:])
        if found.shape != wanted:
            raise ValueError(
                f"x gave an array {found.shape} for a slice that has shape {wanted}: did it change meanwhile?"
            )
        into.reshape(wanted)[...] = found

    def close(self) -> None:
        """The array is the user's, or holds nothing open."""
