"""The GPU engine of MLP.map: chunks of rows through page-locked memory, many at a time.

A lane is a thread with buffers for one chunk and a stream. It takes the next chunk and does all of it: copies rows of x into
page-locked memory, has them uploaded, computed and downloaded, waits, and copies the result out. While one lane waits for the
GPU the others copy, so that the host's cores, both directions of the link and the GPU are busy at once. One thread's copies are
several times slower than the link; and lanes whose buffers all fit into the last-level cache copy faster than fewer, larger or
doubled ones (benchmarks/exploration-h200.txt, which also has what was slower: pieces of chunks copied by several threads
and moved by one, page-locking x and out themselves, the driver's own copies of pageable memory).

Lanes take chunks in order, and no more once one has failed; the calling thread looks now and then how many are written: the
rows that are complete are always the first so many.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ._gpu import cupy_or_error
from ._lanes import Lane, PageLocked, Rows, Shapes
from ._launch import PackedNet
from ._map_engine import Job, naming
from .network import Network, numpy_dtype

__all__ = ["GpuEngine"]

MOST_LANES, LEAST_LANES = 16, 4  # between them: one a core
MOST_BUFFER_BYTES = 1792 << 20  # of all lanes, in page-locked memory and on the GPU
LOOK_SECONDS = 0.02  # how often the calling thread looks what is complete
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

    chunk_bytes = 9 << 20
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
        # The longest chunk: on the grid, none has more than job.rows.
        rows = min(job.rows, job.total - job.start)
        k, n = self._network.sizes[0], self._network.sizes[-1]
        shapes = Shapes(rows, k, n, job.source.dtype, numpy_dtype(self._network.dtype))
        cores = len(os.sched_getaffinity(0))
        chunks = -(-(job.total - job.start) // job.rows) + 1  # at most
        count = _lane_count(cores, shapes.bytes, chunks)
        with _borrowed_streams(self._cupy, count + 1) as streams, contextlib.ExitStack() as at_end:
            with naming("making room for", *first):
                lanes: list[Lane] = []
                at_end.callback(_free, lanes)
                memory = at_end.enter_context(PageLocked(self._cupy, shapes.bytes * count))
                for i in range(count):
                    host = memory.take(shapes.bytes * i, shapes.bytes * (i + 1))
                    # The thread sleeps while it waits if others want its core.
                    event = self._cupy.cuda.Event(block=cores < MOST_LANES, disable_timing=True)
                    lanes.append(Lane(self._cupy, shapes, host, streams[i + 1], event))
                # Memory of the pool may still be in use by what is queued on the current stream, and so may x.
                self._cupy.cuda.get_current_stream().synchronize()
            at_end.enter_context(_Quiet(self._cupy, streams))
            # The first for plans of several launches, whatever the number of lanes: their scratch memory stays with a stream.
            with _Work(self._cupy, self._net, job, lanes, streams[0]) as work:
                work.run()

    def out_of_memory(self, error: BaseException | None) -> bool:
        """Whether CuPy, CUDA or NumPy got no memory: on the device, or page-locked."""
        cuda = self._cupy.cuda
        if isinstance(error, cuda.runtime.CUDARuntimeError | cuda.driver.CUDADriverError):
            return bool(error.status == _CUDA_OUT_OF_MEMORY)
        return isinstance(error, cuda.memory.OutOfMemoryError | MemoryError)


def _lane_count(cores: int, lane_bytes: int, chunks: int) -> int:
    most = max(1, MOST_BUFFER_BYTES // lane_bytes)
    return min(MOST_LANES, max(LEAST_LANES, cores), most, chunks)


# --- Streams ----------------------------------------------------------------------------------------------------------

_idle: dict[int, list[Any]] = {}  # streams of each device: making one takes longer than a chunk
_idle_lock = threading.Lock()


@contextlib.contextmanager
def _borrowed_streams(cupy: Any, count: int) -> Iterator[list[Any]]:
    device_id = cupy.cuda.runtime.getDevice()
    with _idle_lock:
        idle = _idle.setdefault(device_id, [])
        streams = [idle.pop() for _ in range(min(count, len(idle)))]
    streams += [cupy.cuda.Stream(non_blocking=True) for _ in range(count - len(streams))]
    try:
        yield streams
    finally:
        with _idle_lock:
            idle.extend(reversed(streams))  # so that the next map's streams are in the same places


class _Quiet:
    """At the end, however it comes, nothing on the GPU reads or writes a lane's buffers any more."""

    def __init__(self, cupy: Any, streams: list[Any]) -> None:
        self._error = cupy.cuda.runtime.CUDARuntimeError
        self._streams = streams

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        _finish([partial(self._wait, stream, failed=error is not None) for stream in self._streams])

    def _wait(self, stream: Any, failed: bool) -> None:
        # A kernel that failed makes every later call fail: the first error is the one that is told.
        with contextlib.suppress(self._error) if failed else contextlib.nullcontext():
            stream.synchronize()


