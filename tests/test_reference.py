"""The reference and its bound: right, never too small, and small enough to see faults."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import c_loop, odd_values, random_net

from cupymlp import cpu
from cupymlp.network import DTYPES, PRECISIONS, numpy_dtype, precision_takes
from cupymlp.reference import error_in_bounds, forward_and_bound


def exact(net, x):
    """The network of one row in rational arithmetic: no rounding at all."""
    h = [Fraction(float(v)) for v in x]
    for weight, bias, name in zip(net.weights, net.biases, net.network.activations, strict=True):
        sums = []
        for j in range(weight.shape[1]):
            total = Fraction(0) if bias is None else Fraction(float(bias[j]))
            for k, v in enumerate(h):
                total += v * Fraction(float(weight[k, j]))
            sums.append(max(total, Fraction(0)) if name == "relu" else total)
        h = sums
    return h


def naive(net, x, order):
    """The network of one row in its own dtype, products rounded, summed in any order."""
    h = x
    for weight, bias, name in zip(net.weights, net.biases, net.network.activations, strict=True):
        out = []
        for j in range(weight.shape[1]):
            terms = [h[k] * weight[k, j] for k in order(len(h))]
            terms += [] if bias is None else [bias[j]]
            total = x.dtype.type(0)
            for term in terms:
                total = x.dtype.type(total + term)
            out.append(total if name == "identity" or not total < 0 else x.dtype.type(0))
        h = np.array(out, x.dtype)
    return h


@given(
    seed=st.integers(0, 10**6), dtype=st.sampled_from(["float32", "float64"]), scale=st.sampled_from([1e-20, 1.0, 30.0])
)
def test_every_way_to_sum_stays_within_the_bound(seed, dtype, scale):
    rng = np.random.default_rng(seed)
    net = random_net(rng, rng.integers(1, 12, rng.integers(2, 5)), dtype, scale=scale)
    x = (rng.standard_normal(net.network.sizes[0]) * scale).astype(dtype)
    y, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    blocks = forward_and_bound(net.network, net.weights, net.biases, x, order="blocks")[1]
    assert (blocks <= bound).all()
    truth = exact(net, x)
    orders = [range, lambda n: range(n - 1, -1, -1), rng.permutation]
    results = [naive(net, x, order) for order in orders] + [c_loop(net, x[None])[0]]
    for j, value in enumerate(truth):
        assert abs(Fraction(float(y[j])) - value) <= Fraction(float(bound[j]))
        for result, most in zip(results, [bound] * len(orders) + [blocks], strict=True):
            assert abs(Fraction(float(result[j])) - Fraction(float(y[j]))) <= Fraction(float(most[j]))


def test_by_hand():
    net = random_net(
        np.random.default_rng(0), (2, 2, 1), "float64", biases=[True, False], activations=["relu", "identity"]
    )
    net.weights[0][...] = [[1, 2], [3, -4]]
    net.biases[0][...] = [0.5, 0.25]
    net.weights[1][...] = [[2], [100]]
    y, bound = forward_and_bound(net.network, net.weights, net.biases, [[1.0, 1.0], [-1.0, -1.0]])
    assert y.tolist() == [[9.0], [225.0]]
    assert (bound > 0).all()
    assert (bound < 1e-10).all()


def test_the_bound_sees_a_skipped_bias_and_a_swapped_layout(rng):
    net = random_net(rng, (20, 20, 20), biases=[True, True], activations=["relu", "identity"])
    x = rng.standard_normal((5, 20)).astype("f4")
    y, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    good = c_loop(net, x)
    assert error_in_bounds(good, y, bound).max() <= 1
    without_bias, _ = forward_and_bound(net.network, net.weights, [None, net.biases[1]], x)
    transposed, _ = forward_and_bound(net.network, [net.weights[0].T, net.weights[1]], net.biases, x)
    for wrong in (without_bias, transposed):
        assert error_in_bounds(wrong, y, bound).max() > 100


@pytest.mark.parametrize(
    ("dtype", "precision"), [*((d, "ieee") for d in DTYPES), ("float32", "tf32"), ("float32", "split3")]
)
def test_infinities_and_nan_are_compared_exactly(rng, dtype, precision):
    net = random_net(rng, (6, 5, 4), dtype, biases=[True, False], activations=["relu", "identity"], precision=precision)
    x = odd_values(rng, (400, 6), dtype)
    with np.errstate(all="ignore"):
        y, bound = forward_and_bound(net.network, net.weights, net.biases, x)
        blocks = forward_and_bound(net.network, net.weights, net.biases, x, order="blocks")[1]
        good = c_loop(net, x)
        assert error_in_bounds(good, y, bound).max() <= 1
        assert error_in_bounds(good, y, blocks).max() <= 1
        assert np.isnan(y).any()
        assert np.isinf(y).any()
    claimed = ~np.isinf(bound)
    assert claimed.mean() > 0.5
    one = good.dtype.type(1)
    for special in (np.isnan(y), np.isinf(y)):
        for value in (0 * one, one):
            wrong = np.where(special & claimed, value, good)
            assert error_in_bounds(wrong, y, bound).max() == np.inf
    wrong = np.where(np.isfinite(y) & claimed, one * np.nan, good)
    assert error_in_bounds(wrong, y, bound).max() == np.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_claimed_where_an_infinity_meets_what_may_be_zero_or_of_another_sign(dtype):
    """1 - (1 + a little) computed is 0, or of either sign: times infinity that is NaN, or an infinity of either sign."""
    net = random_net(np.random.default_rng(0), (2, 1, 1), dtype, biases=[False] * 2, activations=["identity"] * 2)
    net.weights[0][...] = [[1], [-1]]
    net.weights[1][...] = np.inf
    least = np.nextafter(np.float64(0), 1) if dtype == "float64" else 2.0**-60
    with np.errstate(all="ignore"):
        y, bound = forward_and_bound(
            net.network, net.weights, net.biases, [[1.0, 1.0 + 2**-50], [least, 0.0], [3.0, 1.0]]
        )
    assert np.isinf(y[[0, 2]]).all()
    assert np.isinf(bound[0]).all()
    assert np.isfinite(bound[2]).all()


def test_nothing_is_claimed_where_sums_can_overflow():
    net = random_net(np.random.default_rng(0), (2, 1), biases=[False], activations=["identity"])
    net.weights[0][...] = 1
    big = np.finfo("f4").max / 2
    y, bound = forward_and_bound(net.network, net.weights, net.biases, [[big, big], [big, -big], [1.0, 1.0]])
    assert np.isinf(bound[:2]).all()
    assert np.isfinite(bound[2]).all()
    assert error_in_bounds(np.array([[np.inf], [0], [2]], "f4"), y, bound).tolist() == [[0], [0], [0]]


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)])
def test_nothing_is_claimed_beyond_the_range_of_float16_and_bfloat16(dtype, largest):
    net = random_net(np.random.default_rng(0), (1, 1), dtype, biases=[False], activations=["identity"])
    net.weights[0][...] = 1
    _, bound = forward_and_bound(net.network, net.weights, net.biases, [[largest], [largest / 2]])
    assert np.isinf(bound).tolist() == [[True], [False]]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sizes", [(0, 3), (4, 0, 2), (3, 0)])
def test_empty_layers(sizes, precision):
    biases = [True] + [False] * (len(sizes) - 2)
    net = random_net(np.random.default_rng(0), sizes, biases=biases, precision=precision)
    for shape in ((2, sizes[0]), (sizes[0],)):
        y, bound = forward_and_bound(net.network, net.weights, net.biases, np.ones(shape))
        assert y.shape == bound.shape == (*shape[:-1], sizes[-1])
        assert np.isfinite(bound).all()


def test_the_bound_of_blocks_is_the_sharper_one_and_only_for_ieee(rng):
    for dtype, precision, sharper in [
        ("float32", "ieee", True), ("float64", "ieee", True), ("float16", "ieee", True), ("bfloat16", "ieee", True),
        ("float32", "library", False), ("float16", "library", False), ("float32", "tf32", False), ("float32", "split3", False),
    ]:  # fmt: skip
        net = random_net(rng, (64, 64), dtype, precision=precision)
        x = np.ones(64)
        either, blocks = (
            forward_and_bound(net.network, net.weights, net.biases, x, order=order)[1] for order in ("any", "blocks")
        )
        assert (blocks < either).all() if sharper else (blocks == either).all()
    with pytest.raises(ValueError, match="order is 'random'; accepted: 'any' or 'blocks'"):
        forward_and_bound(net.network, net.weights, net.biases, x, order="random")


# --- Tensor cores, in NumPy ---------------------------------------------------------------------------------------------


def cut(v, unit_exponent):
    """v without what is below 2^unit_exponent: truncated, as tensor cores do."""
    return np.ldexp(np.trunc(np.ldexp(v, -unit_exponent)), unit_exponent)


def exponent(v):
    """Of 24 bits that begin where v does, the last one's."""
    return np.maximum(np.frexp(v)[1] - 24, -149)


