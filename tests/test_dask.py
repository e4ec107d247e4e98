"""Dask arrays: the graph, a cluster of two worker processes, killed workers and runs, zarr to zarr, and docs/clusters.md."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import CANONICAL, c_loop, random_net, same_bits, unavailable

import cupymlp.dask
from cupymlp import MLP, _launch
from cupymlp._gpu import gpu_problem
from cupymlp.cpu import run_cpu
from cupymlp.reference import error_in_bounds, forward_and_bound

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "clusters.md").read_text()
NO_ENDLESS_WAIT = {"distributed.scheduler.no-workers-timeout": "20s"}  # should all workers be gone


def needs(name):
    """The module; without it the test is skipped, or fails where CI or a GPU run wants it."""
    try:
        return import_module(name)
    except ImportError as error:
        unavailable(f"{name} cannot be imported ({error})")


@pytest.fixture(autouse=True)
def no_networks_of_other_tests(monkeypatch):
    """Tests draw equal networks; one that an earlier test left on a GPU would not be uploaded again."""
    monkeypatch.setattr(cupymlp.dask, "_nets", OrderedDict())


@pytest.fixture
def da():
    """dask.array; what is computed without a cluster is computed in this thread."""
    array = needs("dask.array")
    with needs("dask").config.set(scheduler="synchronous"):
        yield array


@pytest.fixture
def zarr(da):
    return needs("zarr")


def two_workers():
    """A cluster of two processes, each under a nanny that starts it again when it dies."""
    distributed = needs("distributed")
    with needs("dask").config.set(NO_ENDLESS_WAIT):
        return distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0")


@pytest.fixture(scope="module")
def cluster():
    client_of = needs("distributed").Client
    with two_workers() as cluster, client_of(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def client(da, cluster):
    with needs("dask").config.set(scheduler=cluster):
        yield cluster


def right(net, result, x):
    """Whether every element is within the bound of the float64 reference."""
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    return result.shape == reference.shape and (error_in_bounds(result, reference, bound) <= 1).all()


def small_net(rng, sizes=CANONICAL, **options):
    return random_net(rng, sizes, **options).mlp()


# --- The token --------------------------------------------------------------------------------------------------------


def test_equal_networks_have_one_token_in_every_process_and_others_have_others(da, rng, tmp_path):
    tokenize = needs("dask.base").tokenize
    net = random_net(rng, CANONICAL, biases=[True, False, True], activations=["relu", "identity", "identity"])
    token = tokenize(net.mlp(), ensure_deterministic=True)
    net.mlp().save(tmp_path / "net.npz")
    program = f"""
import cupymlp
from dask.base import tokenize
print(tokenize(cupymlp.MLP.load({str(tmp_path / "net.npz")!r}), ensure_deterministic=True))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == token
    assert tokenize(pickle.loads(pickle.dumps(net.mlp()))) == token
    weights = [w.copy() for w in net.weights]
    weights[1][3, 4] = np.nextafter(weights[1][3, 4], 9)
    hidden = net.network.activations[:-1]
    others = [
        MLP(weights, net.biases, hidden),
        MLP(net.weights, [net.biases[0], None, None], hidden),
        MLP(net.weights, net.biases, "relu"),
        net.mlp(precision="tf32"),
        net.mlp(schedule="row"),
        net.mlp(weight_layout="out_in"),
        net.mlp(dtype="float64"),
    ]
    assert len({token, *map(tokenize, others)}) == 1 + len(others)


def test_the_weights_are_hashed_once_an_object(rng):
    net = small_net(rng)
    first = net.__dask_tokenize__()
    net._weights = None
    assert net.__dask_tokenize__() == first


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_and_empty_layers_have_tokens(rng, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    assert len({small_net(rng, (7, n, 4), dtype=dtype).__dask_tokenize__() for n in (0, 1, 2)}) == 3


# --- The array ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((48,), (48,)),
        ((1000, 48), (300, 48)),
        ((0, 48), (1, 48)),
        ((6, 0, 48), (4, 1, 48)),
        ((5, 4, 3, 48), (2, 4, 1, 48)),
    ],
    ids=str,
)
def test_any_shape_and_chunks(da, rng, shape, chunks):
    net = small_net(rng)
    x = rng.standard_normal(shape).astype("f4")
    array = da.from_array(x, chunks=chunks)
    y = cupymlp.dask.apply(net, array)
    assert y.shape == (*shape[:-1], 24)
    assert y.chunks == (*array.chunks[:-1], (24,))
    assert (type(y._meta), y._meta.shape, y._meta.dtype, y.dtype) == (np.ndarray, (0,) * len(shape), "f4", "f4")
    result = y.compute()
    assert (type(result), result.dtype) == (np.ndarray, np.float32)
    assert right(net, result, x)


