"""The planner against what was measured: no batch size at which another schedule is more than 1.15 times as fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import H200

from cupymlp.network import Network
from cupymlp.schedules import SCHEDULES, plan_gpu

SWEEPS = ("sweep-canonical-h200.json", "sweep-nets-h200.json")
MOST = 1.15


def measured() -> dict[tuple, dict[str, float]]:
    """GPU time by schedule, for each network, dtype, precision and batch of the committed sweeps."""
    found: dict[tuple, dict[str, float]] = {}
    for file in SWEEPS:
        sweep = json.loads((Path(__file__).parent.parent / "benchmarks" / file).read_text())
        assert sweep["machine"]["gpu"] == H200.name
        for row in sweep["rows"]:
            if row["kind"] == "net" and row["gpu_us"]:
                case = (row["net"], row["dtype"], row["precision"], row["batch"])
                found.setdefault(case, {})[row["schedule"]] = row["gpu_us"]["median"]
    return found


CASES = measured()


def test_the_sweeps_cover_what_they_should():
    assert len(CASES) >= 300
    assert {case[0] for case in CASES} == {
        "48-64-40-24", "64-64-64-64", "16-16-1", "128-128-128-128-128", "784-256-10", "512-512-512-512",
    }  # fmt: skip
    assert {name for times in CASES.values() for name in times} >= {"row", "tile", "layer", "mma", "wgmma"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_planner_takes_a_schedule_that_is_nearly_the_best(case):
    net, dtype, precision, batch = case
    sizes = tuple(map(int, net.split("-")))
    depth = len(sizes) - 1
    network = Network(sizes, ("relu",) * (depth - 1) + ("identity",), (False,) * depth, dtype, precision)
    times = CASES[case]
    plan = plan_gpu(network, batch, H200)
    assert times[plan.schedule] <= MOST * min(times.values()), (plan.schedule, times)
    assert set(times) <= set(SCHEDULES)


@pytest.mark.parametrize("schedule", ["row", "tile", "layer", "mma", "wgmma"])
def test_the_cost_models_are_near_the_measured_times(schedule):
    """Within a factor of two everywhere: they explain a plan, and decide only between schedules that are close."""
    for (net, dtype, precision, batch), times in CASES.items():
        if schedule in times:
            sizes = tuple(map(int, net.split("-")))
            depth = len(sizes) - 1
            network = Network(sizes, ("relu",) * (depth - 1) + ("identity",), (False,) * depth, dtype, precision)
            expected = plan_gpu(network, batch, H200, schedule=schedule).microseconds
            assert 0.5 <= expected / times[schedule] <= 2, (net, dtype, precision, batch, expected, times[schedule])
