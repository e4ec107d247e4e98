"""The kernels and their launch on a GPU: bits, accesses, manners."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import threading

import numpy as np
import pytest
from support import CANONICAL, NETS, c_loop, in_threads, odd_values, random_net, same_bits

import cupymlp
from cupymlp import _compile, _launch
from cupymlp.plan import Device, readable_dtypes
from cupymlp.verify import random_mlp

pytestmark = pytest.mark.gpu

BATCHES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4097)
DTYPES = ("float32", "float64")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def on_gpu(cupy, net, x, **options):
    """net(x) in an output that was poisoned before."""
    out = cupy.full((*x.shape[:-1], net.network.sizes[-1]), np.nan, net.network.dtype)
    return net.mlp(**options)(cupy.asarray(x), out=out).get()


# --- Bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_bits_equal_the_c_loop_for_every_row_of_every_batch(cupy, rng, sizes, dtype):
    net = random_net(rng, sizes, dtype)
    mlp = net.mlp()
    x = rng.standard_normal((max(BATCHES), sizes[0])).astype(dtype)
    want = c_loop(net, x)
    gpu_x = cupy.asarray(x)
    for batch in BATCHES:
        out = cupy.full((batch, sizes[-1]), np.nan, dtype)
        assert same_bits(mlp(gpu_x[:batch], out=out).get(), want[:batch]), batch


@pytest.mark.parametrize("seed", range(20))
def test_bits_of_random_nets_with_odd_values(cupy, seed):
    """Ten nets a seed: depth 1 to 6, widths 1 to 300, subnormals, infinities and NaN in x, and in some weights."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        sizes = rng.integers(1, 301, rng.integers(2, 8))
        dtype = DTYPES[rng.integers(2)]
        net = random_net(rng, sizes, dtype)
        if rng.random() < 0.5:  # tiny weights make subnormal sums; a rare NaN or infinity among them
            few = rng.random(net.weights[0].shape) < 0.05
            net.weights[0][...] = np.where(few, odd_values(rng, net.weights[0].shape, dtype), 0)
        x = odd_values(rng, (int(rng.integers(1, 40)), sizes[0]), dtype)
        layout = ("in_out", "out_in")[rng.integers(2)]
        assert same_bits(on_gpu(cupy, net, x, weight_layout=layout), c_loop(net, x)), (sizes, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_numbers_are_kept(cupy, dtype):
    tiny = np.finfo(dtype).smallest_subnormal
    net = cupymlp.MLP([np.eye(4, dtype=dtype)] * 2, [np.full(4, tiny, dtype), None], "identity", "relu")
    x = np.array([[3, -1, -2, 0]], dtype) * tiny
    assert same_bits(net(cupy.asarray(x)).get(), np.array([[4, 0, 0, 1]], dtype) * tiny)


def test_a_row_has_the_same_bits_wherever_it_is_and_however_often(cupy, canonical, rng):
    mlp = canonical.mlp()
    x = cupy.asarray(rng.standard_normal((257, 48)).astype("f4"))
    all_rows = mlp(x).get()
    for i in (0, 1, 100, 256):
        assert same_bits(mlp(x[i]).get(), all_rows[i])
    order = rng.permutation(257)
    assert same_bits(mlp(x[cupy.asarray(order)]).get(), all_rows[order])
    for _ in range(20):
        assert same_bits(mlp(x).get(), all_rows)


def test_a_block_takes_several_rows_where_the_grid_is_too_small(cupy, canonical, rng, monkeypatch):
    real = _launch.device_numbers(0)
    small = Device(real.name, real.compute_capability, real.multiprocessors, real.shared_bytes, max_grid=7)
    monkeypatch.setattr(_launch, "device_numbers", lambda device_id: small)
    x = rng.standard_normal((100, 48)).astype("f4")
    assert same_bits(on_gpu(cupy, canonical, x, schedule="row"), c_loop(canonical, x))


def test_activations_beyond_48_kib_and_beyond_the_device(cupy, rng):
    for sizes in ((20_000, 3, 2), (100_000, 1)):
        net = random_net(rng, sizes)
        x = rng.standard_normal((3, sizes[0])).astype("f4")
        assert same_bits(on_gpu(cupy, net, x), c_loop(net, x))
    with pytest.raises(cupymlp.PlanError, match=r"activations need 400,000 bytes .* gives a block [\d,]+"):
        net.mlp(schedule="row")(cupy.zeros((1, 100_000), "f4"))


# --- What x and out may be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", readable_dtypes())
def test_narrower_dtypes_are_widened_and_wider_ones_refused(cupy, rng, x_dtype, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    source = np.dtype(ml_dtypes.bfloat16 if x_dtype == "bfloat16" else x_dtype)
    net = random_net(rng, (9, 5), dtype)
    if source.kind in "iu":
        x = rng.integers(np.iinfo(source).min, np.iinfo(source).max, (6, 9), source, endpoint=True)
    else:
        x = (rng.standard_normal((6, 9)) * np.logspace(-7, 3, 9)).astype(source)
    if np.result_type(source, dtype) != dtype:
        with pytest.raises(TypeError, match=f"x has dtype {x_dtype} and the network is {dtype}"):
            net.mlp()(cupy.asarray(x))
        return
    want = c_loop(net, x.astype(dtype))
    for view in (cupy.asarray(x), cupy.asarray(np.repeat(x, 2, axis=0))[::2], unaligned(cupy, x)):
        assert same_bits(net.mlp()(view).get(), want)


def test_float32_subnormals_are_widened_exactly(cupy):
    x = np.array([[1e-42, -1e-45, 1e-38]], "f4")
    assert same_bits(cupymlp.MLP([np.eye(3)])(cupy.asarray(x)).get(), x.astype("f8"))


def unaligned(cupy, array):
    """The same array on the GPU at an address that is no multiple of its element size (if that is more than 1)."""
    raw = cupy.zeros(array.nbytes + 1, "u1")
    raw[1:] = cupy.asarray(np.frombuffer(np.ascontiguousarray(array).tobytes(), "u1"))
    return cupy.ndarray(array.shape, array.dtype, memptr=raw.data + 1)


VIEWS = {
    "fortran": lambda cupy, x: cupy.asfortranarray(x),
    "every second row": lambda cupy, x: cupy.repeat(x, 2, axis=1)[:, ::2],
    "every third feature": lambda cupy, x: cupy.repeat(x, 3, axis=-1)[..., ::3],
    "reversed": lambda cupy, x: x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "axes swapped": lambda cupy, x: x.swapaxes(0, 1).copy().swapaxes(0, 1),
    "features first": lambda cupy, x: cupy.moveaxis(cupy.moveaxis(x, -1, 0).copy(), 0, -1),
    "inside a larger array": lambda cupy, x: cupy.pad(x, ((1, 2), (3, 1), (1, 1)))[1:-2, 3:-1, 1:-1],
    "rows a little longer": lambda cupy, x: cupy.pad(x, ((0, 0), (0, 0), (0, 1)))[..., :-1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("out_view", [None, *VIEWS])
def test_strides_of_x_and_out(cupy, canonical, rng, view, out_view):
    x = rng.standard_normal((5, 7, 48)).astype("f4")
    want = c_loop(canonical, x.reshape(35, 48)).reshape(5, 7, 24)
    gpu_x = VIEWS[view](cupy, cupy.asarray(x))
    out = None if out_view is None else VIEWS[out_view](cupy, cupy.full((5, 7, 24), np.nan, "f4"))
    y = canonical.mlp()(gpu_x, out=out)
    assert out is None or y is out
    assert same_bits(y.get(), want)
    assert same_bits(gpu_x.get(), x)


def test_a_strided_out_leaves_what_lies_between_alone(cupy, canonical, rng):
    x = rng.standard_normal((6, 48)).astype("f4")
    wide = cupy.full((6, 50), 7, "f4")
    canonical.mlp()(cupy.asarray(x), out=wide[:, 1:49:2])
    assert same_bits(wide[:, 1:49:2].get(), c_loop(canonical, x))
    assert (wide[:, 0:49:2] == 7).all()
    assert (wide[:, 49] == 7).all()


def test_broadcast_one_row_and_no_leading_axis(cupy, canonical, rng):
    x = rng.standard_normal(48).astype("f4")
    want = c_loop(canonical, x[None])
    mlp = canonical.mlp()
    assert same_bits(mlp(cupy.asarray(x)).get(), want[0])
    assert same_bits(mlp(cupy.broadcast_to(cupy.asarray(x), (4, 3, 48))).get(), np.broadcast_to(want[0], (4, 3, 24)))
    assert mlp(cupy.asarray(x)[None, None]).shape == (1, 1, 24)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_any_address(cupy, canonical, rng, offset):
    x = rng.standard_normal((5, 48)).astype("f4")
    raw, out_raw = cupy.zeros(5 * 48 * 4 + 16, "u1"), cupy.full(5 * 24 * 4 + 16, 0xAB, "u1")
    raw[offset : offset + x.nbytes] = cupy.asarray(x.view("u1").ravel())
    gpu_x = cupy.ndarray(x.shape, "f4", memptr=raw.data + offset)
    out = cupy.ndarray((5, 24), "f4", memptr=out_raw.data + offset)
    mlp = canonical.mlp()
    want = c_loop(canonical, x)
    for _ in range(2):
        assert same_bits(mlp(gpu_x).get(), want)
        assert mlp(gpu_x, out=out) is out
        assert same_bits(out_raw[offset : offset + want.nbytes].get().view("f4").reshape(5, 24), want)
    assert (out_raw[:offset] == 0xAB).all()
    assert (out_raw[offset + want.nbytes :] == 0xAB).all()


def test_an_unaligned_call_after_an_aligned_one_of_the_same_shape(cupy, canonical, rng):
    x = rng.standard_normal((5, 48)).astype("f4")
    mlp, want = canonical.mlp(), c_loop(canonical, x)
    for view in (cupy.asarray(x), unaligned(cupy, x), cupy.asarray(x), unaligned(cupy, x)):
        assert same_bits(mlp(view).get(), want)


@pytest.mark.parametrize("shift", [-24, -1, 0, 1, 24, 48])
def test_out_that_overlaps_x(cupy, rng, shift):
    net = random_net(rng, (24, 24, 24))
    x = rng.standard_normal((9, 24)).astype("f4")
    memory = cupy.zeros(9 * 24 + 100, "f4")
    start = 50
    gpu_x = memory[start : start + x.size].reshape(x.shape)
    gpu_x[...] = cupy.asarray(x)
    out = memory[start + shift : start + shift + x.size].reshape(x.shape)
    assert same_bits(net.mlp()(gpu_x, out=out).get(), c_loop(net, x))


def test_a_broadcast_out_is_refused(cupy, canonical):
    out = cupy.broadcast_to(cupy.full(24, 3, "f4"), (5, 24))
    with pytest.raises(ValueError, match="out is a broadcast array, whose elements share memory"):
        canonical.mlp()(cupy.zeros((5, 48), "f4"), out=out)
    assert (out == 3).all()


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("which", ["x", "first weight", "last weight", "bias"])
def test_fused_mlp_whose_out_overlaps_an_input(cupy, rng, which, layout):
    net = random_net(rng, (24, 24, 24), biases=[True, True], activations=["relu", "identity"])
    x = rng.standard_normal((24, 24)).astype("f4")
    arrays = {
        "x": cupy.asarray(x),
        "first weight": cupy.asarray((net.weights[0].T if layout == "out_in" else net.weights[0]).copy()),
        "last weight": cupy.asarray((net.weights[1].T if layout == "out_in" else net.weights[1]).copy()),
        "bias": cupy.asarray(np.broadcast_to(net.biases[0], (24, 24)).copy()),
    }  # fmt: skip
    for _ in range(2):
        inputs = {name: array.copy() for name, array in arrays.items()}
        y = cupymlp.fused_mlp(
            inputs["x"], inputs["first weight"], inputs["last weight"],
            biases=[inputs["bias"][11], cupy.asarray(net.biases[1])], out=inputs[which], weight_layout=layout,
        )  # fmt: skip
        assert y is inputs[which]
        assert same_bits(y.get(), c_loop(net, x))


def test_empty_batches_and_empty_outputs(cupy, canonical, rng):
    mlp = canonical.mlp()
    assert mlp(cupy.zeros((0, 48), "f4")).shape == (0, 24)
    assert mlp(cupy.zeros((3, 0, 48), "f4")).shape == (3, 0, 24)
    out = cupy.zeros((0, 24), "f4")
    assert mlp(cupy.zeros((0, 48), "f4"), out=out) is out
    assert cupymlp.MLP([np.zeros((3, 0), "f4")])(cupy.zeros((2, 3), "f4")).shape == (2, 0)


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_errors_name_what_came_and_leave_out_alone(cupy, canonical):
    mlp = canonical.mlp()
    x = cupy.zeros((5, 48), "f4")
    out = cupy.full((5, 24), 3, "f4")
    for bad_x, bad_out, error, message in [
        (cupy.zeros((5, 47), "f4"), out, ValueError, "last axis is 47; the network takes 48"),
        (cupy.zeros((), "f4"), None, ValueError, "0-dimensional"),
        (cupy.zeros((48, 5), "f4"), None, ValueError, r"x\.T would fit"),
        (x.astype("f8"), out, TypeError, r"x\.astype\('float32'\)"),
        (x.astype("c8"), out, TypeError, "complex64"),
        (x, cupy.zeros((5, 23), "f4"), ValueError, r"out has shape \(5, 23\); the result has shape \(5, 24\)"),
        (x, out.astype("f8"), TypeError, "out has dtype float64; the result is float32"),
        (x, np.zeros((5, 24), "f4"), TypeError, "NumPy and GPU arrays are not mixed"),
        (np.zeros((5, 48), "f4"), out, TypeError, "NumPy and GPU arrays are not mixed"),
    ]:
        for _ in range(2):  # the second time must not be taken for known
            with pytest.raises(error, match=message):
                mlp(bad_x, out=bad_out)
    assert (out == 3).all()
    with pytest.raises(TypeError, match="device='cpu'"):
        mlp(x, device="cpu")
    with pytest.raises(TypeError, match="not mixed"):
        cupymlp.MLP([np.zeros((3, 4)), cupy.zeros((4, 5))])


# --- Manners of a call ------------------------------------------------------------------------------------------------


class Allocations:
    """Counts what CuPy's memory pool is asked for."""

    def __init__(self, cupy):
        outer = self
        self.count = 0

        class Hook(cupy.cuda.MemoryHook):
            name = "count"

            def malloc_preprocess(self, **_):
                outer.count += 1

        self._hook = Hook()

    def __enter__(self):
        self._hook.__enter__()
        return self

    def __exit__(self, *args):
        return self._hook.__exit__(*args)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.astype("f2"), lambda x: x[::-1], lambda x: x.T.copy().T])
def test_a_second_call_allocates_and_compiles_nothing(cupy, canonical, rng, monkeypatch, make):
    mlp = canonical.mlp()
    x = make(cupy.asarray(rng.standard_normal((16, 48)).astype("f4")))
    out = cupy.empty((16, 24), "f4")
    mlp(x, out=out)
    mlp(x)
    monkeypatch.setattr(_compile, "_compile", lambda plan: pytest.fail("compiled again"))
    with Allocations(cupy) as allocations:
        for _ in range(3):
            mlp(x, out=out)
        assert allocations.count == 0
        mlp(x)
        assert allocations.count == 1


def test_fused_mlp_with_out_allocates_nothing(cupy, canonical, rng):
    x = cupy.asarray(rng.standard_normal((16, 48)).astype("f4"))
    weights = [cupy.asarray(w) for w in canonical.weights]
    out = cupy.empty((16, 24), "f4")
    cupymlp.fused_mlp(x, *weights, out=out)
    with Allocations(cupy) as allocations:
        cupymlp.fused_mlp(x, *weights, out=out)
        assert allocations.count == 0


SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""


def spin(cupy, seconds):
    """Keep the current stream busy."""
    cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(seconds * 1e9),))


