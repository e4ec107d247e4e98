"""The GPU engine of MLP.map: chunks of rows through pinned memory, with uploads, kernels and downloads side by side.

A chunk passes three stations, in a slot of a ring that has buffers for one chunk::

    reading   threads copy rows of x into the slot's pinned memory
    on GPU    upload, kernel, download: three streams, one for each, tied by events
    writing   threads copy rows out of the slot's pinned memory

One thread's copies are several times slower than the link to the GPU, which carries both ways at once: so several threads copy
pieces of each chunk, and up to SLOTS chunks are under way. The calling thread alone talks to CUDA and keeps the order: the
rows that are complete are always the first so many.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._gpu import cupy_or_error
from ._launch import PackedNet
from ._map_engine import Job, naming
from .network import Network, numpy_dtype

__all__ = ["GpuEngine"]

# While a chunk begins to be read, two are being read, two are on the GPU and two are written. Of what was tried with 20 GB
# on an H200 machine of 16 cores (chunks of 24 to 96 MB, 1 to 8 pieces, 8 to 16 threads) this was the fastest: threads that copy
# need memory's bandwidth, which the link to the GPU takes a share of, and a few cores are better left to everything else.
READING, ON_GPU, WRITING = 2, 2, 2
SLOTS = READING + ON_GPU + WRITING + 1
PIECES = 4  # of a chunk
MOST_THREADS, SPARE_CORES = 12, 4
PIECE_BYTES = 1 << 20  # at least: a thread is not woken for less
_CUDA_OUT_OF_MEMORY = 2  # the status of the runtime's and of the driver's error alike


class GpuEngine:
    """Chunks through the current device.

    Parameters
    ----------
    net
        The network on the GPU.
    network
        Its description.

    Raises
    ------
    RuntimeError
        If the current stream captures a CUDA graph, which cannot hold copies by the host.
    """

    chunk_bytes = 24 << 20  # SLOTS of them, in pinned memory and on the GPU
    most_bytes = 256 << 20
    device = "GPU"

    def __init__(self, net: PackedNet, network: Network) -> None:
        self._cupy = cupy_or_error("map with device='cuda'")
        self._net, self._network = net, network
        if self._cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError(
                "the current stream captures a CUDA graph, and map copies on the host, which a graph cannot hold: call map "
                "outside the capture"
            )

    def run(self, job: Job) -> None:
        """Compute all chunks; returns when everything is written, and leaves nothing allocated."""
        first = next(job.chunks(), None)
        if first is None:
            return
        try:
            self._run(job, first)
        except BaseException as error:
            _let_go(error)
            raise

    def _run(self, job: Job, first: tuple[int, int]) -> None:
        device_id = self._cupy.cuda.runtime.getDevice()
        with _borrowed_streams(self._cupy, device_id) as streams, contextlib.ExitStack() as at_end:
            with naming("making room for", *first):
                # The longest chunk: on the grid, none has more than job.rows.
                rows = min(job.rows, job.total - job.start)
                count = min(SLOTS, -(-(job.total - job.start) // job.rows) + 1)
                slots = [_Slot() for _ in range(count)]
                at_end.callback(_free, slots)
                for slot in slots:
                    slot.allocate(self._cupy, self._network, rows, job.source.dtype)
                # Memory of the pool may still be in use by what is queued on the current stream, and so may x.
                self._cupy.cuda.get_current_stream().synchronize()
            at_end.enter_context(_Quiet(self._cupy, streams))
            threads = at_end.enter_context(_Threads())
            _Conveyor(self._cupy, self._net, job, streams, slots, threads).run()

    def out_of_memory(self, error: BaseException | None) -> bool:
        """Whether CuPy, CUDA or NumPy got no memory: on the device, or pinned."""
        cuda = self._cupy.cuda
        if isinstance(error, cuda.runtime.CUDARuntimeError | cuda.driver.CUDADriverError):
            return bool(error.status == _CUDA_OUT_OF_MEMORY)
        return isinstance(error, cuda.memory.OutOfMemoryError | MemoryError)


# --- Streams ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Streams:
    """One for each direction and one for kernels: what is in one stream runs in order, the three run side by side."""

    upload: Any
    compute: Any
    download: Any


# Streams are used again: a plan of several launches keeps scratch memory for each stream that it ever ran on.
_idle: dict[int, list[_Streams]] = {}
_idle_lock = threading.Lock()


@contextlib.contextmanager
def _borrowed_streams(cupy: Any, device_id: int) -> Iterator[_Streams]:
    with _idle_lock:
        idle = _idle.setdefault(device_id, [])
        streams = idle.pop() if idle else None
    if streams is None:
        streams = _Streams(*(cupy.cuda.Stream(non_blocking=True) for _ in range(3)))
    try:
        yield streams
    finally:
        with _idle_lock:
            idle.append(streams)


class _Quiet:
    """At the end, however it comes, nothing on the GPU reads or writes a slot any more."""

    def __init__(self, cupy: Any, streams: _Streams) -> None:
        self._error = cupy.cuda.runtime.CUDARuntimeError
        self._streams = streams

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.ExitStack() as stack:  # a second Ctrl-C must not keep the other streams from being waited for
            for stream in (self._streams.upload, self._streams.compute, self._streams.download):
                stack.callback(self._wait, stream, failed=error is not None)

    def _wait(self, stream: Any, failed: bool) -> None:
        # A kernel that failed makes every later call fail: the first error is the one that is told.
        with contextlib.suppress(self._error) if failed else contextlib.nullcontext():
            stream.synchronize()


# --- Slots ------------------------------------------------------------------------------------------------------------


class _Slot:
    """Buffers for one chunk, and the events of its way."""

    def __init__(self) -> None:
        self.host_x: Any
        self.host_y: Any
        self.x: Any
        self.y: Any
        self.uploaded: Any
        self.computed: Any
        self.downloaded: Any
        self.free()

    def allocate(self, cupy: Any, network: Network, rows: int, x_dtype: np.dtype[Any]) -> None:
        """Take the memory: pinned on the host, and on the device from CuPy's current allocator."""
        out_dtype = numpy_dtype(network.dtype)
        k, n = network.sizes[0], network.sizes[-1]
        self.host_x, self.host_y = _pinned(cupy, (rows, k), x_dtype), _pinned(cupy, (rows, n), out_dtype)
        self.x, self.y = _on_device(cupy, (rows, k), x_dtype), _on_device(cupy, (rows, n), out_dtype)
        self.uploaded, self.computed, self.downloaded = (
            # The host sleeps while it waits: its cores are wanted for copies.
            cupy.cuda.Event(block=True, disable_timing=True)
            for _ in range(3)
        )

    def free(self) -> None:
        """Let go of everything, whoever still holds the slot (an exception's traceback may)."""
        self.host_x = self.host_y = self.x = self.y = self.uploaded = self.computed = self.downloaded = None


