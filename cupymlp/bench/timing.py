"""Three kinds of time, never mixed.

GPU time: a CUDA graph of many calls in a row, replayed between two events, divided by the calls. Host time: what issuing a
call takes, measured over many calls without waiting for them. Round trip: a call and waiting for its result.

Subjects are measured in rounds, one after the other, so that a change of the machine's mood meets all of them; the median
over the rounds is the figure, and the quartiles are its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Subject", "Timing", "measure", "rounded"]

MOST_CALLS = 200  # in one graph, or in a row without waiting: fewer than the driver queues
MOST_ROUND_TRIPS = 50
SAMPLE_SECONDS = 0.02  # calls that take long are sampled fewer times
WARM_UP = 3  # graph replays before the timed one
# Of launches before anything is timed: at first every launch was seen to be 0.2 us shorter, for a while.
WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class Timing:
    """Microseconds: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The median and quartiles of some samples."""
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, low, high)


def rounded(timing: Timing | None) -> dict[str, float] | None:
    """A timing as it is written to JSON: six digits."""
    if timing is None:
        return None
    return {name: float(f"{getattr(timing, name):.6g}") for name in ("median", "low", "high")}


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes
    ----------
    name
        What the table calls it.
    call
        One call.
    kinds
        Which of ``gpu``, ``host`` and ``round_trip`` to measure. ``gpu`` needs a call that can be captured.
    note
        Why a kind is missing, or what to know.
    """

    name: str
    call: Callable[[], Any]
    kinds: tuple[str, ...]
    note: str = ""


def measure(
    subjects: Sequence[Subject], rounds: int, cupy: Any = None, warm_up_seconds: float = WARM_UP_SECONDS
) -> Iterator[tuple[Subject, dict[str, Timing]]]:
    """Measure the subjects in rounds.

    Parameters
    ----------
    subjects
        What to measure; every one is called a few times first.
    rounds
        How often; at least 1.
    cupy
        The module, on a GPU; None: only round trips of calls that return when they are done.
    warm_up_seconds
        How long a GPU is kept busy before anything is timed.
    """
    samples: list[dict[str, list[float]]] = [{kind: [] for kind in s.kinds} for s in subjects]
    stream = None if cupy is None else cupy.cuda.Stream(non_blocking=True)
    graphs: list[Any] = [None] * len(subjects)
    calls: list[int] = []
    if stream is not None:
        stream.use()
    try:
        for i, subject in enumerate(subjects):
            for _ in range(5):
                subject.call()
            seconds = _round_trip(stream, subject.call, 3) * 1e-6
            calls.append(max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / seconds))))
            if "gpu" in subject.kinds:
                graphs[i] = _capture(stream, subject.call, calls[i])
        end_of_warm_up = time.perf_counter() + (0.0 if stream is None else warm_up_seconds)
        while time.perf_counter() < end_of_warm_up:
            for graph in filter(None, graphs):
                graph.launch(stream)
            _wait(stream)
        for _ in range(rounds):
            for i, subject in enumerate(subjects):
                if "gpu" in subject.kinds:
                    samples[i]["gpu"].append(_replay(cupy, stream, graphs[i], calls[i]))
                if "host" in subject.kinds:
                    samples[i]["host"].append(_issue(stream, subject.call, calls[i]))
                if "round_trip" in subject.kinds:
                    trips = min(calls[i], MOST_ROUND_TRIPS)
                    samples[i]["round_trip"].append(_round_trip(stream, subject.call, trips))
    finally:
        if cupy is not None:
            cupy.cuda.Stream.null.use()
    for subject, of_subject in zip(subjects, samples, strict=True):
        yield subject, {kind: Timing.of(values) for kind, values in of_subject.items()}


def _wait(stream: Any) -> None:
    if stream is not None:
        stream.synchronize()


def _capture(stream: Any, call: Callable[[], Any], calls: int) -> Any:
    stream.begin_capture()
    for _ in range(calls):
        call()
    return stream.end_capture()


def _replay(cupy: Any, stream: Any, graph: Any, calls: int) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(WARM_UP):
        graph.launch(stream)
    start.record(stream)
    graph.launch(stream)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / calls


def _issue(stream: Any, call: Callable[[], Any], calls: int) -> float:
    _wait(stream)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    end = time.perf_counter()
    _wait(stream)
    return (end - start) * 1e6 / calls


def _round_trip(stream: Any, call: Callable[[], Any], calls: int) -> float:
    _wait(stream)
    start = time.perf_counter()
    for _ in range(calls):
        call()
        _wait(stream)
    return (time.perf_counter() - start) * 1e6 / calls