@pytest.mark.parametrize("call", ["out", "no out", "fused", "strided"])
def test_a_call_waits_for_nothing(cupy, canonical, rng, call):
    mlp = canonical.mlp()
    x = cupy.asarray(rng.standard_normal((16, 48)).astype("f4"))
    strided = cupy.asfortranarray(x)
    out = cupy.empty((16, 24), "f4")
    weights = [cupy.asarray(w) for w in canonical.weights]
    calls = {
        "out": lambda: mlp(x, out=out),
        "no out": lambda: mlp(x),
        "fused": lambda: cupymlp.fused_mlp(x, *weights, out=out),
        "strided": lambda: mlp(strided, out=out),
    }
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(cupy, 1e-6)
        calls[call]()
        stream.synchronize()
        spin(cupy, 0.5)
        calls[call]()
        assert not stream.done
    stream.synchronize()


def test_work_goes_on_the_current_stream(cupy, canonical, rng):
    """x is written by the same stream, late: a launch on any other stream would read what was there before."""
    mlp = canonical.mlp()
    fresh = cupy.asarray(rng.standard_normal((64, 48)).astype("f4"))
    x, out = cupy.zeros_like(fresh), cupy.zeros((64, 24), "f4")
    mlp(x, out=out)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(cupy, 0.2)
        cupy.copyto(x, fresh)
        mlp(x, out=out)
    stream.synchronize()
    assert same_bits(out.get(), c_loop(canonical, fresh.get()))