def tensor_core(a, w, start, step):
    """start + a @ w: products exact, ``step`` of them a time, cut off at the last of 24 bits of the largest addend."""
    total = np.broadcast_to(np.float64(start), (len(a), w.shape[1]))
    for k in range(0, a.shape[1], step):
        products = a[:, k : k + step, None] * w[None, k : k + step]
        addends = np.concatenate([products, total[:, None]], axis=1)
        unit = exponent(np.abs(addends).max(axis=1))
        total = cut(addends, unit[:, None]).sum(axis=1)
        total = cut(total, exponent(total))
    return total


def round_tf32(v):
    """To 11 bits, ties away from zero; numbers below 2^-126 flushed."""
    bits = (np.abs(v).astype("f4").view("u4") + 0x1000) & 0xFFFFE000
    return np.where(np.abs(v) < 2.0**-126, 0, np.copysign(bits.view("f4"), v)).astype("f8")


def split(v, largest):
    """High and low part, float16, of v scaled so that largest is in [1, 2); and the exponent of the scale."""
    scale = 1 - np.frexp(largest)[1]
    scaled = np.ldexp(v, scale)
    high = scaled.astype("f2").astype("f8")
    return high, (scaled - high).astype("f2").astype("f8"), scale


def split3_sums(h, w, step, passes):
    high, low, scale = split(h, np.abs(h).max(axis=1, keepdims=True, initial=0))
    w_high, w_low, w_scale = split(w, np.abs(w).max(initial=0))
    total = 0.0
    for a, b in [(low, w_high), (high, w_low), (high, w_high)][3 - passes :]:
        total = tensor_core(a, b, total, step)
    return np.ldexp(total, -scale - w_scale)


