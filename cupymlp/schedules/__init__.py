"""The schedules, and the choice among them. Pure functions of their arguments: no GPU and no CuPy.

Each entry of `SCHEDULES` answers with a plan, or with the reason why it cannot be taken (`PlanError`). Among the plans the
one that its cost model expects to be the fastest is taken. The constants of the models are measured; ``plan()`` prints the
expectations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..network import Network
from ..plan import CONTIGUOUS, Access, Device, Plan, PlanError, cpu_block_rows
from .layer import plan_layer
from .matmul import plan_matmul
from .mma import plan_mma
from .row import plan_row
from .tile import plan_tile
from .wgmma import plan_wgmma

__all__ = ["SCHEDULES", "plan_cpu", "plan_gpu"]

SCHEDULES: dict[str, Callable[[Network, int, Device, Access], Plan]] = {
    "row": plan_row,
    "tile": plan_tile,
    "wgmma": plan_wgmma,
    "mma": plan_mma,
    "layer": plan_layer,
    "matmul": plan_matmul,
}


def plan_cpu(network: Network, batch: int, why: str) -> Plan:
    """The plan of the CPU path. ``why``: the reason why no GPU schedule is taken."""
    weights = sum(k * n for k, n in zip(network.sizes, network.sizes[1:], strict=False))
    weights += sum(n for n, bias in zip(network.sizes[1:], network.biases, strict=True) if bias)
    return Plan(
        schedule="cpu",
        network=network,
        batch=batch,
        device="CPU",
        launches=0,
        weight_bytes=weights * network.itemsize,
        notes=(f"NumPy, {cpu_block_rows(network):,} rows at a time",),
        not_taken=tuple((name, why) for name in SCHEDULES),
    )


def _split3_cost(network: Network, device: Device, access: Access, schedule: str) -> float:
    """What compares the schedules of split3, for few rows and for many: the product of both times."""
    return math.prod(SCHEDULES[schedule](network, rows, device, access).microseconds or 0.0 for rows in (16, 65_536))


def plan_gpu(
    network: Network, batch: int, device: Device, access: Access = CONTIGUOUS, schedule: str | None = None
) -> Plan:
    """The plan of a call on a GPU: of this schedule, or of the one that is expected to be the fastest.

    Raises
    ------
    PlanError
        If the schedule, or every schedule, cannot run the network on the device; the message says why.
    """
    reasons = [("cpu", "the arrays are on the GPU, or go there (device='cpu' keeps NumPy arrays on the CPU)")]
    plans: list[Plan] = []
    for name, make in SCHEDULES.items():
        if schedule not in (None, name):
            reasons.append((name, f"schedule={schedule!r} was asked for"))
            continue
        try:
            plans.append(make(network, batch, device, access))
        except PlanError as error:
            reasons.append((name, str(error)))
    if not plans:
        tried = [(name, reason) for name, reason in reasons[1:] if schedule in (None, name)]
        why = "; ".join(f"{name}: {reason}" for name, reason in tried)
        raise PlanError(
            f"no schedule can run the network {network.describe()} with precision={network.precision!r}: {why}. Use "
            "narrower layers, another precision, or NumPy arrays with device='cpu'"
        )
    if network.precision == "split3" and schedule is None and {p.schedule for p in plans} >= {"wgmma", "mma"}:
        # Their bits are not the same (rows are scaled in other ways), and must not depend on the batch.
        taken = min(("wgmma", "mma"), key=lambda name: _split3_cost(network, device, access, name))
        left = "mma" if taken == "wgmma" else "wgmma"
        plans = [p for p in plans if p.schedule != left]
        reasons.append((left, f"{taken} is taken at every batch size, so that bits do not depend on it"))
    plans.sort(key=lambda plan: plan.microseconds or 0.0)  # stable: the table's order where the models agree
    best = plans[0]
    slower = [(p.schedule, f"{p.microseconds:.3g} us expected, {best.microseconds:.3g} here") for p in plans[1:]]
    order = {name: i for i, name in enumerate(("cpu", *SCHEDULES))}
    return replace(best, not_taken=tuple(sorted([*reasons, *slower], key=lambda entry: order[entry[0]])))