def nodes(graph) -> int:
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(count))
    assert status == 0, status
    return count.value


@pytest.mark.parametrize("kind", ["contiguous", "strided", "fused"])
def test_a_call_is_one_launch_and_can_be_captured(cupy, canonical, rng, kind):
    mlp = canonical.mlp()
    x = cupy.asarray(rng.standard_normal((16, 48)).astype("f4"))
    x = cupy.asfortranarray(x) if kind == "strided" else x
    out = cupy.zeros((16, 24), "f4")
    weights = [cupy.asarray(w) for w in canonical.weights]
    biases = [None if b is None else cupy.asarray(b) for b in canonical.biases]

    def call():
        if kind == "fused":
            cupymlp.fused_mlp(x, *weights, biases=biases, out=out)
        else:
            mlp(x, out=out)

    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        assert nodes(graph) == 1
        for seed in (1, 2):  # changed data in the same buffer gives the new answer
            new = np.random.default_rng(seed).standard_normal((16, 48)).astype("f4")
            x[...] = cupy.asarray(new)
            graph.launch(stream)
            stream.synchronize()
            assert same_bits(out.get(), c_loop(canonical, new))


def test_an_empty_batch_launches_nothing(cupy, canonical):
    mlp = canonical.mlp()
    x, out = cupy.zeros((0, 48), "f4"), cupy.zeros((0, 24), "f4")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        mlp(x, out=out)
        graph = stream.end_capture()
    assert nodes(graph) == 0


