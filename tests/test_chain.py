"""Plans of several launches: rounds, scratch memory, cuBLAS's arguments; no GPU, on the stand-in of host_cupy.py."""

from __future__ import annotations

import threading

import host_cupy
import numpy as np
import pytest
from host_cupy import host_array
from hypothesis import given
from hypothesis import strategies as st
from support import CANONICAL, H200, NETS, random_net

import cupymlp
from cupymlp import _chain
from cupymlp._chain import cublas_reads
from cupymlp._launch import PackedNet
from cupymlp._pack import pack
from cupymlp.network import Network
from cupymlp.plan import Access
from cupymlp.schedules import plan_gpu, steps
from cupymlp.schedules.matmul import array_offsets, arrays_bytes

TOLERANCES = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 1e-4, "float64": 1e-10}
SCHEDULES = {"layer": "ieee", "matmul": "library"}


@pytest.fixture
def gpu(monkeypatch):
    return host_cupy.install(monkeypatch)


@pytest.fixture
def small_rounds(monkeypatch):
    """Rounds of 128 rows."""
    monkeypatch.setattr(steps, "LEAST_ROWS", 128)
    monkeypatch.setattr(steps, "SCRATCH_BYTES", 1)


def packed_net(net, schedule):
    return PackedNet(net.network, net.weights, net.biases, lambda *_: None, schedule)


def net_for(rng, schedule, sizes, dtype="float32", **options):
    return random_net(rng, sizes, dtype, precision=SCHEDULES[schedule], **options)


def check(net, x, y):
    want = net.mlp()(np.array(x), device="cpu").astype(np.float64)
    tolerance = TOLERANCES[net.network.dtype] * max(1.0, float(np.abs(want).max(initial=0)))
    np.testing.assert_allclose(np.array(y).astype(np.float64), want, rtol=0, atol=tolerance)


