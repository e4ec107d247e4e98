"""Tables and JSON of measured rows, with everything needed to read them later."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._gpu import gpu_problem
from .latency import (
    BOUND,
    CALL_OUT,
    CUPY_CHAIN,
    EMPTY,
    FUSED,
    NUMPY_CHAIN,
    NUMPY_CPU,
    NUMPY_GPU,
    RAW,
)

__all__ = ["FORMAT", "machine", "markdown", "table", "write_json"]

FORMAT = 1


def machine() -> dict[str, Any]:
    """Hardware, driver and versions: what a benchmark file and a bug report name."""
    from .. import __version__

    found: dict[str, Any] = {
        "cupymlp": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
    }
    try:
        import cupy
    except ImportError as error:
        return {**found, "cupy": None, "gpu": None, "gpu_problem": str(error)}
    from cupy.cuda import nvrtc

    found["cupy"] = cupy.__version__
    found["nvrtc"] = ".".join(map(str, nvrtc.getVersion()))
    problem = gpu_problem()
    if problem is not None:
        return {**found, "gpu": None, "gpu_problem": problem}
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        **found,
        "gpu": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "gpu_bytes": properties["totalGlobalMem"],
        "gpus": runtime.getDeviceCount(),
        "driver": _version(runtime.driverGetVersion()),
        "runtime": _version(runtime.runtimeGetVersion()),
    }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text: microseconds, and ratios to an empty kernel's GPU, a bare call's host and NumPy's round-trip time."""
    lines = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        group = [row for row in rows if row["batch"] == batch]
        base = {row["subject"]: row for row in group}
        lines.append(f"batch {batch:,}  {group[0]['network']}  [us]")
        lines.append(f"  {'':<34}{'GPU':>9} {'/ empty':>8}{'host':>10} {'/ bare':>8}{'round trip':>12} {'/ NumPy':>8}")
        lines += [
            f"  {row['subject']:<34}{_us(row['gpu_us']):>9} {_ratio(row, base.get(EMPTY), 'gpu_us'):>8}"
            f"{_us(row['host_us']):>10} {_ratio(row, base.get(RAW), 'host_us'):>8}{_us(row['round_trip_us']):>12}"
            f" {_ratio(row, base.get(NUMPY_CHAIN), 'round_trip_us'):>8}"
            for row in group
        ]
    return "\n".join(lines)


README_ROWS = (
    ("GPU time of `net(x, out=y)`", CALL_OUT, "gpu_us"),
    ("an empty kernel, the floor", EMPTY, "gpu_us"),
    ("host time of `net(x, out=y)`", CALL_OUT, "host_us"),
    ("a bare RawKernel call", RAW, "host_us"),
    ("`net.bind(x, out=y)()`", BOUND, "host_us"),
    ("`fused_mlp(x, W1, W2, W3, out=y)`", FUSED, "host_us"),
    ("CuPy, five calls", CUPY_CHAIN, "host_us"),
    ("round trip, NumPy to NumPy: on the GPU", NUMPY_GPU, "round_trip_us"),
    ("the CPU path", NUMPY_CPU, "round_trip_us"),
    ("NumPy, five calls", NUMPY_CHAIN, "round_trip_us"),
)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The README's table: microseconds, one column a batch size."""
    found = {(row["subject"], row["batch"]): row for row in rows}
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    lines = ["| us | " + " | ".join(f"B={batch}" for batch in batches) + " |", "|---|" + "---|" * len(batches)]
    for label, subject, kind in README_ROWS:
        cells = [_us(found[subject, batch][kind]) for batch in batches]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _us(timing: dict[str, float] | None) -> str:
    return "-" if timing is None else f"{timing['median']:.2f}"


def _ratio(row: dict[str, Any], base: dict[str, Any] | None, kind: str) -> str:
    if base is None or row[kind] is None or base[kind] is None:
        return ""
    return f"{row[kind]['median'] / base[kind]['median']:.2f}"


def write_json(
    path: str | os.PathLike[str],
    rows: Sequence[dict[str, Any]],
    verified: str,
    commit: str | None,
    parts: Mapping[str, Any] | None = None,
) -> None:
    """Write rows, machine, date, commit and other parts, under a temporary name first."""
    content = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": machine(),
        "verified": verified.splitlines(),
        **(parts or {}),
    }
    head = json.dumps(content, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)  # a line a row: a sweep has thousands
    place = Path(path)
    part = place.with_name(place.name + ".part")
    part.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    part.replace(place)
