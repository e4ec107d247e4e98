"""MLP.map, as far as it goes without a GPU: sources, sinks, chunks, faults, the command line, and the pipeline's order."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lazy_cupy import LazyCupy
from support import random_net, unavailable

from cupymlp import _map, _map_engine, _map_part, _map_paths, _map_sinks, _map_sources, _pipeline, cli
from cupymlp._map import MapError, MapInterrupted, chunk_rows, run_map, smaller
from cupymlp._map_engine import CpuEngine
from cupymlp.cpu import run_cpu
from cupymlp.network import numpy_dtype
from cupymlp.reference import error_in_bounds, forward_and_bound

SIZES = (5, 7, 3)
ROWS = 1000
no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """map without device= must not find a GPU: these tests are about everything else."""
    monkeypatch.setattr("cupymlp.mlp.gpu_problem", lambda: "these tests are for the CPU")


@pytest.fixture
def zarr():
    try:
        import zarr
    except ImportError as error:
        unavailable(f"the package zarr is needed: {error}")
    return zarr


@pytest.fixture
def net(rng):
    return random_net(rng, SIZES)


@pytest.fixture
def x(rng):
    return rng.standard_normal((ROWS, SIZES[0])).astype("f4")


def assert_right(net, x, y):
    """Within the proven bound, every element."""
    assert y.dtype == numpy_dtype(net.network.dtype)
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, np.asarray(x))
    assert y.shape == reference.shape
    units = error_in_bounds(y, reference, bound)
    assert units.size == 0 or units.max() <= 1


def failing(original, at, error):
    """A function that raises at its at-th call (from 0)."""
    calls = iter(range(10**9))

    def call(*arguments, **options):
        if next(calls) == at:
            raise error
        return original(*arguments, **options)

    return call


# --- Arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rows", [1, 7, 128, 999, 1000, 5000, None])
def test_arrays_of_every_dtype_and_size_of_chunk(rng, dtype, rows):
    net = random_net(rng, SIZES, dtype)
    x = rng.standard_normal((ROWS, SIZES[0])).astype(numpy_dtype(dtype))
    assert_right(net, x, net.mlp().map(x, rows=rows))
    out = np.full((ROWS, SIZES[-1]), np.nan, numpy_dtype(dtype))
    assert net.mlp().map(x, out, rows) is out
    assert_right(net, x, out)


@given(data=st.data())
def test_rows_are_those_of_the_array_whatever_its_axes_and_strides(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    array = np.arange(np.prod([s * 2 for s in shape]), dtype=data.draw(st.sampled_from(["f4", ">f4", "<i2"])))
    array = array.reshape([s * 2 for s in shape])
    array = array[tuple(slice(None, None, data.draw(st.sampled_from([2, -2]))) for _ in shape)]
    array = array.transpose([*data.draw(st.permutations(range(array.ndim)))])
    rows = np.ascontiguousarray(array).reshape(-1, array.shape[-1])
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    into = np.empty((stop - start, array.shape[-1]), array.dtype.newbyteorder("="))
    _map_sources.ArraySource(array).read(start, stop, into)
    assert np.array_equal(into, rows[start:stop])
    out = np.zeros_like(array)
    _map_sinks.array_sink(out, None, created=True).write(start, stop, into)
    want = np.zeros_like(rows)
    want[start:stop] = rows[start:stop]
    assert np.array_equal(np.ascontiguousarray(out).reshape(rows.shape), want)


@given(data=st.data())
def test_chunks_cover_all_rows_once_in_order_and_are_not_too_large(data):
    step = data.draw(st.integers(1, 5))
    unit = step * data.draw(st.integers(1, 50))
    total = step * data.draw(st.integers(0, 3000))
    engine = CpuEngine.__new__(CpuEngine)
    row_bytes = data.draw(st.integers(0, 10**9))
    rows = chunk_rows(total, row_bytes, data.draw(st.none() | st.integers(1, 10**6)), engine, unit, step)
    assert rows % step == 0
    assert rows == step or rows * row_bytes <= engine.most_bytes
    if unit * row_bytes <= engine.most_bytes:
        assert rows % unit == 0
    start = step * data.draw(st.integers(0, total // step))
    job = _map_engine.Job(None, None, start, total, rows, None)
    chunks = [*job.chunks()] if (total - start) // rows < 1000 else [(start, total)]
    assert [a for a, _ in chunks] == [start, *(b for _, b in chunks)][: len(chunks)]
    assert not chunks or chunks[-1][1] == total
    assert all(0 < b - a <= rows or len(chunks) == 1 for a, b in chunks)
    seen = []
    while rows is not None:
        seen.append(rows)
        rows = smaller(rows, unit, step)
    assert seen == sorted(set(seen), reverse=True)
    assert seen[-1] == step
    assert all(s % step == 0 for s in seen)


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 0, 5), (3, 4, 5), (1, 1, 1, 5)])
def test_axes_are_kept(rng, net, shape):
    x = rng.standard_normal(shape).astype("f4")
    seen = []
    y = net.mlp().map(x, rows=5, progress=lambda *rows: seen.append(rows))
    assert_right(net, x, y)
    total = int(np.prod(shape[:-1]))
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert net.mlp().map(x.tolist() if x.size and len(shape) == 2 else x).shape == y.shape


@pytest.mark.parametrize("sizes", [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_layers_without_features(rng, sizes, tmp_path):
    net = random_net(rng, sizes)
    x = rng.standard_normal((20, sizes[0])).astype("f4")
    np.save(tmp_path / "x.npy", x)
    for source in (x, tmp_path / "x.npy"):
        assert_right(net, x, net.mlp().map(source, rows=7))
        assert_right(net, x, np.load(net.mlp().map(source, tmp_path / "y.npy", rows=7, overwrite=True)))


def test_nan_stays_in_its_rows(net, x):
    x[100:200] = np.nan
    y = net.mlp().map(x, rows=64)
    assert np.isnan(y[100:200]).all()
    assert np.isfinite(np.delete(y, slice(100, 200), 0)).all()


def test_memory_maps_and_npy_files(tmp_path, net, x):
    mlp = net.mlp()
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "big.npy", x.astype(">f4"))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x))
    with open(tmp_path / "v2.npy", "wb") as file:
        np.lib.format.write_array(file, x, version=(2, 0))
    want = mlp.map(x, rows=300)
    for name in ("x", "big", "fortran", "v2"):
        place = mlp.map(str(tmp_path / f"{name}.npy"), str(tmp_path / f"y-{name}.npy"), rows=300)
        assert place == tmp_path / f"y-{name}.npy"
        y = np.load(place, mmap_mode="r")
        assert y.flags.c_contiguous
        assert np.array_equal(y, want)
        assert os.path.getsize(place) == y.offset + y.nbytes
    out = np.lib.format.open_memmap(tmp_path / "map.npy", "w+", "f4", want.shape)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert mlp.map(mapped, out, rows=300) is out
    assert np.array_equal(np.load(tmp_path / "map.npy"), want)
    assert sorted(p.name for p in tmp_path.glob("*.part")) == []


def test_what_cannot_be_written_is_told_before_anything_is(tmp_path, net, x):
    mlp = net.mlp()
    y = np.zeros((ROWS, 3), "f4")
    y.flags.writeable = False
    square = random_net(np.random.default_rng(0), (5, 5)).mlp()

    class OnGpu:
        __cuda_array_interface__ = {}  # noqa: RUF012 - only that it is there counts
        shape, dtype = (ROWS, 5), np.dtype("f4")

    cases = [
        (mlp, (x, y), {}, ValueError, "out is read-only"),
        (mlp, (x, np.zeros((ROWS, 2), "f4")), {}, ValueError, "out has shape (1000, 2); the result has shape (1000, 3)"),
        (mlp, (x, np.zeros((ROWS, 3))), {}, TypeError, "out has dtype float64; the result is float32"),
        (mlp, (x, np.broadcast_to(np.zeros(3, "f4"), (ROWS, 3))), {}, ValueError, "read-only"),
        (mlp, (x, [1]), {}, TypeError, "out is a list; accepted"),
        (mlp, (x, OnGpu()), {}, TypeError, "on a GPU; accepted"),
        (mlp, (OnGpu(),), {}, TypeError, "on a GPU already"),
        (mlp, (x.astype("f8"),), {}, TypeError, "would narrow it"),
        (mlp, (x[:, :4], tmp_path / "y.npy"), {}, ValueError, "whose last axis is 4"),
        (mlp, (x, tmp_path / "y.txt"), {}, ValueError, "ends in .npy"),
        (mlp, (x, tmp_path / "no" / "y.npy"), {}, FileNotFoundError, "No such file"),
        (square, (x, x), {}, ValueError, "out overlaps x"),
        (mlp, (x,), {"rows": 0}, ValueError, "rows is 0; accepted"),
        (mlp, (x,), {"rows": 1.5}, ValueError, "rows is 1.5"),
        (mlp, (x,), {"resume": 5}, ValueError, "resume is 5 and out is None"),
        (mlp, (x,), {"resume": True}, ValueError, "resume is True and out is not a path"),
        (mlp, (x, np.zeros((ROWS, 3), "f4")), {"resume": 1001}, ValueError, "resume is 1001; accepted: 0 to 1000"),
        (mlp, (x, np.zeros((ROWS, 3), "f4")), {"resume": -1}, ValueError, "resume is -1"),
        (mlp, (x, np.zeros((ROWS, 3), "f4")), {"overwrite": True}, ValueError, "overwrite is True and out is not a path"),
        (mlp, (x, tmp_path / "y.npy"), {"resume": 4}, ValueError, "does not exist"),
        (mlp, (x,), {"progress": 3}, TypeError, "progress is a int; accepted"),
        (mlp, (x,), {"device": "tpu"}, ValueError, "device is 'tpu'"),
        (mlp, (np.float32(1),), {}, ValueError, "0-dimensional"),
        (mlp, (x, np.ma.zeros((ROWS, 3), "f4")), {}, TypeError, "masked"),
    ]  # fmt: skip
    for mlp_, arguments, options, kind, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            mlp_.map(*arguments, **options)
        assert os.listdir(tmp_path) == [], message


def test_a_broadcast_out_is_refused(net, x):
    out = np.lib.stride_tricks.as_strided(np.zeros(3, "f4"), (ROWS, 3), (0, 4))
    with pytest.raises(ValueError, match="out is a broadcast array"):
        net.mlp().map(x, out)


def test_bfloat16_has_no_files(tmp_path, rng):
    net = random_net(rng, SIZES, "bfloat16")
    for name in ("y.npy", "y.zarr"):
        with pytest.raises(TypeError, match="the result is bfloat16, which"):
            net.mlp().map(np.zeros((3, 5), net.mlp().dtype), tmp_path / name)


@pytest.mark.parametrize("cut", [1, 10, 100, ROWS * 20 - 1, ROWS * 20, ROWS * 20 + 100, ROWS * 20 + 127])
def test_a_truncated_or_damaged_file_is_an_error_that_says_so(tmp_path, net, x, cut):
    np.save(tmp_path / "x.npy", x)
    os.truncate(tmp_path / "x.npy", os.path.getsize(tmp_path / "x.npy") - cut)
    with pytest.raises(ValueError, match=r"truncated|not a .npy file"):
        net.mlp().map(tmp_path / "x.npy", tmp_path / "y.npy")
    assert os.listdir(tmp_path) == ["x.npy"]


def test_files_that_are_something_else(tmp_path, net):
    np.save(tmp_path / "o.npy", np.array([None]), allow_pickle=True)
    np.savez(tmp_path / "z.npz", a=np.zeros(3))
    (tmp_path / "folder").mkdir()
    for name, message in [("o.npy", "Python objects"), ("z.npz", "not a .npy file"), ("folder", "no zarr array")]:
        with pytest.raises(ValueError, match=message):
            net.mlp().map(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        net.mlp().map(tmp_path / "nothing.npy")


def test_a_file_that_shrinks_while_it_is_read(tmp_path, net, x):
    np.save(tmp_path / "x.npy", x)

    def shrink(done, total):
        if done == 300:
            os.truncate(tmp_path / "x.npy", 128 + 450 * 20)

    with pytest.raises(MapError, match=r"reading rows 400 to 500.*has shrunk.*first 400 of 1000 rows") as caught:
        net.mlp().map(tmp_path / "x.npy", tmp_path / "y.npy", rows=100, progress=shrink)
    assert caught.value.rows == 400
    assert not (tmp_path / "y.npy").exists()


# --- Faults -----------------------------------------------------------------------------------------------------------


def test_a_chunk_that_fails_names_its_rows_and_how_to_go_on(monkeypatch, net, x):
    error = ZeroDivisionError("broken")
    with monkeypatch.context() as patch:
        patch.setattr(_map_engine, "run_cpu", failing(run_cpu, 3, error))
        with pytest.raises(MapError) as caught:
            net.mlp().map(x, rows=128)
    failed = caught.value
    assert failed.__cause__ is error
    assert failed.rows == 384
    assert "computing rows 384 to 512: ZeroDivisionError: broken. The first 384 of 1000 rows" in str(failed)
    assert "net.map(x, out=error.out, resume=384)" in str(failed)
    failed.out[384:] = np.nan
    kept = failed.out[:384].copy()
    y = net.mlp().map(x, out=failed.out, resume=failed.rows)
    assert_right(net, x, y)
    assert np.array_equal(y[:384], kept)


def test_ctrl_c_says_how_far_it_came(net, x):
    out = np.full((ROWS, 3), np.nan, "f4")

    def stop(done, total):
        if done >= 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"interrupted. The first 300 of 1000.*resume=300") as caught:
        net.mlp().map(x, out, 100, stop)
    assert isinstance(caught.value, MapInterrupted)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert caught.value.rows == 300
    assert caught.value.out is out
    assert np.isfinite(out[:300]).all()
    assert np.isnan(out[300:]).all()
    net.mlp().map(x, out, resume=300)
    assert_right(net, x, out)


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_a_path_is_gone_on_from(tmp_path, net, x, suffix, request, monkeypatch):
    if suffix == ".zarr":
        request.getfixturevalue("zarr")
        monkeypatch.setattr(_map_paths, "ZARR_CHUNK_BYTES", 200 * 3 * 4)
    mlp, place, part = net.mlp(), tmp_path / f"y{suffix}", tmp_path / f"y{suffix}.part"
    with pytest.raises(MapInterrupted, match=r"y\.\w+\.part.*resume=True") as caught:
        mlp.map(x, place, 200, lambda done, total: done >= 400 and signal.raise_signal(signal.SIGINT))
    assert caught.value.rows == 400
    assert [p.name for p in tmp_path.iterdir()] == [part.name]
    with pytest.raises(FileExistsError, match="an earlier run that did not finish left it"):
        mlp.map(x, place)
    with pytest.raises(ValueError, match="another network or another x"):
        random_net(np.random.default_rng(1), SIZES).mlp().map(x, place, resume=True)
    with pytest.raises(ValueError, match="has 400 complete rows"):
        mlp.map(x, place, resume=401)
    seen = []
    assert mlp.map(x, place, 200, lambda done, total: seen.append(done), resume=True) == place
    assert seen == [400, 600, 800, 1000]
    assert_right(net, x, read(place))
    assert [p.name for p in tmp_path.iterdir()] == [place.name]
    with pytest.raises(FileExistsError, match="out exists; pass another path, or overwrite=True"):
        mlp.map(x, place)
    mlp.map(-x, place, overwrite=True)
    assert_right(net, -x, read(place))
    assert [p.name for p in tmp_path.iterdir()] == [place.name]


def read(place):
    if place.suffix == ".npy":
        return np.load(place)
    import zarr

    assert not (place / "cupymlp.record").exists()
    return zarr.open(place, mode="r")[...]


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_what_is_left_can_be_thrown_away(tmp_path, net, x, suffix, request):
    if suffix == ".zarr":
        request.getfixturevalue("zarr")
    place = tmp_path / f"y{suffix}"
    for _ in range(2):
        with pytest.raises(MapInterrupted):
            net.mlp().map(
                x, place, 200, lambda done, total: done and signal.raise_signal(signal.SIGINT), overwrite=True
            )
    net.mlp().map(x, place, overwrite=True)
    assert_right(net, x, read(place))
    assert [p.name for p in tmp_path.iterdir()] == [place.name]


def test_other_peoples_folders_are_not_overwritten(tmp_path, net, x, zarr):
    (tmp_path / "y.zarr").mkdir()
    (tmp_path / "y.zarr" / "thesis.tex").write_text("42")
    with pytest.raises(FileExistsError, match="is not the folder of a zarr array"):
        net.mlp().map(x, tmp_path / "y.zarr", overwrite=True)
    (tmp_path / "z.zarr.part").mkdir()
    (tmp_path / "z.zarr.part" / "thesis.tex").write_text("42")
    with pytest.raises(FileExistsError, match="not what an earlier run left"):
        net.mlp().map(x, tmp_path / "z.zarr", overwrite=True)
    (tmp_path / "y.npy").mkdir()
    with pytest.raises(FileExistsError, match="is not a file"):
        net.mlp().map(x, tmp_path / "y.npy", overwrite=True)
    assert (tmp_path / "y.zarr" / "thesis.tex").exists()
    assert (tmp_path / "z.zarr.part" / "thesis.tex").exists()


def test_the_record_is_believed_only_if_it_can_be(tmp_path, net, x, monkeypatch):
    place, part = tmp_path / "y.npy", tmp_path / "y.npy.part"

    def leave():
        with pytest.raises(MapInterrupted):
            net.mlp().map(
                x, place, 200, lambda done, total: done and signal.raise_signal(signal.SIGINT), overwrite=True
            )

    leave()
    monkeypatch.setattr(_map, "boot", lambda: "after a restart")
    with pytest.raises(ValueError, match="before a restart of this one, so its 200 rows"):
        net.mlp().map(x, place, resume=True)
    net.mlp().map(x, place, resume=200)
    assert_right(net, x, np.load(place))
    place.unlink()
    leave()
    with open(part, "r+b") as file:
        file.seek(-300, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(ValueError, match="has no record"):
        net.mlp().map(x, place, resume=True)
    part.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not what an earlier run left"):
        net.mlp().map(x, place, resume=True)
    leave()
    with pytest.raises(ValueError, match=r"is to have float32 \(1000, 3\), and the result has float32 \(999, 3\)"):
        net.mlp().map(x[:999], place, resume=True)
    assert part.exists()


@given(rows=st.integers(0, 2**60), text=st.text("0123456789abcdef-", max_size=64))
def test_a_record_is_read_as_it_was_written(rows, text):
    record = _map_part.Record(rows, text, text)
    packed = record.packed()
    assert len(packed) == _map_part.RECORD_BYTES
    assert _map_part.Record.unpacked(packed) == record
    assert _map_part.Record.unpacked(packed[:30] + b"~" + packed[31:]) is None
    assert _map_part.Record.unpacked(packed[:-1]) is None
    assert _map_part.Record.unpacked(b"") is None


def test_two_runs_do_not_write_one_file(tmp_path, net, x):
    def again(done, total):
        if done == 200:
            for options in ({"overwrite": True}, {"resume": True}):
                with pytest.raises(FileExistsError, match="another run is writing it"):
                    net.mlp().map(x, tmp_path / "y.npy", **options)

    net.mlp().map(x, tmp_path / "y.npy", 200, again)
    assert_right(net, x, np.load(tmp_path / "y.npy"))


def test_a_disk_that_is_too_small_is_told_at_once(tmp_path, net, x, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(None, 0, OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device; the results take [\d,]+ bytes: make room"):
        net.mlp().map(x, tmp_path / "y.npy")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("complete", [0, 3])
def test_a_disk_that_is_full_on_the_way(tmp_path, net, x, monkeypatch, complete):
    """As on file systems that promise no room."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(_map_paths._NpySink, "write", failing(_map_paths._NpySink.write, complete, full))
        with pytest.raises(MapError, match=rf"writing rows {complete * 100} to .*No space left on device") as caught:
            net.mlp().map(x, tmp_path / "y.npy", 100)
    assert caught.value.rows == complete * 100
    assert os.listdir(tmp_path) == (["y.npy.part"] if complete else [])
    net.mlp().map(x, tmp_path / "y.npy", resume=True)
    assert_right(net, x, np.load(tmp_path / "y.npy"))


