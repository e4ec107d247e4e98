"""MLP.map on a GPU: bits, sources, faults, memory, threads. No test needs more than 2 GB."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from support import CANONICAL, odd_values, random_net, same_bits

from cupymlp import _map_engine, _map_sources, _pipeline
from cupymlp._map import MapError, MapInterrupted
from cupymlp.network import numpy_dtype
from cupymlp.reference import error_in_bounds, forward_and_bound

pytestmark = pytest.mark.gpu

ROWS = 300_001


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def net(rng):
    return random_net(rng, CANONICAL)


@pytest.fixture
def x(rng):
    return odd_values(rng, (ROWS, CANONICAL[0]), "float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [997, 4096, 100_000, ROWS, 10**9, None])
def test_bits_are_those_of_one_call_whatever_the_chunks(cupy, rng, dtype, rows):
    net = random_net(rng, CANONICAL, dtype).mlp()
    x = odd_values(rng, (ROWS, CANONICAL[0]), dtype)
    out = np.full((ROWS, CANONICAL[-1]), np.nan, dtype)
    seen = []
    assert net.map(x, out, rows, lambda done, total: seen.append((done, total)), device="cuda") is out
    assert same_bits(out, net(x))
    assert seen[0] == (0, ROWS)
    assert seen[-1] == (ROWS, ROWS)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize(
    "sizes", [(5, 3), (1, 1), (0, 5, 3), (7, 0, 4), (5, 4, 0), (512, 512, 512), (784, 256, 10)], ids=str
)
def test_bits_of_other_nets(cupy, rng, sizes):
    net = random_net(rng, sizes).mlp()
    x = rng.standard_normal((5001, sizes[0])).astype("f4")
    assert same_bits(net.map(x, rows=700), net(x))


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "split3"), ("float32", "library"),
        ("float16", "library"),
    ],
)  # fmt: skip
def test_other_precisions_are_within_their_bound(cupy, rng, dtype, precision):
    net = random_net(rng, CANONICAL, dtype, precision=precision)
    x = rng.standard_normal((20_011, CANONICAL[0])).astype(numpy_dtype(dtype))
    y = net.mlp().map(x, rows=3000)
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert error_in_bounds(y, reference, bound).max() <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_pinned_schedule_has_the_same_bits_in_any_chunk(cupy, rng, dtype):
    net = random_net(rng, CANONICAL, dtype).mlp(schedule="tile")
    x = rng.standard_normal((20_011, CANONICAL[0])).astype(numpy_dtype(dtype))
    assert same_bits(net.map(x, rows=3000), net(x))


def test_any_strides_byte_order_and_narrower_dtypes(cupy, rng, net):
    mlp = net.mlp()
    base = rng.standard_normal((40, 60, 2 * 48)).astype("f4")
    cases = {
        "strided": base[:, ::2, ::2],
        "reversed": base[::-1, ::-1, 47::-1],
        "transposed": base[..., :48].transpose(1, 0, 2),
        "big-endian": base[..., :48].astype(">f4"),
        "float16": base[..., :48].astype("f2"),
        "int8": (base[..., :48] * 10).astype("i1"),
        "broadcast": np.broadcast_to(base[0, 0, :48], (3, 700, 48)),
        "one row": base[0, 0, :48],
        "empty": base[:0, :, :48],
    }
    for name, x in cases.items():
        assert same_bits(mlp.map(x, rows=100), mlp(x)), name
        out = np.zeros((*x.shape[:-1], 2 * 24), ">f4")[..., ::2]
        mlp.map(x, out, rows=333)
        assert same_bits(out.astype("f4"), mlp(x)), name


def test_files_and_memory_maps(cupy, net, x, tmp_path):
    mlp = net.mlp()
    want = mlp(x)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "big.npy", x.astype(">f4"))
    for name in ("x", "big"):
        place = mlp.map(tmp_path / f"{name}.npy", tmp_path / "y.npy", rows=50_000, overwrite=True)
        assert same_bits(np.load(place), want)
    out = np.lib.format.open_memmap(tmp_path / "map.npy", "w+", "f4", want.shape)
    mlp.map(np.load(tmp_path / "x.npy", mmap_mode="r"), out, rows=77_777)
    assert same_bits(np.load(tmp_path / "map.npy"), want)


def test_zarr_arrays(cupy, net, x, tmp_path):
    zarr = pytest.importorskip("zarr")
    mlp = net.mlp()
    source = zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(7000, 48))
    out = zarr.create_array(tmp_path / "y.zarr", shape=(ROWS, 24), chunks=(5000, 24), dtype="f4")
    mlp.map(source, out)
    assert same_bits(out[...], mlp(x))
    assert same_bits(zarr.open(mlp.map(tmp_path / "x.zarr", tmp_path / "z.zarr"), mode="r")[...], mlp(x))


def test_nan_stays_in_its_rows(cupy, net):
    x = np.ones((ROWS, 48), "f4")
    x[1000:2000] = np.nan
    y = net.mlp().map(x, rows=1024)
    assert np.isnan(y[1000:2000]).all()
    assert np.isfinite(y[:1000]).all()
    assert np.isfinite(y[2000:]).all()


# --- Memory and streams -----------------------------------------------------------------------------------------------


def test_nothing_stays_allocated(cupy, net, x):
    mlp, pool = net.mlp(), cupy.get_default_memory_pool()
    mlp.map(x, rows=20_000)
    gc.collect()
    used, pinned = pool.used_bytes(), cupy.get_default_pinned_memory_pool().n_free_blocks()
    for _ in range(3):
        mlp.map(x, rows=20_000)
    gc.collect()
    assert pool.used_bytes() == used
    assert cupy.get_default_pinned_memory_pool().n_free_blocks() == pinned
    assert all(len(idle) <= _pipeline.MOST_LANES + 1 for idle in _pipeline._idle.values())


def test_memory_of_an_x_of_a_gigabyte_is_bounded(cupy, rng):
    """A gigabyte of rows that are all the same memory: what is taken beside it is seen alone."""
    net = random_net(rng, (256, 8)).mlp()
    x = np.broadcast_to(rng.standard_normal(256).astype("f4"), (1_000_000, 256))
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before, most = pool.total_bytes(), [0]

    def look(done, total):
        most[0] = max(most[0], pool.total_bytes() - before)

    y = net.map(x, progress=look)
    assert 0 < most[0] <= 512 << 20
    assert same_bits(y[[0, 500_000, -1]], net(x[:3]))


def test_what_is_queued_on_the_current_stream_is_waited_for(cupy, net, rng):
    """x is pinned memory that a download on the current stream is still to fill."""
    rows = 100_000
    memory = cupy.cuda.alloc_pinned_memory(rows * 48 * 4)
    x = np.frombuffer(memory, "f4", rows * 48).reshape(rows, 48)
    x[...] = np.nan
    source = cupy.asarray(rng.standard_normal((rows, 48)).astype("f4"))
    heavy = cupy.ones((4096, 4096), "f4")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(200):
            heavy = heavy * 0.5 + 0.5
        source.get(out=x, stream=stream, blocking=False)
        y = net.mlp().map(x, rows=9000)
        assert cupy.cuda.get_current_stream() == stream
    assert np.isfinite(y).all()
    assert same_bits(y, net.mlp()(source.get()))


def test_a_capture_is_refused(cupy, net):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="captures a CUDA graph"):
                net.mlp().map(np.zeros((10, 48), "f4"))
        finally:
            stream.end_capture()


def test_several_threads_at_once(cupy, rng):
    nets = [random_net(rng, CANONICAL).mlp() for _ in range(2)]
    inputs = [rng.standard_normal((100_003, 48)).astype("f4") for _ in range(4)]
    results, errors = {}, []

    def work(i):
        try:
            for rows in (10_000, 7_001):
                results[i, rows] = nets[i % 2].map(inputs[i], rows=rows)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for (i, _), y in results.items():
        assert same_bits(y, nets[i % 2](inputs[i]))


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["read", "launch", "write"])
def test_what_fails_in_the_middle_names_its_rows_and_can_be_gone_on_from(cupy, net, x, monkeypatch, place):
    mlp = net.mlp()
    out = np.full((ROWS, 24), np.nan, "f4")

    def breaking(original, start_of):
        def call(*arguments):
            if start_of(*arguments) >= 100_000:
                raise ZeroDivisionError("broken")
            return original(*arguments)

        return call

    with monkeypatch.context() as patch:
        if place == "read":
            patch.setattr(
                _map_sources.ArraySource, "read", breaking(_map_sources.ArraySource.read, lambda s, a, b, i: a)
            )
        elif place == "write":
            from cupymlp._map_sinks import _ArraySink

            patch.setattr(_ArraySink, "write", breaking(_ArraySink.write, lambda s, a, b, i: a))
        else:
            calls = iter(range(10**6))
            patch.setattr(
                _pipeline.PackedNet, "__call__",
                breaking(_pipeline.PackedNet.__call__, lambda *_: 10_000 * next(calls)),
            )  # fmt: skip
        with pytest.raises(MapError, match=r"ing rows \d+ to \d+: ZeroDivisionError: broken") as caught:
            mlp.map(x, out, 10_000)
    rows = caught.value.rows
    assert f"rows {rows} to {rows + 10_000}" in str(caught.value)
    assert rows == 100_000 or (place == "launch" and rows <= 100_000 and rows % 10_000 == 0)
    want = mlp(x)
    assert same_bits(out[:rows], want[:rows])
    out[rows:] = np.nan
    mlp.map(x, out, 10_000, resume=rows)
    assert same_bits(out, want)


def test_ctrl_c_in_the_middle(cupy, net, x, tmp_path):
    def stop(done, total):
        if done >= 100_000:
            raise KeyboardInterrupt

    with pytest.raises(MapInterrupted) as caught:
        net.mlp().map(x, tmp_path / "y.npy", 10_000, stop)
    assert caught.value.rows == 100_000
    assert same_bits(np.load(net.mlp().map(x, tmp_path / "y.npy", 10_000, resume=True)), net.mlp()(x))


@pytest.mark.parametrize("most", [10 << 20, 1 << 20])
def test_chunks_are_halved_until_they_fit(cupy, net, x, monkeypatch, most):
    original, asked = cupy.cuda.alloc, []

    def alloc(size):
        asked.append(size)
        if size > most:
            raise cupy.cuda.memory.OutOfMemoryError(size, 0, most)
        return original(size)

    mlp = net.mlp()
    want = mlp(x)
    monkeypatch.setattr(cupy.cuda, "alloc", alloc)
    assert same_bits(mlp.map(x, rows=200_000), want)
    assert max(asked) > most
    assert asked[-1] <= most


def test_out_of_memory_on_the_way(cupy, net, x, monkeypatch):
    calls, original, seen = iter(range(10**6)), _pipeline.PackedNet.__call__, []

    def call(self, a, b):
        if next(calls) == 7:
            raise cupy.cuda.memory.OutOfMemoryError(1, 2, 3)
        return original(self, a, b)

    mlp = net.mlp()
    want = mlp(x)
    monkeypatch.setattr(_pipeline.PackedNet, "__call__", call)
    assert same_bits(mlp.map(x, rows=20_000, progress=lambda done, total: seen.append(done)), want)
    assert seen == sorted(set(seen))
    assert min(np.diff(seen)) < 20_000


def test_no_memory_says_what_to_do(cupy, net, monkeypatch):
    def alloc(size):
        raise cupy.cuda.memory.OutOfMemoryError(size, 0, 0)

    mlp = net.mlp()
    mlp(np.zeros((1, 48), "f4"))
    monkeypatch.setattr(cupy.cuda, "alloc", alloc)
    with pytest.raises(MapError, match=r"making room for rows 0 to 1: OutOfMemoryError.*device='cpu'"):
        mlp.map(np.zeros((1000, 48), "f4"))


def test_the_cpu_can_be_asked_for(cupy, net, monkeypatch):
    used = []
    original = _map_engine.CpuEngine.run
    monkeypatch.setattr(_map_engine.CpuEngine, "run", lambda self, job: used.append(1) or original(self, job))
    net.mlp().map(np.zeros((10, 48), "f4"), device="cpu")
    assert used == [1]