def poisoned(shape, dtype):
    return host_array(np.full(shape, np.nan).astype(dtype))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_net(gpu, small_rounds, rng, schedule, dtype):
    """300 rows are three rounds, the last one of fewer rows. Some nets have a layer with no outputs."""
    pytest.importorskip("ml_dtypes")
    for sizes in (*NETS, (0, 5), (4, 0, 0, 3), (9, 5, 0, 7, 2)):
        net = net_for(rng, schedule, sizes, dtype)
        x = host_array(rng.standard_normal((300, sizes[0])).astype(net.mlp().dtype))
        y = poisoned((300, sizes[-1]), x.dtype)
        gpu.launches.clear()
        gpu.products.clear()
        assert packed_net(net, schedule)(x, y) is y
        check(net, x, y)
        plan = plan_gpu(net.network, 300, H200, schedule=schedule)
        empty_products = sum(k == 0 < n for k, n in zip(sizes, sizes[1:])) if schedule == "matmul" else 0
        rounds = -(-300 // plan.rows_at_once)
        assert len(gpu.launches) + len(gpu.products) + empty_products * rounds == plan.launches
        assert rounds == (3 if plan.scratch_bytes else 1)


VIEWS = {
    "strided": lambda a: host_array(np.repeat(a, 2, axis=1))[:, ::2],
    "features first": lambda a: host_array(np.moveaxis(a, -1, 0))[...].transpose(1, 2, 0),
    "reversed": lambda a: host_array(a[::-1, :, ::-1])[::-1, :, ::-1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sizes", [(5, 4), (5, 6, 4), (5, 6, 7, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_x_and_out_through_strides(gpu, small_rounds, rng, schedule, dtype, sizes, view):
    """Only the first step reads x and only the last writes out; rounds begin in the middle of their axes."""
    net = net_for(rng, schedule, sizes, dtype)
    x = rng.standard_normal((3, 50, 5)).astype(dtype)
    for strided_x, strided_y in ((True, True), (True, False), (False, True)):
        its_x = VIEWS[view](x) if strided_x else host_array(x)
        y = VIEWS[view](np.full((3, 50, 4), np.nan, dtype)) if strided_y else poisoned((3, 50, 4), dtype)
        assert packed_net(net, schedule)(its_x, y) is y
        check(net, x, y)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_narrower_x(gpu, rng, schedule):
    net = net_for(rng, schedule, (5, 6, 4))
    x = host_array(rng.integers(-9, 9, (20, 5), np.int8))
    check(net, x.astype("f4"), packed_net(net, schedule)(x))


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("kind", ["plain", "every second", "broadcast"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_callers_own_weights(gpu, small_rounds, rng, schedule, kind, layout):
    """cuBLAS reads either order as it is; other strides are packed first."""
    net = net_for(rng, schedule, (8, 8, 8), biases=[True, False], activations=["relu", "identity"])
    weights = [host_array(w.T if layout == "out_in" else w) for w in net.weights]
    if kind == "every second":
        weights[0] = host_array(np.repeat(np.repeat(weights[0], 2, axis=0), 2, axis=1))[::2, ::2]
    elif kind == "broadcast":
        net.weights[1][...] = net.weights[1][:1] if layout == "in_out" else net.weights[1][:, :1]
        whole = net.weights[1].T if layout == "out_in" else net.weights[1]
        weights[1] = np.broadcast_to(host_array(whole[:1]), (8, 8), subok=True)
    for _ in range(2):
        x = host_array(rng.standard_normal((200, 8)).astype("f4"))
        y = poisoned((200, 8), "f4")
        cupymlp.fused_mlp(
            x, *weights, biases=[host_array(net.biases[0]), None], weight_layout=layout, out=y,
            precision=net.network.precision, schedule=schedule,
        )  # fmt: skip
        check(net, x, y)
    if schedule == "matmul" and kind == "plain":
        assert {product[1] for product in gpu.products} == {int(layout == "out_in")}


def test_an_out_that_is_x_is_copied_first(gpu, rng):
    for schedule in SCHEDULES:
        net = net_for(rng, schedule, (8, 8, 8))
        x = host_array(rng.standard_normal((20, 8)).astype("f4"))
        before = np.array(x)
        packed_net(net, schedule)(x, x)
        check(net, before, x)


# --- cuBLAS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "compute", "sums"), [("float32", 69, 0), ("float16", 68, 0), ("bfloat16", 68, 0), ("float64", 70, 1)]
)
def test_products_are_never_less_than_float32(gpu, rng, dtype, compute, sums):
    """69 is CUBLAS_COMPUTE_32F_PEDANTIC, which takes no TF32 whatever the handle's math mode; sums leave as float32."""
    pytest.importorskip("ml_dtypes")
    net = net_for(rng, "matmul", (8, 8), dtype)
    packed_net(net, "matmul")(host_array(np.ones((3, 8)).astype(net.mlp().dtype)))
    (product,) = gpu.products
    assert (product[17], product[15]) == (compute, sums)


def test_a_layer_that_is_only_a_product_is_one_launch(gpu, rng):
    for dtype, kernels in (("float32", 0), ("float16", 2)):
        net = net_for(rng, "matmul", (8, 6, 4), dtype, biases=[False] * 2, activations=["identity"] * 2)
        gpu.launches.clear()
        x = host_array(rng.standard_normal((9, 8)).astype(dtype))
        check(net, x, packed_net(net, "matmul")(x))
        assert len(gpu.launches) == kernels
        assert plan_gpu(net.network, 9, H200).launches == 2 + kernels


def test_bias_and_activation_are_applied_in_place(gpu, rng):
    net = net_for(rng, "matmul", (8, 6, 4), biases=[True, True])
    plan = plan_gpu(net.network, 9, H200)
    assert plan.scratch_bytes == 256  # 9 rows of 6 float32: no room for sums
    half = plan_gpu(Network((8, 6, 4), ("relu",) * 2, (True,) * 2, "float16", "library"), 9, H200)
    assert half.scratch_bytes == 2 * 256


@pytest.mark.parametrize(
    ("layer", "read"),
    [
        ((3, 4, 4, 1), (0, 4)),
        ((3, 4, 9, 1), (0, 9)),
        ((3, 4, 1, 3), (1, 3)),
        ((3, 4, 1, 9), (1, 9)),
        ((3, 1, 5, 7), (0, 5)),  # one column: its other stride does not matter
        ((1, 4, 7, 1), (0, 4)),
        ((1, 4, 7, 5), (1, 5)),
        ((1, 1, 0, 0), (0, 1)),
        ((3, 4, 8, 2), None),
        ((3, 4, 0, 1), None),
        ((3, 4, -4, 1), None),
        ((3, 4, 2**31, 1), None),
    ],
)
def test_what_cublas_reads(layer, read):
    assert cublas_reads(*layer) == read


def test_arrays_are_packed_one_after_the_other(rng):
    net = random_net(rng, (3, 5, 2), biases=[True, False], precision="library")
    assert array_offsets(net.network) == [(0, 64), (96, 144)]
    packed = pack(np, "arrays", net.network, net.weights, net.biases)
    assert packed.nbytes == arrays_bytes(net.network) == 144
    np.testing.assert_array_equal(packed[:15], net.weights[0].ravel())
    np.testing.assert_array_equal(packed[16:21], net.biases[0])
    np.testing.assert_array_equal(packed[24:34], net.weights[1].ravel())


# --- Scratch memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def layered(gpu, rng):
    net = random_net(rng, CANONICAL)
    x = host_array(rng.standard_normal((50, 48)).astype("f4"))
    run = packed_net(net, "layer")

    def call(rows=50):
        y = poisoned((rows, 24), "f4")
        run(x[:rows], y)
        check(net, x[:rows], y)

    return call


def scratch(gpu):
    return {key[:2]: memory.address for key, memory in _chain._memories.items() if memory.address}


def test_a_second_call_allocates_nothing(gpu, layered):
    layered()
    allocations = list(gpu.allocations)
    assert len(allocations) == 3  # the weights, the stream's scratch memory, and as much for a capture
    layered()
    layered(20)
    assert gpu.allocations == allocations


def test_memory_grows_and_the_old_one_stays(gpu, layered):
    layered(1)
    old = scratch(gpu)
    layered(50)
    assert scratch(gpu) != old
    assert {memory.ptr for memory in _chain._kept} >= {*old.values(), *scratch(gpu).values()}


def test_streams_share_nothing(gpu, layered):
    layered()
    gpu.stream.ptr = 7
    layered()
    assert len(set(scratch(gpu).values())) == 2


def test_threads_share_nothing_of_their_default_streams(gpu, layered):
    """All of these have one address, 2, and are different streams."""
    gpu.stream.ptr = 2
    layered()
    thread = threading.Thread(target=layered)
    thread.start()
    thread.join()
    assert len({memory.address for memory in _chain._memories.values()}) == 2


def test_a_capture_takes_what_was_put_aside(gpu, layered):
    """On any stream; graphs that are captured on one stream share their memory, which no other call uses."""
    layered()
    allocations = list(gpu.allocations)
    gpu.stream.ptr, gpu.stream.capturing = 9, True
    layered()
    layered()
    assert gpu.allocations == allocations
    captured = _chain._memories[0, 9, 0, True].address
    gpu.stream.ptr, gpu.stream.capturing = 0, False
    layered()  # puts aside again
    assert len(gpu.allocations) == len(allocations) + 1
    assert captured not in scratch(gpu).values() or scratch(gpu)[0, 9] == captured
    assert _chain._spares[0][0] not in {memory.address for memory in _chain._memories.values()}


def test_a_capture_cannot_allocate(gpu, layered):
    gpu.stream.capturing = True
    with pytest.raises(RuntimeError, match="make the same call once before the capture"):
        layered()
    gpu.stream.capturing = False
    layered(1)
    layered(50)
    gpu.stream.ptr, gpu.stream.capturing = 9, True
    layered()
    gpu.stream.ptr = 10  # nothing is left for a second one
    with pytest.raises(RuntimeError, match="make the same call once before the capture"):
        layered()


def test_a_capture_of_cublas_is_refused(gpu, rng):
    net = net_for(rng, "matmul", CANONICAL)
    run = packed_net(net, "matmul")
    x, y = host_array(np.ones((5, 48), "f4")), poisoned((5, 24), "f4")
    run(x, y)
    gpu.stream.capturing = True
    with pytest.raises(RuntimeError, match="precision='library' calls cuBLAS"):
        run(x, y)


@given(batch=st.integers(0, 10**7), sizes=st.lists(st.integers(1, 20_000), min_size=2, max_size=6), half=st.booleans())
def test_rounds_cover_the_batch_and_bound_the_memory(batch, sizes, half):
    network = Network(
        tuple(sizes), ("relu",) * (len(sizes) - 1), (True,) * (len(sizes) - 1), "float16" if half else "float32"
    )
    layout = steps.hidden_scratch(network)
    rows = steps.rows_at_once(batch, layout)
    assert rows <= batch
    if batch == 0 or layout.bytes_of_a_row == 0:
        assert rows == batch
        return
    rounds = -(-batch // rows)
    assert rows == batch or rows % steps.ROUND_ROWS == 0
    assert rows * layout.bytes_of_a_row <= max(steps.SCRATCH_BYTES, steps.LEAST_ROWS * layout.bytes_of_a_row)
    assert batch - (rounds - 1) * rows > 0
    offsets = [*layout.offsets(rows).values(), layout.total(rows)]
    for (start, end), size in zip(zip(offsets, offsets[1:]), layout.row_bytes.values()):
        assert start % 16 == 0
        assert end - start >= rows * size


def test_accesses_of_the_ends_stay_at_the_ends():
    network = Network((4, 5, 6, 7), ("relu",) * 3, (True,) * 3, "float32")
    access = Access("int8", "strided", "strided", 2)
    assert steps.layer_access(network, 0, access) == Access("int8", "strided", "contiguous", 2)
    assert steps.layer_access(network, 1, access) == Access()
    assert steps.layer_access(network, 2, access) == Access(None, "contiguous", "strided", 2)