def _free(slots: list[_Slot]) -> None:
    for slot in slots:
        slot.free()


def _let_go(error: BaseException | None) -> None:
    """Clear the frames that an error remembers: pinned memory must not live as long as somebody keeps the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _bytes_of(shape: tuple[int, int], dtype: np.dtype[Any]) -> int:
    return max(1, shape[0] * shape[1] * dtype.itemsize)


def _pinned(cupy: Any, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Pinned memory of its own: CuPy's pool would keep it."""
    memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(_bytes_of(shape, dtype)), 0)
    flat = np.frombuffer(memory, np.uint8)
    return flat[: shape[0] * shape[1] * dtype.itemsize].view(dtype).reshape(shape)


def _on_device(cupy: Any, shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.alloc(_bytes_of(shape, dtype)))


# --- Threads ----------------------------------------------------------------------------------------------------------


class _Threads:
    """Threads that copy. At the end, however it comes, none of them copies any more."""

    def __init__(self) -> None:
        count = max(2, min(MOST_THREADS, len(os.sched_getaffinity(0)) - SPARE_CORES))
        self.parallel = ThreadPoolExecutor(count, "cupymlp-copy")
        # What takes one call at a time gets its calls in order, from one thread.
        self.reader = ThreadPoolExecutor(1, "cupymlp-read")
        self.writer = ThreadPoolExecutor(1, "cupymlp-write")

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for pool in (self.parallel, self.reader, self.writer):
                stack.callback(pool.shutdown, wait=True, cancel_futures=True)