def test_a_disk_that_loses_what_was_written_leaves_nothing(tmp_path, net, x, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(os.fsync, 0, OSError(errno.EIO, "Input/output error")))
    with pytest.raises(MapError, match=r"Input/output error.*The first 0 of 1000 rows") as caught:
        net.mlp().map(x, tmp_path / "y.npy")
    assert caught.value.rows == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_a_rename_that_fails_loses_nothing(tmp_path, net, x, monkeypatch, suffix, request):
    if suffix == ".zarr":
        request.getfixturevalue("zarr")
    place = tmp_path / f"y{suffix}"
    net.mlp().map(-x, place)
    with monkeypatch.context() as patch:
        name = "replace" if suffix == ".npy" else "rename"
        original = getattr(os, name)

        def rename(a, b):
            if os.fspath(a).endswith(f"{suffix}.part"):
                raise PermissionError("no")
            return original(a, b)

        patch.setattr(os, name, rename)
        with pytest.raises(MapError, match="The first 1000 of 1000 rows") as caught:
            net.mlp().map(x, place, overwrite=True)
    assert caught.value.rows == 1000
    assert_right(net, -x, read(place))  # the old one
    net.mlp().map(x, place, resume=True, overwrite=True)
    assert_right(net, x, read(place))
    assert [p.name for p in tmp_path.iterdir()] == [place.name]


