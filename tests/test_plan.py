"""Planning is arithmetic: no GPU, no CuPy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from support import CANONICAL, H200, NETS

from cupymlp import MLP, PlanError
from cupymlp._gpu import gpu_problem
from cupymlp.network import Network
from cupymlp.plan import (
    ROW_HELD_BYTES,
    SCHEDULES,
    Access,
    activation_bytes,
    cpu_block_rows,
    layer_vectors,
    packed_bytes,
    plan_cpu,
    plan_gpu,
    row_held,
)
from cupymlp.verify import random_mlp


def network(sizes, dtype="float32", bias=False):
    depth = len(sizes) - 1
    return Network(tuple(sizes), ("relu",) * depth, (bias,) * depth, dtype)


def test_planning_needs_no_cupy():
    """plan, network and reference, and the whole package, without importing CuPy."""
    program = "import sys, cupymlp, cupymlp.plan, cupymlp.reference, cupymlp.cli; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_the_canonical_plan():
    plan = plan_gpu(network(CANONICAL), 16, H200)
    assert (plan.schedule, plan.grid, plan.block, plan.launches) == ("row", (16,), (64,), 1)
    assert plan.shared_bytes == 4 * (48 + 64)  # x and the second hidden layer share one half, the first has the other
    assert plan.weight_bytes == 4 * (48 * 64 + 64 * 40 + 40 * 24)
    assert plan.registers is None
    assert "all layers are held in registers" in str(plan)
    assert [name for name, _ in plan.not_taken] == ["cpu"]


@pytest.mark.parametrize(("batch", "grid"), [(1, 1), (2**31 - 1, 2**31 - 1), (2**40, 2**31 - 1)])
def test_the_grid_is_the_batch_as_far_as_a_grid_goes(batch, grid):
    assert plan_gpu(network(CANONICAL), batch, H200).grid == (grid,)


@pytest.mark.parametrize(
    ("widest", "block"), [(1, 64), (64, 64), (65, 96), (128, 128), (250, 256), (256, 256), (257, 256), (4000, 256)]
)
def test_a_block_covers_the_widest_layer(widest, block):
    assert plan_gpu(network((3, widest, 2)), 1, H200).block == (block,)


def test_the_batch_size_is_no_constant_of_the_kernel():
    """One kernel for up to a row a multiprocessor, one for more: never one a batch size."""
    for sizes in NETS:
        options = {plan_gpu(network(sizes), batch, H200).options for batch in range(1, 400)}
        assert len(options) <= 2
        held, _ = row_held(network(sizes), 64)
        if held == len(sizes) - 1:
            assert len(options) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [*NETS, (128,) * 5, (4096, 4096), (64,) * 40], ids=str)
def test_registers_have_room_for_what_is_held(sizes, dtype):
    net = network(sizes, dtype)
    block = plan_gpu(net, 1, H200).block[0]
    held, group = row_held(net, block)
    per_output = [-(-k * net.itemsize // 16) * 16 * -(-n // block) for k, n in zip(sizes, sizes[1:])]
    assert 0 <= held <= net.depth
    assert group in (16, 32, 48, 64)
    assert sum(per_output[:held]) + (0 if held == net.depth else group * net.itemsize) <= ROW_HELD_BYTES


def test_packed_sizes_count_padding():
    net = Network((5, 3, 2), ("relu", "relu"), (True, False), "float32")
    assert [layer_vectors(net, i) for i in (0, 1)] == [2 * 3 + 1, 1 * 2]
    assert packed_bytes(net) == 16 * 9
    assert activation_bytes(Network((5, 0, 7, 2), ("relu",) * 3, (False,) * 3, "float64")) == 16 * 4
    assert packed_bytes(network((3, 0))) == 0


def test_a_row_that_does_not_fit_names_bytes_needed_and_available():
    with pytest.raises(PlanError) as caught:
        plan_gpu(network((60_000, 10)), 1, H200)
    message = str(caught.value)
    assert "60000-10 float32" in message
    assert (
        "row: one row's activations need 240,000 bytes of shared memory, and NVIDIA H200 gives a block 232,448"
        in message
    )
    assert "device='cpu'" in message
    assert isinstance(caught.value, ValueError)
    plan_gpu(network((58_112, 10)), 1, H200)  # 232,448 bytes


def test_an_access_is_part_of_the_options_and_an_empty_batch_launches_nothing():
    net = network(CANONICAL)
    assert plan_gpu(net, 1, H200).options != plan_gpu(net, 1, H200, Access("float16")).options
    assert plan_gpu(net, 0, H200).launches == 0
    assert plan_gpu(network((3, 0)), 5, H200).launches == 0


def test_cpu_blocks_keep_two_layers_in_cache():
    net = network((1000, 2000, 10), "float64")
    assert cpu_block_rows(net) == 21
    assert cpu_block_rows(network(CANONICAL)) * (64 + 48) * 4 <= 512 * 1024
    plan = plan_cpu(net, 7, "because")
    assert (plan.schedule, plan.launches, plan.weight_bytes) == ("cpu", 0, 8 * (1000 * 2000 + 2000 * 10))
    assert plan.not_taken == tuple((name, "because") for name in SCHEDULES)


def test_plan_of_an_mlp():
    net = random_mlp(CANONICAL, bias=True)
    plan = net.plan(16, device="cpu")
    assert plan.schedule == "cpu"
    for word in (
        "48-64-40-24 float32, relu relu identity, bias",
        "16 rows",
        "not taken  row: device='cpu' was asked for",
    ):
        assert word in str(plan)
    with pytest.raises(ValueError, match=r"batch is 1\.5"):
        net.plan(1.5)
    with pytest.raises(ValueError, match="batch is -1"):
        net.plan(-1)
    if gpu_problem():
        assert net.plan(16).schedule == "cpu"
        with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
            net.plan(16, device="cuda")


def test_a_weight_that_outgrows_shared_memory_is_no_obstacle():
    """Weights never go through shared memory: only activations count."""
    plan = plan_gpu(network((512,) * 4), 16, replace(H200, shared_bytes=48 * 1024))
    assert plan.weight_bytes > 3_000_000
    assert plan.shared_bytes == 4096


def test_describe_says_which_layers_have_a_bias():
    assert Network((2, 3, 4), ("relu", "relu"), (True, False), "float32").describe().endswith("bias in layer 1")
    assert repr(MLP([[[1.0]]])) == "<cupymlp.MLP 1-1 float64, identity, no bias>"
