"""Every schedule on a GPU: bits where they are promised, proven bounds elsewhere, accesses, manners, large arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support import CANONICAL, NETS, c_loop, odd_values, random_net, same_bits

import cupymlp
from cupymlp.network import numpy_dtype
from cupymlp.plan import CONTIGUOUS, PlanError
from cupymlp.reference import error_in_bounds, forward_and_bound
from cupymlp.schedules import plan_gpu

pytestmark = pytest.mark.gpu

BATCHES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4097)
IEEE = ("row", "tile", "layer")
DTYPES = ("float16", "bfloat16", "float32", "float64")
TENSOR = (("float32", "tf32"), ("float32", "split3"), ("float16", "ieee"), ("bfloat16", "ieee"))
WIDE = ((128,) * 5, (784, 256, 10), (200, 300, 150), (512, 512, 512))


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def device_of(cupy):
    from cupymlp._gpu import device_numbers

    return device_numbers(cupy.cuda.runtime.getDevice())


def runs(cupy, network, schedule, batch=16) -> bool:
    """Whether the schedule can compute the network here; if not, the plan must say why."""
    try:
        plan_gpu(network, batch, device_of(cupy), CONTIGUOUS, schedule)
    except PlanError as error:
        message = str(error)
    else:
        return True
    assert f"{schedule}: " in message
    return False


def on_gpu(cupy, array):
    """The array on the GPU; bfloat16 by its bits."""
    if array.dtype.name == "bfloat16":
        return cupy.asarray(array.view("u2")).view(array.dtype)
    return cupy.asarray(array)


def poisoned(cupy, shape, dtype):
    """An array on the GPU whose every byte is 0xff: NaN."""
    size = int(np.prod(shape)) * dtype.itemsize
    return cupy.ndarray(shape, dtype, memptr=cupy.full(max(size, 1), 0xFF, "u1").data)


def host(array):
    """The array from the GPU."""
    if array.dtype.name == "bfloat16":
        return array.view("u2").get().view(array.dtype)
    return array.get()


def result(cupy, mlp, x, batch=None):
    """The net of x (on the GPU, or to go there) in a poisoned output."""
    gpu_x = on_gpu(cupy, x) if isinstance(x, np.ndarray) else x
    gpu_x = gpu_x if batch is None else gpu_x[:batch]
    out = poisoned(cupy, (*gpu_x.shape[:-1], mlp.network.sizes[-1]), numpy_dtype(mlp.network.dtype))
    assert mlp(gpu_x, out=out) is out
    return host(out)


def numpy_like(array, dtype):
    """The numbers in this dtype."""
    return array.astype(numpy_dtype(dtype))


def with_precision(net, precision):
    return replace(net, network=replace(net.network, precision=precision))


# --- ieee: one order of summation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*NETS, *WIDE], ids=str)
def test_bits_are_equal_across_row_tile_and_layer(cupy, rng, sizes, dtype):
    net = random_net(rng, sizes, dtype)
    x = odd_values(rng, (max(BATCHES), sizes[0]), dtype)
    want = c_loop(net, x[:1000])
    gpu_x = on_gpu(cupy, x)
    for schedule in IEEE:
        if not runs(cupy, net.network, schedule):
            assert schedule == "tile", (sizes, schedule)  # the only one that may not have room
            continue
        mlp = net.mlp(schedule=schedule)
        for batch in BATCHES:
            y = result(cupy, mlp, gpu_x, batch)
            assert same_bits(y[:1000], want[:batch]), (schedule, batch)
            if batch > 1000:
                assert same_bits(y[1000:], c_loop(net, x[1000:batch]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_planners_choice_has_the_bits_of_the_row_schedule_at_every_batch(cupy, rng, dtype):
    net = random_net(rng, CANONICAL, dtype)
    x = on_gpu(cupy, odd_values(rng, (70_001, 48), dtype))
    row, free = net.mlp(schedule="row"), net.mlp()
    for batch in (1, 100, 500, 1500, 3000, 9000, 70_001):
        assert same_bits(result(cupy, free, x, batch), result(cupy, row, x, batch)), batch


def test_sums_that_would_stick_in_half_precision_do_not(cupy):
    for dtype in ("float16", "bfloat16"):
        kind = numpy_dtype(dtype)
        for schedule in ("row", "tile", "layer", "mma", "wgmma"):
            ones = cupymlp.MLP([np.ones((4096, 1), kind)], schedule=schedule)
            if runs(cupy, ones.network, schedule):
                assert float(result(cupy, ones, np.ones((3, 4096), kind))[0, 0]) == 4096, (dtype, schedule)
            pair = cupymlp.MLP([np.array([[300], [300]], kind)], schedule=schedule)
            if runs(cupy, pair.network, schedule):
                assert float(result(cupy, pair, np.array([[300, -300]], kind))[0, 0]) == 0, (dtype, schedule)


# --- Tensor cores ----------------------------------------------------------------------------------------------------


def assert_in_bounds(net, x, y, **context):
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    units = error_in_bounds(y, reference, bound)
    assert units.size == 0 or units.max() <= 1, (
        float(units.max()),
        np.unravel_index(units.argmax(), units.shape),
        context,
    )


@pytest.mark.parametrize("schedule", ["mma", "wgmma"])
@pytest.mark.parametrize(("dtype", "precision"), TENSOR)
@pytest.mark.parametrize("sizes", [*NETS, *WIDE], ids=str)
def test_tensor_cores_are_within_the_bound_and_do_not_depend_on_the_batch(cupy, rng, sizes, dtype, precision, schedule):
    net = with_precision(random_net(rng, sizes, dtype), precision)
    if not runs(cupy, net.network, schedule):
        return
    mlp = net.mlp(schedule=schedule)
    x = odd_values(rng, (max(BATCHES), sizes[0]), dtype)
    gpu_x = on_gpu(cupy, x)
    whole = result(cupy, mlp, gpu_x)
    assert_in_bounds(net, x, whole)
    for batch in BATCHES:
        assert same_bits(result(cupy, mlp, gpu_x, batch), whole[:batch]), batch
    for row in (0, 1, 17, 4096):
        assert same_bits(result(cupy, mlp, gpu_x[row]), whole[row])


@pytest.mark.parametrize("precision", ["tf32", "split3"])
@pytest.mark.parametrize("sizes", [CANONICAL, (17, 33, 65, 2), (16, 16, 1), (128,) * 5], ids=str)
def test_the_planners_choice_does_not_depend_on_the_batch_in_its_bits(cupy, rng, sizes, precision):
    """Where it takes mma for few rows and wgmma for many, their bits must be the same."""
    net = with_precision(random_net(rng, sizes), precision)
    x = on_gpu(cupy, rng.standard_normal((70_001, sizes[0])).astype("f4"))
    mlp = net.mlp()
    whole = result(cupy, mlp, x)
    for batch in (1, 16, 100, 1000, 5000, 20_000):
        assert same_bits(result(cupy, mlp, x, batch), whole[:batch]), batch


@pytest.mark.parametrize("schedule", ["mma", "wgmma"])
@pytest.mark.parametrize("bias", [False, True])
def test_split3_at_any_scale(cupy, rng, schedule, bias):
    """x and weights scaled from 2^-60 to 2^60, rows of mixed scale, subnormal rows."""
    net = random_net(rng, CANONICAL, biases=[bias] * 3, activations=["relu", "relu", "identity"])
    net = with_precision(net, "split3")
    if not runs(cupy, net.network, schedule):
        return
    x = rng.standard_normal((500, 48)).astype("f4")
    mixed = x * np.exp2(rng.integers(-100, 100, (500, 1))).astype("f4")
    inside = x * np.exp2(rng.integers(-30, 30, (500, 48))).astype("f4")
    tiny = (x * 1e-40).astype("f4")
    with np.errstate(all="ignore"):
        for of_x in (-60, -20, 0, 20, 60):
            for of_w in (-60, -20, 0, 20, 60):
                scaled = [(w * 2.0**of_w).astype("f4") for w in net.weights]
                scaled_net = replace(net, weights=scaled)
                for unscaled in (x, mixed, inside, tiny):
                    rows = (unscaled * 2.0**of_x).astype("f4")
                    y = result(cupy, scaled_net.mlp(schedule=schedule), rows)
                    assert_in_bounds(scaled_net, rows, y, of_x=of_x, of_w=of_w)


@pytest.mark.parametrize("schedule", ["mma", "wgmma"])
def test_split3_is_as_accurate_as_a_chain_of_float32(cupy, rng, schedule):
    """At most twice the error of the C loop, in the Frobenius norm, on normally distributed numbers."""
    net = random_net(rng, CANONICAL, biases=[False] * 3, activations=["relu", "relu", "identity"])
    x = rng.standard_normal((20_000, 48)).astype("f4")
    split = with_precision(net, "split3")
    if not runs(cupy, split.network, schedule):
        return
    reference, _ = forward_and_bound(net.network, net.weights, net.biases, x)
    y = result(cupy, split.mlp(schedule=schedule), x)
    one_chain = x
    for weight, name in zip(net.weights, net.network.activations):
        sums = np.zeros((len(x), weight.shape[1]), "f4")
        for k in range(len(weight)):  # float64 products rounded once: a fused multiply-add, but for double rounding
            sums = (one_chain[:, k : k + 1].astype("f8") * weight[k].astype("f8") + sums).astype("f4")
        one_chain = np.maximum(sums, 0) if name == "relu" else sums
    size = np.linalg.norm(reference)
    error, of_chain = np.linalg.norm(y - reference) / size, np.linalg.norm(one_chain - reference) / size
    assert error <= 2 * of_chain, (error, of_chain)
    tf32 = with_precision(net, "tf32")
    coarse = result(cupy, tf32.mlp(schedule=schedule), x)
    assert np.linalg.norm(coarse - reference) / size > 100 * error  # the precisions are what they say


@pytest.mark.parametrize("schedule", ["mma", "wgmma"])
@pytest.mark.parametrize("where", ["x", "weight", "bias"])
def test_split3_computes_rows_with_infinities_and_nan_as_ieee_does(cupy, rng, schedule, where):
    net = random_net(rng, (20, 33, 7), biases=[True, True], activations=["relu", "identity"])
    if not runs(cupy, with_precision(net, "split3").network, schedule):
        return
    x = rng.standard_normal((100, 20)).astype("f4")
    if where == "x":
        x[::7, 3], x[3::11, 5], x[5::13, 0] = np.inf, np.nan, -np.inf
    elif where == "weight":
        net.weights[1][4, 2], net.weights[0][0, 0] = np.inf, np.nan
    else:
        net.biases[0][5] = -np.inf
    y = result(cupy, with_precision(net, "split3").mlp(schedule=schedule), x)
    want = c_loop(net, x)
    odd_rows = ~np.isfinite(x).all(1) if where == "x" else np.ones(len(x), bool)
    assert odd_rows.any()
    assert same_bits(y[odd_rows], want[odd_rows])
    assert_in_bounds(with_precision(net, "split3"), x, y)


# --- library -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*NETS, *WIDE], ids=str)
def test_library_is_within_the_bound(cupy, rng, sizes, dtype, monkeypatch):
    monkeypatch.setenv("CUPY_TF32", "1")  # must not matter
    net = with_precision(random_net(rng, sizes, dtype), "library")
    x = numpy_like(rng.standard_normal((1000, sizes[0])), dtype)
    for batch in (1, 33, 1000):
        assert_in_bounds(net, x[:batch], result(cupy, net.mlp(), x, batch), batch=batch)


def test_library_inside_a_capture_is_an_error_that_says_so(cupy, rng):
    net = with_precision(random_net(rng, (8, 8)), "library")
    mlp, x, out = net.mlp(), cupy.zeros((4, 8), "f4"), cupy.zeros((4, 8), "f4")
    mlp(x, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        mlp(x, out=out)
        stream.synchronize()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="precision='library'"):
            mlp(x, out=out)
        stream.end_capture()
        mlp(x, out=out)
        stream.synchronize()


# --- What x and out may be, in every schedule -------------------------------------------------------------------------------

EVERYTHING = [
    ("row", "float32", "ieee"), ("tile", "float32", "ieee"), ("tile", "float64", "ieee"), ("layer", "float32", "ieee"),
    ("tile", "float16", "ieee"), ("layer", "bfloat16", "ieee"),
    *[(schedule, dtype, precision) for schedule in ("mma", "wgmma") for dtype, precision in TENSOR],
    ("matmul", "float32", "library"), ("matmul", "float16", "library"),
]  # fmt: skip


def views(cupy, array):
    """The same numbers in other memory: strided, reversed, at an odd address, narrow rows of a wider array."""
    size, shape = array.dtype.itemsize, array.shape
    raw = array.view("u1").reshape(*shape, size)

    def view(steps, offset):
        reach = [abs(s) * (n - 1) for s, n in zip(steps, shape)]
        start = offset + sum(r for r, s in zip(reach, steps) if s < 0)
        memory = cupy.zeros(offset + sum(reach) + size, "u1")
        place = cupy.ndarray((*shape, size), "u1", memptr=memory.data + start, strides=(*steps, 1))
        place[...] = raw
        return cupy.ndarray(shape, array.dtype, memptr=memory.data + start, strides=steps)

    k = shape[-1]
    yield view((k * size, size), 0)
    yield view((k * size, size), size)  # aligned to an element only
    yield view((k * size, size), 1)  # not even that
    yield view((size, shape[0] * size), 0)  # Fortran order
    yield view((2 * k * size, -2 * size), 0)
    yield view(((k + 1) * size, size), 0)


@pytest.mark.parametrize(("schedule", "dtype", "precision"), EVERYTHING, ids=str)
@pytest.mark.parametrize("sizes", [(48, 64, 40, 24), (9, 17, 5)], ids=str)
def test_views_give_what_a_contiguous_copy_gives(cupy, rng, sizes, schedule, dtype, precision):
    net = with_precision(random_net(rng, sizes, dtype), precision)
    if not runs(cupy, net.network, schedule):
        return
    mlp = net.mlp(schedule=schedule)
    x = odd_values(rng, (70, sizes[0]), dtype)
    want = result(cupy, mlp, x)
    kind = numpy_dtype(dtype)
    for view in views(cupy, on_gpu(cupy, x)):
        assert same_bits(host(mlp(view)), want), view.strides
    for out in views(cupy, poisoned(cupy, (70, sizes[-1]), kind)):
        assert mlp(on_gpu(cupy, x), out=out) is out
        copy = cupy.ndarray((*out.shape, kind.itemsize), "u1", memptr=out.data, strides=(*out.strides, 1)).copy()
        assert same_bits(host(copy.view(kind).reshape(out.shape)), want), out.strides


@pytest.mark.parametrize(("schedule", "dtype", "precision"), EVERYTHING, ids=str)
def test_narrower_x_is_widened(cupy, rng, schedule, dtype, precision):
    net = with_precision(random_net(rng, (48, 33, 5), dtype), precision)
    if not runs(cupy, net.network, schedule):
        return
    mlp = net.mlp(schedule=schedule)
    for source in ("bool", "int8", "uint8", *([] if dtype.endswith("16") else ["int16", "float16"])):
        x = rng.integers(0, 2, (40, 48)).astype(bool) if source == "bool" else numpy_like(
            rng.integers(0 if source[0] == "u" else -100, 100, (40, 48)), source)  # fmt: skip
        assert same_bits(result(cupy, mlp, x), result(cupy, mlp, x.astype(numpy_dtype(dtype)))), source


@pytest.mark.parametrize(("schedule", "dtype", "precision"), EVERYTHING, ids=str)
def test_fused_mlp_gives_what_an_mlp_gives(cupy, rng, schedule, dtype, precision):
    net = with_precision(random_net(rng, CANONICAL, dtype), precision)
    if not runs(cupy, net.network, schedule):
        return
    x = odd_values(rng, (70, 48), dtype)
    want = result(cupy, net.mlp(schedule=schedule), x)
    weights = [on_gpu(cupy, w) for w in net.weights]
    biases = [None if b is None else on_gpu(cupy, b) for b in net.biases]
    hidden, last = net.network.activations[:-1], net.network.activations[-1]
    for layout in ("in_out", "out_in"):
        ready = [w.T if layout == "out_in" else w for w in weights]
        for _ in range(2):
            y = cupymlp.fused_mlp(
                on_gpu(cupy, x), *ready, biases=biases, activation=hidden, out_activation=last, weight_layout=layout,
                precision=precision, schedule=schedule,
            )  # fmt: skip
            assert same_bits(host(y), want), layout


@pytest.mark.parametrize(("schedule", "dtype", "precision"), [e for e in EVERYTHING if e[0] != "matmul"], ids=str)
def test_a_second_call_allocates_nothing_and_can_be_captured(cupy, rng, schedule, dtype, precision):
    net = with_precision(random_net(rng, CANONICAL, dtype), precision)
    if not runs(cupy, net.network, schedule):
        return
    mlp = net.mlp(schedule=schedule)
    x = on_gpu(cupy, numpy_like(rng.standard_normal((300, 48)), dtype))
    out = poisoned(cupy, (300, 24), numpy_dtype(dtype))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        mlp(x, out=out)
        stream.synchronize()
        want = host(out)
        used = cupy.get_default_memory_pool().used_bytes()
        mlp(x, out=out)
        assert cupy.get_default_memory_pool().used_bytes() == used
        out.view("u1")[...] = 0xFF
        stream.synchronize()
        stream.begin_capture()
        mlp(x, out=out)
        graph = stream.end_capture()
        for _ in range(2):
            out.view("u1")[...] = 0xFF
            graph.launch(stream)
            stream.synchronize()
            assert same_bits(host(out), want)


@pytest.mark.parametrize("schedule", ["layer", "tile", "wgmma"])
def test_streams_do_not_share_scratch(cupy, rng, schedule):
    dtype = "float16"
    net = random_net(rng, (64, 128, 128, 32), dtype)
    if not runs(cupy, net.network, schedule):
        return
    mlp = net.mlp(schedule=schedule)
    xs = [on_gpu(cupy, numpy_like(rng.standard_normal((5000, 64)), dtype)) for _ in range(4)]
    wants = [result(cupy, mlp, x) for x in xs]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in xs]
    outs = [poisoned(cupy, (5000, 32), numpy_dtype(dtype)) for _ in xs]
    cupy.cuda.Device().synchronize()
    for _ in range(10):
        for stream, x, out in zip(streams, xs, outs):
            with stream:
                mlp(x, out=out)
    for stream, out, want in zip(streams, outs, wants):
        stream.synchronize()
        assert same_bits(host(out), want)


# --- Large arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "precision"), [(None, "ieee"), ("row", "ieee"), ("tile", "ieee"), ("layer", "ieee"), ("mma", "ieee"),
                                ("wgmma", "ieee"), (None, "library")]
)  # fmt: skip
def test_more_than_2_to_the_31_elements(cupy, rng, schedule, precision):
    """A float16 x of 2^31 + 2^26 elements and an out as large: each row is one of 1,000 different ones."""
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 16 << 30:
        pytest.skip(f"needs 16 GiB of GPU memory, {free >> 30} are free")
    net = with_precision(random_net(rng, (64, 16, 64), "float16", biases=[True, True]), precision)
    if schedule is not None and not runs(cupy, net.network, schedule):
        return
    rows = 2**25 + 2**20
    some = on_gpu(cupy, numpy_like(rng.standard_normal((1024, 64)), "float16"))
    x = cupy.empty((rows, 64), "f2")
    x.reshape(-1, 1024, 64)[...] = some
    out = cupy.empty((rows, 64), "f2")
    out.view("u1")[...] = 0xFF
    assert x.size > 2**31
    mlp = net.mlp(schedule=schedule)
    mlp(x, out=out)
    want = mlp(some) if schedule is not None else out[:1024].copy()
    assert_in_bounds(net, some.get(), want.get())
    assert bool((out.view("u2").reshape(-1, 1024, 64) == want.view("u2")).all())
    del x, out
    cupy.get_default_memory_pool().free_all_blocks()
