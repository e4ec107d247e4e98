"""The sweep: every network, dtype and precision is verified, then measured at every batch size, beside floors and peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan import PlanError
from ..verify import random_mlp, verify
from .cases import Case, Group, Settings
from .interleave import Measurement
from .machines import CpuBench, GpuBench, Machine, TooLargeError
from .timing import Timing, rounded

__all__ = ["FMA_PEAK", "Result", "VerificationError", "sweep"]

VERIFIED_ROWS = 1000
FMA_PEAK = "FMA peak"


class VerificationError(RuntimeError):
    """A network is wrong, so it is not measured; the message is the report."""


@dataclass
class Result:
    """What a sweep found, so far.

    Attributes
    ----------
    rows
        Of the table: plain dictionaries, as they are written to JSON.
    verified
        One line a verification.
    skipped
        ``(case, reason)`` for what was not measured.
    fma_rates
        Fused multiply-adds a second, by dtype.
    peer_notes
        On peers that are not measured, by name.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    fma_rates: dict[str, Timing] = field(default_factory=dict)
    peer_notes: dict[str, str] = field(default_factory=dict)


def sweep(
    settings: Settings,
    progress: Callable[[str], None] = lambda _: None,
    save: Callable[[Result], None] = lambda _: None,
) -> Result:
    """Verify and measure.

    Parameters
    ----------
    settings
        What, and for how long.
    progress
        Called with a line after each case.
    save
        Called after each network, dtype and precision, and at the end.

    Raises
    ------
    VerificationError
        If a network is wrong.
    ValueError
        If nothing could be measured at all.
    """
    start = time.perf_counter()
    machine: Machine = CpuBench(settings) if settings.device == "cpu" else GpuBench(settings)
    result = Result(fma_rates=machine.fma_rates, peer_notes=machine.notes)

    def over_budget() -> bool:
        return settings.budget_seconds is not None and time.perf_counter() - start > settings.budget_seconds

    for group in settings.groups():
        if over_budget():
            result.skipped.append((str(group), f"the budget of {settings.budget_seconds:g} s was used up"))
            for batch in settings.batches:
                progress(f"{group} B={batch}: skipped")
            continue
        _measure_group(group, settings, machine, result, over_budget, progress)
        save(result)
    if not result.rows:
        raise ValueError("nothing could be measured: " + "; ".join(f"{case}: {why}" for case, why in result.skipped))
    save(result)
    return result


def _measure_group(
    group: Group,
    settings: Settings,
    machine: Machine,
    result: Result,
    over_budget: Callable[[], bool],
    progress: Callable[[str], None],
) -> None:
    try:
        net = _make(group, settings, None)
        forced = {name: _make(group, settings, name) for name in settings.schedules}
    except (ValueError, TypeError, ImportError) as error:
        result.skipped.append((str(group), str(error)))
        for batch in settings.batches:
            progress(f"{group} B={batch}: skipped")
        return
    result.verified += _verified(group, settings, net, forced, result)
    for batch in settings.batches:
        case = Case(group, batch)
        label = f"{group} B={batch}"
        if over_budget():
            result.skipped.append((label, f"the budget of {settings.budget_seconds:g} s was used up"))
            progress(f"{label}: skipped")
            continue
        try:
            runnable = {name: same for name, same in forced.items() if _schedule(same, batch, settings) is not None}
            measured, sets = machine.measure(case, net, runnable)
        except (PlanError, TooLargeError) as error:
            result.skipped.append((label, str(error)))
            progress(f"{label}: skipped")
            continue
        rows = _rows(case, net.network.describe(), measured, sets, machine.fma_rates)
        result.rows += rows
        progress(f"{label}: {_line(rows)}")


def _make(group: Group, settings: Settings, schedule: str | None) -> Any:
    options: dict[str, Any] = {"precision": group.precision}
    if schedule is not None:
        options["schedule"] = schedule
    return random_mlp(group.sizes, settings.seed, dtype=group.dtype, **options)


def _schedule(net: Any, batch: int, settings: Settings) -> str | None:
    """The schedule of a call with this many rows; None if there is none."""
    try:
        return str(net.plan(batch, settings.device).schedule)
    except PlanError:
        return None


def _verified(group: Group, settings: Settings, net: Any, forced: dict[str, Any], result: Result) -> list[str]:
    """Verify every schedule that will be measured, at the largest batch that it is measured at, up to some rows."""
    rows: dict[str, int] = {}
    for one in (net, *forced.values()):
        for batch in settings.batches:
            schedule = _schedule(one, batch, settings)
            if schedule is not None:
                rows[schedule] = max(rows.get(schedule, 1), min(batch, VERIFIED_ROWS))
    lines = []
    for schedule, batch in rows.items():
        same = net if schedule == "cpu" else forced.get(schedule) or _make(group, settings, schedule)
        try:
            report = verify(same, batch=batch, device=settings.device)  # type: ignore[arg-type]
        except PlanError as error:  # it runs larger batches only
            result.skipped.append((f"verification of {group}, schedule {schedule}, {batch} rows", str(error)))
            continue
        if not report.ok:
            raise VerificationError(f"the network is wrong, so it is not measured:\n{report}")
        worst = max((c.in_bounds / c.limit for c in report.comparisons), default=0.0)
        lines.append(f"{group}, schedule {schedule}, {batch} rows: {worst:.2g} of the proven bound at most")
    return lines


def _rows(
    case: Case, network: str, measured: Sequence[Measurement], sets: int, fma_rates: dict[str, Timing]
) -> list[dict[str, Any]]:
    """The rows of one case, with their ratios to the floors."""
    times = {m.name: m.timing.median for m in measured if m.timing is not None}
    copies = [times[name] for name in ("copy kernel", "memcpy") if name in times]
    rate = fma_rates.get("float64" if case.group.dtype == "float64" else "float32")
    fma = None if rate is None else Timing(*(case.fmas / r * 1e6 for r in (rate.median, rate.high, rate.low)))
    bases = {
        "to_copy": min(copies) if copies else None,
        "to_fma": None if fma is None else fma.median,
        "to_empty": times.get("empty kernel"),
    }
    if fma is not None:
        note = "the case's fused multiply-adds at the peak rate of this run"
        measured = [*measured, Measurement(FMA_PEAK, "floor", None, False, fma, None, 0, note)]
    rows = []
    for m in measured:
        on_gpu = m.method != "each"
        ratios = {
            name: round(m.timing.median / base, 4) if m.timing is not None and on_gpu and base else None
            for name, base in bases.items()
        }
        rows.append(
            {
                "network": network,
                "net": case.group.net,
                "dtype": case.group.dtype,
                "precision": case.group.precision,
                "batch": case.batch,
                "subject": m.name,
                "kind": m.kind,
                "schedule": m.schedule,
                "forced": m.forced,
                "gpu_us": rounded(m.timing) if on_gpu else None,
                "round_trip_us": None if on_gpu else rounded(m.timing),
                "method": m.method,
                "calls": m.calls,
                "sets": sets,
                **ratios,
                "note": m.note,
            }
        )
    return rows


def _line(rows: Sequence[dict[str, Any]]) -> str:
    """One case in a few words."""
    row = next(r for r in rows if r["kind"] == "net" and not r["forced"])
    timing = row["gpu_us"] or row["round_trip_us"]
    to_copy = "" if row["to_copy"] is None else f", {row['to_copy']:.2f} copies"
    return f"{row['schedule']} {timing['median']:.2f} us{to_copy}"
