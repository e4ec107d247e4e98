"""MLP and fused_mlp on NumPy arrays: what they take, what they give, what they refuse. The CPU path runs here."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import CANONICAL, NETS, odd_values, random_net, same_bits

import cupymlp
from cupymlp import MLP, fused_mlp
from cupymlp._gpu import gpu_problem
from cupymlp.plan import cpu_block_rows
from cupymlp.reference import error_in_bounds, forward_and_bound
from cupymlp.verify import random_mlp


def worst(net, y, x):
    with np.errstate(all="ignore"):
        reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    return error_in_bounds(y, reference, bound).max(initial=0.0)


@pytest.fixture
def canonical(rng):
    return random_net(rng, CANONICAL, biases=[True, False, True], activations=["relu", "relu", "identity"])


# --- Results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
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
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    net = random_net(rng, sizes, dtype, scale=data.draw(st.sampled_from([1e-6, 0.3, 3.0])))
    codes = "?bBhHefiIlLd" if dtype == "float64" else "?bBhHef"
    x = rng.standard_normal((*data.draw(st.lists(st.integers(0, 5), max_size=3)), sizes[0])) * 50
    x = (np.abs(x) if (code := data.draw(st.sampled_from(codes))).isupper() else x).astype(code)
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
    f4, f8, f2, i2 = (np.ones((2, 2), d) for d in ("f4", "f8", "f2", "i2"))
    assert MLP([f4, f8]).dtype == np.float64
    assert MLP([f4, f2]).dtype == np.float32
    assert MLP([i2, f4]).dtype == np.float32
    assert MLP([f8], dtype="float32").dtype == np.float32
    assert MLP([f4.astype(">f4")]).weights[0].dtype == np.dtype("f4")
    for weights, message in [([f2], "float16"), ([i2], "int16"), ([f4.astype("c8")], "complex64"), ([f4 > 0], "bool")]:
        with pytest.raises(TypeError, match=message):
            MLP(weights)
    with pytest.raises(TypeError, match="dtype is float16; accepted: float32 or float64"):
        MLP([f4], dtype="float16")


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
    with pytest.raises(TypeError, match="float16"):
        fused_mlp(np.ones(2, "f2"), w.astype("f2"), device="cpu")


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
            lambda: MLP([W, V], activation="gelu"),
            ValueError,
            "activation is 'gelu'; accepted: one of 'identity', 'relu'",
        ),
        (lambda: MLP([W], activation="gelu"), ValueError, "activation is 'gelu'"),
        (lambda: MLP([W, V], activation=["relu", "relu"]), ValueError, "activation has 2 entries for 1 hidden layers"),
        (lambda: MLP([W, V], activation=[3]), TypeError, r"activation\[0\] is a int"),
        (lambda: MLP([W, V], activation=3), TypeError, "activation is a int; accepted: a name"),
        (lambda: MLP([W], out_activation="softmax"), ValueError, "out_activation is 'softmax'"),
        (lambda: MLP([W], precision="half"), ValueError, "precision is 'half'; accepted: 'ieee'"),
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
