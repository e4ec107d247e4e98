"""Bound calls and captures: one CUDA graph for a call, or for several."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from support import CANONICAL, c_loop, in_threads, random_net, same_bits

import cupymlp
from cupymlp import MLP, _recorders


def test_numpy_arrays_are_refused(canonical, rng):
    x = rng.standard_normal((4, 48)).astype("f4")
    with pytest.raises(TypeError, match=r"x is a numpy\.ndarray; accepted: arrays on a GPU"):
        canonical.mlp().bind(x)
    with pytest.raises(TypeError, match=r"x is a numpy\.ndarray and out a list; accepted"):
        canonical.mlp().bind(x, out=[0])


def test_without_a_gpu_a_capture_says_so(monkeypatch):
    monkeypatch.setattr(cupymlp._gpu, "gpu_problem", lambda: "there is no CUDA device")
    with pytest.raises(RuntimeError, match="capturing calls needs a CUDA GPU, and there is no CUDA device"):
        cupymlp.capture()


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def nothing_stays_recorded():
    yield
    assert not _recorders.recorders


def poison(array):
    array[...] = np.nan


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16, 1000, 5000])
@pytest.mark.parametrize("schedule", [None, "row", "tile", "layer"])
def test_a_bound_call_computes_from_what_x_holds(cupy, rng, schedule, batch):
    net = random_net(rng, CANONICAL)
    first, second = (rng.standard_normal((batch, 48)).astype("f4") for _ in range(2))
    x, y = cupy.asarray(first), cupy.empty((batch, 24), "f4")
    step = net.mlp(schedule=schedule).bind(x, out=y)
    assert step.out is y
    assert same_bits(y.get(), c_loop(net, first))  # it computes once
    for data in (second, first):
        x.set(data)
        poison(y)
        assert step() is y
        assert same_bits(y.get(), c_loop(net, data))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "tf32"), ("float32", "split3"), ("float16", "ieee"), ("float64", "ieee")]
)
def test_bound_calls_of_every_kind_have_the_bits_of_a_call(cupy, rng, dtype, precision):
    net = random_net(rng, CANONICAL, dtype)
    mlp = MLP(net.weights, net.biases, precision=precision)
    x = cupy.asarray(rng.standard_normal((300, 48)).astype(dtype))
    step = mlp.bind(x)
    x *= 2
    assert same_bits(step().get(), mlp(x).get())


@pytest.mark.gpu
def test_views_are_bound_too(cupy, rng):
    net = random_net(rng, CANONICAL)
    memory, results = cupy.zeros((20, 2 * 48), "f4"), cupy.full((24, 20), np.nan, "f4")
    x, y = memory[::2, ::-2], results.T[::2]
    step = net.mlp().bind(x, out=y)
    x[...] = cupy.asarray(rng.standard_normal((10, 48)).astype("f4"))
    step()
    assert same_bits(y.get(), c_loop(net, x.get()))
    assert np.isnan(results.T[1::2].get()).all()


@pytest.mark.gpu
def test_a_bound_call_keeps_its_buffers_and_weights(cupy, rng):
    net = random_net(rng, CANONICAL)
    data = rng.standard_normal((64, 48)).astype("f4")
    step = net.mlp().bind(cupy.asarray(data))
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    rubbish = [cupy.full((64, 48), np.nan, "f4") for _ in range(20)]
    poison(step.out)
    assert same_bits(step().get(), c_loop(net, data))
    del rubbish


@pytest.mark.gpu
def test_an_empty_batch_is_bound(cupy, canonical):
    x = cupy.empty((0, 48), "f4")
    step = canonical.mlp().bind(x)
    assert step().shape == (0, 24)


@pytest.mark.gpu
def test_arrays_that_overlap_are_refused(cupy, rng):
    memory = cupy.zeros((8, 16), "f4")
    net = random_net(rng, (16, 16))
    with pytest.raises(ValueError, match="x and out overlap: a bound call reads x again and again"):
        net.mlp().bind(memory[:5], out=memory[3:])


@pytest.mark.gpu
def test_bad_arguments_are_those_of_a_call(cupy, canonical):
    with pytest.raises(ValueError, match="47"):
        canonical.mlp().bind(cupy.zeros((2, 47), "f4"))


@pytest.mark.gpu
def test_it_runs_in_the_order_of_the_current_stream(cupy, rng):
    net = random_net(rng, CANONICAL)
    x = cupy.zeros((16, 48), "f4")
    step = net.mlp().bind(x)
    wait = cupy.RawKernel(
        'extern "C" __global__ void wait() { long long t = clock64(); while (clock64() - t < 50000000ll); }', "wait"
    )
    data = cupy.asarray(rng.standard_normal((16, 48)).astype("f4"))
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.null):
        x.fill(0)
        cupy.cuda.Device().synchronize()
        with stream:
            wait((1,), (1,), ())
            x[...] = data
            step()
            after = step.out.copy()
        stream.synchronize()
        assert same_bits(after.get(), c_loop(net, data.get()))


@pytest.mark.gpu
def test_several_networks_in_one_graph(cupy, rng):
    first, second = random_net(rng, (48, 33, 20)), random_net(rng, (20, 17, 5))
    a, b = first.mlp(), second.mlp()
    data = rng.standard_normal((2, 40, 48)).astype("f4")
    x = cupy.asarray(data[0])
    h, y = a(x), b(a(x))
    with cupymlp.capture() as step:
        a(x, out=h)
        b(h, out=y)
    assert "2 calls" in repr(step)
    x.set(data[1])
    poison(h)
    poison(y)
    assert step() is y
    want = c_loop(first, data[1])
    assert same_bits(h.get(), want)
    assert same_bits(y.get(), c_loop(second, want))


@pytest.mark.gpu
def test_an_array_made_inside_a_capture_belongs_to_it(cupy, rng):
    net = random_net(rng, CANONICAL)
    mlp, x = net.mlp(), cupy.asarray(rng.standard_normal((16, 48)).astype("f4"))
    mlp(x)
    with cupymlp.capture() as step:
        mlp(x)
    rubbish = [cupy.full((16, 24), np.nan, "f4") for _ in range(20)]
    assert same_bits(step().get(), c_loop(net, x.get()))
    del rubbish


@pytest.mark.gpu
def test_fused_mlp_can_be_captured(cupy, rng):
    net = random_net(rng, CANONICAL)
    x = cupy.asarray(rng.standard_normal((16, 48)).astype("f4"))
    weights = [cupy.asarray(w) for w in net.weights]
    y = cupy.empty((16, 24), "f4")
    want = cupymlp.fused_mlp(x, *weights, out=y).get()
    with cupymlp.capture() as step:
        cupymlp.fused_mlp(x, *weights, out=y)
    del weights
    rubbish = [cupy.full((64, 64), np.nan, "f4") for _ in range(20)]
    poison(y)
    assert same_bits(step().get(), want)
    del rubbish


@pytest.mark.gpu
def test_a_first_call_inside_a_capture_is_an_error_and_the_stream_goes_on(cupy, rng):
    net = random_net(rng, (7, 5))
    mlp, x = net.mlp(), cupy.asarray(rng.standard_normal((3, 7)).astype("f4"))
    outer = cupy.cuda.Stream(non_blocking=True)
    with outer:
        with pytest.raises(RuntimeError, match="make the same call once before the capture"), cupymlp.capture():
            mlp(x)
        assert cupy.cuda.get_current_stream() == outer
        assert not outer.is_capturing()
        assert same_bits(mlp(x).get(), c_loop(net, x.get()))
        with cupymlp.capture() as step:
            mlp(x)
        assert same_bits(step().get(), c_loop(net, x.get()))


@pytest.mark.gpu
def test_an_error_of_the_caller_leaves_nothing_behind(cupy, rng):
    net = random_net(rng, (7, 5))
    mlp, x = net.mlp(), cupy.zeros((3, 7), "f4")
    y = mlp(x)

    def fail():
        with cupymlp.capture():
            mlp(x, out=y)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert same_bits(mlp(x).get(), c_loop(net, x.get()))


@pytest.mark.gpu
def test_captures_that_hold_nothing_or_nest_are_refused(cupy, canonical):
    with pytest.raises(ValueError, match="nothing was captured"), cupymlp.capture():
        pass
    with pytest.raises(RuntimeError, match="captures do not nest"), cupymlp.capture(), cupymlp.capture():
        pass
    x = cupy.zeros((2, 48), "f4")
    canonical.mlp()(x)
    with pytest.raises(RuntimeError, match="leave the with block"), cupymlp.capture() as step:
        step()


@pytest.mark.gpu
def test_cublas_cannot_be_bound(cupy, canonical):
    mlp = MLP(canonical.weights, canonical.biases, precision="library")
    with pytest.raises(RuntimeError, match="precision='library' calls cuBLAS"):
        mlp.bind(cupy.zeros((2, 48), "f4"))


@pytest.mark.gpu
def test_a_bound_call_inside_the_callers_own_capture(cupy, rng):
    net = random_net(rng, CANONICAL)
    data = rng.standard_normal((16, 48)).astype("f4")
    x = cupy.zeros((16, 48), "f4")
    step = net.mlp().bind(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        x.set(data)
        poison(step.out)
        graph.launch(stream)
        stream.synchronize()
    assert same_bits(step.out.get(), c_loop(net, data))


@pytest.mark.gpu
def test_threads_share_a_bound_call_and_a_net(cupy, rng):
    """Each launches on a stream of its own; the launch's arguments are filled in place, and must not mix."""
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    data = rng.standard_normal((8, 16, 48)).astype("f4")
    wrong = []

    def work(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x, y = cupy.asarray(data[i]), cupy.empty((16, 24), "f4")
            step = mlp.bind(x, out=y)
            for turn in range(300):
                poison(y)
                mlp(x, out=y) if turn % 2 else step()
                stream.synchronize()
                if not same_bits(y.get(), want[i]):
                    wrong.append((i, turn))

    want = [c_loop(net, rows) for rows in data]
    in_threads(8, work)
    assert wrong == []


@pytest.mark.gpu
def test_the_first_launch_of_a_thread_may_be_a_repeated_call(cupy, rng):
    """The driver's own launch needs a context, which a thread that has not used CUDA lacks."""
    net = random_net(rng, CANONICAL)
    mlp, x = net.mlp(), cupy.asarray(rng.standard_normal((16, 48)).astype("f4"))
    y = cupy.full((16, 24), np.nan, "f4")
    mlp(x, out=y)
    poison(y)
    cupy.cuda.Device().synchronize()
    thread = threading.Thread(target=lambda: mlp(x, out=y))
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    assert same_bits(y.get(), c_loop(net, x.get()))