def test_a_first_call_inside_a_capture_is_an_error_and_leaves_the_stream_usable(cupy, canonical):
    mlp = canonical.mlp()
    x, out = cupy.zeros((16, 48), "f4"), cupy.zeros((16, 24), "f4")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="make the same call once before the capture"):
            mlp(x, out=out)
        stream.end_capture()
        mlp(x, out=out)
        stream.begin_capture()
        mlp(x, out=out)
        assert nodes(stream.end_capture()) == 1


def test_a_result_in_memory_that_held_nan(cupy, canonical, rng):
    """Without out the result comes from the pool: every element must be written."""
    x = cupy.asarray(rng.standard_normal((100, 48)).astype("f4"))
    mlp = canonical.mlp()
    want = c_loop(canonical, x.get())
    for _ in range(3):
        poison = [cupy.full((100, 24), np.nan, "f4") for _ in range(4)]
        del poison
        assert same_bits(mlp(x).get(), want)


def test_threads_share_a_net(cupy, rng):
    net = random_net(rng, (40, 33, 21))
    mlp = net.mlp()
    x = rng.standard_normal((64, 40)).astype("f4")
    want = c_loop(net, x)
    wrong, start = [], threading.Barrier(8)

    def work(number):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            gpu_x = cupy.asarray(x)
            stream.synchronize()
            start.wait()
            for i in range(30):
                batch = 1 + (number * 7 + i) % 64
                y = mlp(gpu_x[:batch])
                stream.synchronize()
                if not same_bits(y.get(), want[:batch]):
                    wrong.append((number, i))

    in_threads(8, work)
    assert wrong == []


