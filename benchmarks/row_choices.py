"""What the row kernel's block size, group size and held layers are worth: what the constants of schedules/row.py rest on.

    python benchmarks/row_choices.py benchmarks/row-choices-h200.json

For each network and batch, the GPU time (graph replays, interleaved rounds, as `python -m cupymlp bench` measures it) of the
plan as it is, and of plans with one choice made otherwise. Every variant's bits are compared with the plan's first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import cupy
import numpy as np

from cupymlp._compile import kernel_for
from cupymlp._gpu import device_numbers
from cupymlp._pack import pack
from cupymlp.bench.report import write_json
from cupymlp.bench.timing import Subject, measure
from cupymlp.plan import CONTIGUOUS
from cupymlp.schedules import row as planning
from cupymlp.verify import random_mlp

NETS: dict[Sequence[int], str] = {
    (48, 64, 40, 24): "float32",
    (16, 16, 1): "float32",
    (64, 64, 64, 64): "float32",
    (96, 96, 96, 96): "float32",
    (128, 128, 128, 128, 128): "float32",
    (784, 256, 10): "float32",
    (512, 512, 512, 512): "float32",
    (48, 64, 40, 25): "float64",
}
BATCHES = (16, 1024)
ROUNDS = 7


def variants(block: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of variants and the constants of schedules/row.py that make them."""
    yield "as planned", {}
    for other in (32, 64, 128, 256, 512):
        if other != block:
            yield f"block {other}", {"ROW_BLOCK_LEAST": other, "ROW_BLOCK_MOST": other}
    for group in (16, 32, 48, 64):
        yield f"group {group}", {"ROW_GROUP_MOST": group, "ROW_GROUP_SHARING": group}
    yield "nothing held", {"row_held": lambda *_: 0}


def main(path: str) -> None:
    """Measure, print and write."""
    device_id = cupy.cuda.runtime.getDevice()
    device = device_numbers(device_id)
    floor = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    rows: list[dict[str, Any]] = []
    for sizes, dtype in NETS.items():
        net = random_mlp(sizes, bias=True, dtype=dtype)
        packed = cupy.asarray(pack(np, "vectors", net.network, net.weights, net.biases))
        for batch in BATCHES:
            x = cupy.random.default_rng(0).standard_normal((batch, sizes[0]), dtype=net.dtype)
            want = net(x)
            subjects = [Subject("empty kernel", partial(floor, (batch,), (64,), ()), ("gpu",))]
            plans: dict[str, Any] = {}
            for name, constants in variants(planning.row_block(net.network)):
                with mock.patch.multiple(planning, **constants) if constants else contextlib.nullcontext():
                    plan = planning.plan_row(net.network, batch, device, CONTIGUOUS)
                if plan.kernels[0].options in [p.kernels[0].options for p in plans.values()]:
                    continue
                plans[name] = plan
                raw = kernel_for(plan.kernels[0], device_id).raw
                y = cupy.full((batch, sizes[-1]), np.nan, dtype)
                arguments = (x, y, packed, batch)
                call = partial(raw, plan.grid, plan.block, arguments, shared_mem=plan.shared_bytes)
                call()
                if y.tobytes() != want.tobytes():
                    raise RuntimeError(f"{net}, {name}: other bits")
                subjects.append(Subject(name, call, ("gpu",)))
            for subject, timings in measure(subjects, ROUNDS, cupy, warm_up_seconds=0.3):
                kernel = kernel_for(plans[subject.name], device_id) if subject.name in plans else None
                timing = timings["gpu"]
                rows.append(
                    {
                        "network": net.network.describe(),
                        "batch": batch,
                        "subject": subject.name,
                        "options": list(plans[subject.name].options[-4:]) if kernel else [],
                        "registers": kernel.registers if kernel else None,
                        "local_bytes": kernel.local_bytes if kernel else None,
                        "gpu_us": {"median": timing.median, "low": timing.low, "high": timing.high},
                    }
                )
                print(f"{rows[-1]['network']:<60} {batch:>5} {subject.name:<14} {timing.median:9.3f}", flush=True)
    commit = sys.argv[2] if len(sys.argv) > 2 else None
    write_json(path, rows, "bits of every variant equal", commit)


if __name__ == "__main__":
    main(sys.argv[1])
