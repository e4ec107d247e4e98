"""What MLP.map writes to: arrays, and objects that take rows by slices. Paths are in `_map_paths`."""

from __future__ import annotations

import errno
import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._checks import library_of, type_name
from ._map_engine import Sink
from ._map_sources import is_sliced, row_blocks, row_view, sliced_unit

__all__ = ["SlicedSink", "array_sink", "check_out", "reserve"]


def check_out(out: Any) -> None:
    """Raise TypeError unless out is something that rows can be written to; shape and dtype are checked elsewhere."""
    if library_of("out", out) == "gpu":
        raise TypeError(
            f"out is a {type_name(out)}, on a GPU; accepted: arrays in host memory, paths of .npy files, zarr arrays"
        )
    if isinstance(out, np.ndarray):
        if isinstance(out, np.ma.MaskedArray):
            raise TypeError("out is a masked array, whose mask would be left as it is; pass out.data")
        if not out.flags.writeable:
            raise ValueError("out is read-only: pass an array that can be written, a memory map with mode='r+'")
    elif not is_sliced(out) or not hasattr(out, "__setitem__"):
        raise TypeError(
            f"out is a {type_name(out)}; accepted: a NumPy array, the path of a .npy file or a folder .zarr, or an object with "
            "shape, dtype and slices, such as a zarr array"
        )


# --- Arrays ---------------------------------------------------------------------------------------------------------


def array_sink(out: Any, source_array: Any, *, created: bool) -> Sink:
    """The sink for an array that `check_out` accepts. ``created``: it is map's own, not the caller's."""
    if not isinstance(out, np.ndarray):
        if out is source_array:
            raise ValueError("out is x: pass another one, since a run that stops could not go on from x as it is then")
        return SlicedSink(out)
    if isinstance(source_array, np.ndarray) and np.may_share_memory(source_array, out):
        raise ValueError(
            "out overlaps x: pass an out that shares no memory with it, since a run that stops could not go on from x as it is "
            "then. net(x, out=out) takes arrays that overlap"
        )
    if out.size and any(length > 1 and step == 0 for length, step in zip(out.shape, out.strides, strict=True)):
        raise ValueError(
            "out is a broadcast array, whose elements share memory: pass an array with room for every element"
        )
    _reserve_disk(out)
    return _ArraySink(out, created)


def _reserve_disk(out: NDArray[Any]) -> None:
    """Have the system take the blocks of a memory map's file now: a disk that fills up later is a SIGBUS.

    Raises
    ------
    OSError
        If there is not enough room.
    """
    while isinstance(out.base, np.memmap):
        out = out.base
    if (
        not isinstance(out, np.memmap)
        or out.mode not in ("r+", "w+")
        or not isinstance(out.filename, str | os.PathLike)
    ):
        return
    descriptor = os.open(out.filename, os.O_RDWR | os.O_CLOEXEC)
    try:
        reserve(descriptor, out.offset, out.nbytes, os.fspath(out.filename))
    finally:
        os.close(descriptor)


def reserve(descriptor: int, offset: int, size: int, name: str) -> None:
    """Have the system take the blocks of this part of a file: OSError if there is not enough room."""
    try:
        os.posix_fallocate(descriptor, offset, max(size, 1))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot: its writes will tell
            return
        reason = os.strerror(error.errno or 0)
        raise OSError(
            error.errno, f"{reason}; the results take {size:,} bytes: make room, or write elsewhere", name
        ) from error


class _ArraySink:
    """A NumPy array, memory maps included: any strides, either byte order."""

    unit = step = 1
    parallel = True

    def __init__(self, out: NDArray[Any], created: bool) -> None:
        self._out, self._created = out, created
        self._rows = row_view(out)

    def write(self, start: int, stop: int, rows: NDArray[Any]) -> None:
        """Copy; NumPy lets other threads run meanwhile."""
        if self._rows.ndim == 2:
            self._rows[start:stop] = rows
            return
        done = 0
        for block in row_blocks(self._rows, start, stop):
            count = math.prod(block.shape[:-1])
            block[...] = rows[done : done + count].reshape(block.shape)
            done += count

    def commit(self, done: int) -> None:
        """Nothing is kept but the rows."""

    def finish(self) -> NDArray[Any]:
        """The array."""
        return self._out

    def abandon(self, done: int) -> tuple[int, str]:
        """The caller has the array, or gets it with the exception."""
        if not done:
            return 0, "call it again from the beginning"
        name = "error.out" if self._created else "out"  # error: the exception, which brings it
        return done, f"call net.map(x, out={name}, resume={done}) to go on from there"


# --- Objects that take rows by slices -----------------------------------------------------------------------------------


class SlicedSink:
    """Rows by slices of the first axis: zarr arrays, h5py datasets."""

    parallel = False  # two slices of one stored chunk must not be written at once

    def __init__(self, array: Any) -> None:
        self._array = array
        self._shape = tuple(array.shape)
        self.unit, self.step = sliced_unit("out", array)

    def write(self, start: int, stop: int, rows: NDArray[Any]) -> None:
        """One slice."""
        if len(self._shape) == 1:
            self._array[:] = rows[0]
        else:
            shape = ((stop - start) // self.step, *self._shape[1:])
            self._array[start // self.step : stop // self.step] = rows.reshape(shape)

    def commit(self, done: int) -> None:
        """Nothing is kept but the rows."""

    def finish(self) -> Any:
        """The object."""
        return self._array

    def abandon(self, done: int) -> tuple[int, str]:
        """The caller has the object."""
        return done, f"call net.map(x, out=out, resume={done}) to go on from there" if done else "call it again"