def test_pickles_and_copies_hold_host_weights_only(cupy, canonical, rng):
    mlp = canonical.mlp(weight_layout="out_in")
    size = len(pickle.dumps(mlp))
    x = cupy.asarray(rng.standard_normal((4, 48)).astype("f4"))
    want = mlp(x).get()
    assert len(pickle.dumps(mlp)) == size
    for again in (pickle.loads(pickle.dumps(mlp)), copy.deepcopy(mlp), copy.copy(mlp)):
        assert same_bits(again(x).get(), want)
        assert again.weight_layout == "out_in"


def test_a_dropped_net_gives_its_memory_back(cupy, rng):
    net = random_net(rng, (512, 2048, 512))  # 8 MiB of weights
    x = cupy.zeros((1, 512), "f4")
    net.mlp()(x)
    gc.collect()
    before = cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(20):
        net.mlp()(x)
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (32 << 20)


# --- Weights ------------------------------------------------------------------------------------------------------------


def test_an_mlp_copies_its_weights_and_fused_mlp_reads_them_at_the_call(cupy, rng):
    w = cupy.asarray(rng.standard_normal((6, 5)).astype("f4"))
    x = rng.standard_normal((3, 6)).astype("f4")
    mlp = cupymlp.MLP([w])
    before = mlp(cupy.asarray(x)).get()
    w[...] = 0
    assert same_bits(mlp(cupy.asarray(x)).get(), before)
    assert not cupymlp.fused_mlp(cupy.asarray(x), w).any()


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_fused_mlp_has_the_same_bits(cupy, rng, sizes, dtype, layout):
    net = random_net(rng, sizes, dtype)
    x = odd_values(rng, (11, sizes[0]), dtype)
    weights = [cupy.asarray(w.T if layout == "out_in" else w) for w in net.weights]
    biases = [None if b is None else cupy.asarray(b) for b in net.biases]
    hidden, last = net.network.activations[:-1], net.network.activations[-1]
    out = cupy.full((11, sizes[-1]), np.nan, dtype)
    y = cupymlp.fused_mlp(
        cupy.asarray(x), *weights, biases=biases, activation=hidden, out_activation=last, weight_layout=layout, out=out
    )
    assert y is out
    assert same_bits(y.get(), c_loop(net, x))
    again = cupymlp.fused_mlp(  # a remembered call, on the same arrays
        cupy.asarray(x), *weights, biases=biases, activation=hidden, out_activation=last, weight_layout=layout, out=out
    )
    assert same_bits(again.get(), c_loop(net, x))


