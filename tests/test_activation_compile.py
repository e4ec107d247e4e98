"""Activations through NVRTC: nothing is spilled, code stays small, and what keeps subnormal numbers flushes none."""

from __future__ import annotations

import re

import pytest
from compiling import DEVICES, build, spills
from support import CANONICAL, H200

from cupymlp.activations import ACTIVATIONS
from cupymlp.network import Network
from cupymlp.plan import CONTIGUOUS, Access, Device
from cupymlp.schedules import plan_gpu

TURING = Device("Tesla T4", 75, 40, 65_536)
ELEMENTWISE = [name for name, row in ACTIVATIONS.items() if not row.over_row]
KEEPING = [name for name in ELEMENTWISE if ACTIVATIONS[name].exact]
# Two networks with all elementwise activations between them, the long ones in the hidden layers.
DEEP = (ELEMENTWISE[:10], ELEMENTWISE[10:])


def network(sizes, activations, dtype="float32", precision="ieee"):
    filled = [(a, 0.3) if ACTIVATIONS[a].parameter else a for a in activations]
    return Network(tuple(sizes), tuple(filled), (True,) * len(filled), dtype, precision)


def check(nvrtc, net, architecture, schedule=None, batch=300, code_bytes=None):
    device = DEVICES.get(architecture, H200 if architecture == "sm_90a" else TURING)
    for kernel in plan_gpu(net, batch, device, CONTIGUOUS, schedule).kernels:
        own = "sm_90a" if kernel.name == "mlp_wgmma" else architecture
        code, log = build(nvrtc, kernel, own)
        assert spills(log) == 0, (kernel.name, net, log)
        assert "C75" not in log, log
        assert "warning" not in log, log
        assert code_bytes is None or len(code) < code_bytes, (kernel.name, net, len(code))


@pytest.mark.parametrize(
    ("architecture", "schedule"),
    [
        ("sm_75", "row"),
        ("sm_90", "row"),
        ("sm_80", "tile"),
        ("sm_120", "tile"),
        ("sm_86", "layer"),
        ("sm_100", "matmul"),
    ],
)
def test_every_activation_compiles_and_spills_nothing(nvrtc, architecture, schedule):
    precision = "library" if schedule == "matmul" else "ieee"
    for activations in DEEP:
        for dtype in ("float32", "float64") if schedule == "row" else ("float32",):
            net = network((17,) * (len(activations) + 1), activations, dtype, precision)
            check(nvrtc, net, architecture, schedule)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(("dtype", "precision"), [("float16", "ieee"), ("float32", "tf32"), ("float32", "split3")])
def test_long_activations_spill_nothing_on_tensor_cores(nvrtc, architecture, dtype, precision):
    """Those that take the most registers, at the widths that take the most, and softmax after them."""
    for sizes, activations in (
        (CANONICAL, ["gelu", "sin", "softmax"]),
        ((64,) * 4, ["silu", "gelu", "softplus"]),
        ((128,) * 3, ["softplus", "log_softmax"]),
    ):
        check(nvrtc, network(sizes, activations, dtype, precision), architecture)


def test_code_stays_small(nvrtc):
    """CUDA's own sinf, side by side for all numbers of a lane, takes 180 kB in mma; a long activation in tile a loop."""
    check(nvrtc, network(CANONICAL, ["sin"] * 3, precision="tf32"), "sm_90", "mma", 1 << 20, code_bytes=100_000)
    check(nvrtc, network(CANONICAL, ["tanh", "tanh", "identity"]), "sm_90", "tile", 1 << 20, code_bytes=60_000)


@pytest.mark.parametrize("schedule", ["row", "tile", "mma"])
def test_activations_of_single_operations_keep_subnormal_numbers(nvrtc, schedule):
    """Comparisons may flush: with numbers that are not near zero, or where either way is the same number."""
    for name in KEEPING:
        net = network((20, 12, 3), [name, name], precision="tf32" if schedule == "mma" else "ieee")
        (kernel,) = plan_gpu(net, 100, H200, Access(), schedule).kernels
        code, _ = build(nvrtc, kernel, "sm_90", ptx=True)
        flushing = set(re.findall(r"\S*\.ftz\S*", code.decode()))
        assert all(op.startswith(("setp.", "abs.")) for op in flushing), (name, flushing)
        if name in {"identity", "relu", "leaky_relu"}:
            assert not flushing, name