def _finish(waits: Iterable[Callable[[], object]]) -> None:
    """Wait for all of these, whatever one of them raises, and through every Ctrl-C: until then memory is in use.

    The first error is raised afterwards.
    """
    first: BaseException | None = None
    for wait in waits:
        waiting = True
        while waiting:
            try:
                wait()
                waiting = False
            except BaseException as error:
                first = first or error
                waiting = isinstance(error, KeyboardInterrupt)
    if first is not None:
        raise first


def _free(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.free()


def _let_go(error: BaseException | None, seen: set[int] | None = None) -> None:
    """Clear the frames that an error remembers: buffers must not live as long as somebody keeps the error."""
    seen = set() if seen is None else seen
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)
    _let_go(error.__cause__, seen)
    _let_go(error.__context__, seen)


# --- What takes one call at a time -----------------------------------------------------------------------------------


class _StoppedError(Exception):
    """An earlier chunk failed. Nobody sees it: the earlier chunk's error is the one that is raised."""


class _InOrder:
    """Calls one at a time, in the order of the chunks' numbers, from one thread: chunks must begin in that order."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turn, self._failed = 0, math.inf
        self._condition = threading.Condition()

    def call(self, number: int, function: Callable[..., None], *arguments: Any) -> None:
        """Wait for the chunk's turn, and for the call."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn == number or number > self._failed)
            if number > self._failed:
                raise _StoppedError
        self._thread.submit(function, *arguments).result()
        with self._condition:
            self._turn += 1
            self._condition.notify_all()

    def stop_after(self, number: float) -> None:
        """A chunk failed: later ones must not wait for it."""
        with self._condition:
            self._failed = min(self._failed, number)
            self._condition.notify_all()

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()


# --- The chunks' way --------------------------------------------------------------------------------------------------