def test_fused_mlp_reads_strided_weights_biases_and_x(cupy, rng):
    net = random_net(rng, (10, 20, 5), biases=[True, True])
    x = rng.standard_normal((4, 6, 10)).astype("f4")
    weights = [cupy.asarray(np.repeat(np.repeat(w, 2, 0), 3, 1))[::2, ::3] for w in net.weights]
    weights[1] = weights[1][::-1].copy()[::-1]
    biases = [cupy.asarray(b[::-1].copy())[::-1] for b in net.biases]
    hidden, last = net.network.activations[:-1], net.network.activations[-1]
    y = cupymlp.fused_mlp(
        VIEWS["axes swapped"](cupy, cupy.asarray(x)), *weights, biases=biases, activation=hidden, out_activation=last
    )
    assert same_bits(y.get(), c_loop(net, x.reshape(24, 10)).reshape(4, 6, 5))


def test_fused_mlp_widens_x_and_weights_to_their_common_dtype(cupy, rng):
    net = random_net(rng, (5, 4), "float64", activations=["identity"], biases=[False])
    net.weights[0][...] = net.weights[0].astype("f2")
    x = rng.standard_normal((3, 5))
    y = cupymlp.fused_mlp(cupy.asarray(x), unaligned(cupy, net.weights[0].astype("f2")))
    assert y.dtype == np.float64
    assert same_bits(y.get(), c_loop(net, x))


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_fused_mlp_deeper_than_the_kernel_arguments(cupy, rng, layout):
    net = random_net(rng, (6, *[8] * 120, 3), activations=["relu"] * 120 + ["identity"])
    x = rng.standard_normal((5, 6)).astype("f4")
    weights = [cupy.asarray((w.T if layout == "out_in" else w).copy()) for w in net.weights]
    biases = [None if b is None else cupy.asarray(b) for b in net.biases]
    for _ in range(2):  # the second call is a remembered one
        y = cupymlp.fused_mlp(cupy.asarray(x), *weights, biases=biases, weight_layout=layout)
        assert same_bits(y.get(), c_loop(net, x))


# --- Other libraries ----------------------------------------------------------------------------------------------------


class OnlyInterface:
    """Another library's array, known by ``__cuda_array_interface__`` alone."""

    def __init__(self, array, read_only=False):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.__cuda_array_interface__ = {
            **array.__cuda_array_interface__, "data": (array.data.ptr, read_only)
        }  # fmt: skip