@pytest.mark.parametrize(
    ("dtype", "x_dtype"),
    [("float64", "f4"), ("float32", "i2"), ("float16", "f2"), ("bfloat16", "bfloat16"), ("float32", ">f4")],
)
def test_the_dtype_is_the_networks(da, rng, dtype, x_dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    net = small_net(rng, (9, 8, 5), dtype=dtype)
    x = (10 * rng.standard_normal((20, 9))).astype(x_dtype)
    y = cupymlp.dask.apply(net, da.from_array(x, chunks=(6, 9)))
    assert y.dtype == y._meta.dtype == net.dtype
    result = y.compute()
    assert result.dtype == net.dtype
    assert right(net, result, x)


def test_unknown_chunk_lengths_along_the_leading_axes(da, rng):
    net = small_net(rng)
    x = rng.standard_normal((100, 48)).astype("f4")
    x[30:60, 0] = -1  # one chunk keeps no row
    array = da.from_array(x, chunks=(30, 48))
    y = cupymlp.dask.apply(net, array[array[:, 0] > 0])
    assert np.isnan(y.chunks[0]).all()
    assert y.chunks[1] == (24,)
    assert right(net, y.compute(), x[x[:, 0] > 0])


def test_the_network_is_called_on_the_chunks_and_nothing_else(da, rng, monkeypatch):
    """Dask, not told what comes, calls functions on arrays of shape (0, 0) and (1, 1)."""
    shapes = []
    run = cupymlp.dask._run
    monkeypatch.setattr(cupymlp.dask, "_run", lambda block, *a, **k: shapes.append(block.shape) or run(block, *a, **k))
    y = cupymlp.dask.apply(small_net(rng), da.ones((50, 48), dtype="f4", chunks=(20, 48)))
    assert shapes == []
    y.compute()
    assert sorted(shapes) == [(10, 48), (20, 48), (20, 48)]


def test_the_same_call_is_the_same_array_and_another_network_another(da, rng):
    net, other = small_net(rng), small_net(rng)
    x = da.ones((50, 48), dtype="f4", chunks=(20, 48))
    names = [cupymlp.dask.apply(n, x).name for n in (net, pickle.loads(pickle.dumps(net)), other)]
    names.append(cupymlp.dask.apply(net, x, device="cpu").name)
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_the_graph_holds_the_network_once(da, rng):
    net = small_net(rng, (48, 512, 24), biases=[True, True])  # 150 kB
    weights = sum(a.nbytes for a in [*net.weights, *net.biases])
    x = da.ones((1000, 48), dtype="f4", chunks=(10, 48))
    once = len(pickle.dumps(net))
    assert once < weights + 1000
    y = cupymlp.dask.apply(net, x)
    for array in (y, *needs("dask").optimize(y)):
        tasks = array.__dask_graph__().values()
        assert len(tasks) >= 101
        assert len(pickle.dumps(list(tasks))) < weights + 50_000
        sizes = sorted(len(pickle.dumps(task)) for task in tasks)  # a scheduler sends them one by one
        assert once <= sizes[-1] < once + 1000
        assert sizes[-2] < 5000
    two = needs("dask").optimize(cupymlp.dask.apply(net, x + 1), y)
    nets = [key for array in two for key in array.__dask_graph__() if str(key).startswith("cupymlp-net")]
    assert len(set(nets)) == 1  # two arrays share it


# --- Errors: when apply is called, not in the workers -----------------------------------------------------------------------


def test_a_feature_axis_in_chunks_is_an_error_that_says_how_to_rechunk(da, rng):
    net = small_net(rng)
    x = da.ones((20, 48), dtype="f4", chunks=(10, 8))
    message = (
        r"x has its feature axis, the last one, in 6 chunks \(8, 8, 8, 8, \.\.\.\); accepted: one chunk of 48, .* "
        r"Pass x\.rechunk\(\{-1: -1\}\)"
    )
    with pytest.raises(ValueError, match=message):
        cupymlp.dask.apply(net, x)
    assert right(net, cupymlp.dask.apply(net, x.rechunk({-1: -1})).compute(), np.ones((20, 48)))
    rows = x[x[:, 0] > 0]
    assert cupymlp.dask.apply(net, rows.rechunk({-1: -1})).compute().shape == (20, 24)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda da: {"net": np.ones}, TypeError, "net is a .*; accepted: a cupymlp.MLP"),
        (lambda da: {"x": np.ones((3, 48), "f4")}, TypeError, r"x is a numpy\.ndarray; accepted: a Dask array\. Make one"),
        (lambda da: {"x": da.ones((), dtype="f4")}, ValueError, r"x is 0-dimensional; accepted: an array \(\.\.\., 48\)"),
        (lambda da: {"x": da.ones((48, 3), dtype="f4")}, ValueError, r"the network takes 48 features\. x\.T would fit"),
        (lambda da: {"x": da.ones((3, 48))}, TypeError, r"x has dtype float64 .* convert x with x\.astype\('float32'\)"),
        (lambda da: {"x": da.ones((3, 48), dtype="c8")}, TypeError, "x has dtype complex64; accepted: real numbers"),
        (lambda da: {"x": da.ma.masked_equal(da.ones((3, 48), dtype="f4"), 1)}, TypeError, "masked arrays, whose mask"),
        (lambda da: {"device": "gpu"}, ValueError, "device is 'gpu'; accepted: None, 'cuda' or 'cpu'"),
    ],
)  # fmt: skip
def test_what_does_not_suit_is_refused_at_once(da, rng, arguments, error, message):
    given = {"net": small_net(rng), "x": da.ones((3, 48), dtype="f4"), **arguments(da)}
    with pytest.raises(error, match=message):
        cupymlp.dask.apply(given.pop("net"), given.pop("x"), **given)


