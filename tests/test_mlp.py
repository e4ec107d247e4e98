"""MLP and fused_mlp on NumPy arrays: what they take, what they give, what they refuse. The CPU path runs here."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NETS, c_loop, in_threads, odd_values, random_net, same_bits

import cupymlp
import cupymlp.mlp
from cupymlp import MLP, fused_mlp
from cupymlp._gpu import gpu_problem
from cupymlp.network import DTYPES, PRECISIONS, Network, numpy_dtype
from cupymlp.plan import cpu_block_rows
from cupymlp.reference import error_in_bounds, forward_and_bound
from cupymlp.schedules import SCHEDULES
from cupymlp.verify import random_mlp

HALVES = ("float16", "bfloat16")


def worst(net, y, x):
    with np.errstate(all="ignore"):
        reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    return error_in_bounds(y, reference, bound).max(initial=0.0)


# --- Results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_results_are_within_the_bound(rng, sizes, dtype, layout):
    net = random_net(rng, sizes, dtype)
    mlp = net.mlp(weight_layout=layout)
    for batch in (1, 2, 33, 700):
        x = odd_values(rng, (batch, sizes[0]), dtype)
        y = mlp(x, device="cpu")
        assert y.dtype == dtype
        assert y.shape == (batch, sizes[-1])
        assert worst(net, y, x) <= 1


def test_blocks_of_rows_leave_no_seam(canonical, rng):
    step = cpu_block_rows(canonical.network)
    for batch in (step - 1, step, step + 1, 3 * step + 5):
        x = rng.standard_normal((batch, 48)).astype("f4")
        assert worst(canonical, canonical.mlp()(x, device="cpu"), x) <= 1


@given(data=st.data())
def test_any_net_in_any_layout_and_dtype_is_within_the_bound(data):
    """Depth, widths, biases, activations, dtypes of weights and x, layout, scale and leading axes, all drawn."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=6))
    name = data.draw(st.sampled_from(DTYPES))
    net, dtype = random_net(rng, sizes, name, scale=data.draw(st.sampled_from([1e-6, 0.3, 3.0]))), numpy_dtype(name)
    codes = {"float16": "?bBe", "bfloat16": "?bB", "float32": "?bBhHef", "float64": "?bBhHefiIlLd"}[name]
    x = rng.standard_normal((*data.draw(st.lists(st.integers(0, 5), max_size=3)), sizes[0])) * 50
    code = data.draw(st.sampled_from([*codes, dtype]))
    x = (np.abs(x) if code in ("B", "H", "I", "L") else x).astype(code)
    layout = data.draw(st.sampled_from(["in_out", "out_in"]))
    y = net.mlp(weight_layout=layout)(x, device="cpu")
    assert (y.dtype, y.shape) == (dtype, (*x.shape[:-1], sizes[-1]))
    assert worst(net, y, x.astype(dtype)) <= 1
    again = fused_mlp(
        x.astype(dtype),
        *(w.T if layout == "out_in" else w for w in net.weights),
        biases=net.biases,
        activation=net.network.activations[:-1],
        out_activation=net.network.activations[-1],
        weight_layout=layout,
        device="cpu",
    )
    assert worst(net, again, x.astype(dtype)) <= 1