PROGRAM = """
    import os, resource, signal, sys
    import numpy as np, cupymlp
    net = cupymlp.MLP.load("net.npz")
    def progress(done, total):
        if done >= 400:
            {what}
    try:
        net.map("x.npy", "y.npy", 100, progress, device="cpu")
    except BaseException as error:
        print(type(error).__name__, error)
        raise
"""


def in_a_process(folder, net, x, what):
    np.save(folder / "x.npy", x)
    net.mlp().save(folder / "net.npz")
    program = textwrap.dedent(PROGRAM).format(what=what)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=no_gpu, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip


def command(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "cupymlp", "run", "net.npz", "x.npy", *arguments],
        cwd=folder, env=no_gpu, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_killed(tmp_path, net, x):
    done = in_a_process(tmp_path, net, x, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["net.npz", "x.npy", "y.npy.part"]
    again = command(tmp_path, "-o", "y.npy")
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert "Traceback" not in again.stderr
    resumed = command(tmp_path, "-o", "y.npy", "--resume")
    assert (resumed.returncode, resumed.stdout) == (0, "y.npy\n"), resumed.stderr
    assert_right(net, x, np.load(tmp_path / "y.npy"))
    assert sorted(os.listdir(tmp_path)) == ["net.npz", "x.npy", "y.npy"]


def test_a_limit_on_the_size_of_files(tmp_path, net, x):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 6000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))"
    done = in_a_process(tmp_path, net, x, limit)
    assert done.returncode == 1
    assert done.stdout.startswith("MapError map failed")
    assert "File too large" in done.stdout
    (rows,) = re.findall(r"The first (\d+) of 1000 rows of out are complete", done.stdout)
    assert rows == "400"  # the next record, behind the data, was over the limit
    assert not (tmp_path / "y.npy").exists()
    assert command(tmp_path, "-o", "y.npy", "--resume").returncode == 0
    assert_right(net, x, np.load(tmp_path / "y.npy"))


