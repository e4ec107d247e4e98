"""NumPy arrays on the GPU: staging memory, its bounds, threads, errors, forked children."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from support import CANONICAL, c_loop, in_threads, random_net, same_bits

from cupymlp import MLP, _host


def test_in_the_child_of_a_process_that_used_cuda_there_is_an_error(monkeypatch, canonical):
    """The flag alone; the real thing is below."""
    forked = threading.Event()
    forked.set()
    monkeypatch.setattr(_host, "_forked", forked)
    host = object.__new__(_host.Host)
    with pytest.raises(RuntimeError, match=r"forked from one that had used it: start processes with .*'spawn'"):
        host.run(np.zeros((2, 48), "f4"), np.zeros((2, 24), "f4"))


SIZES = [1, 16, 256, 3000, 4000, 40_000]  # mapped and copied


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.gpu
def test_the_sizes_below_are_on_both_sides_of_the_limits():
    row = (48 + 24) * 4
    assert SIZES[3] * row < _host.MAPPED_BYTES < SIZES[4] * row


@pytest.mark.gpu
@pytest.mark.parametrize("batch", SIZES)
def test_bits_are_those_of_the_gpu_whatever_way_arrays_take(cupy, rng, batch):
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    out = np.full((batch, 24), np.nan, "f4")
    for _ in range(3):
        x = rng.standard_normal((batch, 48)).astype("f4")
        want = c_loop(net, x)
        assert same_bits(mlp(x, device="cuda"), want)
        assert mlp(x, out=out, device="cuda") is out
        x.fill(np.nan)  # the call is done with it
        assert same_bits(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [5, 4000])
def test_views_byte_orders_and_axes(cupy, rng, batch):
    net = random_net(rng, (12, 9, 4))
    mlp = net.mlp()
    x = rng.standard_normal((batch, 12)).astype("f4")
    want = c_loop(net, x)
    wide = np.repeat(x, 2, axis=1)
    for view in (x, x.astype(">f4"), np.asfortranarray(x), wide[:, ::2], x[::-1][::-1]):
        assert same_bits(mlp(view, device="cuda"), want)
    for out in (np.empty((batch, 4), ">f4"), np.empty((4, batch), "f4").T, np.empty((batch, 8), "f4")[:, ::2]):
        mlp(x, out=out, device="cuda")
        assert same_bits(np.ascontiguousarray(out).astype("f4"), want)
    deep = x[:4].reshape(2, 1, 2, 12)
    assert same_bits(mlp(deep, device="cuda"), want[:4].reshape(2, 1, 2, 4))
    assert same_bits(mlp(x[0], device="cuda"), want[0])
    whole = np.arange(24, dtype=np.int16).reshape(2, 12)
    assert same_bits(mlp(whole, device="cuda"), c_loop(net, whole.astype("f4")))


@pytest.mark.gpu
def test_x_and_out_may_be_the_same_memory(cupy, rng):
    net = random_net(rng, (16, 16))
    memory = rng.standard_normal((40, 16)).astype("f4")
    want = c_loop(net, memory)
    net.mlp()(memory, out=memory, device="cuda")
    assert same_bits(memory, want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", "ieee"), ("float64", "ieee"), ("float32", "split3"), ("float32", "library")]
)
def test_every_kind_of_network(cupy, rng, dtype, precision):
    net = random_net(rng, CANONICAL, dtype)
    mlp = MLP(net.weights, net.biases, precision=precision)
    for batch in (3, 3000):
        x = rng.standard_normal((batch, 48)).astype(dtype)
        for _ in range(2):
            assert same_bits(mlp(x, device="cuda"), mlp(cupy.asarray(x)).get())


@pytest.mark.gpu
def test_nets_of_several_launches_and_empty_axes(cupy, rng):
    wide = random_net(rng, (300, 400, 200))
    x = rng.standard_normal((5, 300)).astype("f4")
    mlp = wide.mlp(schedule="layer")
    for _ in range(3):
        assert same_bits(mlp(x, device="cuda"), c_loop(wide, x))
    no_features = random_net(rng, (0, 5), biases=[True])
    assert same_bits(
        no_features.mlp()(np.zeros((3, 0), "f4"), device="cuda"), c_loop(no_features, np.zeros((3, 0), "f4"))
    )
    assert no_features.mlp()(np.zeros((0, 0), "f4"), device="cuda").shape == (0, 5)


@pytest.mark.gpu
def test_few_shapes_are_kept(cupy, rng):
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    for batch in [*range(1, 30), 3, 29]:
        x = rng.standard_normal((batch, 48)).astype("f4")
        assert same_bits(mlp(x, device="cuda"), c_loop(net, x))
        assert len(mlp._host._thread.kept) <= _host.KEPT_SHAPES


@pytest.mark.gpu
def test_threads_do_not_share_staging_memory(cupy, rng):
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    data = rng.standard_normal((8, 16, 48)).astype("f4")
    want = [c_loop(net, x) for x in data]
    wrong = []

    def work(i):
        wrong.extend((i, turn) for turn in range(200) if not same_bits(mlp(data[i], device="cuda"), want[i]))

    in_threads(8, work)
    assert wrong == []


@pytest.mark.gpu
def test_after_an_error_the_next_call_is_right(cupy, rng, monkeypatch):
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    x = rng.standard_normal((16, 48)).astype("f4")
    want = c_loop(net, x)
    assert same_bits(mlp(x, device="cuda"), want)
    run = _host._Staging.run

    def interrupted(self, *arrays):
        run(self, *arrays)  # is under way
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_host._Staging, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mlp(x, device="cuda")
    assert mlp._host._thread.kept == {}
    assert same_bits(mlp(x, device="cuda"), want)


@pytest.mark.gpu
def test_what_is_wrong_is_found_in_repeated_calls_too(cupy, rng):
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    x = rng.standard_normal((16, 48)).astype("f4")
    mlp(x, device="cuda")
    read_only = np.zeros((16, 24), "f4")
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        mlp(x, out=read_only, device="cuda")
    with pytest.raises(ValueError, match="out"):
        mlp(x, out=np.zeros((16, 23), "f4"), device="cuda")
    with pytest.raises(TypeError, match="out"):
        mlp(x, out=np.zeros((16, 24)), device="cuda")
    with pytest.raises(TypeError, match="out is a list"):
        mlp(x, out=[1], device="cuda")
    with pytest.raises(TypeError, match="float64"):
        mlp(x.astype("f8"), device="cuda")
    assert same_bits(mlp(x, device="cuda"), c_loop(net, x))


@pytest.mark.gpu
def test_it_does_not_wait_for_the_current_stream(cupy, rng):
    """It reads and writes host memory alone: work that is under way elsewhere does not hold it up."""
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    x = rng.standard_normal((16, 48)).astype("f4")
    mlp(x, device="cuda")
    code = 'extern "C" __global__ void wait() { long long t = clock64(); while (clock64() - t < 1000000000ll); }'
    wait = cupy.RawKernel(code, "wait")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        wait((1,), (1,), ())
        assert same_bits(mlp(x, device="cuda"), c_loop(net, x))
        assert not stream.done
        stream.synchronize()


FORKED = """
    import os, numpy as np, cupymlp
    net = cupymlp.MLP([np.ones((3, 2), "f4")])
    x = np.ones((4, 3), "f4")
    assert net(x).tolist() == [[3, 3]] * 4
    child = os.fork()
    if child == 0:
        status = 1
        try:
            net(x)
        except RuntimeError as error:
            status = 0 if "spawn" in str(error) and net(x, device="cpu")[0, 0] == 3 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert net(x).tolist() == [[3, 3]] * 4
    print("right")
"""


@pytest.mark.gpu
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_a_forked_child_gets_an_error_and_the_parent_goes_on(cupy):
    code = textwrap.dedent(FORKED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "right\n", done.stderr