@given(data=st.data())
def test_any_view_gives_what_a_contiguous_copy_gives(data):
    """Any strides, order of axes, byte order, offset and alignment of x and out, in 1 to 4 dimensions."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    net = random_net(np.random.default_rng(5), (4, 6, 3))
    batch = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))

    def view(features, dtype):
        shape = (*batch, features)
        order = data.draw(st.permutations(range(len(shape))))
        gaps = [data.draw(st.integers(1, 3)) for _ in shape]
        offset = data.draw(st.integers(0, 3))
        dtype = np.dtype(data.draw(st.sampled_from([dtype, ">" + dtype])))
        length = int(np.prod([shape[a] * gaps[a] for a in order])) * dtype.itemsize
        raw = np.full(length + offset, 0xAB, "u1")
        array = raw[offset:].view(dtype).reshape([shape[a] * gaps[a] for a in order]).transpose(np.argsort(order))
        array = array[tuple(slice(0, s * g, g) for s, g in zip(shape, gaps, strict=True))]
        return array[tuple(slice(None, None, -1) if data.draw(st.booleans()) else slice(None) for _ in shape)]

    x = view(4, "f4")
    x[...] = rng.standard_normal(x.shape)
    want = net.mlp()(np.ascontiguousarray(x, "f4"), device="cpu")
    out = view(3, "f4")
    y = net.mlp()(x, out=out, device="cpu")
    assert y is out
    np.testing.assert_array_max_ulp(out.astype("f4"), want, 8) if want.size else None
    assert worst(net, out.astype("f4"), x.astype("f4")) <= 1
    assert net.mlp()(x, device="cpu").shape == want.shape


def test_broadcast_and_unmergeable_axes(canonical, rng):
    x = rng.standard_normal((5, 1, 48)).astype("f4")
    wide = np.broadcast_to(x, (5, 300, 48))
    y = canonical.mlp()(wide, device="cpu")
    assert y.shape == (5, 300, 24)
    assert worst(canonical, y, wide) <= 1
    swapped = np.ascontiguousarray(np.broadcast_to(x, (5, 700, 48)).swapaxes(0, 1)).swapaxes(0, 1)
    out = np.empty((700, 5, 24), "f4").swapaxes(0, 1)
    assert worst(canonical, canonical.mlp()(swapped, out=out, device="cpu"), swapped) <= 1


@pytest.mark.parametrize("shift", [-8, -3, 0, 3, 8])
def test_out_that_overlaps_x(rng, shift):
    net = random_net(rng, (8, 8, 8))
    x = rng.standard_normal((2000, 8)).astype("f4")
    memory = np.zeros(2000 * 8 + 16, "f4")
    view = memory[8 : 8 + x.size].reshape(x.shape)
    view[...] = x
    out = memory[8 + shift : 8 + shift + x.size].reshape(x.shape)
    assert same_bits(net.mlp()(view, out=out, device="cpu"), net.mlp()(x, device="cpu"))


def test_one_row_no_rows_and_no_leading_axis(canonical):
    mlp = canonical.mlp()
    assert mlp(np.zeros(48, "f4"), device="cpu").shape == (24,)
    assert mlp(np.zeros((0, 48), "f4"), device="cpu").shape == (0, 24)
    assert mlp(np.zeros((2, 0, 3, 48), "f4"), device="cpu").shape == (2, 0, 3, 24)
    out = np.zeros((0, 24), "f4")
    assert mlp(np.zeros((0, 48), "f4"), out=out, device="cpu") is out
    assert MLP([np.zeros((3, 0), "f4"), np.zeros((0, 2), "f4")], [None, np.ones(2, "f4")])(
        np.ones((1, 3), "f4"), device="cpu"
    ).tolist() == [[1, 1]]


@pytest.mark.parametrize("source", ["?", "i1", "u1", "i2", "u2", "f2", "f4"])
def test_narrower_dtypes_are_widened(canonical, rng, source):
    x = (rng.standard_normal((5, 48)) * 20).astype(source)
    assert worst(canonical, canonical.mlp()(x, device="cpu"), x.astype("f4")) <= 1


def test_bfloat16_x(canonical, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = rng.standard_normal((5, 48)).astype(ml_dtypes.bfloat16)
    assert worst(canonical, canonical.mlp()(x, device="cpu"), x.astype("f4")) <= 1


# --- float16 and bfloat16 -----------------------------------------------------------------------------------------------


def ones(shape, dtype):
    return np.ones(shape, numpy_dtype(dtype))


@pytest.mark.parametrize(("dtype", "count"), [("float16", 4096), ("bfloat16", 1024)])
def test_sums_are_kept_in_float32(dtype, count):
    """Sums in float16 would stay at 2048, in bfloat16 at 256: from there one is less than half a unit."""
    assert MLP([ones((count, 1), dtype)])(ones(count, dtype), device="cpu").tolist() == [count]


def test_products_and_sums_beyond_float16_are_kept():
    net = MLP([np.array([[300], [-300]], "f2")])
    assert net(np.array([300, 300], "f2"), device="cpu").tolist() == [0]
    assert net(np.array([300, 1], "f2"), device="cpu").tolist() == [np.inf]


@pytest.mark.parametrize(("dtype", "odd"), [("float16", 2049), ("bfloat16", 257)])
def test_a_layer_rounds_once_after_the_bias(dtype, odd):
    """The sum is no number of the dtype; with the bias it is. Rounded before the bias, too, it would become odd - 1."""
    net = MLP([ones((odd, 1), dtype), ones((1, 1), dtype)], [ones(1, dtype), None])
    assert net(ones(odd, dtype), device="cpu").tolist() == [odd + 1]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_layer_rounds(dtype):
    """The first layer gives 1 + 2^-13, which rounds to 1; the second takes 1 away."""
    last = np.array([[1], [-1]], numpy_dtype(dtype))
    first = np.array([[1, 1], [2**-13, 0]], numpy_dtype(dtype))
    assert MLP([first, last])(ones(2, dtype), device="cpu").tolist() == [0]


@pytest.mark.parametrize("dtype", HALVES)
def test_bits_are_those_of_the_c_loop_where_sums_are_exact(rng, dtype):
    """Small whole numbers: float32 sums are exact in any order, and the rounding to the dtype is not."""
    net = random_net(rng, (40, 30, 20), dtype, biases=[True, False])
    for array in (*net.weights, net.biases[0]):
        array[...] = rng.integers(-9, 10, array.shape)
    x = rng.integers(-9, 10, (50, 40)).astype(numpy_dtype(dtype))
    assert same_bits(net.mlp()(x, device="cpu"), c_loop(net, x))


@pytest.mark.parametrize("dtype", HALVES)
def test_subnormal_numbers_infinities_and_nan_are_kept(dtype):
    least = {"float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype]
    x = (np.array([[3, -1, -2, 0], [np.inf, -np.inf, np.nan, 1]]) * least).astype(numpy_dtype(dtype))
    y = MLP([np.eye(2, dtype="i1")] * 2, activation="identity", out_activation="relu", dtype=dtype)(
        x.reshape(-1, 2), device="cpu"
    ).reshape(2, 4)
    np.testing.assert_array_equal(y[0].astype("f8"), np.array([3, 0, 0, 0]) * least)
    np.testing.assert_array_equal(y[1].astype("f8"), [np.nan, np.nan, np.nan, np.nan])  # 0 * inf is NaN
    single = MLP([np.eye(1)], activation="identity", out_activation="relu", dtype=dtype)
    y = single(x[1][:, None], device="cpu")[:, 0].astype("f8")
    np.testing.assert_array_equal(y, [np.inf, 0, np.nan, least])


def test_weights_of_half_nets_are_widened_once(rng):
    net = random_net(rng, (5, 4, 3), "float16").mlp()
    x = rng.standard_normal((2, 5)).astype("f2")
    net(x, device="cpu")
    kept = net._for_cpu
    net(x, device="cpu")
    assert net._for_cpu is kept
    assert kept[0][0].dtype == np.float32
    whole = random_net(rng, (5, 4, 3)).mlp()
    whole(x.astype("f4"), device="cpu")
    assert all(np.shares_memory(a, b) for a, b in zip(whole._for_cpu[0], whole.weights))


def test_bfloat16_without_ml_dtypes_is_one_clear_error():
    program = """