class _Work:
    """The lanes' threads, and the chunks of a job. At the end, however it comes, no thread copies any more."""

    def __init__(self, cupy: Any, net: PackedNet, job: Job, lanes: list[Lane], one_stream: Any) -> None:
        self._cupy, self._net, self._job = cupy, net, job
        self._one_stream = one_stream
        self._once: dict[int, bool] = {}  # whether a chunk of so many rows is one launch
        self._device = cupy.cuda.Device(cupy.cuda.runtime.getDevice())
        self._chunks = enumerate(job.chunks())
        self._lock = threading.Lock()  # of the chunks, and of what follows
        self._stopped = False
        self._done: set[int] = set()  # chunks that are written and not committed
        self._errors: dict[float, BaseException] = {}  # by the chunk's number
        self._news = threading.Event()  # a thread has ended
        # Not Thread.join: interrupted by Ctrl-C, it takes the thread for ended ever after (Python 3.11, 3.12).
        self._ended = [threading.Event() for _ in lanes]
        self._threads = [
            threading.Thread(target=self._run_lane, args=each, name="cupymlp-map", daemon=True)
            for each in zip(lanes, self._ended, strict=True)
        ]
        self._one_thread = ThreadPoolExecutor(1, "cupymlp-compute", self._device.use)
        self._reads, self._writes = _InOrder("cupymlp-read"), _InOrder("cupymlp-write")

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        started = [thread.ident is not None for thread in self._threads]
        waits = [ended.wait for ended, was in zip(self._ended, started, strict=True) if was]
        _finish([*waits, self._one_thread.shutdown, self._reads.close, self._writes.close])

    def run(self) -> None:
        """Until every chunk is written, or one has failed and those before it are written."""
        for thread in self._threads:
            thread.start()
        ends = (stop for _, stop in self._job.chunks())
        committed, over = 0, False
        while not over:
            # Seldom: to be woken for every chunk would take the interpreter from the lanes, again and again.
            self._news.wait(LOOK_SECONDS)
            self._news.clear()
            over = all(ended.is_set() for ended in self._ended)
            while committed in self._done:
                self._done.remove(committed)
                committed += 1
                self._job.commit(next(ends))
        if self._errors:
            raise self._errors[min(self._errors)]

    def _run_lane(self, lane: Lane, ended: threading.Event) -> None:
        """In a thread: take chunks, until there are none or one has failed."""
        number: float = math.inf  # no chunk yet
        try:
            self._device.use()
            with lane.stream:
                while not self._stopped:
                    with self._lock:
                        chunk = next(self._chunks, None)
                    if chunk is None:
                        break
                    number, (start, stop) = chunk
                    self._chunk(lane, chunk[0], start, stop)
                    self._done.add(chunk[0])
        except BaseException as error:  # to be raised where map was called
            self._errors[number] = error
            self._stopped = True
            self._reads.stop_after(number)
            self._writes.stop_after(number)
        finally:
            ended.set()
            self._news.set()

    def _chunk(self, lane: Lane, number: int, start: int, stop: int) -> None:
        """All of a chunk."""
        source, sink = self._job.source, self._job.sink
        with naming("reading", start, stop):
            rows = lane.rows(stop - start)
            if source.parallel:
                source.read(start, stop, rows.host_x)
            else:
                self._reads.call(number, source.read, start, stop, rows.host_x)
        with naming("computing", start, stop):
            self._compute(lane, rows, stop - start)
        with naming("writing", start, stop):
            if sink.parallel:
                sink.write(start, stop, rows.host_y)
            else:
                self._writes.call(number, sink.write, start, stop, rows.host_y)

    def _compute(self, lane: Lane, rows: Rows, count: int) -> None:
        """Upload, compute and download; returns when the result is there."""
        stream = lane.stream  # this thread's current one
        if rows.graph is not None:
            self._cupy.cuda.runtime.graphLaunch(rows.graph.graphExec, stream.ptr)
        else:
            once = self._once.get(count)
            if once is None:
                once = self._once[count] = self._net.launches_once(rows.x)
            self._queue(lane, rows, once)
            if once:
                # One call of CUDA for each chunk instead of three, for which threads wait for each other.
                stream.synchronize()
                stream.begin_capture()
                try:
                    self._queue(lane, rows, once)
                except BaseException:
                    # What failed is the error to be told, not that the capture has become invalid by it.
                    with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):
                        stream.end_capture()
                    raise
                rows.graph = stream.end_capture()
        lane.done.record(stream)
        lane.done.synchronize()

    def _queue(self, lane: Lane, rows: Rows, once: bool) -> None:
        copy = self._cupy.cuda.runtime.memcpyAsync
        if rows.x.size:
            copy(*rows.upload)
        if once:
            self._net(rows.x, rows.y)
        else:
            self._one_thread.submit(self._compute_in_one, lane, rows.x, rows.y).result()
        copy(*rows.download)

    def _compute_in_one(self, lane: Lane, x: Any, y: Any) -> None:
        """From one thread to one stream: cuBLAS keeps memory for each thread, and several launches for each stream."""
        lane.done.record(lane.stream)
        self._one_stream.wait_event(lane.done)
        with self._one_stream:
            self._net(x, y)
        lane.done.record(self._one_stream)
        lane.stream.wait_event(lane.done)
