"""MLP.map to a path: a ``.npy`` file or a zarr array, written under a temporary name beside it and renamed at the end."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ._map_engine import Sink, Source
from ._map_part import RECORD_BYTES, Record, lock, part_of, resumed_rows
from ._map_sinks import SlicedSink, reserve
from ._map_sources import ZARR_FILES, import_zarr

__all__ = ["path_sink"]

ZARR_CHUNK_BYTES = 8 << 20  # of results, where x has no chunks of its own
SUFFIXES = (".npy", ".zarr")


def path_sink(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    source: Source,
    record: Record,
    resume: int,
    overwrite: bool,
) -> tuple[Sink, int]:
    """The sink for a path, and the rows that are there already.

    Parameters
    ----------
    record
        What to write beside the rows: with 0 rows.
    resume
        The rows to go on from, True for those that are recorded, 0 to begin.
    overwrite
        Whether the path may exist, and, if resume is 0, what an earlier run left.

    Raises
    ------
    FileExistsError, IsADirectoryError
        For what is not to be overwritten.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"out is {os.fspath(path)!r}; accepted: a name that ends in .npy, or in .zarr for a zarr array"
        )
    if dtype.kind == "V":
        raise TypeError(
            f"the result is {dtype.name}, which .npy files and zarr arrays do not have; accepted: a path for float16, float32 "
            "and float64 networks. Write to np.lib.format.open_memmap(path, 'w+', 'uint16', shape).view('bfloat16')"
        )
    is_zarr = path.suffix == ".zarr"
    part = part_of(path)
    if path.exists() or path.is_symlink():
        _check_overwrite(path, overwrite, is_zarr)
    if part.exists() and not resume and not overwrite:
        raise FileExistsError(
            errno.EEXIST,
            "an earlier run that did not finish left it. Go on with resume=True (on the command line, --resume), or begin "
            "afresh with overwrite=True (--force)",
            os.fspath(part),
        )
    if resume and not part.exists():
        if resume is not True:
            raise ValueError(f"resume is {resume}, and {os.fspath(part)!r}, where these rows should be, does not exist")
        resume = 0  # nothing is there yet: begin
    sink = (_ZarrSink if is_zarr else _NpySink)(path, shape, dtype, source, record, resume)
    return sink, sink.done


