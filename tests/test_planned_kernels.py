"""What the planner picks for widths up to 128 spills nothing, on the GPUs of every generation from sm_80 on."""

from __future__ import annotations

import pytest
from compiling import DEVICES, build, spills

from cupymlp.network import Network
from cupymlp.schedules import plan_gpu

NETS = ((64, 64, 64, 64), (128, 128, 128), (127, 128, 3), (32,) * 8)
KINDS = (("float64", "ieee"), ("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "split3"))


@pytest.mark.parametrize("architecture", DEVICES)
def test_no_kernel_that_is_picked_spills(nvrtc, architecture):
    device = DEVICES[architecture]
    kinds = (("float32", "ieee"), *(KINDS if architecture in {"sm_80", "sm_120"} else ()))
    kernels = {}
    for sizes in NETS:
        depth = len(sizes) - 1
        activations, biases = ("relu",) * (depth - 1) + ("identity",), (True,) * depth
        for dtype, precision in kinds:
            for batch in (1, 300, 10**6) if (dtype, precision) == ("float32", "ieee") else (300,):
                plan = plan_gpu(Network(sizes, activations, biases, dtype, precision), batch, device)
                if plan.schedule != "layer":  # whose shapes are few, and compiled in test_compile_matrix
                    kernels |= {(k.name, k.options): (k, sizes, batch) for k in plan.kernels}
    for kernel, sizes, batch in kernels.values():
        own = "sm_90a" if kernel.name == "mlp_wgmma" else architecture
        _, log = build(nvrtc, kernel, own)
        assert spills(log) == 0, (kernel.name, sizes, batch, kernel.options)