def test_chunks_of_other_libraries_and_unknown_features_are_refused(da, rng):
    net = small_net(rng)
    x = da.ones((3, 48), dtype="f4")
    x._meta = SomethingElse()
    with pytest.raises(TypeError, match=r"chunks of type .*SomethingElse; accepted: NumPy or CuPy\. Convert them with"):
        cupymlp.dask.apply(net, x)
    row = da.ones(48, dtype="f4")
    with pytest.raises(ValueError, match=r"last axis has an unknown length; .*Call x\.compute_chunk_sizes\(\) first"):
        cupymlp.dask.apply(net, row[row > 0])


class SomethingElse:
    dtype = np.dtype("f4")


def test_without_dask_or_zarr_the_errors_say_what_to_install():
    program = """
import sys, numpy as np, cupymlp
assert not {"cupy", "dask", "zarr"} & {*sys.modules}
import cupymlp.dask
assert not {"cupy", "dask", "zarr"} & {*sys.modules}
sys.modules["dask"] = None
net = cupymlp.MLP([np.eye(2)])
for call in (lambda: cupymlp.dask.apply(net, None), lambda: cupymlp.dask.store(net, "x", "y")):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("cupymlp.dask.apply needs dask.array, which cannot be imported (")
    assert second.startswith("cupymlp.dask.store needs dask.array")
    assert first.endswith(": pip install 'cupymlp[dask]'")


# --- Networks that a process keeps --------------------------------------------------------------------------------------------


def test_copies_that_are_unpickled_for_each_task_run_as_one_network(rng):
    net = small_net(rng)
    token = net.__dask_tokenize__()[1]
    packed = pickle.dumps(net)
    kept = {id(cupymlp.dask._kept(pickle.loads(packed), token)) for _ in range(10)}
    assert len(kept) == 1


def test_a_process_keeps_the_networks_that_it_used_last(rng):
    nets = {str(i): small_net(rng, (2, 2)) for i in range(cupymlp.dask.KEPT_NETS + 5)}
    for token, net in nets.items():
        assert cupymlp.dask._kept(net, token) is net
        assert cupymlp.dask._kept(small_net(rng, (2, 2)), "0") is nets["0"]  # in use, so it stays
    assert [*cupymlp.dask._nets] == [*list(nets)[-cupymlp.dask.KEPT_NETS + 1 :], "0"]


class GpuChunk(np.ndarray):
    """A NumPy array in the place of a CuPy one."""


@pytest.fixture
def uploaded(monkeypatch):
    """Without a GPU: the stand-ins for a network on one that were made."""
    made = []

    class PackedNet:
        def __init__(self, network, weights, biases, *_):
            time.sleep(0.05)  # so that threads which do not wait for each other are seen
            made.append(self)
            self.arguments = network, weights, biases

        def run(self, x, out=None):
            out = np.empty((*x.shape[:-1], self.arguments[0].sizes[-1]), np.float32).view(GpuChunk)
            run_cpu(*self.arguments, x, out)
            return out

        __call__ = run

    cupy = SimpleNamespace(ndarray=GpuChunk)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupymlp.mlp, "cupy_or_error", lambda _: cupy)
    monkeypatch.setattr(cupymlp.mlp, "PackedNet", PackedNet)
    return made


def test_gpu_chunks_give_gpu_chunks_and_one_upload_whatever_is_unpickled(da, rng, uploaded):
    """With eight threads that start together, each with a copy of the network."""
    net = small_net(rng)
    token = net.__dask_tokenize__()[1]
    pickled = pickle.dumps(net)
    x = rng.standard_normal((800, 48)).astype("f4")
    copies = [pickle.loads(pickled) for _ in range(8)]
    start, results = threading.Barrier(8), [None] * 8

    def work(i):
        start.wait()
        results[i] = cupymlp.dask._run(x[i::8].view(GpuChunk), copies[i], token=token, device=None)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(type(y) is GpuChunk and right(net, np.asarray(y), x[i::8]) for i, y in enumerate(results))
    assert len(uploaded) == 1

    on_gpu = da.from_array(x, chunks=(100, 48)).map_blocks(
        lambda block: block.view(GpuChunk), dtype="f4", meta=np.empty((0, 0), "f4").view(GpuChunk)
    )
    y = cupymlp.dask.apply(pickle.loads(pickled), on_gpu)
    assert (type(y._meta), y._meta.shape, y._meta.dtype) == (GpuChunk, (0, 0), "f4")
    assert right(net, np.asarray(y.compute()), x)
    assert len(uploaded) == 1
    with pytest.raises(TypeError, match=r"x has CuPy chunks and device='cpu': pass NumPy chunks"):
        cupymlp.dask.apply(net, on_gpu, device="cpu")


# --- A cluster of two worker processes ----------------------------------------------------------------------------------------


def start_counting():
    """In a worker: count the networks that are unpickled and those that compute."""
    counts = cupymlp.dask._counts = {"unpickled": 0, "blocks": 0, "nets": set()}
    make, call = MLP._set, MLP.__call__  # not _rebuilt: it is in every pickle, by name

    def counted_set(self, *arguments):
        counts["unpickled"] += 1
        make(self, *arguments)

    def counted_call(self, *arguments, **options):
        counts["blocks"] += 1
        counts["nets"].add(id(self))
        return call(self, *arguments, **options)

    MLP._set, MLP.__call__ = counted_set, counted_call


def counted():
    return cupymlp.dask._counts


def test_two_workers_compute_with_one_network_each(da, rng, client):
    net = small_net(rng)
    x = rng.standard_normal((2000, 48)).astype("f4")
    array = da.from_array(x, chunks=(50, 48))
    client.run(start_counting)
    for _ in range(3):
        assert right(net, cupymlp.dask.apply(net, array).compute(), x)
    counts = list(client.run(counted).values())
    assert len(counts) == 2
    assert sum(c["blocks"] for c in counts) == 120
    for count in counts:
        assert count["blocks"] > 0
        assert 1 <= count["unpickled"] <= 3  # one a computation, not one a task
        assert len(count["nets"]) == 1


def test_a_worker_without_a_gpu_says_so_when_cuda_is_asked(da, rng, client):
    if gpu_problem() is None:
        pytest.skip("there is a GPU")
    y = cupymlp.dask.apply(small_net(rng), da.ones((4, 48), dtype="f4"), device="cuda")
    with pytest.raises(RuntimeError, match=r"device='cuda' .*needs a CUDA GPU, and "):
        y.compute()


def slowly(block, folder):
    Path(folder, uuid.uuid4().hex).touch()
    time.sleep(0.1)
    return block


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return found


def test_a_killed_worker_costs_nothing_but_time(da, rng, tmp_path):
    net = small_net(rng)
    x = rng.standard_normal((400, 48)).astype("f4")
    array = da.from_array(x, chunks=(20, 48)).map_blocks(slowly, str(tmp_path), dtype="f4", meta=np.empty((0, 0), "f4"))
    with two_workers() as cluster, needs("distributed").Client(cluster, set_as_default=False) as client:
        pids = client.run(os.getpid)
        future = client.compute(cupymlp.dask.apply(net, array))
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 6)
        victim = wait_until(lambda: next((w for w, tasks in client.processing().items() if tasks), None))
        os.kill(pids[victim], signal.SIGKILL)
        result = future.result(timeout=30)
        assert len(list(tmp_path.iterdir())) > 20  # what the worker held was computed again
    assert right(net, result, x)


# --- From zarr to zarr ------------------------------------------------------------------------------------------------------


def zarr_source(zarr, rng, path, shape=(1000, 48), chunks=(100, 16), **options):
    x = rng.standard_normal(shape).astype("f4")
    array = zarr.create_array(path, shape=shape, chunks=chunks, dtype="f4", **options)
    array[...] = x
    return x


@pytest.fixture
def blocks(monkeypatch):
    """The shapes of the blocks that are computed in this process."""
    shapes = []
    run = cupymlp.dask._run
    monkeypatch.setattr(cupymlp.dask, "_run", lambda block, *a, **k: shapes.append(block.shape) or run(block, *a, **k))
    return shapes


def test_zarr_in_zarr_out_and_again_nothing_to_do(zarr, rng, tmp_path, blocks):
    net = small_net(rng)
    x = zarr_source(zarr, rng, tmp_path / "x.zarr")  # its feature axis is chunked: reading joins it
    done = cupymlp.dask.store(net, tmp_path / "x.zarr", tmp_path / "y.zarr")
    assert (done.regions, done.computed) == (10, 10)
    assert (done.target.shape, done.target.chunks, done.target.dtype) == ((1000, 24), (100, 24), np.float32)
    assert right(net, zarr.open_array(tmp_path / "y.zarr", mode="r")[:], x)
    assert blocks == 10 * [(100, 48)]
    again = cupymlp.dask.store(net, str(tmp_path / "x.zarr"), done.target)
    assert (again.regions, again.computed) == (10, 0)
    assert len(blocks) == 10


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"shards": (6, 4, 24)}], ids=["v3", "v2", "shards"])
def test_regions_are_the_targets_chunks_or_shards(da, zarr, rng, tmp_path, blocks, options):
    """Whatever the source's chunks: three axes, chunks that do not divide them, the target's features in several chunks."""
    net = small_net(rng)
    x = rng.standard_normal((7, 9, 48)).astype("f4")
    group = zarr.create_group(tmp_path / "group", zarr_format=options.pop("zarr_format", 3))
    target = group.create_array("y", shape=(7, 9, 24), chunks=(3, 4, 8), dtype="f4", **options)
    done = cupymlp.dask.store(net, da.from_array(x, chunks=(2, 5, 48)), target)
    regions = 2 * 3 if "shards" in options else 3 * 3
    assert (done.regions, done.computed) == (regions, regions)
    assert right(net, target[...], x)
    assert len(blocks) == regions
    assert (*(target.shards or target.chunks)[:2], 48) in blocks
    assert [name for name, _ in group.members()] == ["y"]  # the marks are no array of the group
    chunked_otherwise = da.from_array(x, chunks=(7, 9, 48))
    assert cupymlp.dask.store(net, chunked_otherwise, target).computed == 0


@pytest.mark.parametrize("shape", [(48,), (0, 48)], ids=str)
def test_one_row_and_no_rows_are_stored(da, zarr, rng, tmp_path, shape):
    net = small_net(rng)
    x = rng.standard_normal(shape).astype("f4")
    array = da.from_array(x, chunks=(*(1,) * (len(shape) - 1), 48))
    done = cupymlp.dask.store(net, array, tmp_path / "y.zarr")
    assert right(net, done.target[...], x)
    assert cupymlp.dask.store(net, array, tmp_path / "y.zarr").computed == 0


KILLED = """
import sys, time
import dask, numpy as np
import cupymlp, cupymlp.dask