def test_a_limit_from_the_start(tmp_path, net, x):
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n" + textwrap.dedent(PROGRAM)
    np.save(tmp_path / "x.npy", x)
    net.mlp().save(tmp_path / "net.npz")
    command = [sys.executable, "-c", program.format(what="pass")]
    done = subprocess.run(command, cwd=tmp_path, env=no_gpu, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("OSError")
    assert "File too large; the results take" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["net.npz", "x.npy"]


# --- Zarr -------------------------------------------------------------------------------------------------------------


class Counting:
    """An object with slices that counts the writes of its stored chunks."""

    def __init__(self, array, chunks=None):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.chunks = chunks
        self.slices = []

    def __getitem__(self, index):
        self.slices.append(index)
        return self.array[index]

    def __setitem__(self, index, value):
        self.slices.append(index)
        self.array[index] = value


@pytest.mark.parametrize("rows", [None, 10, 100, 333])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_zarr_arrays(tmp_path, net, x, zarr, rows, zarr_format):
    source = zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(70, 5), zarr_format=zarr_format)
    out = zarr.create_array(tmp_path / "y.zarr", shape=(ROWS, 3), chunks=(100, 2), dtype="f4", zarr_format=zarr_format)
    assert net.mlp().map(source, out, rows) is out
    assert_right(net, x, out[...])
    place = net.mlp().map(tmp_path / "x.zarr", tmp_path / "z.zarr", rows)
    written = zarr.open(place, mode="r")
    assert written.chunks == (70, 3)
    assert_right(net, x, written[...])
    assert_right(net, x, net.mlp().map(source, rows=rows))


