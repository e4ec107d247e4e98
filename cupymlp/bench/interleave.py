"""Measure the entries of one case in rounds, one after the other, so that a change of the machine's mood meets them all."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from .peers import Entry, failed
from .samplers import Sampler, calls_for
from .timing import Timing

__all__ = ["Measurement", "measure_entries"]

ENTRY_SECONDS = 1.0  # of samples; an entry that takes long is sampled fewer times, but at least so often:
LEAST_SAMPLES = 3
HOPELESS_SECONDS = 2.0  # of one call of a forced schedule or a peer: not measured
WARM_UP_SECONDS = 0.05  # of each case; the sweep warms up for longer once


@dataclass(frozen=True)
class Measurement:
    """What came out of an entry.

    Attributes
    ----------
    name, kind, schedule, forced
        The entry's.
    timing
        Microseconds a call; None if it failed, and the note says why.
    method, calls
        How it was sampled, and the calls in a sample; None and 0 if it failed.
    note
        What to know.
    """

    name: str
    kind: str
    schedule: str | None
    forced: bool
    timing: Timing | None
    method: str | None
    calls: int
    note: str


class _Running:
    """An entry, called until it is warm, with what samples it."""

    def __init__(self, entry: Entry, sets: int) -> None:
        self.entry = entry
        self.samples: list[float] = []
        self.note = entry.note
        self._optional = entry.kind == "peer" or entry.forced
        self._sampler: Sampler | None = None
        if entry.call is None:
            return
        try:
            entry.engine.wait(entry.call(0))  # compiles and allocates
            seconds = _seconds(entry, 1)
            if self._optional and seconds > HOPELESS_SECONDS:
                self.note = f"not measured: one call takes {seconds:.1f} s"
                return
            if seconds < 0.01:
                seconds = _seconds(entry, 5)
            self._sampler = entry.engine.sampler(entry.call, calls_for(seconds, sets), sets)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Go on without a peer or a forced schedule; a failure of anything else is raised."""
        if not self._optional:
            raise error
        self._sampler, self.samples, self.note = None, [], failed(error)

    def sample(self) -> float:
        """One more sample; returns the seconds that it took."""
        if self._sampler is None:
            return 0.0
        try:
            microseconds = self._sampler.sample()
        except Exception as error:
            self._fail(error)
            return 0.0
        self.samples.append(microseconds)
        return microseconds * self._sampler.calls * 1e-6

    def measurement(self) -> Measurement:
        entry, sampler = self.entry, self._sampler
        return Measurement(
            name=entry.name,
            kind=entry.kind,
            schedule=entry.schedule,
            forced=entry.forced,
            timing=Timing.of(self.samples) if self.samples else None,
            method=sampler.method if sampler else None,
            calls=sampler.calls if sampler else 0,
            note=self.note,
        )


def measure_entries(entries: Iterable[Entry], rounds: int, sets: int) -> list[Measurement]:
    """Measure the entries, in the same rounds.

    Parameters
    ----------
    entries
        What to measure. A peer or a forced schedule that fails, or that takes too long, has no timing and a note; a failure
        of anything else is raised.
    rounds
        How often; entries that take long fewer times.
    sets
        Of buffers that the calls go around.
    """
    running = [_Running(entry, sets) for entry in entries]
    end_of_warm_up = time.perf_counter() + WARM_UP_SECONDS
    lengths = [r.sample() for r in running]
    while time.perf_counter() < end_of_warm_up:
        lengths = [r.sample() for r in running]
    for r in running:
        r.samples.clear()
    for done in range(rounds):
        for r, seconds in zip(running, lengths, strict=True):
            least = LEAST_SAMPLES if seconds < ENTRY_SECONDS else 1
            if done < least or done * seconds < ENTRY_SECONDS:
                r.sample()
    return [r.measurement() for r in running]


def _seconds(entry: Entry, calls: int) -> float:
    """What a call takes, about, its issuing included."""
    if entry.call is None:
        return 0.0
    start = time.perf_counter()
    for _ in range(calls):
        result = entry.call(0)
    entry.engine.wait(result)
    return (time.perf_counter() - start) / calls
