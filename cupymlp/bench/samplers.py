"""How one sample of a call's time is taken. A sample is the mean over many calls in a row; which way is named with it.

``graph``: a CUDA graph of the calls, replayed between two events. ``queue``: the calls themselves between two events, issued
while a waiting kernel holds the stream, so that the host's time is not in it; for what cannot be captured. ``wall``: many
calls, then waiting for the last, by the host's clock: GPU time or the time to issue a call, whichever is longer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

__all__ = ["METHODS", "Call", "CupyEngine", "Engine", "HostEngine", "Sampler", "WallSampler", "calls_for"]

Call = Callable[[int], Any]  # one call, on the set of buffers of this number

METHODS = {
    "graph": "a CUDA graph of the calls, replayed between two events",
    "queue": "the calls between two events, issued while a waiting kernel holds the stream",
    "wall": "many calls, then waiting for the last: GPU time or host time, whichever is longer",
    "each": "a call that returns when it is done, by the host's clock",
}

MOST_CALLS = 200
MOST_QUEUED = 40  # of calls that are several launches each: the driver queues about a thousand launches
SAMPLE_SECONDS = 0.01
LONG_SECONDS = 0.1  # of a sample: not warmed up first, nor made longer for the sake of the cache

_WAIT_SOURCE = r"""
extern "C" __global__ void wait_ns(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}
"""


class Sampler(Protocol):
    """Takes samples of one call.

    Attributes
    ----------
    method
        A name of `METHODS`.
    calls
        Calls in a sample.
    """

    method: str
    calls: int

    def sample(self) -> float:
        """Microseconds a call."""


class Engine(Protocol):
    """How one library's calls are waited for and timed."""

    def wait(self, result: Any) -> None:
        """Wait until this result of a call is there."""

    def sampler(self, call: Call, calls: int, sets: int) -> Sampler:
        """What samples the call, which is warm: so many calls in a row, around so many sets of buffers."""


def calls_for(seconds: float, sets: int) -> int:
    """Calls in a sample, for a call that takes about so long: whole tours of the sets unless that takes too long."""
    calls = max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / max(seconds, 1e-9))))
    tours = -(-calls // sets) * sets
    return tours if tours * seconds <= LONG_SECONDS else calls


def warm_ups(microseconds: float) -> int:
    """Replays before the timed one: a short one more, since it has to outlast the host's issuing of the next."""
    if microseconds > LONG_SECONDS * 1e6:
        return 0
    return 1 if microseconds > 2e3 else 3


class CupyEngine:
    """Calls on a CuPy stream: by graph, or by queue where a call refuses to be captured.

    Parameters
    ----------
    cupy
        The module.
    stream
        Where the calls go; it is made the current stream around them.
    """

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._cupy = cupy
        self._stream = stream
        self._hold = cupy.RawModule(code=_WAIT_SOURCE).get_function("wait_ns")

    def wait(self, _: Any) -> None:
        """Wait for everything on the stream."""
        self._stream.synchronize()

    def sampler(self, call: Call, calls: int, sets: int) -> Sampler:
        """By graph if the call can be captured."""
        with self._stream:
            try:
                graph = self._capture(call, calls, sets)
            except (NotImplementedError, RuntimeError):  # CuPy's cuBLAS calls, and what allocates by the driver
                return _Queue(self._cupy, self._stream, self._hold, call, min(calls, MOST_QUEUED), sets)
        return _Graph(self._cupy, self._stream, graph, calls)

    def _capture(self, call: Call, calls: int, sets: int) -> Any:
        self._stream.begin_capture()
        try:
            for i in range(calls):
                call(i % sets)
        except BaseException:
            with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):  # it may have been broken off already
                self._stream.end_capture()
            raise
        return self._stream.end_capture()


class _Graph:
    method = "graph"

    def __init__(self, cupy: Any, stream: Any, graph: Any, calls: int) -> None:
        self.calls = calls
        self._cupy, self._stream, self._graph = cupy, stream, graph
        self._warm_ups = 1

    def sample(self) -> float:
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        for _ in range(self._warm_ups):
            self._graph.launch(self._stream)
        start.record(self._stream)
        self._graph.launch(self._stream)
        end.record(self._stream)
        end.synchronize()
        microseconds = float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e3
        self._warm_ups = warm_ups(microseconds)
        return microseconds / self.calls


class _Queue:
    method = "queue"

    def __init__(self, cupy: Any, stream: Any, hold: Any, call: Call, calls: int, sets: int) -> None:
        self.calls = calls
        self._cupy, self._stream, self._hold = cupy, stream, hold
        self._call, self._sets, self._next = call, sets, 0
        self._hold_seconds = 1e-3

    def sample(self) -> float:
        for _ in range(3):  # until the kernel holds the stream for as long as the host takes to issue the calls
            microseconds, issued = self._attempt()
            enough = issued < self._hold_seconds
            self._hold_seconds = max(self._hold_seconds, min(0.1, 1.5 * issued))
            if enough:
                break
        return microseconds / self.calls

    def _attempt(self) -> tuple[float, float]:
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        with self._stream:
            begin = time.perf_counter()
            self._hold((1,), (1,), (np.uint64(self._hold_seconds * 1e9),))
            start.record(self._stream)
            for _ in range(self.calls):
                self._call(self._next % self._sets)
                self._next += 1
            end.record(self._stream)
            issued = time.perf_counter() - begin
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e3, issued


class WallSampler:
    """Many calls, then waiting for the last, by the host's clock.

    Parameters
    ----------
    method
        ``wall``, or ``each`` for calls that return when they are done.
    """

    def __init__(self, method: str, call: Call, wait: Callable[[Any], None], calls: int, sets: int) -> None:
        self.method = method
        self.calls = calls
        self._call, self._wait, self._sets, self._next = call, wait, sets, 0

    def sample(self) -> float:
        """Microseconds a call."""
        start = time.perf_counter()
        for _ in range(self.calls):
            result = self._call(self._next % self._sets)
            self._next += 1
        self._wait(result)
        return (time.perf_counter() - start) * 1e6 / self.calls


class HostEngine:
    """Calls that return when they are done: NumPy's, and the CPU path's."""

    def wait(self, _: Any) -> None:
        """Nothing to wait for."""

    def sampler(self, call: Call, calls: int, sets: int) -> Sampler:
        """Round trips."""
        return WallSampler("each", call, self.wait, calls, sets)
