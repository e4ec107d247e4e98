"""The unmodified .cu files, compiled for the host and run with real threads: bits, and what the sanitizers say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    CANONICAL,
    H200,
    NETS,
    HostError,
    Net,
    c_loop,
    launch_on_host,
    odd_values,
    random_net,
    run_on_host,
    same_bits,
)

from cupymlp._pack import pack
from cupymlp.network import numpy_dtype
from cupymlp.plan import Access, Device, readable_dtypes
from cupymlp.schedules import plan_gpu
from cupymlp.schedules.matmul import matmul_steps
from cupymlp.schedules.steps import one_layer

SCHEDULES = ("row", "tile", "layer")  # the layer schedule runs here on networks of one layer: they are its launches
HALVES = ("float16", "bfloat16")
ONE_SM = Device("one multiprocessor", 90, 1, 232448)  # few of them make the planner take the large tiles
LAYERS = ((48, 64), (1, 1), (17, 33), (65, 2), (130, 10), (0, 5), (129, 70), (3, 200))


def numbers(rng, rows, net):
    return odd_values(rng, (rows, net.network.sizes[0]), net.network.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_bits_of_row_equal_the_c_loop(rng, sizes, dtype):
    net = random_net(rng, sizes, dtype)
    x = numbers(rng, 7, net)
    assert same_bits(run_on_host(net, x), c_loop(net, x))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sizes", [CANONICAL, (17, 33, 65, 2), (130, 10), (3, 600, 2), (7, 0, 4), (0, 5, 3)], ids=str)
def test_bits_of_row_equal_the_c_loop_in_half_precision(rng, sizes, dtype):
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, sizes, dtype)
    x = numbers(rng, 7, net)
    assert same_bits(run_on_host(net, x), c_loop(net, x))


@pytest.mark.parametrize("device", [H200, ONE_SM], ids=["few rows a lane", "many"])
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_bits_of_tile_equal_the_c_loop(rng, sizes, device):
    """37 rows: the last tile is not full."""
    net = random_net(rng, sizes)
    x = numbers(rng, 37, net)
    assert same_bits(run_on_host(net, x, schedule="tile", device=device), c_loop(net, x))


@pytest.mark.parametrize("dtype", ["float64", *HALVES])
@pytest.mark.parametrize("sizes", [CANONICAL, (17, 33, 65, 2), (130, 10), (7, 0, 4), (0, 5, 3)], ids=str)
def test_bits_of_tile_equal_the_c_loop_in_other_dtypes(rng, sizes, dtype):
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, sizes, dtype)
    x = numbers(rng, 37, net)
    assert same_bits(run_on_host(net, x, schedule="tile", device=ONE_SM), c_loop(net, x))


@pytest.mark.parametrize("device", [H200, ONE_SM], ids=["small tiles", "large"])
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_bits_of_layer_equal_the_c_loop(rng, sizes, device):
    net = random_net(rng, sizes)
    x = numbers(rng, 131 if device is ONE_SM else 37, net)
    assert same_bits(run_on_host(net, x, schedule="layer", device=device), c_loop(net, x))


@pytest.mark.parametrize("dtype", ["float64", *HALVES])
@pytest.mark.parametrize("sizes", [(48, 64), (17, 33), (130, 10), (0, 5)], ids=str)
def test_bits_of_layer_equal_the_c_loop_in_other_dtypes(rng, sizes, dtype):
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, sizes, dtype)
    x = numbers(rng, 67, net)
    assert same_bits(run_on_host(net, x, schedule="layer", device=ONE_SM), c_loop(net, x))


def test_layer_after_layer_is_the_network(rng):
    """A hidden layer's outputs in the storage type are what the next launch reads."""
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, (17, 33, 20, 2), "bfloat16")
    x = h = numbers(rng, 10, net)
    for layer in range(3):
        one = Net(one_layer(net.network, layer), [net.weights[layer]], [net.biases[layer]])
        h = run_on_host(one, h, schedule="layer")
    assert same_bits(h, c_loop(net, x))