run = cupymlp.dask._run
def slow(*arguments, **options):
    time.sleep(0.05)
    return run(*arguments, **options)

cupymlp.dask._run = slow
with dask.config.set(scheduler="threads", num_workers=2):
    cupymlp.dask.store(cupymlp.MLP.load(sys.argv[1]), sys.argv[2], sys.argv[3], device="cpu")
"""


def test_a_killed_run_is_resumed_and_computes_only_what_is_missing(zarr, rng, tmp_path, blocks):
    net = small_net(rng)
    net.save(tmp_path / "net.npz")
    x = zarr_source(zarr, rng, tmp_path / "x.zarr", chunks=(20, 48))
    paths = [str(tmp_path / name) for name in ("net.npz", "x.zarr", "y.zarr")]
    marks = tmp_path / "y.zarr" / cupymlp.dask.DONE

    def written():
        return {f.name for f in marks.rglob("c*") if f.is_file() and not f.name.endswith(".partial")}

    with subprocess.Popen([sys.executable, "-c", KILLED, *paths]) as process:
        wait_until(lambda: len(written()) >= 7)
        process.kill()
    before = written()
    assert process.returncode == -signal.SIGKILL
    assert 7 <= len(before) < 50
    data = {name: (tmp_path / "y.zarr" / "c" / name[1:] / "0").stat().st_mtime_ns for name in before}
    done = cupymlp.dask.store(net, paths[1], paths[2], device="cpu")
    assert (done.regions, done.computed) == (50, 50 - len(before))
    assert len(blocks) == done.computed
    for name, time_ns in data.items():
        assert (tmp_path / "y.zarr" / "c" / name[1:] / "0").stat().st_mtime_ns == time_ns
    whole = cupymlp.dask.store(net, paths[1], tmp_path / "whole.zarr", device="cpu")
    assert whole.computed == 50
    assert same_bits(done.target[:], whole.target[:])
    assert right(net, done.target[:], x)


def test_a_region_without_its_mark_is_computed_again_whatever_is_there(zarr, rng, tmp_path, blocks):
    """Killed between data and mark, or in the middle of the data."""
    net = small_net(rng)
    x = zarr_source(zarr, rng, tmp_path / "x.zarr")
    cupymlp.dask.store(net, tmp_path / "x.zarr", tmp_path / "y.zarr")
    (mark,) = (tmp_path / "y.zarr" / cupymlp.dask.DONE).rglob("c3")
    mark.unlink()
    (tmp_path / "y.zarr" / "c" / "3" / "0").write_bytes(b"torn")
    (tmp_path / "y.zarr" / "c" / "5" / "0").unlink()  # by hand: the mark is believed
    done = cupymlp.dask.store(net, tmp_path / "x.zarr", tmp_path / "y.zarr")
    assert done.computed == 1
    result = done.target[:]
    assert right(net, result[:500], x[:500])
    assert not result[500:600].any()


def test_a_mark_follows_its_data(monkeypatch):
    events = []

    class Target:
        def __setitem__(self, region, data):
            events.append((region, data.shape))
            if len(events) == 3:
                raise OSError("the disk is full")

    monkeypatch.setattr(cupymlp.dask, "_mark", lambda target, job, where: events.append((job, where)))
    options = {"lengths": (10, 7), "job": "job"}
    cupymlp.dask._write(np.ones((10, 2, 4)), Target(), block_id=(3, 1, 0), **options)
    assert events == [((slice(30, 40), slice(7, 9), slice(None)), (10, 2, 4)), ("job", (3, 1))]
    with pytest.raises(OSError, match="the disk is full"):
        cupymlp.dask._write(np.ones((10, 7, 4)), Target(), block_id=(0, 0, 0), **options)
    assert len(events) == 3  # no mark


def test_another_network_starts_afresh_and_so_does_the_first_after_it(zarr, rng, tmp_path):
    net, other = small_net(rng), small_net(rng)
    x = zarr_source(zarr, rng, tmp_path / "x.zarr")
    for each in (net, other, net):
        done = cupymlp.dask.store(each, tmp_path / "x.zarr", tmp_path / "y.zarr")
        assert done.computed == 10
        assert right(each, done.target[:], x)
    target = done.target
    target.resize((1100, 24))
    zarr.open_array(tmp_path / "x.zarr", mode="r+").resize((1100, 48))
    assert cupymlp.dask.store(net, tmp_path / "x.zarr", target).computed == 11  # another shape
    zarr.create_array(tmp_path / "y.zarr", shape=(1100, 24), chunks=(100, 24), dtype="f4", overwrite=True)
    # Made anew: the marks went with the old one.
    assert cupymlp.dask.store(net, tmp_path / "x.zarr", tmp_path / "y.zarr").computed == 11


def test_two_workers_store_and_a_store_that_they_do_not_share_is_noticed(da, zarr, rng, tmp_path, client):
    net = small_net(rng)
    x = zarr_source(zarr, rng, tmp_path / "x.zarr")
    done = cupymlp.dask.store(net, tmp_path / "x.zarr", tmp_path / "y.zarr")
    assert done.computed == 10
    assert right(net, done.target[:], x)
    in_memory = zarr.create_array({}, shape=(1000, 24), chunks=(500, 24), dtype="f4")
    with pytest.raises(RuntimeError, match=r"2 of the 2 regions that workers wrote are not in target .*memory"):
        cupymlp.dask.store(net, tmp_path / "x.zarr", in_memory)
    with needs("dask").config.set(scheduler="threads"):
        assert cupymlp.dask.store(net, tmp_path / "x.zarr", in_memory).computed == 2
    assert right(net, in_memory[:], x)


def test_the_graph_of_a_store_holds_network_and_target_once(da, zarr, rng, tmp_path, monkeypatch):
    net = small_net(rng, (48, 512, 24), biases=[True, True])
    zarr.create_array(tmp_path / "x.zarr", shape=(500, 48), chunks=(5, 48), dtype="f4")
    collections = []
    dask = needs("dask")
    monkeypatch.setattr(dask, "compute", lambda *tasks: collections.extend(tasks))
    with pytest.raises(RuntimeError, match="100 of the 100 regions"):
        cupymlp.dask.store(net, tmp_path / "x.zarr", tmp_path / "y.zarr")
    graph = {key: task for part in dask.optimize(*collections) for key, task in part.__dask_graph__().items()}
    sizes = sorted(len(pickle.dumps(task)) for task in graph.values())
    assert len(collections) == 100
    assert len(graph) == 103  # network, source and target; a region is read, computed and written in one task
    assert sizes[-1] < len(pickle.dumps(net)) + 1000
    assert sizes[-2] < 5000


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda z, da: {"net": "net.npz"}, TypeError, "net is a str; accepted: a cupymlp.MLP"),
        (lambda z, da: {"x": np.ones((20, 48), "f4")}, TypeError, r"x is a numpy\.ndarray; accepted: a zarr array, its path"),
        (lambda z, da: {"x": z((20, 49))}, ValueError, "x has shape .* the network takes 48 features"),
        (lambda z, da: {"x": z((20, 48), "f8")}, TypeError, "x has dtype float64 and the network is float32"),
        (lambda z, da: {"x": da.ones((20, 48), dtype="f4", chunks=(10, 8))}, ValueError, "feature axis, .* in 6 chunks"),
        (lambda z, da: {"x": (a := da.ones((20, 48), dtype="f4"))[a[:, 0] > 0]}, ValueError, "gives its rows no place"),
        (lambda z, da: {"target": z((20, 23))}, ValueError, r"target has shape \(20, 23\); the result has shape \(20, 24\)"),
        (lambda z, da: {"target": z((20, 24), "f8")}, TypeError, "target has dtype float64; the result is float32: pass"),
        (lambda z, da: {"target": np.ones((20, 24), "f4")}, TypeError, r"target is a numpy\.ndarray; accepted: a zarr"),
        (lambda z, da: {"target": z((20, 24), mode="r")}, ValueError, "target is read-only: open it with"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_at_once(da, zarr, rng, tmp_path, arguments, error, message):
    def made(shape, dtype="f4", mode="r+"):
        path = tmp_path / uuid.uuid4().hex
        zarr.create_array(path, shape=shape, chunks=shape, dtype=dtype)
        return zarr.open_array(path, mode=mode)

    given = {"net": small_net(rng), "x": made((20, 48)), "target": tmp_path / "y.zarr", **arguments(made, da)}
    with pytest.raises(error, match=message):
        cupymlp.dask.store(*given.values())
    assert not (tmp_path / "y.zarr").exists()


def test_the_target_is_not_the_source_and_zarr_has_no_bfloat16(da, zarr, rng, tmp_path):
    square = small_net(rng, (8, 8))
    zarr_source(zarr, rng, tmp_path / "x.zarr", (20, 8), (10, 8))
    with pytest.raises(ValueError, match="target is x itself"):
        cupymlp.dask.store(square, tmp_path / "x.zarr", tmp_path / "x.zarr")
    pytest.importorskip("ml_dtypes")
    net = small_net(rng, (8, 8), dtype="bfloat16")
    with pytest.raises(TypeError, match="target cannot be made: zarr has no bfloat16"):
        cupymlp.dask.store(net, da.ones((20, 8), dtype=net.dtype), tmp_path / "y.zarr")


# --- The guide and the docstrings say what is true ----------------------------------------------------------------------------

CODE = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
UNTESTED = ("import ray", ", ray, ", "mpi4py", "tcp://head")  # not installed here, or the other half of what follows


def examples():
    yield from (code for code in CODE if not any(word in code for word in UNTESTED))
    for function in (cupymlp.dask.apply, cupymlp.dask.store):
        _, _, code = function.__doc__.partition("    ::\n")
        yield textwrap.dedent(code)


@pytest.mark.parametrize("code", list(examples()), ids=["apply", "store", "gpus", "doc of apply", "doc of store"])
def test_the_examples_run_as_they_stand(da, zarr, tmp_path, code):
    """Without a GPU, ``CUDA_VISIBLE_DEVICES`` in them tells the workers apart and nothing else."""
    needs("distributed")
    program = tmp_path / "example.py"
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if "y.zarr" in code and "tempfile" not in code:
        assert re.findall(r"computed=(\d+)", done.stdout) == ["10", "0"]


def test_what_is_not_run_compiles_and_is_said_not_to_be_tested():
    untested = [code for code in CODE if any(word in code for word in UNTESTED)]
    assert len(untested) == 3
    for code in untested:
        compile(code, "clusters.md", "exec")
        assert len([line for line in code.splitlines() if line.strip()]) <= 11
    for section in ("Ray", "MPI"):
        _, _, text = GUIDE.partition(f"## {section}\n")
        assert text.lstrip().startswith("Not part of the tests")


def test_the_guides_commands_start_a_cluster(da, rng, tmp_path):
    """The shell lines, on this machine and a free port."""
    distributed = needs("distributed")
    (lines,) = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    scheduler, *workers = lines.strip().splitlines()
    assert len(workers) == 2
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    processes = []
    try:
        for line, more in ((scheduler, "--host 127.0.0.1 --no-dashboard"), *((w, "--no-dashboard") for w in workers)):
            command = line.replace("8786", port).replace("head", "127.0.0.1")
            setting, _, rest = command.rpartition("dask ")
            environment = dict(pair.split("=") for pair in setting.split())
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dask", *rest.split(), *more.split()],
                    cwd=tmp_path, env={**os.environ, **environment}, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        net = small_net(rng)
        x = rng.standard_normal((100, 48)).astype("f4")
        with distributed.Client(f"tcp://127.0.0.1:{port}", set_as_default=False, timeout=30) as client:
            client.wait_for_workers(2, timeout=30)
            assert sorted(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values()) == ["0", "1"]
            y = cupymlp.dask.apply(net, da.from_array(x, chunks=(10, 48)), device="cpu")
            assert right(net, client.compute(y).result(timeout=30), x)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)


# --- On GPUs ------------------------------------------------------------------------------------------------------------------


def count_uploads():
    """Note the device and the layout of each upload of weights that this process makes from now on."""
    import cupy

    found, pack = [], _launch.pack

    def counted(xp, layout, *arguments):
        found.append((cupy.cuda.runtime.getDevice(), layout))
        return pack(xp, layout, *arguments)

    _launch.pack = counted
    return found


@pytest.fixture
def uploads(monkeypatch):
    needs("cupy")
    monkeypatch.setattr(_launch, "pack", _launch.pack)  # put back what it is now
    return count_uploads()


def once_on(devices, uploads):
    """Whether these devices have the weights, each layout that was needed uploaded once."""
    return {device for device, _ in uploads} == set(devices) and len(set(uploads)) == len(uploads)


@pytest.mark.gpu
def test_cupy_chunks_on_a_gpu(da, rng, uploads):
    cupy = pytest.importorskip("cupy")
    net = random_net(rng, CANONICAL)
    x = rng.standard_normal((1000, 48)).astype("f4")
    array = da.from_array(x, chunks=(100, 48)).map_blocks(cupy.asarray)
    with needs("dask").config.set(scheduler="threads", num_workers=8):
        for _ in range(2):
            y = cupymlp.dask.apply(net.mlp(), array)  # an MLP of its own, equal to the first
            assert type(y._meta) is cupy.ndarray
            assert y._meta.dtype == "f4"
            result = y.compute()
            assert type(result) is cupy.ndarray
            assert same_bits(result.get(), c_loop(net, x))
    assert once_on([cupy.cuda.runtime.getDevice()], uploads)


@pytest.mark.gpu
def test_numpy_chunks_go_to_the_gpu_of_this_process(da, zarr, rng, tmp_path, uploads):
    device = needs("cupy").cuda.runtime.getDevice()
    net = random_net(rng, CANONICAL)
    x = zarr_source(zarr, rng, tmp_path / "x.zarr")
    y = cupymlp.dask.apply(net.mlp(), da.from_array(x, chunks=(100, 48)), device="cuda")
    assert same_bits(y.compute(), c_loop(net, x))
    done = cupymlp.dask.store(net.mlp(), tmp_path / "x.zarr", tmp_path / "y.zarr", device="cuda")
    assert same_bits(done.target[:], c_loop(net, x))
    assert once_on([device], uploads)


@pytest.mark.gpu
def test_cupy_chunks_are_stored(da, zarr, rng, tmp_path):
    cupy = pytest.importorskip("cupy")
    net = random_net(rng, CANONICAL)
    x = rng.standard_normal((1000, 48)).astype("f4")
    array = da.from_array(x, chunks=(300, 48)).map_blocks(cupy.asarray)
    done = cupymlp.dask.store(net.mlp(), array, tmp_path / "y.zarr")
    assert same_bits(done.target[:], c_loop(net, x))


def start_counting_uploads():
    cupymlp.dask._uploads = count_uploads()


def uploads_and_device():
    import cupy

    return cupymlp.dask._uploads, cupy.cuda.runtime.deviceGetPCIBusId(0), cupy.cuda.runtime.getDeviceCount()


def one_worker_a_device(devices):
    distributed = needs("distributed")

    def worker(device):
        return {"cls": distributed.Nanny, "options": {"nthreads": 2, "env": {"CUDA_VISIBLE_DEVICES": device}}}

    scheduler = {"cls": distributed.Scheduler, "options": {"port": 0, "dashboard_address": ":0"}}
    with needs("dask").config.set(NO_ENDLESS_WAIT):
        return distributed.SpecCluster({i: worker(device) for i, device in enumerate(devices)}, scheduler)


def check_workers_on_gpus(da, rng, devices):
    """Every worker computes on its own device, uploads once, and all give the bits of the C loop."""
    net = random_net(rng, CANONICAL)
    x = rng.standard_normal((4000, 48)).astype("f4")
    array = da.from_array(x, chunks=(100, 48))
    with one_worker_a_device(devices) as cluster, needs("distributed").Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(len(devices), timeout=60)
        client.run(start_counting_uploads)
        with needs("dask").config.set(scheduler=client):
            for _ in range(3):
                y = cupymlp.dask.apply(net.mlp(), array, device="cuda").compute()
                assert same_bits(y, c_loop(net, x))
        found = list(client.run(uploads_and_device).values())
    assert len(found) == len(devices)
    assert all(once_on([0], uploads) for uploads, _, _ in found)
    assert [count for _, _, count in found] == [1] * len(devices)
    assert len({bus for _, bus, _ in found}) == len(set(devices))


def visible_devices():
    import cupy

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(cupy.cuda.runtime.getDeviceCount())]


@pytest.mark.gpu
def test_two_workers_share_a_gpu_and_upload_once_each(da, rng):
    check_workers_on_gpus(da, rng, visible_devices()[:1] * 2)


@pytest.fixture
def cupy_on_two_gpus():
    if (problem := gpu_problem()) is not None:
        pytest.skip(f"no GPU: {problem}")
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    return cupy


@pytest.mark.two_gpus
def test_a_worker_for_each_of_two_gpus(da, rng, cupy_on_two_gpus):
    check_workers_on_gpus(da, rng, visible_devices()[:2])


@pytest.mark.two_gpus
def test_chunks_on_two_gpus_of_one_process_are_computed_where_they_are(da, rng, cupy_on_two_gpus, uploads):
    cupy = cupy_on_two_gpus
    net = random_net(rng, CANONICAL)
    x = rng.standard_normal((800, 48)).astype("f4")

    def to_device(block, block_id):
        with cupy.cuda.Device(block_id[0] % 2):
            return cupy.asarray(block)

    array = da.from_array(x, chunks=(100, 48))
    on_both = array.map_blocks(to_device, block_id=True, dtype="f4", meta=cupy.empty((0, 0), "f4"))
    for _ in range(2):
        y = cupymlp.dask.apply(net.mlp(), on_both)
        (parts,) = needs("dask").compute(list(y.to_delayed().ravel()))
        assert [part.device.id for part in parts] == [0, 1] * 4
        for i, part in enumerate(parts):
            with part.device:
                assert same_bits(part.get(), c_loop(net, x[100 * i : 100 * i + 100]))
    assert once_on([0, 1], uploads)