import sys, numpy as np, cupymlp
assert "ml_dtypes" not in sys.modules
sys.modules["ml_dtypes"] = None  # as if it were not installed
from cupymlp.network import Network
from cupymlp.reference import forward_and_bound
network = Network((2, 2), ("relu",), (False,), "bfloat16")
assert network.itemsize == 2
assert forward_and_bound(network, [np.eye(2)], [None], [1.0, 2.0])[0].tolist() == [1, 2]
net = cupymlp.MLP([np.eye(2, dtype="f4")])
try:
    cupymlp.MLP([np.eye(2)], dtype="bfloat16")
except ImportError as error:
    assert "pip install ml-dtypes" in str(error), error
else:
    sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- precision and schedule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_ieee_on_the_cpu(canonical, rng, precision):
    x = rng.standard_normal((30, 48)).astype("f4")
    net = canonical.mlp(precision=precision)
    assert net.network.precision == precision
    assert same_bits(net(x, device="cpu"), canonical.mlp()(x, device="cpu"))
    y = fused_mlp(x, *canonical.weights, biases=canonical.biases, precision=precision, device="cpu")
    assert same_bits(y, net(x, device="cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tf32_and_split3_are_for_float32(dtype, precision):
    if dtype == "float32" or precision in ("ieee", "library"):
        assert MLP([np.eye(2)], dtype=dtype, precision=precision).network == Network(
            (2, 2), ("identity",), (False,), dtype, precision
        )
        return
    with pytest.raises(
        ValueError, match=f"precision is '{precision}' and the network is {dtype}; .* float32 networks only"
    ):
        MLP([np.eye(2)], dtype=dtype, precision=precision)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_a_schedule_is_kept_and_ignored_on_the_cpu(canonical, rng, tmp_path, schedule):
    x = rng.standard_normal((3, 48)).astype("f4")
    net = canonical.mlp(schedule=schedule)
    assert net.schedule == schedule
    want = canonical.mlp()(x, device="cpu")
    assert same_bits(net(x, device="cpu"), want)
    assert same_bits(fused_mlp(x, *canonical.weights, biases=canonical.biases, schedule=schedule, device="cpu"), want)
    assert net.plan(3, device="cpu").schedule == "cpu"
    for again in (copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert again.schedule == schedule
    net.save(tmp_path / "net.npz")
    assert MLP.load(tmp_path / "net.npz").schedule is None
    assert MLP.load(tmp_path / "net.npz", schedule=schedule).schedule == schedule


def test_the_schedule_is_handed_to_the_launch_and_to_the_planner(canonical, monkeypatch):
    name, calls = next(iter(SCHEDULES)), []
    monkeypatch.setattr(cupymlp.mlp, "PackedNet", lambda *arguments: calls.append(arguments))
    fake = SimpleNamespace(ndarray=None, cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)))
    monkeypatch.setattr(cupymlp.mlp, "cupy_or_error", lambda asked: fake)
    monkeypatch.setattr(cupymlp.mlp, "gpu_problem", lambda: None)
    monkeypatch.setattr(cupymlp.mlp, "device_numbers", lambda device_id: "numbers")
    monkeypatch.setattr(cupymlp.mlp, "plan_gpu", lambda *arguments, schedule: (*arguments, schedule))
    monkeypatch.setattr(cupymlp.mlp, "with_registers", lambda plan, device_id: plan)
    net = canonical.mlp(schedule=name)
    net._on_gpu()
    ((network, weights, biases, check, schedule),) = calls
    assert (network, schedule) == (net.network, name)
    assert all(same_bits(a, b) for a, b in zip(weights, canonical.weights, strict=True))
    assert [b is None for b in biases] == [False, True, False]
    check((2, 48), np.dtype("f4"), None, None)
    assert net.plan(7) == (net.network, 7, "numbers", name)


def test_threads_that_come_first_share_one_upload(canonical, monkeypatch):
    made, start = [], threading.Barrier(8)

    def slow(*_):
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(cupymlp.mlp, "PackedNet", slow)
    monkeypatch.setattr(cupymlp.mlp, "cupy_or_error", lambda asked: SimpleNamespace(ndarray=None))
    net, found = canonical.mlp(), []

    def work(_):
        start.wait()
        found.append(net._on_gpu())

    in_threads(8, work)
    assert found == made * 8


def test_lists_are_taken_as_numpy_takes_them():
    net = MLP([[[1.0, -1.0]]], activation="relu")
    assert net([[2.0], [3]], device="cpu").tolist() == [[2, -2], [3, -3]]


def test_infinities_and_nan_make_no_noise(canonical):
    """pytest turns warnings into errors."""
    x = np.full((2, 48), np.inf, "f4")
    x[1] = np.nan
    assert np.isnan(canonical.mlp()(x, device="cpu")[1]).all()


# --- Weights -----------------------------------------------------------------------------------------------------------


def test_weights_come_back_in_the_layout_asked_for_and_cannot_be_changed(canonical):
    for layout in ("in_out", "out_in"):
        net = canonical.mlp(weight_layout=layout)
        assert net.weight_layout == layout
        for given_, back in zip(canonical.weights, net.weights, strict=True):
            assert same_bits(back.T if layout == "out_in" else back, given_)
            with pytest.raises(ValueError, match="read-only"):
                back[0, 0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                back.flags.writeable = True
        assert net.biases[1] is None
        with pytest.raises(ValueError, match="read-only"):
            net.biases[0][0] = 1
    assert canonical.weights[0].flags.writeable


def test_weights_are_copied_when_the_mlp_is_made_and_read_by_fused_mlp_at_the_call(rng):
    w = rng.standard_normal((3, 2))
    x = rng.standard_normal((4, 3))
    net = MLP([w])
    before = net(x, device="cpu")
    w[...] = 0
    assert same_bits(net(x, device="cpu"), before)
    assert not fused_mlp(x, w, device="cpu").any()


def test_both_layouts_of_a_square_net_differ_only_by_the_transpose(rng):
    w = rng.standard_normal((5, 5))
    x = rng.standard_normal((3, 5))
    np.testing.assert_allclose(MLP([w], weight_layout="out_in")(x, device="cpu"), x @ w.T)
    np.testing.assert_allclose(MLP([w])(x, device="cpu"), x @ w)


def test_dtypes_of_a_network():
    f4, f8, f2, i2, i1 = (np.ones((2, 2), d) for d in ("f4", "f8", "f2", "i2", "i1"))
    bf = ones((2, 2), "bfloat16")
    for weights, dtype in [
        ([f4, f8], "float64"), ([f4, f2], "float32"), ([i2, f4], "float32"), ([f2], "float16"), ([f2, i1], "float16"),
        ([f2, i2], "float32"), ([f2, f4 > 0], "float16"), ([bf], "bfloat16"), ([bf, i1], "bfloat16"), ([bf, f4], "float32"),
        ([bf, f8], "float64"),
    ]:  # fmt: skip
        assert MLP(weights).dtype == numpy_dtype(dtype)
        assert MLP(weights).weights[0].dtype == numpy_dtype(dtype)
    assert MLP([f8], dtype="float32").dtype == np.float32
    for dtype in (np.float16, "f2", "float16", np.dtype(">f2")):
        assert MLP([f8], dtype=dtype).weights[0].dtype == np.float16
    for dtype in ("bfloat16", bf.dtype, bf.dtype.type):
        assert MLP([f8], dtype=dtype).weights[0].dtype == bf.dtype
    assert MLP([f4.astype(">f4")]).weights[0].dtype == np.dtype("f4")
    for weights, message in [
        ([i2], "int16, which makes int16"), ([f4.astype("c8")], "complex64"), ([f4 > 0], "bool"),
        ([bf, f2], "bfloat16, float16, which makes no common dtype"), ([bf, i2], "bfloat16, int16, which makes no common"),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=message):
            MLP(weights)
    for dtype in ("int8", "complex64", "half a float", ["f4"]):
        with pytest.raises(TypeError, match=r"dtype is .*; accepted: float16, bfloat16, float32 or float64"):
            MLP([f4], dtype=dtype)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_and_pickles(canonical, rng, again):
    net = canonical.mlp(weight_layout="out_in")
    x = rng.standard_normal((3, 48)).astype("f4")
    other = again(net)
    assert same_bits(other(x, device="cpu"), net(x, device="cpu"))
    assert (other.network, other.weight_layout) == (net.network, "out_in")
    with pytest.raises(ValueError, match="read-only"):
        other.weights[0][0, 0] = 1
    assert len(pickle.dumps(net)) < 2 * sum(w.nbytes for w in net.weights)


def test_threads_share_a_net(canonical, rng):
    net = canonical.mlp()
    x = rng.standard_normal((50, 48)).astype("f4")
    want = [net(x[: n + 1], device="cpu") for n in range(50)]
    wrong = []

    def work():
        wrong.extend(n for n in range(50) if not same_bits(net(x[: n + 1], device="cpu"), want[n]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- fused_mlp ----------------------------------------------------------------------------------------------------------


def test_fused_mlp_is_the_mlp(canonical, rng):
    x = rng.standard_normal((3, 48)).astype("f4")
    want = canonical.mlp()(x, device="cpu")
    y = fused_mlp(x, *canonical.weights, biases=canonical.biases, device="cpu")
    assert same_bits(y, want)
    out = np.empty_like(want)
    transposed = [w.T for w in canonical.weights]
    assert fused_mlp(x, *transposed, biases=canonical.biases, weight_layout="out_in", out=out, device="cpu") is out
    assert same_bits(out, want)


def test_fused_mlp_computes_in_the_common_dtype():
    w = np.ones((2, 2), "f4")
    assert fused_mlp(np.ones(2, "f2"), w, device="cpu").dtype == np.float32
    assert fused_mlp(np.ones(2, "f8"), w, device="cpu").dtype == np.float64
    assert fused_mlp(np.ones(2, "f4"), w.astype("f8"), device="cpu").dtype == np.float64
    assert fused_mlp(np.ones(2, "f2"), w.astype("f2"), device="cpu").dtype == np.float16
    assert fused_mlp(np.ones(2, "i1"), w.astype("f2"), device="cpu").dtype == np.float16
    assert fused_mlp(np.ones(2, "f4"), w.astype("f2"), device="cpu").dtype == np.float32
    assert fused_mlp(ones(2, "bfloat16"), w, device="cpu").dtype == np.float32
    assert fused_mlp(ones(2, "bfloat16"), ones((2, 2), "bfloat16"), device="cpu").dtype == numpy_dtype("bfloat16")
    with pytest.raises(TypeError, match="no common dtype"):
        fused_mlp(np.ones(2, "f2"), ones((2, 2), "bfloat16"), device="cpu")


# --- Errors: the argument, what came, what is accepted, what to do ----------------------------------------------------------

W = np.ones((3, 4), "f4")
V = np.ones((4, 2), "f4")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MLP([]), ValueError, "MLP got no weights; accepted: one 2-D array a layer"),
        (lambda: MLP(W), TypeError, r"weights is a numpy\.ndarray; accepted: a sequence with one 2-D array a layer"),
        (lambda: MLP("W"), TypeError, "weights is a str"),
        (lambda: MLP([W, None]), TypeError, r"weights\[1\] is None"),
        (lambda: MLP([W[0]]), ValueError, r"weights\[0\] has shape \(4,\); accepted: a 2-D array"),
        (lambda: MLP([["a"]]), TypeError, r"weights\[0\] is a list of dtype <U1"),
        (lambda: MLP([[[1], [1, 2]]]), TypeError, r"weights\[0\] is a list that NumPy makes no array of"),
        (lambda: MLP([np.ma.masked_array(W)]), TypeError, r"masked array, whose mask would be lost"),
        (
            lambda: MLP([W, W]),
            ValueError,
            r"weights\[0\] \(3, 4\) and weights\[1\] \(3, 4\) do not chain with weight_layout='in_out': the one gives 4 "
            r"features, the other takes 3\. weights\[1\]\.T would fit",
        ),
        (lambda: MLP([W.T, V.T]), ValueError, "They do chain as weight_layout='out_in'"),
        (lambda: MLP([W, V], weight_layout="out_in"), ValueError, "They do chain as weight_layout='in_out'"),
        (
            lambda: MLP([W], weight_layout="torch"),
            ValueError,
            r"weight_layout is 'torch'; accepted: 'in_out' .* 'out_in'",
        ),
        (lambda: MLP([W, V], [None]), ValueError, "biases has 1 entries for 2 layers"),
        (lambda: MLP([W], [np.ones(3)]), ValueError, r"biases\[0\] has shape \(3,\); layer 1 needs \(4,\)"),
        (lambda: MLP([W], [np.ones((1, 4))]), ValueError, r"biases\[0\] has shape \(1, 4\)"),
        (lambda: MLP([W], np.ones((1, 4))), TypeError, r"biases is a numpy\.ndarray"),
        (lambda: MLP([W], [1j * np.ones(4)]), TypeError, r"biases\[0\] is a numpy\.ndarray of dtype complex128"),
        (
            lambda: MLP([W, V], activation="mish"),
            ValueError,
            "activation is 'mish'; accepted: one of 'identity', 'relu', .*, 'squareplus'$",
        ),
        (lambda: MLP([W], activation="mish"), ValueError, "activation is 'mish'"),
        (lambda: MLP([W, V], activation=["relu", "relu"]), ValueError, "activation has 2 entries for 1 hidden layers"),
        (
            lambda: MLP([W, V], activation=[3]),
            TypeError,
            r"activation\[0\] is 3 \(a int\); accepted: one of 'identity'",
        ),
        (lambda: MLP([W, V], activation=3), TypeError, "activation is a int; accepted: a name"),
        (
            lambda: MLP([W, V], activation="softmax"),
            ValueError,
            r"activation is 'softmax', which the output layer alone takes \(out_activation\); accepted: one of 'identity'",
        ),
        (
            lambda: MLP([W, V], activation=["log_softmax"]),
            ValueError,
            r"activation\[0\] is 'log_softmax', which the output layer alone takes",
        ),
        (
            lambda: MLP([W], out_activation="max"),
            ValueError,
            "out_activation is 'max'; accepted: one of .*, 'softmax', 'log_softmax'$",
        ),
        (
            lambda: MLP([W], out_activation=["relu"]),
            TypeError,
            r"out_activation is \['relu'\] \(a list\); accepted: one of .*, or a name with its parameter, as \('leaky",
        ),
        (
            lambda: MLP([W, V], activation=("relu", 0.5)),
            ValueError,
            r"activation is \('relu', 0.5\), and relu has no parameter; accepted: 'relu'",
        ),
        (
            lambda: MLP([W, V], activation=("elu", True)),
            TypeError,
            r"the alpha of activation is True \(a bool\); accepted: a finite number, at least 0, as \('elu', 1.0\)",
        ),
        (lambda: MLP([W, V], activation=[("elu", "1")]), TypeError, r"the alpha of activation\[0\] is '1' \(a str\)"),
        (
            lambda: MLP([W, V], activation=("elu", -0.5)),
            ValueError,
            r"the alpha of activation is -0.5 \(arithmetic is float32\); accepted: a finite number, at least 0",
        ),
        (
            lambda: MLP([W, V], activation=("celu", 0)),
            ValueError,
            "the alpha of activation is 0 .* at least 1.17549e-38",
        ),
        (
            lambda: MLP([W], out_activation=("leaky_relu", float("nan"))),
            ValueError,
            r"the slope of out_activation is nan \(arithmetic is float32\); accepted: a finite number, as \('leaky_relu', 0.01",
        ),
        (lambda: MLP([W], out_activation=("sin", 1e39)), ValueError, "the omega of out_activation is 1e\\+39"),
        (
            lambda: MLP([W], out_activation=("sin", 10**400)),
            ValueError,
            "the omega of out_activation is an integer beyond",
        ),
        (
            lambda: MLP([W, V], activation=["leaky_relu", 0.25]),
            ValueError,
            r"activation has 2 entries for 1 hidden layers; .*\. A name with its parameter is a tuple, as \('leaky_relu', 0.25",
        ),
        (lambda: MLP([W, V], activation=("relu", "relu")), ValueError, "activation has 2 entries for 1 hidden layers"),
        (lambda: MLP([W], precision="half"), ValueError, "precision is 'half'; accepted: 'ieee'"),
        (
            lambda: MLP([W], schedule="fast"),
            ValueError,
            "schedule is 'fast'; accepted: " + ", ".join(map(repr, SCHEDULES)) + ", or None",
        ),
        (lambda: fused_mlp(np.ones(3), W, schedule="fast"), ValueError, "schedule is 'fast'; accepted: 'row', "),
        (lambda: MLP([W], schedule=["row"]), ValueError, r"schedule is \['row'\]; accepted"),
        (
            lambda: MLP([W], dtype="float16")(np.ones(3, "f4")),
            TypeError,
            r"x has dtype float32 and the network is float16, which would narrow it: convert x with x\.astype\('float16'\), "
            "or make the network with dtype='float32'",
        ),
        (
            lambda: MLP([W], dtype="bfloat16")(np.ones(3, "f2")),
            TypeError,
            "float16 and the network is bfloat16, which have no common dtype: convert x with",
        ),
        (lambda: MLP([W], dtype="float16")(np.ones(3, "i2")), TypeError, "int16 and the network is float16"),
        (
            lambda: fused_mlp(np.ones(3), W, precision="tf32"),
            ValueError,
            "precision is 'tf32' and the network is float64",
        ),
        (lambda: MLP([W])(np.float32(1)), ValueError, r"x is 0-dimensional; accepted: an array \(\.\.\., 3\)"),
        (lambda: MLP([W])(None), TypeError, "x is None; accepted: an array"),
        (lambda: MLP([W])("x"), TypeError, "x is a str of dtype <U1"),
        (lambda: MLP([W])(np.ones((2, 5), "f4")), ValueError, "whose last axis is 5; the network takes 3 features"),
        (lambda: MLP([W])(np.ones((3, 5), "f4")), ValueError, r"x\.T would fit"),
        (
            lambda: MLP([W])(np.ones((2, 4), "f4")),
            ValueError,
            "It fits the output: are the weights in the other layout",
        ),
        (
            lambda: MLP([W])(np.ones(3)),
            TypeError,
            r"x has dtype float64 and the network is float32, which would narrow it: convert x with x\.astype\('float32'\), "
            "or make the network with dtype='float64'",
        ),
        (lambda: MLP([W])(np.ones(3, "i4")), TypeError, "int32 and the network is float32"),
        (lambda: MLP([W])(np.ones(3, "c8")), TypeError, "complex64"),
        (lambda: MLP([W])(np.ones(3, "M8[s]")), TypeError, "datetime64"),
        (lambda: MLP([W])(np.ones(3, "g")), TypeError, "longdouble|float128"),
        (
            lambda: MLP([W])(np.ones(3, "f4"), out=np.ones(3, "f4")),
            ValueError,
            r"out has shape \(3,\); the result .* \(4,\)",
        ),
        (lambda: MLP([W])(np.ones(3, "f4"), out=np.ones(4)), TypeError, "out has dtype float64; the result is float32"),
        (lambda: MLP([W])(np.ones(3, "f4"), out=[0] * 4), TypeError, "out is a list; accepted: a NumPy array"),
        (lambda: MLP([W])(np.ones(3, "f4"), out=MLP([W]).weights[0][0]), ValueError, "out is read-only"),
        (
            lambda: MLP([W])(np.ones(3, "f4"), device="gpu"),
            ValueError,
            "device is 'gpu'; accepted: None, 'cuda' or 'cpu'",
        ),
        (lambda: fused_mlp(np.ones(3)), ValueError, "fused_mlp got no weights"),
        (lambda: fused_mlp(np.ones(3), W, device="gpu"), ValueError, "device is 'gpu'"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_error_leaves_out_alone():
    out = np.full((2, 4), 7, "f4")
    with pytest.raises(TypeError):
        MLP([W])(np.ones((2, 3)), out=out)
    assert (out == 7).all()


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_without_a_gpu_cuda_is_one_clear_error_whatever_the_batch():
    for x in (np.ones((2, 3), "f4"), np.ones((0, 3), "f4")):
        with pytest.raises(
            RuntimeError, match=r"device='cuda'.* needs a CUDA GPU, and .*NumPy arrays with device='cpu'"
        ):
            MLP([W])(x, device="cuda")
    assert MLP([W])(np.ones((2, 3), "f4")).shape == (2, 4)


def test_the_names_that_are_public():
    assert set(cupymlp.__all__) <= set(dir(cupymlp))
    assert random_mlp((3, 2), bias=True, weight_layout="out_in").weights[0].shape == (2, 3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_numbers_that_the_dtype_cannot_hold(dtype):
    """They would be infinite, which is more than rounding; infinities that are there stay."""
    most = float(np.finfo(dtype).max)
    weight = np.array([[most * 4, 1.0], [1, 1]])
    for options in ({"weights": [weight]}, {"weights": [np.eye(2)], "biases": [weight[0]]}):
        name = r"biases\[0\]" if "biases" in options else r"weights\[0\]"
        with pytest.raises(ValueError, match=f"{name} has numbers up to .*, which {dtype} cannot hold"):
            MLP(**options, dtype=dtype)
    assert np.isinf(MLP([np.array([[np.inf]])], dtype=dtype).weights[0]).all()