def test_zarr_shards_are_written_at_once(tmp_path, net, x, zarr):
    out = zarr.create_array(tmp_path / "y.zarr", shape=(ROWS, 3), shards=(200, 3), chunks=(50, 3), dtype="f4")
    seen = []
    net.mlp().map(x, out, 1, lambda done, total: seen.append(done))
    assert seen == [0, 200, 400, 600, 800, 1000]
    assert_right(net, x, out[...])


def test_no_stored_chunk_is_written_twice(net, x):
    out = Counting(np.zeros((ROWS, 3), "f4"), (60, 3))
    net.mlp().map(x, out, 100)
    assert [(s.start, s.stop) for s in out.slices] == [(i, min(i + 60, ROWS)) for i in range(0, ROWS, 60)]
    out.slices.clear()
    net.mlp().map(Counting(x, (40, 5)), out, 250, resume=100)
    edges = [100, 240, 480, 720, 960, 1000]  # both chunks are whole in 240 rows
    assert [(s.start, s.stop) for s in out.slices] == [*zip(edges, edges[1:])]
    assert_right(net, x, out.array)


def test_sliced_objects_of_more_axes_and_of_one(rng, net):
    x = rng.standard_normal((20, 6, 5)).astype(">f4")
    out = Counting(np.zeros((20, 6, 3), "f4"), (3, 6, 3))
    seen = []
    net.mlp().map(Counting(x), out, 10, lambda done, total: seen.append(done))
    assert seen == [*range(0, 120, 18), 120]  # three of six rows at a time
    assert_right(net, x, out.array)
    with pytest.raises(ValueError, match="multiple of the 6 rows of one index"):
        net.mlp().map(Counting(x), out, resume=7)
    one = Counting(np.zeros(3, "f4"))
    net.mlp().map(Counting(x[0, 0]), one)
    assert_right(net, x[0, 0], one.array)


def test_what_sliced_objects_do_wrong(net, x, monkeypatch):
    class Short(Counting):
        def __getitem__(self, index):
            return self.array[index][:-1]

    with pytest.raises(MapError, match=r"reading rows 0 to 100.*gave an array \(99, 5\)"):
        net.mlp().map(Short(x), rows=100)
    monkeypatch.setattr(_map_sources, "SLICED_BYTES", 100)
    with pytest.raises(ValueError, match=r"of which x\[0\] alone takes 4,000 bytes; accepted: at most 100"):
        net.mlp().map(Counting(x.reshape(5, 200, 5)))
    square = random_net(np.random.default_rng(0), (5, 5)).mlp()
    same = Counting(x)
    with pytest.raises(ValueError, match="out is x"):
        square.map(same, same)


