"""The wgmma schedule without a GPU: its plans, and that its kernels compile with nothing spilled and nothing serialised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiling import build, registers, spills
from support import CANONICAL, H200

from cupymlp.network import Network
from cupymlp.plan import CONTIGUOUS, Access, PlanError
from cupymlp.schedules import plan_gpu
from cupymlp.schedules.wgmma import lane_registers, shared_bytes, warp_bytes

KINDS = (("float32", "tf32"), ("float32", "split3"), ("float16", "ieee"), ("bfloat16", "ieee"))
NETS = (CANONICAL, (17, 33, 65, 2), (64, 64, 64, 64), (16, 16, 1), (1, 1), (100, 70, 7), (96, 96), (128, 128))
ACCESSES = (CONTIGUOUS, Access("int8"), Access(None, "unaligned", "strided", 2))


def net_of(sizes, dtype, precision, biases=True):
    depth = len(sizes) - 1
    return Network(tuple(sizes), ("relu",) * (depth - 1) + ("identity",), (biases,) * depth, dtype, precision)


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_nothing_is_spilled_and_no_wgmma_waits_for_another(nvrtc, dtype, precision):
    """C75xx is what ptxas says when it serialises wgmma instructions."""
    for sizes in NETS:
        for biases in (False, True):
            for access in ACCESSES if sizes == CANONICAL else ACCESSES[:1]:
                kernel = plan_gpu(net_of(sizes, dtype, precision, biases), 1 << 20, H200, access, "wgmma").kernels[0]
                assert "-arch=sm_90a" in kernel.options
                _, log = build(nvrtc, kernel, "sm_90a")
                assert spills(log) == 0, (sizes, biases, log)
                assert "C75" not in log, (sizes, biases, log)
                assert "warning" not in log, log
                assert registers(log) * kernel.block[0] <= 65536


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_nothing_on_the_data_path_flushes_subnormals(nvrtc, dtype, precision):
    kernel = plan_gpu(net_of(CANONICAL, dtype, precision), 1 << 20, H200, schedule="wgmma").kernels[0]
    code, _ = build(nvrtc, kernel, "sm_90a", ptx=True)
    assert ".ftz" not in code.decode()


def test_it_is_for_hopper_only_and_says_so():
    net = net_of(CANONICAL, "float16", "ieee")
    for capability in (75, 80, 89, 100, 120):
        device = replace(H200, name="another GPU", compute_capability=capability)
        with pytest.raises(PlanError, match=f"needs a Hopper GPU \\(sm_90\\), and another GPU is sm_{capability}"):
            plan_gpu(net, 1000, device, schedule="wgmma")
    with pytest.raises(PlanError, match="computes tf32, split3, and float16 or bfloat16 networks"):
        plan_gpu(net_of(CANONICAL, "float32", "ieee"), 1000, H200, schedule="wgmma")


@pytest.mark.parametrize("sizes", [(129, 3), (3, 129, 4), (7, 0, 4), (0, 5)], ids=str)
def test_widths_that_it_does_not_take_go_to_another_schedule(sizes):
    net = net_of(sizes, "float16", "ieee")
    with pytest.raises(PlanError, match="widths of 1 to 128"):
        plan_gpu(net, 1000, H200, schedule="wgmma")
    assert plan_gpu(net, 1000, H200).schedule != "wgmma"


def test_warpgroups_are_as_many_as_registers_and_shared_memory_allow():
    canonical = plan_gpu(net_of(CANONICAL, "float32", "split3"), 1 << 20, H200, schedule="wgmma")
    assert canonical.block == (640,)
    wide = plan_gpu(net_of((128, 128), "float32", "tf32"), 1 << 20, H200, schedule="wgmma")
    assert 128 <= wide.block[0] < 640
    assert wide.shared_bytes <= H200.shared_bytes
    with pytest.raises(PlanError, match=r"need [\d,]+ bytes of shared memory, and NVIDIA H200 gives a block 232,448"):
        plan_gpu(net_of((128,) * 5, "float32", "split3"), 1000, H200, schedule="wgmma")


def test_shared_memory_of_the_canonical_net():
    net = net_of(CANONICAL, "float16", "ieee", biases=False)
    assert warp_bytes(net, 2) == 2 * 16 * 48 * 2 + 16 * 24 * 2  # two stages of x, one of y
    weights = 16 + 2 * (48 * 64 + 64 * 40 + 48 * 24)
    assert shared_bytes(net, 2, 1) == 128 + -(-weights // 128) * 128 + 4 * warp_bytes(net, 2)
    assert lane_registers(net) == 32 + 16 + 32


def test_split3_does_not_mix_two_schedules_whose_bits_differ():
    net = net_of(CANONICAL, "float32", "split3")
    for batch in (1, 16, 1000, 1 << 20):
        plan = plan_gpu(net, batch, H200)
        assert plan.schedule == "wgmma"
        assert ("mma", "wgmma is taken at every batch size, so that bits do not depend on it") in plan.not_taken
    assert plan_gpu(net, 1000, replace(H200, compute_capability=80)).schedule == "mma"
    assert plan_gpu(net, 1000, H200, schedule="mma").schedule == "mma"
