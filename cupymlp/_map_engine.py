"""What MLP.map's parts agree on: rows come from a Source, go to a Sink, and an Engine computes them chunk by chunk.

A row is one vector of features: an array (A, B, K) has A * B of them, in C order. Whatever fails, the rows that are complete
are the first so many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .cpu import run_cpu
from .network import Network, numpy_dtype

__all__ = ["ChunkError", "CpuEngine", "Engine", "Job", "Sink", "Source", "naming"]


class Source(Protocol):
    """Where rows come from."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of what `read` gives, in the machine's byte order
    unit: int  # rows that are best read together: those of a chunk of a zarr array
    step: int  # rows that can be read only together; unit is a multiple of it
    parallel: bool  # whether several threads may read at once

    def read(self, start: int, stop: int, into: NDArray[Any]) -> None:
        """Put rows start to stop into a C-contiguous array (stop - start, K)."""

    def close(self) -> None:
        """Let go of what was opened."""


class Sink(Protocol):
    """Where results go. unit, step and parallel are as a Source's."""

    unit: int
    step: int
    parallel: bool

    def write(self, start: int, stop: int, rows: NDArray[Any]) -> None:
        """Keep rows start to stop; rows is C-contiguous, (stop - start, N)."""

    def commit(self, done: int) -> None:
        """The first so many rows are complete."""

    def finish(self) -> Any:
        """All rows are complete; returns what `MLP.map` returns."""

    def abandon(self, done: int) -> tuple[int, str]:
        """It stops at so many rows; returns how many of them can be gone on from, and how, as the rest of a sentence."""


@dataclass(frozen=True)
class Job:
    """Rows start to total, in chunks of this many rows, on a grid that begins at row 0."""

    source: Source
    sink: Sink
    start: int
    total: int
    rows: int
    commit: Callable[
        [int], None
    ]  # to be called with the rows that are complete, ascending, by the thread that runs the job

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each chunk: the first and the last may be smaller than the others."""
        start = self.start
        while start < self.total:
            stop = min(self.total, (start // self.rows + 1) * self.rows)
            yield start, stop
            start = stop


class ChunkError(Exception):
    """A chunk failed; the cause says why."""

    def __init__(self, doing: str, start: int, stop: int) -> None:
        super().__init__(f"{doing} rows {start} to {stop} failed")
        self.doing, self.start, self.stop = doing, start, stop


@contextmanager
def naming(doing: str, start: int, stop: int) -> Iterator[None]:
    """Say which rows an error is about. KeyboardInterrupt and its like pass."""
    try:
        yield
    except Exception as error:
        raise ChunkError(doing, start, stop) from error


class Engine(Protocol):
    """What computes a job."""

    chunk_bytes: int  # of x and y together, that chunks have if the user does not say
    most_bytes: int  # that a chunk may have whatever the user says: memory stays bounded
    device: str

    def run(self, job: Job) -> None:
        """Compute all chunks. It returns, or raises, only when nothing reads x or writes out any more.

        Raises
        ------
        ChunkError
            With the cause, for whatever fails.
        """

    def out_of_memory(self, error: BaseException | None) -> bool:
        """Whether this error is one that a smaller chunk may avoid."""


class CpuEngine:
    """One chunk after the other through the CPU path, in chunks that stay in cache."""

    chunk_bytes = 4 << 20
    most_bytes = 256 << 20
    device = "CPU"

    def __init__(
        self,
        network: Network,
        weights: Sequence[NDArray[np.floating]],
        biases: Sequence[NDArray[np.floating] | None],
    ) -> None:
        self._network, self._weights, self._biases = network, weights, biases

    def run(self, job: Job) -> None:
        """Read, compute, write."""
        sizes = self._network.sizes
        rows = min(job.rows, job.total)
        x = y = None
        for start, stop in job.chunks():
            if x is None or y is None:
                with naming("making room for", start, stop):
                    x = np.empty((rows, sizes[0]), job.source.dtype)
                    y = np.empty((rows, sizes[-1]), numpy_dtype(self._network.dtype))
            count = stop - start
            with naming("reading", start, stop):
                job.source.read(start, stop, x[:count])
            with naming("computing", start, stop):
                run_cpu(self._network, self._weights, self._biases, x[:count], y[:count])
            with naming("writing", start, stop):
                job.sink.write(start, stop, y[:count])
            job.commit(stop)

    def out_of_memory(self, error: BaseException | None) -> bool:
        """Whether NumPy got no memory."""
        return isinstance(error, MemoryError)