class OnlyDLPack:
    """Another library's array, known by DLPack alone."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("wrap", [OnlyInterface, OnlyDLPack])
def test_foreign_gpu_arrays(cupy, canonical, rng, wrap):
    x = rng.standard_normal((7, 48)).astype("f4")
    want = c_loop(canonical, x)
    mlp, gpu_x, out = canonical.mlp(), cupy.asarray(x), cupy.zeros((7, 24), "f4")
    y = mlp(wrap(gpu_x))
    assert isinstance(y, cupy.ndarray)
    assert same_bits(y.get(), want)
    foreign_out = wrap(out)
    assert mlp(wrap(gpu_x), out=foreign_out) is foreign_out
    assert same_bits(out.get(), want)
    assert same_bits(gpu_x.get(), x)
    again = cupymlp.MLP([wrap(cupy.asarray(w)) for w in canonical.weights], activation="identity")
    assert same_bits(again.weights[0], canonical.weights[0])
    with pytest.raises(TypeError, match="not mixed"):
        mlp(wrap(gpu_x), out=np.zeros((7, 24), "f4"))


def test_a_read_only_foreign_out_is_refused(cupy, canonical):
    out = cupy.zeros((2, 24), "f4")
    with pytest.raises(ValueError, match="out is read-only"):
        canonical.mlp()(cupy.zeros((2, 48), "f4"), out=OnlyInterface(out, read_only=True))


# --- NumPy arrays on the GPU -----------------------------------------------------------------------------------------------


def test_numpy_in_and_out(cupy, canonical, rng):
    mlp = canonical.mlp()
    x = rng.standard_normal((3, 5, 48)).astype("f4")
    want = c_loop(canonical, x.reshape(15, 48)).reshape(3, 5, 24)
    assert same_bits(mlp(x), want)
    for view in (
        x.astype(">f4"), np.asfortranarray(x), x[::-1].copy()[::-1], np.repeat(x, 2, axis=1)[:, ::2],
        np.frombuffer(b"1" + x.tobytes(), "u1")[1:].view("f4").reshape(x.shape),
    ):  # fmt: skip
        assert same_bits(mlp(view, device="cuda"), want)
    for out in (np.empty((3, 5, 24), "f4"), np.empty((3, 5, 24), ">f4"), np.empty((3, 5, 48), "f4")[..., ::2]):
        assert mlp(x, out=out) is out
        assert same_bits(out.astype("f4"), want)
    assert same_bits(mlp(x[0, 0]), want[0, 0])
    in_place = random_net(rng, (8, 8))
    z = rng.standard_normal((4, 8)).astype("f4")
    expected = c_loop(in_place, z)
    assert same_bits(in_place.mlp()(z, out=z), expected)


def test_fused_mlp_on_numpy_arrays(cupy, canonical, rng):
    x = rng.standard_normal((5, 48)).astype("f4")
    y = cupymlp.fused_mlp(x, *canonical.weights, biases=canonical.biases)
    assert isinstance(y, np.ndarray)
    assert same_bits(y, c_loop(canonical, x))


# --- The rest of the main job ------------------------------------------------------------------------------------------------


def test_plan_tells_registers_once_compiled_and_the_canonical_launch(cupy, rng):
    mlp = random_net(rng, CANONICAL, biases=[False] * 3, activations=["relu", "relu", "identity"]).mlp()
    mlp(cupy.zeros((16, 48), "f4"))
    plan = mlp.plan(16)
    assert (plan.grid, plan.block, plan.launches, plan.schedule) == ((16,), (64,), 1, "row")
    assert 0 < plan.registers <= 255
    assert f"{plan.registers} a thread" in str(plan)


@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_on_the_gpu(cupy, dtype):
    report = cupymlp.verify(random_mlp(CANONICAL, bias=True, dtype=dtype), batch=200, device="cuda")
    assert report.ok, report
    assert {c.name for c in report.comparisons} == {"float64 reference", "cupy.matmul"}
    assert report.rows_equal is True


@pytest.mark.parametrize("sizes", [(0, 5, 3), (7, 0, 4), (3, 0)], ids=str)
def test_verify_nets_with_empty_layers(cupy, sizes):
    assert cupymlp.verify(random_mlp(sizes, bias=True), device="cuda").ok


def test_verify_fails_on_a_wrong_kernel(cupy, rng, monkeypatch):
    real = _compile.kernel_source
    monkeypatch.setattr(_compile, "kernel_source", lambda name: real(name).replace("return relu(v);", "return v;"))
    net = random_net(rng, (30, 20, 10), activations=["relu", "relu"], biases=[True, False]).mlp()
    report = cupymlp.verify(net, device="cuda")
    assert not report.ok
    assert "FAILED" in str(report)