def test_a_zarr_writer_that_fails(net, x):
    class Full(Counting):
        def __setitem__(self, index, value):
            if index.start >= 300:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().__setitem__(index, value)

    out = Full(np.full((ROWS, 3), np.nan, "f4"))
    with pytest.raises(MapError, match=r"writing rows 300 to 400: OSError: .*resume=300") as caught:
        net.mlp().map(x, out, 100)
    assert caught.value.rows == 300
    assert_right(net, x[:300], out.array[:300])


def test_zarr_files_that_are_damaged_are_an_error(tmp_path, net, x, zarr):
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(100, 5))
    chunk = tmp_path / "x.zarr" / "c" / "5" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-20])
    with pytest.raises(MapError, match="reading rows 500 to 600") as caught:
        net.mlp().map(tmp_path / "x.zarr", tmp_path / "y.npy", 100)
    assert caught.value.rows == 500
    zarr.create_group(tmp_path / "group.zarr")
    with pytest.raises(ValueError, match="accepted: an array"):
        net.mlp().map(tmp_path / "group.zarr")


def test_without_zarr_the_package_is_named(tmp_path, net, x, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"pip install 'cupymlp\[zarr\]'"):
        net.mlp().map(x, tmp_path / "y.zarr")
    assert os.listdir(tmp_path) == []


# --- Progress and the command line --------------------------------------------------------------------------------------


def test_progress_true_prints_lines_where_there_is_no_terminal(net, x, capsys):
    net.mlp().map(x, progress=True)
    assert capsys.readouterr().err.splitlines()[-1] == "1,000/1,000 rows"
    net.mlp().map(x, progress=False)
    assert capsys.readouterr().err == ""


