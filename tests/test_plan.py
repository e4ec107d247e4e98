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
from cupymlp.plan import CONTIGUOUS, Access, cpu_block_rows, layer_vectors, packed_bytes
from cupymlp.schedules import SCHEDULES, plan_cpu, plan_gpu
from cupymlp.schedules.layer import SHAPES
from cupymlp.schedules.row import ROW_GROUP_SHARING, ROW_HELD_BYTES, ROW_MIXED_BYTES, activation_bytes, row_held
from cupymlp.verify import random_mlp


def network(sizes, dtype="float32", bias=False, precision="ieee"):
    depth = len(sizes) - 1
    return Network(tuple(sizes), ("relu",) * depth, (bias,) * depth, dtype, precision)


def row(net, batch, device=H200, access=CONTIGUOUS):
    return plan_gpu(net, batch, device, access, "row")


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
    assert [name for name, _ in plan.not_taken] == ["cpu", *(name for name in SCHEDULES if name != "row")]


@pytest.mark.parametrize(("batch", "grid"), [(1, 1), (2**31 - 1, 2**31 - 1), (2**40, 2**31 - 1)])
def test_the_grid_is_the_batch_as_far_as_a_grid_goes(batch, grid):
    assert row(network(CANONICAL), batch).grid == (grid,)


@pytest.mark.parametrize(
    ("widest", "block"), [(1, 64), (64, 64), (65, 96), (128, 128), (250, 256), (256, 256), (257, 256), (4000, 256)]
)
def test_a_block_covers_the_widest_layer(widest, block):
    assert row(network((3, widest, 2)), 1).block == (block,)


@pytest.mark.parametrize(("schedule", "most"), [("row", 2), ("tile", 4), ("layer", 30)])
def test_the_batch_size_is_no_constant_of_the_kernel(schedule, most):
    """A few kernels for all batch sizes, and never one a batch size."""
    for sizes in NETS:
        kernels = set()
        for batch in (*range(1, 400), *range(400, 100_000, 997)):
            kernels |= {k.options for k in plan_gpu(network(sizes), batch, H200, schedule=schedule).kernels}
        assert len(kernels) <= most
        if schedule == "row" and row_held(network(sizes), 64, ROW_GROUP_SHARING) == len(sizes) - 1:
            assert len(kernels) == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sizes", [*NETS, (128,) * 5, (4096, 4096), (64,) * 40], ids=str)
def test_registers_have_room_for_what_is_held(sizes, dtype):
    net = network(sizes, dtype)
    block = row(net, 1).block[0]
    for group in (16, 32, 64):
        held = row_held(net, block, group)
        per_output = [-(-k * net.itemsize // 16) * 16 * -(-n // block) for k, n in zip(sizes, sizes[1:])]
        assert 0 <= held <= net.depth
        if held == net.depth:
            assert sum(per_output) <= ROW_HELD_BYTES[dtype]
        else:
            assert sum(per_output[:held]) + group * net.itemsize <= max(ROW_MIXED_BYTES[dtype], group * net.itemsize)


def test_packed_sizes_count_padding():
    net = Network((5, 3, 2), ("relu", "relu"), (True, False), "float32")
    assert [layer_vectors(net, i) for i in (0, 1)] == [2 * 3 + 1, 1 * 2]
    assert packed_bytes(net) == 16 * 9
    assert activation_bytes(Network((5, 0, 7, 2), ("relu",) * 3, (False,) * 3, "float64")) == 16 * 4
    assert packed_bytes(network((3, 0))) == 0


def test_a_row_that_does_not_fit_names_bytes_needed_and_available():
    with pytest.raises(PlanError) as caught:
        row(network((60_000, 10)), 1)
    message = str(caught.value)
    assert "60000-10 float32" in message
    assert (
        "row: one row's activations need 240,000 bytes of shared memory, and NVIDIA H200 gives a block 232,448"
        in message
    )
    assert "device='cpu'" in message
    assert isinstance(caught.value, ValueError)
    row(network((58_112, 10)), 1)  # 232,448 bytes
    assert plan_gpu(network((60_000, 10)), 1, H200).schedule == "layer"  # which keeps no row in shared memory


def test_an_access_is_part_of_the_options_and_an_empty_batch_launches_nothing():
    net = network(CANONICAL)
    for schedule in ("row", "tile", "layer"):
        kernels = [plan_gpu(net, 1, H200, access, schedule).kernels[0] for access in (CONTIGUOUS, Access("float16"))]
        assert kernels[0].options != kernels[1].options
        assert plan_gpu(net, 0, H200, schedule=schedule).launches == 0
        assert plan_gpu(network((3, 0)), 5, H200, schedule=schedule).launches == 0
    assert plan_gpu(network(CANONICAL, precision="library"), 0, H200).launches == 0


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
    plan = row(network((512,) * 4), 16, replace(H200, shared_bytes=48 * 1024))
    assert plan.weight_bytes > 3_000_000
    assert plan.shared_bytes == 4096


def test_describe_says_which_layers_have_a_bias():
    assert Network((2, 3, 4), ("relu", "relu"), (True, False), "float32").describe().endswith("bias in layer 1")
    assert repr(MLP([[[1.0]]])) == "<cupymlp.MLP 1-1 float64, identity, no bias>"


# --- layer and matmul ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", SHAPES)
def test_shapes_of_layer_fit_every_gpu(itemsize):
    """With no more shared memory than sm_75 gives a block, which is the least."""
    for shape in SHAPES[itemsize]:
        assert shape.shared_bytes(itemsize) <= 64 * 1024
        assert shape.threads * shape.blocks <= 1024
        assert shape.chunk % 16 == 0


def test_layer_is_one_launch_a_layer_and_a_round():
    net = network((512,) * 4)
    plan = plan_gpu(net, 65_536, H200)
    assert plan.schedule == "layer"
    assert [kernel.name for kernel in plan.kernels] == ["mlp_layer"] * 3
    assert len({kernel.options for kernel in plan.kernels}) == 1  # equal layers share a kernel
    assert plan.scratch_bytes <= 32 << 20
    assert plan.launches == 3 * -(-65_536 // plan.rows_at_once)
    assert plan.weight_bytes == packed_bytes(net)
    assert f"{plan.rows_at_once:,} rows at a time" in str(plan)


def test_few_rows_use_many_multiprocessors():
    (kernel, *_) = plan_gpu(network((1024,) * 3), 16, H200, schedule="layer").kernels
    assert kernel.grid[0] >= 64


def test_layer_wants_a_grid_that_the_device_takes():
    with pytest.raises(PlanError, match=r"layer: needs a grid of [\d,]+ blocks, and NVIDIA H200 takes 7"):
        plan_gpu(network((64, 4096)), 16, replace(H200, max_grid=7), schedule="layer")


def test_matmul_is_for_those_who_ask():
    ieee = dict(plan_gpu(network((512,) * 4), 4096, H200).not_taken)
    assert ieee["matmul"].startswith("sums in cuBLAS's order: only with precision='library'")
    plan = plan_gpu(network((512,) * 4, bias=True, precision="library"), 4096, H200)
    assert (plan.schedule, plan.layout, plan.launches) == ("matmul", "arrays", 6)
    assert "expected to be faster than precision='ieee' for layers about" in str(plan)
    assert "cannot capture" in str(plan)
    for name in ("row", "tile", "layer"):
        assert "precision='library' was asked for" in dict(plan.not_taken)[name]