def _check_overwrite(path: Path, overwrite: bool, is_zarr: bool) -> None:
    if not overwrite:
        raise FileExistsError(
            errno.EEXIST,
            "out exists; pass another path, or overwrite=True (on the command line, --force)",
            os.fspath(path),
        )
    if path.is_dir() != is_zarr or (is_zarr and not any((path / name).exists() for name in ZARR_FILES)):
        kind = "the folder of a zarr array" if is_zarr else "a file"
        raise FileExistsError(errno.EEXIST, f"out exists and is not {kind}: it is not overwritten", os.fspath(path))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _PathSink(ABC):
    """What .npy files and zarr arrays have in common. Subclasses keep the record."""

    def __init__(self, path: Path, record: Record) -> None:
        self._path, self._part, self._record = path, part_of(path), record
        self.done = 0
        self._descriptor = -1
        self._in_place = False

    def _close(self) -> None:
        """Let go of the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @abstractmethod
    def _remove(self) -> None:
        """Leave nothing."""

    @contextlib.contextmanager
    def _opening(self, is_new: bool) -> Iterator[None]:
        """If it cannot be opened, leave things as they were."""
        try:
            yield
        except BaseException:
            if is_new:
                self._remove()
            self._close()
            raise

    def abandon(self, done: int) -> tuple[int, str]:
        """The temporary place stays if there is something in it."""
        if self._in_place:
            self._close()
            return done, f"{os.fspath(self._path)!r} has them all"
        if done and self._part.exists():
            self._close()
            return done, (
                f"they are in {os.fspath(self._part)!r}: the same call with resume=True goes on from there (on the command "
                "line, the same command with --resume)"
            )
        self._remove()
        self._close()
        return 0, "nothing was left behind: call it again from the beginning"


class _NpySink(_PathSink):
    """A ``.npy`` file, its record behind the data until it is finished.

    It is written by calls, not through a memory map, on which a full disk is a SIGBUS. The room for all rows is taken at
    the start, so that a disk that is too small is known then.
    """

    unit = step = 1
    parallel = True

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], _: Source, record: Record, resume: int
    ) -> None:
        super().__init__(path, record)
        is_new = not self._part.exists()
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0)
        self._descriptor = os.open(self._part, flags, 0o666)
        with self._opening(is_new):
            lock(self._descriptor, self._part)
            with open(os.dup(self._descriptor), "r+b") as file:
                if not resume:
                    file.truncate(0)
                    npy.write_array_header_1_0(
                        file, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                    )
                    self._offset = file.tell()
                else:
                    self._offset = self._check_header(file, shape, dtype)
            self._row_bytes = shape[-1] * dtype.itemsize
            self._end = self._offset + math.prod(shape) * dtype.itemsize
            if resume:
                found = Record.unpacked(os.pread(self._descriptor, RECORD_BYTES + 1, self._end))
                self.done = resumed_rows(found, record, resume, self._part)
            else:
                reserve(self._descriptor, 0, self._end + RECORD_BYTES, os.fspath(self._part))
            self.commit(self.done)

    def _check_header(self, file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        try:
            npy.read_magic(file)
            found = npy.read_array_header_1_0(file)
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(self._part)!r} is not what an earlier run left ({error}). Begin afresh with overwrite=True (on "
                "the command line, --force)"
            ) from error
        if found != (shape, False, dtype):
            raise ValueError(
                f"{os.fspath(self._part)!r} is to have {found[2]} {found[0]}, and the result has {dtype} {shape}: it is of "
                "another network or x. Begin afresh with overwrite=True (on the command line, --force)"
            )
        return int(file.tell())

    def write(self, start: int, stop: int, rows: NDArray[Any]) -> None:
        """Write; the system lets other threads run meanwhile."""
        at, end = (self._offset + row * self._row_bytes for row in (start, stop))
        self._write_all(rows.reshape(-1).view(np.uint8).data, at, end)

    def _write_all(self, left: memoryview | bytes, at: int, end: int) -> None:
        while at < end:
            count = os.pwrite(self._descriptor, left, at)
            left, at = left[count:], at + count

    def commit(self, done: int) -> None:
        """Record it."""
        self._write_all(replace(self._record, rows=done).packed(), self._end, self._end + RECORD_BYTES)
        self.done = done

    def finish(self) -> Path:
        """Onto the disk and to its place."""
        try:
            os.fsync(self._descriptor)
        except OSError:
            self._remove()  # what reached the disk is unknown
            raise
        try:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)
            os.replace(self._part, self._path)
            self._in_place = True
        except BaseException:
            if self._part.exists():
                self.commit(self.done)  # it can still be gone on from
            raise
        self._close()
        _sync_folder(self._path.parent)
        return self._path

    def _remove(self) -> None:
        self._part.unlink(missing_ok=True)


class _ZarrSink(_PathSink):
    """A zarr array in a folder, its record a file beside the chunks until it is finished."""

    parallel = False
    RECORD = "cupymlp.record"

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], source: Source, record: Record, resume: int
    ) -> None:
        super().__init__(path, record)
        zarr = import_zarr("out")
        if self._part.exists() and not resume:
            self._remove_old()
        is_new = not self._part.exists()
        if is_new:
            self._part.mkdir()
        self._descriptor = os.open(self._part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with self._opening(is_new):
            lock(self._descriptor, self._part)
            if resume:
                found = self._read_record()
                self.done = resumed_rows(found, record, resume, self._part)
                array = zarr.open(os.fspath(self._part), mode="r+")
            else:
                array = zarr.open_array(
                    os.fspath(self._part),
                    mode="w-",
                    shape=shape,
                    dtype=dtype,
                    chunks=_zarr_chunks(shape, dtype, source),
                )
                self.commit(0)
            self._slices = SlicedSink(array)
            self.unit, self.step = self._slices.unit, self._slices.step

    def _read_record(self) -> Record | None:
        try:
            return Record.unpacked((self._part / self.RECORD).read_bytes())
        except FileNotFoundError:
            return None

    def _remove_old(self) -> None:
        """Remove what an earlier run left, but nothing else that has this name."""
        # One that was killed before the first record has nothing but what describes the array.
        described = {*ZARR_FILES, ".zattrs", f"{self.RECORD}.part"}
        if not self._part.is_dir() or (
            self._read_record() is None and not described.issuperset(os.listdir(self._part))
        ):
            raise FileExistsError(
                errno.EEXIST,
                "it is not what an earlier run left, and is not overwritten: move it away",
                os.fspath(self._part),
            )
        descriptor = os.open(self._part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock(descriptor, self._part)
            self._remove()
        finally:
            os.close(descriptor)

    def write(self, start: int, stop: int, rows: NDArray[Any]) -> None:
        """One slice."""
        self._slices.write(start, stop, rows)

    def commit(self, done: int) -> None:
        """Record it: the record is there as a whole at any time."""
        beside = self._part / f"{self.RECORD}.part"
        beside.write_bytes(replace(self._record, rows=done).packed())
        os.replace(beside, self._part / self.RECORD)
        self.done = done

    def finish(self) -> Path:
        """To its place; an old one is moved aside first, and removed last."""
        old = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.part")
        had_old = self._path.exists()
        try:
            (self._part / self.RECORD).unlink()
            if had_old:
                os.rename(self._path, old)
            os.rename(self._part, self._path)
            self._in_place = True
        except BaseException:
            if had_old and old.exists() and not self._path.exists():
                os.rename(old, self._path)
            if self._part.exists():
                self.commit(self.done)
            raise
        self._close()
        _sync_folder(self._path.parent)
        if had_old:
            shutil.rmtree(old)
        return self._path

    def _remove(self) -> None:
        if self._part.exists():
            shutil.rmtree(self._part)


def _zarr_chunks(shape: Sequence[int], dtype: np.dtype[Any], source: Source) -> tuple[int, ...]:
    """As long as x's chunks if it has some, so that one is read for one that is written."""
    items, item_bytes = shape[0], max(1, math.prod(shape[1:]) * dtype.itemsize)
    if len(shape) == 1:
        return (max(1, items),)
    wanted = source.unit // source.step if source.unit > source.step else ZARR_CHUNK_BYTES // item_bytes
    return (max(1, min(items, wanted)), *(max(1, n) for n in shape[1:]))