@pytest.mark.parametrize("sanitizer", ["plain", "address+undefined"])
def test_a_round_of_rows(rng, sanitizer):
    """Rows 20 .. 45 of x to rows 3 .. 28 of y; the grid would do for more."""
    net = random_net(rng, (40, 30))
    x = numbers(rng, 46, net)
    (kernel,) = plan_gpu(net.network, 200, H200, schedule="layer").kernels
    packed = pack(np, "vectors", net.network, net.weights, net.biases)
    y = launch_on_host(
        kernel, x.tobytes(), b"\xff" * (29 * 30 * 4), packed.tobytes(), np.int64(26).tobytes(),
        sanitizer=sanitizer, round_=(20, 3, 26),
    )  # fmt: skip
    assert y[: 3 * 30 * 4] == b"\xff" * (3 * 30 * 4)
    assert same_bits(np.frombuffer(y, "f4").reshape(29, 30)[3:], c_loop(net, x)[20:])


@pytest.mark.parametrize("sanitizer", ["address+undefined", "thread"])
@pytest.mark.parametrize("sizes", [CANONICAL, (17, 33, 65, 2), (130, 10), (3, 100, 2, 70), (7, 0, 4)], ids=str)
def test_sanitizers_have_nothing_to_say_about_row(rng, sizes, sanitizer):
    """A grid of two blocks for five rows, so that blocks go round, too."""
    net = random_net(rng, sizes)
    x = numbers(rng, 5, net)
    assert same_bits(run_on_host(net, x, sanitizer=sanitizer, grid=2), c_loop(net, x))


@pytest.mark.parametrize("sanitizer", ["address+undefined", "thread"])
@pytest.mark.parametrize("sizes", [CANONICAL, (17, 33, 65, 2), (7, 0, 4)], ids=str)
def test_sanitizers_have_nothing_to_say_about_tile(rng, sizes, sanitizer):
    """One block, whose warps go round."""
    net = random_net(rng, sizes)
    x = numbers(rng, 597, net)
    assert same_bits(run_on_host(net, x, schedule="tile", sanitizer=sanitizer, grid=1), c_loop(net, x))


@pytest.mark.parametrize("sanitizer", ["address+undefined", "thread"])
@pytest.mark.parametrize(("sizes", "device"), [((70, 33), H200), ((40, 130), ONE_SM), ((0, 5), H200)], ids=str)
def test_sanitizers_have_nothing_to_say_about_layer(rng, sizes, device, sanitizer):
    net = random_net(rng, sizes)
    x = numbers(rng, 67, net)
    assert same_bits(run_on_host(net, x, schedule="layer", device=device, sanitizer=sanitizer), c_loop(net, x))


@pytest.mark.parametrize(
    ("dtype", "n", "strided"), [("float32", 8, False), ("bfloat16", 30, True), ("float16", 12, False)]
)
@pytest.mark.parametrize("sanitizer", ["plain", "address+undefined"])
def test_bias_act_rounds_once(rng, sanitizer, dtype, n, strided):
    """Sums of float32 (from row 5 on), bias, relu, rounding: what follows cuBLAS's product."""
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, (n, n), dtype, biases=[True], activations=["relu"], precision="library")
    access = Access("float32", "contiguous", "strided" if strided else "contiguous", int(strided))
    (kernel,) = [step.kernel for step in matmul_steps(net.network, 20, H200, access) if step.kernel and step.layer == 0]
    sums = odd_values(rng, (25, n), "float32")
    step = (2 if strided else 1) * n * net.biases[0].itemsize
    rows = [20, 0, net.biases[0].itemsize, 20, 0, step] if strided else [20]
    y = launch_on_host(
        kernel, sums.tobytes(), b"\xff" * (20 * step), np.array([0, 40, 0, 0, 1], np.int64).tobytes() + net.biases[0].tobytes(),
        np.array(rows, np.int64).tobytes(), sanitizer=sanitizer, grid=1, round_=(5, 0, 20),
    )  # fmt: skip
    v = sums[5:] + net.biases[0].astype("f4")
    with np.errstate(all="ignore"):
        want = np.where(v < 0, np.float32(0), v).astype(numpy_dtype(dtype))
    got = np.frombuffer(y, numpy_dtype(dtype)).reshape(20, -1)
    assert same_bits(got[:, :n], want)
    assert got[:, n:].tobytes() == b"\xff" * got[:, n:].nbytes


