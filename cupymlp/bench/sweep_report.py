"""What a sweep's rows say: the table, the planner's choices against the best, and what the JSON file adds to the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from itertools import groupby
from typing import Any

from .cases import Settings
from .floors import FLOOR_NOTES
from .samplers import METHODS
from .sweep import Result
from .timing import rounded

__all__ = ["crossings", "crossings_table", "json_parts", "sweep_table"]

CASE = ("net", "dtype", "precision", "batch")
GROUP = CASE[:-1]
FLOORS = ("empty kernel", "copy kernel", "memcpy", "FMA peak")
PEER_PACKAGES = ("numpy", "torch", "triton", "jax", "jaxlib", "matplotlib")


def microseconds(row: dict[str, Any]) -> float | None:
    """The row's time, whichever kind it is; None if it was not measured."""
    timing = row["gpu_us"] or row["round_trip_us"]
    return None if timing is None else float(timing["median"])


def grouped(
    rows: Sequence[dict[str, Any]], keys: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Rows that agree in some fields, in the order in which they first come."""
    order: dict[tuple[Any, ...], int] = {}
    for row in rows:
        order.setdefault(tuple(row[k] for k in keys), len(order))
    in_order = sorted(rows, key=lambda row: order[tuple(row[k] for k in keys)])
    for key, group in groupby(in_order, key=lambda row: tuple(row[k] for k in keys)):
        yield key, list(group)


def crossings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The planner's choice beside the best schedule that could run, for every case in which schedules were forced.

    Returns
    -------
    list of dict
        ``net``, ``dtype``, ``precision``, ``batch``; ``chosen`` and ``chosen_us``; ``best`` and ``best_us``, the chosen one's
        own if nothing was faster; ``ratio``, chosen to best, at least 1; ``all_us``, every schedule's time by its name.
    """
    found = []
    for key, case in grouped(rows, CASE):
        nets = [row for row in case if row["kind"] == "net" and microseconds(row) is not None]
        chosen = next((row for row in nets if not row["forced"]), None)
        if chosen is None or not any(row["forced"] for row in nets):
            continue
        times = {str(row["schedule"]): float(microseconds(row) or 0.0) for row in nets}
        best = min(times, key=lambda name: times[name])
        mine = times[str(chosen["schedule"])]
        found.append(
            {
                **dict(zip(CASE, key, strict=True)),
                "chosen": chosen["schedule"],
                "chosen_us": mine,
                "best": best,
                "best_us": times[best],
                "ratio": round(mine / times[best], 4) if times[best] else 1.0,
                "all_us": times,
            }
        )
    return found


def crossings_table(found: Sequence[dict[str, Any]], limit: float = 1.15) -> str:
    """The cases whose choice takes more than ``limit`` times the best schedule's time, worst first, and how many do not."""
    worse = sorted((c for c in found if c["ratio"] > limit), key=lambda c: -c["ratio"])
    lines = [f"choices within {limit} of the best schedule: {len(found) - len(worse)} of {len(found)}"]
    lines += [
        f"  {c['net']} {c['dtype']} {c['precision']} B={c['batch']:,}: {c['chosen']} {c['chosen_us']:.2f} us, "
        f"{c['best']} {c['best_us']:.2f} us, {c['ratio']:.2f}"
        for c in worse
    ]
    return "\n".join(lines)


def sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text: a block for each network, dtype and precision, a line for each batch size, microseconds."""
    lines = []
    for key, group in grouped(rows, GROUP):
        others = list(dict.fromkeys(row["subject"] for row in group if row["kind"] == "peer" or row["forced"]))
        heads = {name: name.removeprefix("schedule ") for name in others}
        wide = {name: max(10, len(head) + 1) for name, head in heads.items()}
        titles = "".join(f"{heads[name]:>{wide[name]}}" for name in others)
        lines += [
            f"{key[0]} {key[1]} {key[2]}  [us]",
            f"{'batch':>12}  {'schedule':<9}{'time':>10}{'/ copy':>8}{'/ FMA':>8}{'/ empty':>8}{'copy':>10}{titles}",
        ]
        for (batch,), case in grouped(group, ("batch",)):
            by_name = {row["subject"]: row for row in case}
            net = next((row for row in case if row["kind"] == "net" and not row["forced"]), None)
            if net is None:
                continue
            copies = [by_name[name] for name in ("copy kernel", "memcpy") if name in by_name]
            copy = min((us for us in map(microseconds, copies) if us is not None), default=None)
            cells = "".join(f"{_us(by_name.get(name)):>{wide[name]}}" for name in others)
            lines.append(
                f"{batch:>12,}  {net['schedule']:<9}{_us(net):>10}{_ratio(net, 'to_copy'):>8}{_ratio(net, 'to_fma'):>8}"
                f"{_ratio(net, 'to_empty'):>8}{'-' if copy is None else f'{copy:.2f}':>10}{cells}"
            )
    return "\n".join(lines)


def _us(row: dict[str, Any] | None) -> str:
    time = None if row is None else microseconds(row)
    return "-" if time is None else f"{time:.2f}"


def _ratio(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1000 else ">1000"


def json_parts(settings: Settings, result: Result) -> dict[str, Any]:
    """What a sweep's JSON file has beside rows and machine: settings, floors, methods, versions, what was left out."""
    return {
        "kind": "sweep",
        "settings": asdict(settings),
        "methods": METHODS,
        "floors": {
            "notes": FLOOR_NOTES,
            "fma_per_second": {dtype: rounded(rate) for dtype, rate in result.fma_rates.items()},
        },
        "peers": {name: _version(name) for name in PEER_PACKAGES},
        "peer_notes": result.peer_notes,
        "skipped": [{"case": case, "reason": reason} for case, reason in result.skipped],
        "crossings": crossings(result.rows),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