def test_progress_that_fails_stops_the_run(net, x):
    with pytest.raises(MapError, match="ZeroDivisionError") as caught:
        net.mlp().map(x, rows=100, progress=lambda done, total: done and 1 // 0)
    assert caught.value.rows == 100


def test_run_on_the_command_line(tmp_path, net, x, capsys):
    np.save(tmp_path / "x.npy", x)
    net.mlp().save(tmp_path / "net.npz")
    files = [str(tmp_path / name) for name in ("net.npz", "x.npy")]
    place = tmp_path / "y.npy"
    options = ["-o", str(place), "--device", "cpu"]
    assert cli.main(["run", *files, *options, "--rows", "300"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{place}\n"
    assert "1,000/1,000 rows" in printed.err
    assert_right(net, x, np.load(place))
    assert cli.main(["run", *files, *options]) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main(["run", *files, *options, "--force", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["run", files[0], str(tmp_path / "no.npy"), *options, "--force"]) == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *files])
    assert caught.value.code == 2


def test_zarr_on_the_command_line(tmp_path, net, x, zarr):
    zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(100, 5))
    net.mlp().save(tmp_path / "net.npz")
    arguments = [str(tmp_path / name) for name in ("net.npz", "x.zarr")]
    assert cli.main(["run", *arguments, "-o", str(tmp_path / "y.zarr"), "--device", "cpu"]) == 0
    assert_right(net, x, read(tmp_path / "y.zarr"))


def test_exit_statuses_of_a_run_that_stops(tmp_path, net, x, monkeypatch, capsys):
    np.save(tmp_path / "x.npy", x)
    net.mlp().save(tmp_path / "net.npz")
    command = [
        "run",
        str(tmp_path / "net.npz"),
        str(tmp_path / "x.npy"),
        "-o",
        str(tmp_path / "y.npy"),
        "--rows",
        "100",
    ]
    for error, status in [(KeyboardInterrupt(), 130), (OSError(errno.EIO, "broken"), 3)]:
        with monkeypatch.context() as patch:
            patch.setattr(_map_engine, "run_cpu", failing(run_cpu, 4, error))
            assert cli.main([*command, "--device", "cpu", "--force"]) == status
        said = capsys.readouterr().err
        assert "The first 400 of 1000 rows" in said
        assert "--resume" in said
    assert cli.main([*command, "--device", "cpu", "--resume"]) == 0
    assert_right(net, x, np.load(tmp_path / "y.npy"))


# --- The pipeline, on a stand-in for CuPy whose streams put off their work ------------------------------------------------


def gpu_engine(monkeypatch, net, cupy, compute=None, launches_once=True):
    monkeypatch.setattr(_pipeline, "cupy_or_error", lambda _: cupy)
    monkeypatch.setattr(_pipeline, "_idle", {})
    monkeypatch.setattr(_pipeline, "MOST_LANES", 4)  # on every machine

    def run(x, y):
        run_cpu(net.network, net.weights, net.biases, x, y)

    return _pipeline.GpuEngine(cupy.net(compute or run, launches_once), net.network)


def through(engine, net, x, out=None, **options):
    return run_map(engine, net.network, [*net.weights, *net.biases], x, out, **options)


@pytest.mark.parametrize("seed", [None, *range(8)])
@pytest.mark.parametrize("rows", [1, 37, 500, 999, 5000, None])
def test_the_pipeline_waits_for_what_it_needs(monkeypatch, net, x, rows, seed):
    cupy = LazyCupy(None if seed is None else np.random.default_rng(seed))
    x = x if rows != 1 else x[:60]
    engine = gpu_engine(monkeypatch, net, cupy, launches_once=seed is None or seed % 2 == 0)
    idle = []
    for _ in range(2):
        seen: list[int] = []
        y = through(engine, net, x, rows=rows, progress=lambda done, total, seen=seen: seen.append(done))
        assert_right(net, x, y)
        assert seen == sorted(set(seen))
        idle.append(len(_pipeline._idle[0]))  # streams are kept for the next
    assert idle[0] == idle[1] <= 5
    gc.collect()
    assert not cupy.live


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("stage", ["read", "compute", "write", "progress"])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_the_pipeline_stops_in_order(monkeypatch, net, x, stage, error, tmp_path, sliced):
    if stage != "progress" and isinstance(error, KeyboardInterrupt):
        return  # signals reach the main thread only
    cupy, calls = LazyCupy(), iter(range(10**6))

    def breaking(original, at_500):
        def call(*arguments):
            if at_500(*arguments):
                raise error
            return original(*arguments)

        return call

    def run(a, b):
        run_cpu(net.network, net.weights, net.biases, a, b)

    source, sink = (
        (_map_sources._SlicedSource, _map_sinks.SlicedSink)
        if sliced
        else (_map_sources.ArraySource, _map_paths._NpySink)
    )
    if stage == "read":
        monkeypatch.setattr(source, "read", breaking(source.read, lambda _, start, stop, rows: start == 500))
    if stage == "write":
        monkeypatch.setattr(sink, "write", breaking(sink.write, lambda _, start, stop, rows: start == 500))
    if stage == "compute":
        run = breaking(run, lambda a, b: np.array_equal(a[0], x[500]))
    engine = gpu_engine(monkeypatch, net, cupy, run)

    def progress(done, total):
        if stage == "progress" and next(calls) == 5:
            raise error

    out = Counting(np.zeros((ROWS, 3), "f4")) if sliced else tmp_path / "y.npy"
    with pytest.raises((MapError, MapInterrupted)) as caught:
        through(engine, net, Counting(x) if sliced else x, out, rows=100, progress=progress)
    rows = caught.value.rows
    assert rows == 500
    if stage != "progress":
        assert f"{stage.removesuffix('e')}ing rows 500 to 600" in str(caught.value)
    assert caught.value.__cause__ is error
    partial = out.array[:rows] if sliced else np.fromfile(f"{out}.part", "f4", rows * 3, offset=128).reshape(rows, 3)
    assert_right(net, x[:rows], partial)
    gc.collect()
    assert not cupy.live  # although the exception is still held
    monkeypatch.undo()
    net.mlp().map(x, out, resume=rows if sliced else True, device="cpu")
    assert_right(net, x, out.array if sliced else np.load(out))


@pytest.mark.parametrize(("kind", "most"), [("device", 4 * 150 * 8 * 4), ("pinned", 4 * 8192)])
def test_the_pipeline_takes_smaller_chunks_if_memory_is_short(monkeypatch, net, x, kind, most):
    cupy = LazyCupy(**{f"most_{kind}_bytes": most})
    seen = []
    y = through(gpu_engine(monkeypatch, net, cupy), net, x, rows=600, progress=lambda done, total: seen.append(done))
    assert_right(net, x, y)
    assert 0 < seen[1] <= 256


def test_out_of_memory_on_the_way_goes_on_where_it_was(monkeypatch, net, x):
    cupy = LazyCupy()
    engine = gpu_engine(monkeypatch, net, cupy)
    launches_once = engine._net.launches_once
    engine._net = failing(engine._net, 1, cupy.cuda.memory.OutOfMemoryError("scratch"))
    engine._net.launches_once = launches_once
    seen = []
    y = through(engine, net, x, rows=200, progress=lambda done, total: seen.append(done))
    assert_right(net, x, y)
    assert seen[0] == 0
    assert seen[-1] == 1000
    assert seen == sorted(set(seen))
    assert 100 in np.diff(seen) or 128 in np.diff(seen)


def test_threads_that_cannot_begin_are_an_error(monkeypatch, net, x):
    cupy = LazyCupy()

    def broken():
        raise cupy.cuda.runtime.CUDARuntimeError(46, "cudaErrorDevicesUnavailable")

    cupy.cuda.Device = lambda _: SimpleNamespace(use=broken)
    with pytest.raises(MapError, match="cudaErrorDevicesUnavailable") as caught:
        through(gpu_engine(monkeypatch, net, cupy), net, x, rows=100)
    assert caught.value.rows == 0
    gc.collect()
    assert not cupy.live


def test_ctrl_c_while_threads_are_waited_for_waits_for_them(monkeypatch, net, x):
    """Twice Ctrl-C, the second while map cleans up: until the last lane is done its memory stays."""
    cupy, main, entered, done = LazyCupy(), threading.main_thread(), threading.Event(), threading.Event()

    original_read = _map_sources.ArraySource.read

    def slow(*arguments):
        if not entered.is_set():
            entered.set()
            time.sleep(1.5)  # outside of the stand-in's lock, for which everything else would wait
            original_read(*arguments)
            done.set()
        else:
            original_read(*arguments)

    monkeypatch.setattr(_map_sources.ArraySource, "read", slow)

    def interrupt():
        entered.wait(10)
        for _ in range(2):
            time.sleep(0.15)
            signal.pthread_kill(main.ident, signal.SIGINT)

    unregistered = []
    original = cupy.cuda.runtime.hostUnregister

    def unregister(address):
        unregistered.append(done.is_set())
        original(address)

    cupy.cuda.runtime.hostUnregister = unregister
    engine = gpu_engine(monkeypatch, net, cupy)
    threading.Thread(target=interrupt).start()
    with pytest.raises(MapInterrupted):
        through(engine, net, x, rows=100)
    assert unregistered == [True]
    gc.collect()
    assert not cupy.live


def test_ctrl_c_while_memory_is_locked_leaves_none_locked(monkeypatch, net, x):
    cupy = LazyCupy()
    original = cupy.cuda.runtime.hostRegister

    def register(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    cupy.cuda.runtime.hostRegister = register
    with pytest.raises(MapInterrupted):
        through(gpu_engine(monkeypatch, net, cupy), net, x, rows=100)
    gc.collect()
    assert not cupy.live


def test_what_fails_in_a_capture_is_the_error_that_is_told(monkeypatch, net, x):
    cupy = LazyCupy()
    engine = gpu_engine(monkeypatch, net, cupy)
    launch = engine._net

    def failing_in_captures(a, b):
        if cupy.current.is_capturing():
            raise cupy.cuda.runtime.CUDARuntimeError(700, "launch fails in the capture")
        launch(a, b)

    def end_capture(stream):
        stream.captured = None
        raise cupy.cuda.runtime.CUDARuntimeError(901, "cudaErrorStreamCaptureInvalidated")

    failing_in_captures.launches_once = launch.launches_once
    engine._net = failing_in_captures
    monkeypatch.setattr("lazy_cupy._Stream.end_capture", end_capture)
    with pytest.raises(MapError, match="launch fails in the capture"):
        through(engine, net, x, rows=100)
    gc.collect()
    assert not cupy.live


def test_no_memory_at_all_says_what_to_do(monkeypatch, net, x):
    cupy = LazyCupy(most_device_bytes=10)
    with pytest.raises(MapError, match=r"making room for rows 0 to 1: OutOfMemoryError.*free_all_blocks.*device='cpu'"):
        through(gpu_engine(monkeypatch, net, cupy), net, x, rows=600)
    gc.collect()
    assert not cupy.live


def test_a_capture_is_refused(monkeypatch, net):
    cupy = LazyCupy()
    cupy.null.is_capturing = lambda: True
    with pytest.raises(RuntimeError, match="captures a CUDA graph"):
        gpu_engine(monkeypatch, net, cupy)


def test_lanes_copy_side_by_side_and_what_takes_one_call_at_a_time_gets_one(monkeypatch, net, x):
    """In the order of the rows, and from one thread, whose objects may belong to it."""

    class Watched:
        def __init__(self):
            self.busy = self.most = 0
            self.threads, self.starts = set(), []
            self.lock = threading.Lock()

        def __call__(self, original):
            def call(sink_or_source, start, stop, rows):
                with self.lock:
                    self.busy += 1
                    self.most = max(self.most, self.busy)
                    self.threads.add(threading.get_ident())
                    self.starts.append(start)
                time.sleep(0.002)
                original(sink_or_source, start, stop, rows)
                with self.lock:
                    self.busy -= 1

            return call

    for source, sink, wrap in [
        (_map_sources._SlicedSource, _map_sinks.SlicedSink, Counting),
        (_map_sources.ArraySource, _map_sinks._ArraySink, lambda array: array),
    ]:
        reads, writes, out = Watched(), Watched(), np.zeros((ROWS, 3), "f4")
        with monkeypatch.context() as patch:
            patch.setattr(source, "read", reads(source.read))
            patch.setattr(sink, "write", writes(sink.write))
            through(gpu_engine(patch, net, LazyCupy()), net, wrap(x), wrap(out), rows=50)
        assert_right(net, x, out)
        for watched in (reads, writes):
            assert sorted(watched.starts) == list(range(0, ROWS, 50))
            if wrap is Counting:
                assert watched.most == len(watched.threads) == 1
                assert watched.starts == sorted(watched.starts)
            else:
                assert watched.most > 1
                assert len(watched.threads) == 4


def test_chunks_are_of_a_size_that_lanes_copy_fast():
    class Engine(_pipeline.GpuEngine):
        def __init__(self):
            pass

    rows = chunk_rows(2**30, 72 * 4, None, Engine(), 1, 1)
    assert 6 << 20 <= rows * 72 * 4 <= 12 << 20
    assert rows % 128 == 0


def test_buffers_stay_below_two_gigabytes():
    """Whatever the rows of a chunk; those of one index of a sliced object have 512 MB at most."""
    for cores in (1, 2, 8, 64):
        for size in (4096, 9 << 20, 100 << 20, _pipeline.GpuEngine.most_bytes, 600 << 20):
            lanes = _pipeline._lane_count(cores, size, 10**6)
            assert 1 <= lanes <= _pipeline.MOST_LANES
            assert lanes * size < 2 << 30
            assert lanes >= min(_pipeline.LEAST_LANES, _pipeline.MOST_BUFFER_BYTES // size)
    assert _pipeline._lane_count(16, 4096, 3) == 3


def test_every_stream_is_waited_for_whatever_one_of_them_raises():
    """What one still copies to and from must not be given back because another one failed."""
    waited = []

    class Stream:
        def __init__(self, *errors):
            self.errors = list(errors)

        def synchronize(self):
            waited.append(self)
            if self.errors:
                raise self.errors.pop(0)

    cupy = LazyCupy()
    broken = cupy.cuda.runtime.CUDARuntimeError(700, "an illegal access")
    streams = [Stream(broken), Stream(KeyboardInterrupt()), Stream()]
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as caught, _pipeline._Quiet(cupy, streams):
        pass
    assert caught.value is broken
    assert waited == [streams[0], streams[1], streams[1], streams[2]]  # after Ctrl-C again
