"""MLP.map: a network of more rows than a GPU, or this machine's memory, holds.

Here is what all ways have in common: the checks, the sizes of chunks, and what is told when something fails. Rows come from
`_map_sources`, go to `_map_sinks` or `_map_paths`, and are computed by an engine: `CpuEngine` of `_map_engine`, or
`GpuEngine` of `_pipeline`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._checks import check_call, type_name
from ._map_engine import ChunkError, Engine, Job, Sink, Source
from ._map_part import Record, boot, fingerprint
from ._map_paths import path_sink
from ._map_sinks import array_sink, check_out
from ._map_sources import open_source
from ._progress import RowsBar
from .network import Network, numpy_dtype

__all__ = ["MapError", "MapInterrupted", "Progress", "run_map"]

Progress = Callable[[int, int], object] | bool | None

ROW_GRAIN = 128  # a default chunk is a multiple of it: whole tiles of every schedule


class MapError(RuntimeError):
    """`MLP.map` failed; the cause is the error that made it fail.

    Attributes
    ----------
    rows
        So many rows of out, from the first on, are complete: what ``resume`` takes.
    out
        What was passed as out, or the array that map made.
    """

    def __init__(self, message: str, rows: int, out: Any) -> None:
        super().__init__(message)
        self.rows, self.out = rows, out


class MapInterrupted(KeyboardInterrupt):
    """Ctrl-C during `MLP.map`. The attributes are those of `MapError`.

    It is a KeyboardInterrupt, so that whoever waits for one, or for no ``Exception``, sees what they expect.
    """

    def __init__(self, message: str, rows: int, out: Any) -> None:
        super().__init__(message)
        self.rows, self.out = rows, out


def run_map(
    engine: Engine,
    network: Network,
    weights: Sequence[NDArray[Any] | None],
    x: Any,
    out: Any = None,
    rows: int | None = None,
    progress: Progress = None,
    resume: int = 0,
    overwrite: bool = False,
) -> Any:
    """What `MLP.map` does, on this engine. ``weights`` are all arrays that make the network what it is."""
    rows = _checked_rows(rows)
    resume = _checked_resume(resume, out)
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            f"progress is a {type_name(progress)}; accepted: None, True, or a callable progress(done, total)"
        )
    to_path = isinstance(out, str | os.PathLike)
    if out is not None and not to_path:
        check_out(out)
    source = open_source(x)
    try:
        given = (None, None) if out is None or to_path else (tuple(out.shape), out.dtype)
        check_call(network, source.shape, source.dtype, *given)
        shape, dtype = (*source.shape[:-1], network.sizes[-1]), numpy_dtype(network.dtype)
        total = math.prod(source.shape[:-1])
        start: int = resume
        sink: Sink
        if to_path:
            record = Record(0, fingerprint(network, weights, x, source.shape, source.dtype), boot())
            sink, start = path_sink(Path(out), shape, dtype, source, record, resume, overwrite)
        else:
            if overwrite:
                raise ValueError("overwrite is True and out is not a path; an array is written to in any case")
            created = out is None
            if created:
                out = np.empty(shape, dtype)
            sink = array_sink(out, x, created=created)
        _check_start(start, total, source, sink)
        return _Run(engine, network, source, sink, total, start, out).run(rows, progress)
    finally:
        source.close()


# --- Checks -------------------------------------------------------------------------------------------------------------


def _checked_rows(rows: Any) -> int | None:
    if rows is None:
        return None
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
        raise ValueError(f"rows is {rows!r}; accepted: how many rows a chunk may have, 1 or more, or None")
    return int(rows)


def _checked_resume(resume: Any, out: Any) -> int:
    if isinstance(resume, bool):
        if resume and not isinstance(out, str | os.PathLike):
            raise ValueError(
                "resume is True and out is not a path; accepted: for an array, how many of its rows are complete, which the "
                "exception that stopped map has as .rows"
            )
        return resume
    if not isinstance(resume, int | np.integer) or resume < 0:
        raise ValueError(
            f"resume is {resume!r}; accepted: how many rows of out are complete, 0 or more, or True for a path"
        )
    if resume and out is None:
        raise ValueError(f"resume is {resume} and out is None: pass the out that has these rows")
    return int(resume)


def _check_start(start: int, total: int, source: Source, sink: Sink) -> None:
    step = math.lcm(source.step, sink.step)
    if start > total or (start % step and start != total):
        sink.abandon(start)
        raise ValueError(
            f"resume is {start}; accepted: 0 to {total}, as many rows as x has"
            + (f", a multiple of the {step} rows of one index along the first axis" if step > 1 else "")
        )


# --- Sizes --------------------------------------------------------------------------------------------------------------


def chunk_rows(total: int, row_bytes: int, asked: int | None, engine: Engine, unit: int, step: int) -> int:
    """How many rows a chunk has.

    Parameters
    ----------
    row_bytes
        Of a row of x and of out together.
    asked
        What the user wants, or None.
    unit, step
        A chunk is a multiple of unit, if that is not too large, and of step in any case.
    """
    row_bytes = max(1, row_bytes)
    most = max(1, engine.most_bytes // row_bytes)
    # Small inputs are cut, too, so that copies and kernels overlap; but not into crumbs.
    default = min(engine.chunk_bytes, max(engine.chunk_bytes // 8, total * row_bytes // 8)) // row_bytes
    wanted = min(most, default if asked is None else asked)
    grains = [unit] if unit > step else [ROW_GRAIN * step] if asked is None else []
    return _rounded(wanted, next((grain for grain in grains if grain <= most), step))


def _rounded(rows: int, grain: int) -> int:
    """Down to a multiple of the grain, but at least one of it."""
    return max(grain, rows // grain * grain)


def smaller(rows: int, unit: int, step: int) -> int | None:
    """About half as many rows; None if there is no smaller chunk."""
    if rows <= step:
        return None
    half = max(step, rows // 2)
    grains = (unit if unit > step else ROW_GRAIN * step, ROW_GRAIN * step)
    return _rounded(half, next((grain for grain in grains if grain <= half), step))


# --- The run --------------------------------------------------------------------------------------------------------------


class _Run:
    """One map: it knows how far it is."""

    def __init__(
        self, engine: Engine, network: Network, source: Source, sink: Sink, total: int, start: int, out: Any
    ) -> None:
        self._engine, self._network = engine, network
        self._source, self._sink, self._out = source, sink, out
        self._total, self._done = total, start
        self._progress: Callable[[int, int], object] | None = None

    def run(self, rows: int | None, progress: Progress) -> Any:
        """Compute what is left; returns what map returns."""
        network, source = self._network, self._source
        unit, step = math.lcm(source.unit, self._sink.unit), math.lcm(source.step, self._sink.step)
        row_bytes = network.sizes[0] * source.dtype.itemsize + network.sizes[-1] * network.itemsize
        size = chunk_rows(self._total, row_bytes, rows, self._engine, unit, step)
        bar = RowsBar() if progress is True else None
        self._progress = bar or (progress if callable(progress) else None)
        try:
            with bar or nullcontext():
                if self._progress is not None:
                    self._progress(self._done, self._total)
                if network.sizes[-1] == 0:
                    self._commit(self._total)
                while self._done < self._total:
                    size = self._stretch(size, unit, step)
            return self._sink.finish()
        except ChunkError as error:
            raise self._failed(
                f"{error.doing} rows {error.start} to {error.stop}", error.__cause__
            ) from error.__cause__
        except KeyboardInterrupt as error:
            raise self._interrupted() from error
        except Exception as error:
            raise self._failed("what goes on around the chunks", error) from error
        except BaseException:
            self._sink.abandon(self._done)
            raise

    def _stretch(self, size: int, unit: int, step: int) -> int:
        """Compute chunks of this size until all are done or memory is short; returns the size to go on with."""
        job = Job(self._source, self._sink, self._done, self._total, size, self._commit)
        try:
            self._engine.run(job)
        except ChunkError as error:
            less = smaller(min(size, self._total), unit, step)
            if less is None or not self._engine.out_of_memory(error.__cause__):
                raise
            return less
        return size

    def _commit(self, done: int) -> None:
        self._sink.commit(done)
        self._done = done
        if self._progress is not None:
            self._progress(done, self._total)

    def _told(self) -> tuple[int, str]:
        """How far it came, and how to go on."""
        rows, how = self._sink.abandon(self._done)
        return rows, f"The first {rows} of {self._total} rows of out are complete; {how}"

    def _failed(self, what: str, error: BaseException | None) -> MapError:
        rows, told = self._told()
        if self._engine.out_of_memory(error):
            told += (
                f". Even the smallest chunk did not fit into the memory of the {self._engine.device}: free some "
                "(cupy.get_default_memory_pool().free_all_blocks() gives back what CuPy keeps), or use another device, as with "
                "device='cpu'"
            )
        return MapError(f"map failed at {what}: {type(error).__name__}: {error}. {told}", rows, self._out)

    def _interrupted(self) -> MapInterrupted:
        rows, told = self._told()
        return MapInterrupted(f"map was interrupted. {told}", rows, self._out)