@pytest.mark.parametrize("group", [16, 32, 48, 64])
def test_bits_do_not_depend_on_the_group(rng, group):
    net = random_net(rng, (130, 70, 90, 7))
    x = numbers(rng, 4, net)
    edit = {f"-DMLP_GROUP={g}": f"-DMLP_GROUP={group}" for g in (16, 32, 48, 64)}
    assert same_bits(run_on_host(net, x, plan_edit=edit), c_loop(net, x))


@pytest.mark.parametrize(("schedule", "sizes"), [("row", (20, 70, 3)), ("tile", (20, 70, 3)), ("layer", (20, 70))])
@pytest.mark.parametrize("sanitizer", ["plain", "address+undefined"])
def test_the_callers_own_weights_through_strides(rng, sanitizer, schedule, sizes):
    """fused_mlp's arguments: pointers and strides of each layer; here a transposed weight and a reversed bias."""
    depth = len(sizes) - 1
    net = random_net(rng, sizes, biases=[True, False][:depth])
    x = numbers(rng, 5, net)
    arrays = [net.weights[0].T.copy(), *net.weights[1:], net.biases[0][::-1].copy()]
    starts = np.cumsum([5 * 8 * depth, *(array.nbytes for array in arrays)])
    last_of_b1 = starts[-1] - 4
    table = {  # weights, biases, k strides, j strides, bias strides
        1: [starts[0], last_of_b1, 1, 20, -1],
        2: [starts[0], starts[1], last_of_b1, 0, 1, 3, 20, 1, -1, 0],
    }[depth]
    weights = np.array(table, np.int64).tobytes() + b"".join(array.tobytes() for array in arrays)
    y = run_on_host(net, x, schedule=schedule, sanitizer=sanitizer, access=Access(packed=False), weights=weights)
    assert same_bits(y, c_loop(net, x))


CASTS = [("row", d) for d in readable_dtypes()] + [
    (schedule, d) for schedule in ("tile", "layer") for d in ("bool", "int8", "int64", "bfloat16", "float16")
]