def _pieces(start: int, stop: int, row_bytes: int) -> list[tuple[int, int]]:
    """Ranges of rows of about equal length for the threads."""
    rows = stop - start
    count = max(1, min(PIECES, rows, rows * row_bytes // PIECE_BYTES))
    edges = [start + rows * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


# --- The chunks' way --------------------------------------------------------------------------------------------------


@dataclass
class _Flight:
    """A chunk in its slot."""

    slot: _Slot
    start: int
    stop: int
    copies: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Until the copies are done; raises what one of them raised."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.result()


class _Conveyor:
    """Takes the chunks of a job through the slots, in order."""

    def __init__(
        self, cupy: Any, net: PackedNet, job: Job, streams: _Streams, slots: list[_Slot], threads: _Threads
    ) -> None:
        self._cupy, self._net, self._job, self._streams = cupy, net, job, streams
        self._threads = threads
        self._idle = deque(slots)
        self._reading: deque[_Flight] = deque()
        self._on_gpu: deque[_Flight] = deque()
        self._writing: deque[_Flight] = deque()

    def run(self) -> None:
        """Until every chunk is written."""
        for start, stop in self._job.chunks():
            if not self._idle:  # fewer slots than SLOTS, for fewer chunks
                self._advance(0, 0, 0)
            self._begin(_Flight(self._idle.popleft(), start, stop))
            self._advance(READING, ON_GPU, WRITING)
        self._advance(0, 0, 0)

    def _advance(self, reading: int, on_gpu: int, writing: int) -> None:
        """Move chunks on until no more than so many are left in each station."""
        while len(self._reading) > reading:
            self._launch(self._reading.popleft())
        while len(self._on_gpu) > on_gpu:
            self._fetch(self._on_gpu.popleft())
        while len(self._writing) > writing:
            self._commit(self._writing.popleft())

    def _begin(self, flight: _Flight) -> None:
        source, buffer = self._job.source, flight.slot.host_x
        self._copy(flight, source.read, source.parallel, self._threads.reader, buffer)
        self._reading.append(flight)

    def _launch(self, flight: _Flight) -> None:
        slot, count, streams = flight.slot, flight.stop - flight.start, self._streams
        runtime = self._cupy.cuda.runtime
        with naming("reading", flight.start, flight.stop):
            flight.wait()
        with naming("computing", flight.start, flight.stop):
            x, y = slot.x[:count], slot.y[:count]
            host_x, host_y = slot.host_x[:count], slot.host_y[:count]
            upload = (x.data.ptr, host_x.ctypes.data, x.nbytes, runtime.memcpyHostToDevice, streams.upload.ptr)
            download = (host_y.ctypes.data, y.data.ptr, y.nbytes, runtime.memcpyDeviceToHost, streams.download.ptr)
            if x.nbytes:
                runtime.memcpyAsync(*upload)
            slot.uploaded.record(streams.upload)
            streams.compute.wait_event(slot.uploaded)
            with streams.compute:
                self._net(x, y)
            slot.computed.record(streams.compute)
            streams.download.wait_event(slot.computed)
            runtime.memcpyAsync(*download)
            slot.downloaded.record(streams.download)
        self._on_gpu.append(flight)

    def _fetch(self, flight: _Flight) -> None:
        with naming("computing", flight.start, flight.stop):
            flight.slot.downloaded.synchronize()
        sink = self._job.sink
        self._copy(flight, sink.write, sink.parallel, self._threads.writer, flight.slot.host_y)
        self._writing.append(flight)

    def _commit(self, flight: _Flight) -> None:
        with naming("writing", flight.start, flight.stop):
            flight.wait()
        self._idle.append(flight.slot)
        self._job.commit(flight.stop)

    def _copy(
        self,
        flight: _Flight,
        copy: Callable[[int, int, NDArray[Any]], None],
        parallel: bool,
        alone: ThreadPoolExecutor,
        buffer: NDArray[Any],
    ) -> None:
        """Have threads copy a chunk's rows between x or out and its buffer."""
        start, stop = flight.start, flight.stop
        row_bytes = buffer.shape[1] * buffer.itemsize
        pool, pieces = (
            (self._threads.parallel, _pieces(start, stop, row_bytes)) if parallel else (alone, [(start, stop)])
        )
        flight.copies = [pool.submit(copy, a, b, buffer[a - start : b - start]) for a, b in pieces]