def f4(v):
    return np.float64(np.float32(v))


def tensor_core_net(net, x, step, arithmetic):
    """The network of x on tensor cores: sums of float32, one rounding for the bias, one for the storage dtype."""
    h = np.asarray(x, "f8")
    for weight, bias, name in zip(net.weights, net.biases, net.network.activations, strict=True):
        w, b = weight.astype("f8"), 0.0 if bias is None else bias.astype("f8")
        if arithmetic == "half":
            v = tensor_core(h, w, b, step)
        elif arithmetic == "tf32":
            v = f4(tensor_core(round_tf32(h), round_tf32(w), 0.0, step) + b)
        else:
            v = f4(
                f4(split3_sums(h, w, step, passes={"split3": 3, "one product": 1, "two products": 2}[arithmetic])) + b
            )
        v = v if name == "identity" else np.maximum(v, 0)
        h = v.astype(numpy_dtype(net.network.dtype)).astype("f8")
    return h


def compare(net, result, x, **options):
    y, bound = forward_and_bound(net.network, net.weights, net.biases, x, **options)
    assert np.isfinite(bound).all()
    return error_in_bounds(result, y, bound).max()


@pytest.mark.parametrize("step", [4, 8, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("signs", [True, False])
def test_half_sums_on_tensor_cores_are_within_the_bound(rng, dtype, step, signs):
    """With one sign all that is cut off adds up."""
    net = random_net(rng, (200, 50, 10), dtype)
    x = rng.standard_normal((60, 200)).astype(numpy_dtype(dtype))
    if not signs:
        x = np.abs(x)
        for weight in net.weights:
            weight[...] = np.abs(weight)
    assert 1e-3 < compare(net, tensor_core_net(net, x, step, "half"), x) <= 1
    assert compare(net, c_loop(net, x), x, order="blocks") <= 1


@pytest.mark.parametrize(("dtype", "scale"), [("float16", 2.0**-18), ("bfloat16", 2.0**-70), ("bfloat16", 2.0**-125)])
def test_half_sums_of_subnormal_numbers_are_within_the_bound(rng, dtype, scale):
    net = random_net(rng, (40, 30), dtype, scale=2.0**-5)
    x = (rng.standard_normal((60, 40)) * scale).astype(numpy_dtype(dtype))
    assert compare(net, tensor_core_net(net, x, 8, "half"), x) <= 1
    assert compare(net, c_loop(net, x), x, order="blocks") <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_kept_in_half_precision_are_outside_its_bound(rng, dtype):
    net = random_net(rng, (200, 50), dtype, biases=[False], activations=["identity"])
    x = rng.standard_normal((60, 200)).astype(numpy_dtype(dtype))
    total = np.zeros((60, 50), x.dtype)
    for k in range(200):
        total = (total + x[:, k : k + 1] * net.weights[0][k]).astype(x.dtype)
    assert compare(net, total, x) > 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_layer_cut_off_to_half_precision_is_outside_its_bound(rng, dtype):
    """A result cut off instead of rounded is up to one unit off, where the bound allows half a unit."""
    net = random_net(rng, (8, 50), dtype, biases=[False], activations=["identity"])
    x = rng.standard_normal((60, 8)).astype(numpy_dtype(dtype))
    sums = x.astype("f8") @ net.weights[0].astype("f8")
    assert compare(net, sums, x) < 0.1
    bits = {"float16": 11, "bfloat16": 8}[dtype]
    assert compare(net, cut(sums, np.frexp(sums)[1] - bits), x) > 1.5


SCALES = [2.0**-60, 2.0**-20, 1.0, 2.0**20, 2.0**60]


def mixed_rows(rng, net, scale):
    """Rows of every scale up to this one, among them rows with large and small features together, and subnormal numbers."""
    x = rng.standard_normal((60, net.network.sizes[0])) * scale
    x[10:20] *= 2.0 ** rng.integers(-40, 1, (10, 1))
    x[20:40] *= 2.0 ** rng.integers(-40, 1, (20, x.shape[1]))
    x[40:45] = 0
    x[45:50] = rng.standard_normal((5, x.shape[1])) * 2.0**-130
    return x.astype("f4")


@pytest.mark.parametrize("step", [4, 8, 16])
@pytest.mark.parametrize("arithmetic", ["tf32", "split3"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("weight_scale", [2.0**-40, 0.2, 2.0**40])
def test_tf32_and_split3_are_within_their_bounds(rng, arithmetic, step, scale, weight_scale):
    depth = 1 if weight_scale != 0.2 else 3
    net = random_net(rng, (48, 33, 20, 7)[: depth + 1], scale=weight_scale, precision=arithmetic)
    net.weights[0][...] *= 2.0 ** rng.integers(-30, 1, net.weights[0].shape)
    x = mixed_rows(rng, net, scale)
    assert compare(net, tensor_core_net(net, x, step, arithmetic), x) <= 1
    assert compare(net, c_loop(net, x), x) <= 1


@pytest.mark.parametrize("scale", SCALES)
def test_a_sloppier_arithmetic_is_outside_the_bound_of_a_better_one(rng, scale):
    """tf32 against the bounds of split3 and ieee, split3 without its low parts, and tf32 with 8 bits instead of 11."""
    x = (rng.standard_normal((60, 12)) * scale).astype("f4")
    exact, tf32, split3 = (
        random_net(np.random.default_rng(1), (12, 40), biases=[False], activations=["identity"], precision=precision)
        for precision in ("ieee", "tf32", "split3")
    )
    for sloppy in ("tf32", "one product", "two products"):
        result = tensor_core_net(split3, x, 8, sloppy)
        assert compare(split3, result, x) > 3
        assert compare(exact, result, x) > 3
    assert 0.01 < compare(split3, tensor_core_net(split3, x, 8, "split3"), x) <= 1
    assert 0.1 < compare(tf32, tensor_core_net(tf32, x, 8, "tf32"), x) <= 1
    few_bits = x.view("u4") & 0xFFFF0000
    assert compare(tf32, tensor_core_net(tf32, few_bits.view("f4"), 8, "tf32"), x) > 1


def test_the_bound_of_split3_is_normwise():
    """A feature far below its row's largest loses bits, which the bound knows."""
    net = random_net(np.random.default_rng(0), (2, 1), biases=[False], activations=["identity"], precision="split3")
    net.weights[0][...] = [[0], [1]]
    x = np.array([[1, 1 / 3 * 2**-16]], "f4")
    result = tensor_core_net(net, x, 8, "split3")
    assert 0.1 < compare(net, result, x) <= 1
    plain = random_net(np.random.default_rng(0), (2, 1), biases=[False], activations=["identity"])
    plain.weights[0][...] = net.weights[0]
    assert compare(plain, result, x) > 100


def test_the_largest_numbers_round_up_to_infinity_in_tf32():
    net = random_net(np.random.default_rng(0), (2, 1), biases=[False], activations=["identity"], precision="tf32")
    net.weights[0][...] = 2.0**-20
    _, bound = forward_and_bound(net.network, net.weights, net.biases, [[np.finfo("f4").max, 1], [1e38, 1]])
    assert np.isinf(bound).tolist() == [[True], [False]]


@pytest.mark.parametrize(
    ("dtype", "precision"), [(d, p) for d in DTYPES for p in PRECISIONS if precision_takes(p, d)], ids=str
)
def test_the_cpu_path_is_within_every_bound(rng, dtype, precision):
    net = random_net(rng, (90, 33, 7), dtype, precision=precision)
    x = rng.standard_normal((40, 90)).astype(numpy_dtype(dtype))
    out = np.empty((40, 7), x.dtype)
    wide = [w.astype(net.network.sum_dtype) for w in net.weights]
    wide_biases = [None if b is None else b.astype(net.network.sum_dtype) for b in net.biases]
    cpu.run_cpu(net.network, wide, wide_biases, x, out)
    assert compare(net, out, x) <= 1