@pytest.mark.parametrize(("schedule", "source"), CASTS)
def test_narrower_x_is_widened(rng, schedule, source):
    pytest.importorskip("ml_dtypes")
    code = numpy_dtype(source)
    dtype = "float32" if np.result_type(code, "f4") == np.float32 else "float64"
    sizes = (9, 5) if schedule == "row" else (8, 5)  # which take quads of x
    net = random_net(rng, sizes, dtype)
    shape = (6, sizes[0])
    if code.kind in "iu":
        x = rng.integers(np.iinfo(code).min, np.iinfo(code).max, shape, code, endpoint=True)
    elif source == "bool":
        x = rng.integers(0, 2, shape).astype(bool)
    else:
        x = odd_values(rng, shape, source)
    y = run_on_host(net, x, schedule=schedule, access=Access(x_dtype=source))
    assert same_bits(y, c_loop(net, x.astype(dtype)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["strided", "unaligned"])
@pytest.mark.parametrize("sanitizer", ["plain", "address+undefined"])
@settings(max_examples=12)
@given(data=st.data())
def test_strides_and_addresses(schedule, kind, sanitizer, data):
    """x and y as views of larger arrays, with any order of axes, gaps and reversed axes."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    net = random_net(np.random.default_rng(7), (5, 4), biases=[True], activations=["relu"])
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2)))
    order = data.draw(st.permutations(range(3)))
    gaps = [data.draw(st.integers(1, 3)) for _ in range(3)]
    flips = [data.draw(st.booleans()) for _ in range(3)]

    def view(features):
        """A view of memory, its strides in bytes, the memory and where the first element is in it."""
        full = (*shape, features)
        memory = np.full(np.prod([full[a] * gaps[a] for a in order]), np.nan, "f4")
        array = memory.reshape([full[a] * gaps[a] for a in order]).transpose(np.argsort(order))
        array = array[tuple(slice(0, f * g, g) for f, g in zip(full, gaps, strict=True))]
        array = array[tuple(slice(None, None, -1) if flip else slice(None) for flip in flips)]
        start = array.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
        return array, memory, start

    x, x_memory, x_start = view(5)
    y, y_memory, y_start = view(4)
    x[...] = rng.standard_normal(x.shape)
    rows = np.array(
        [shape[0] * shape[1], x.strides[-1], y.strides[-1], *shape, *x.strides[:-1], *y.strides[:-1]], np.int64
    )
    past = (1, 3) if kind == "unaligned" else (0, 0)
    out = run_on_host(
        net,
        np.empty((shape[0] * shape[1], 0)),
        schedule=schedule,
        sanitizer=sanitizer,
        grid=3 if schedule == "row" else None,
        access=Access("float32", kind, kind, 2),
        rows=rows.tobytes(),
        x_bytes=x_memory.tobytes(),
        y_bytes=y_memory.nbytes,
        past=past,
        starts=(x_start, y_start),
    )
    y_memory[...] = np.frombuffer(out, "f4")
    want = c_loop(net, np.ascontiguousarray(x).reshape(-1, 5)).reshape(*shape, 4)
    assert same_bits(np.ascontiguousarray(y), want)
    y[...] = np.frombuffer(b"\xff" * 4, "f4")[0]
    assert y_memory.tobytes() == b"\xff" * y_memory.nbytes  # nothing else was written


# --- The tests can fail: each fault goes red -------------------------------------------------------------------------

FAULTS = {
    "row, a barrier dropped": ("__syncthreads();\n        run_layers<L + 1>", "run_layers<L + 1>", "thread"),
    "row, the first barrier dropped": ("__syncthreads();\n        run_layers<0>", "run_layers<0>", "thread"),
    "row, the barrier between rows dropped": ("__syncthreads();  // the next row", "  // the next row", "thread"),
    "row, a bound off by one": ("if (t < REST) f(", "if (t <= REST) f(", "address+undefined"),
    "row, the layout swapped": ("WEIGHTS_AT + static_cast<long long>(i) * N + j", "WEIGHTS_AT + j * vectors(K) + i", "plain"),
    "row, NaN swallowed": ("return relu(v);", "return v > 0 ? v : T(0);", "plain"),
    "row, the bias skipped": ("T sum = bias;", "T sum = -T(0); (void)bias;", "plain"),
    "row, blocks added in another order": ("for (int c = 0; c < CHAINS; ++c) sum =",
                                           "for (int c = CHAINS - 1; c >= 0; --c) sum =", "plain"),
    "tile, the barrier between layers dropped": ("__syncwarp();\n        run_layers<L + 1>", "run_layers<L + 1>", "thread"),
    "tile, the first barrier dropped": ("__syncwarp();\n        run_layers<0>", "run_layers<0>", "thread"),
    "tile, the barrier between tiles dropped": ("__syncwarp();  // the next tile", "  // the next tile", "thread"),
    "tile, the weights' barrier dropped": ("__syncthreads();\n    for (; first_row", "for (; first_row", "thread"),
    "tile, a row too many": ("if (r > last) continue;", "if (r > last + 1) continue;", "address+undefined"),
    "layer, the barrier between chunks dropped": ("__syncthreads();  // the next stage", "  // the next stage", "thread"),
    "layer, the first barrier dropped": ("weights_share.store_to(shared);\n        __syncthreads();",
                                         "weights_share.store_to(shared);", "thread"),
    "layer, one stage for all": ("shared + (chunk + 1) % 2 * STAGE", "shared + chunk % 2 * STAGE", "plain"),
    "layer, a row too many": ("if (row >= count) continue;", "if (row > count) continue;", "address+undefined"),
    "layer, a column too many": ("|| j < N) to.set", "|| j <= N) to.set", "address+undefined"),
    "layer, the last chunk whole": ("add_chunk<LAST>(sum", "add_chunk<LAST / 4 * 4>(sum", "plain"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(rng, fault):
    old, new, sanitizer = FAULTS[fault]
    schedule = fault.split(",")[0]
    sizes = (70, 33) if schedule == "layer" else (40, 70, 33, 50)
    depth = len(sizes) - 1
    net = random_net(rng, sizes, biases=[True] * depth, activations=["relu"] * depth)
    rows, grid = {"row": (6, 2), "tile": (597, 1), "layer": (21, None)}[schedule]
    x = numbers(rng, rows, net)
    try:
        y = run_on_host(net, x, schedule=schedule, sanitizer=sanitizer, grid=grid, edit=(old, new))
    except HostError as error:
        found = "Sanitizer" in str(error) or "runtime error" in str(error)
    else:
        found = not same_bits(y, c_loop(net, x))
    assert found
