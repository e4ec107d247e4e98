"""MLP.scaled against exact arithmetic, for means that are small and large beside standard deviations."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from support import random_net

from cupymlp import MLP
from cupymlp.network import numpy_dtype
from cupymlp.reference import error_in_bounds, forward_and_bound

UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
K, N = 6, 4


def exact(z, weight, bias):
    """``z @ weight + bias`` of fractions."""
    W = [[Fraction(float(v)) for v in row] for row in weight]
    b = [Fraction(float(v)) for v in bias]
    return [[sum((r[k] * W[k][n] for k in range(len(W))), b[n]) for n in range(len(b))] for r in z]


def units_of_rounding(net, x, x_mean, x_std, weight, bias, dtype):
    """The worst error of one layer of scaled x, in units of what a sum of K + 1 terms and its operands' roundings can be off
    for x within three standard deviations of the mean: ``(K + 4) u (3 |W| + |b|)``, written here from the formula.
    """
    z = [
        [(Fraction(float(v)) - Fraction(float(m))) / Fraction(float(s)) for v, m, s in zip(row, x_mean, x_std)]
        for row in x
    ]
    want = exact(z, weight, bias)
    unit = UNITS[dtype] * (3 * np.abs(weight).astype(float).sum(0) + np.abs(bias).astype(float)) * (K + 4)
    got = net(x, device="cpu")
    errors = [[abs(float(Fraction(float(g)) - w)) / u for g, w, u in zip(gs, ws, unit)] for gs, ws in zip(got, want)]
    return np.max(errors)


def case(rng, ratio, dtype):
    """One layer; x within three standard deviations of a mean that is ratio of them."""
    kind = numpy_dtype(dtype)
    weight, bias = rng.standard_normal((K, N)).astype(kind), rng.standard_normal(N).astype(kind)
    x_std = np.exp(rng.uniform(-2, 2, K))
    x_mean = ratio * x_std * rng.choice([-1, 1], K)
    x = (x_mean + x_std * np.clip(rng.standard_normal((20, K)), -2.9, 2.9)).astype(kind)
    return weight, bias, x_mean, x_std, x


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("ratio", [0, 0.3, 2, 30, 1000, 1e6])
def test_auto_is_as_accurate_as_the_network_itself_whatever_the_mean(rng, ratio, dtype):
    if dtype == "float16" and ratio > 1000:
        pytest.skip("such an x has no float16 digits left of what it is about")
    weight, bias, x_mean, x_std, x = case(rng, ratio, dtype)
    x = x.astype(dtype)
    spread = np.abs((x.astype(float) - x_mean) / x_std).max()
    net = MLP([weight], [bias]).scaled(x_mean=x_mean, x_std=x_std)
    error = units_of_rounding(net, x, x_mean, x_std, weight, bias, dtype)
    assert error <= 4 * max(1, spread / 3)
    assert net.dtype == dtype
    assert (net.network.depth == 2) == (ratio >= 30), "a layer of its own is for large means"
    if net.network.depth == 2:
        assert error <= max(1, spread / 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_folding_a_large_mean_loses_what_auto_keeps(rng, dtype):
    """Here is what auto is for: this measures what it avoids."""
    weight, bias, x_mean, x_std, x = case(rng, 1e6, dtype)
    plain = MLP([weight], [bias])
    errors = {
        scaling: units_of_rounding(
            plain.scaled(x_mean=x_mean, x_std=x_std, scaling=scaling), x, x_mean, x_std, weight, bias, dtype
        )
        for scaling in ("fold", "apart", "auto")
    }
    assert errors["fold"] > 1000
    assert errors["apart"] < 1
    assert errors["auto"] == errors["apart"]


def test_the_rest_of_a_rounded_mean_is_not_lost(rng):
    """300.1 is not a float32 number: it is 3e-6 off, which is 3 % of these standard deviations."""
    weight, bias = rng.standard_normal((K, N)).astype("f4"), rng.standard_normal(N).astype("f4")
    x_mean, x_std = np.full(K, 300.1), np.full(K, 1e-4)
    x = (x_mean + x_std * rng.uniform(-2.5, 2.5, (20, K))).astype("f4")
    net = MLP([weight], [bias]).scaled(x_mean=300.1, x_std=1e-4)
    assert net.network.depth == 2
    assert units_of_rounding(net, x, x_mean, x_std, weight, bias, "float32") < 1


@pytest.mark.parametrize("scaling", ["auto", "fold", "apart"])
@pytest.mark.parametrize("sizes", [(6, 4), (6, 6, 6), (6, 9, 9, 1), (5, 5, 5, 5, 5, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("out_activation", ["identity", "relu"])
def test_networks_of_all_depths(rng, sizes, dtype, scaling, out_activation):
    activations = ["relu"] * (len(sizes) - 2) + [out_activation]
    plain = random_net(rng, sizes, dtype, activations=activations).mlp()
    x_mean, x_std = rng.standard_normal(sizes[0]), rng.uniform(0.5, 2, sizes[0])
    y_mean, y_std = rng.standard_normal(sizes[-1]), rng.uniform(0.5, 2, sizes[-1])
    net = plain.scaled(x_mean=x_mean, x_std=x_std, y_mean=y_mean, y_std=y_std, scaling=scaling)
    apart = 2 if scaling == "apart" else int(out_activation == "relu")
    assert net.network.depth == plain.network.depth + apart
    x = (x_mean + x_std * rng.standard_normal((30, sizes[0]))).astype(dtype)
    z, bound = forward_and_bound(plain.network, plain.weights, plain.biases, (x.astype(float) - x_mean) / x_std)
    # Weights that were rounded once more add about as much as one more rounding a term.
    own, own_bound = forward_and_bound(net.network, net.weights, net.biases, x)
    allowed = 4 * (bound * y_std + own_bound)
    assert error_in_bounds(own, y_mean + y_std * z, allowed).max() <= 1
    assert error_in_bounds(net(x, device="cpu"), own, own_bound).max() <= 1


@pytest.mark.parametrize("out_activation", ["tanh", "exp", ("leaky_relu", 0.25)], ids=str)
def test_other_activations(rng, out_activation):
    activations = [("elu", 0.5), out_activation]
    net = random_net(rng, (4, 5, 3), "float64", activations=activations).mlp()
    scaled = net.scaled(x_mean=1.0, x_std=2.0, y_std=3.0, y_mean=[1.0, 2.0, 3.0])
    x = rng.standard_normal((9, 4))
    assert scaled.network.activations == (*activations, "identity")
    np.testing.assert_allclose(scaled(x, device="cpu"), [1, 2, 3] + 3 * net((x - 1) / 2, device="cpu"), rtol=1e-13)


def test_what_is_not_scaled_stays_the_same(rng):
    net = random_net(rng, (3, 8, 2), "float32", biases=[False, True]).mlp()
    same = net.scaled()
    assert same.network == net.network
    assert all((a == b).all() for a, b in zip(same.weights, net.weights))
    assert net.scaled(x_std=2.0).network == net.network, "no bias where none is needed"
    halved = net.scaled(x_std=2.0)
    assert (halved.weights[0] == net.weights[0] / 2).all()
    assert (halved.weights[1] == net.weights[1]).all()


def test_powers_of_two_and_small_numbers_are_exact(rng):
    net = MLP([np.array([[2.0], [4.0]])], [np.array([1.0])])
    x = np.array([[3.0, 5.0]])
    for scaling in ("fold", "apart"):
        got = net.scaled(x_mean=[1.0, 1.0], x_std=[2.0, 4.0], y_mean=10.0, y_std=0.5, scaling=scaling)
        assert got(x, device="cpu").tolist() == [[10 + 0.5 * (2 * 1 + 4 * 1 + 1)]]


def test_precision_layout_and_schedule_are_kept(rng):
    plain = random_net(rng, (5, 5, 3), "float32", biases=[True, True])
    net = plain.mlp(weight_layout="out_in", precision="split3", schedule="mma")
    scaled = net.scaled(x_mean=500.0, x_std=0.25, scaling="apart")
    assert scaled.weight_layout == "out_in"
    assert scaled.network.precision == "split3"
    assert scaled.schedule == "mma"
    assert [w.shape for w in scaled.weights] == [(5, 5), (5, 5), (3, 5)]
    x = rng.normal(500, 0.25, (7, 5)).astype("f4")
    want = plain.mlp().scaled(x_mean=500.0, x_std=0.25, scaling="apart")(x, device="cpu")
    assert (scaled(x, device="cpu") == want).all()


@pytest.mark.parametrize("precision", ["tf32", "split3"])
def test_rounded_operands_gain_nothing_by_a_layer_apart(rng, precision):
    """x is an operand: digits of it are gone before the mean is subtracted."""
    net = random_net(rng, (5, 8, 3), "float32", activations=["relu", "identity"])
    assert net.mlp().scaled(x_mean=1000.0).network.depth == 3
    assert net.mlp(precision=precision).scaled(x_mean=1000.0).network.depth == 2


def test_weights_are_rounded_once(rng):
    weight = rng.standard_normal((4, 3))
    net = MLP([weight]).scaled(x_std=3.0, dtype="float32")
    assert net.dtype == np.float32
    assert (net.weights[0] == (weight * (1 / 3.0)).astype("f4")).all()
    half = MLP([weight]).scaled(x_std=3.0, dtype="bfloat16")
    assert half.network.dtype == "bfloat16"


def test_what_a_dtype_cannot_hold_folded_is_kept_apart(rng):
    """float16 weights over a standard deviation of 1000 are subnormal numbers, which have few bits; powers of two do not."""
    net = random_net(rng, (6, 8, 3), "float16", activations=["relu", "identity"], scale=0.02).mlp()
    scaled = net.scaled(x_std=4000.0)
    assert scaled.network.depth == 3
    x = rng.normal(0, 4000, (50, 6)).astype("f2")
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x.astype(float) / 4000.0)
    assert error_in_bounds(scaled(x, device="cpu"), want, 3 * bound).max() <= 1
    assert error_in_bounds(net.scaled(x_std=4000.0, scaling="fold")(x, device="cpu"), want, 3 * bound).max() > 1


def test_arrays_of_other_kinds_are_taken(rng):
    net = random_net(rng, (3, 2), "float64").mlp()
    want = net.scaled(x_mean=[1.0, 2.0, 3.0], x_std=2.0)
    for mean in ((1, 2, 3), np.array([1, 2, 3], ">f4"), np.array([1, 2, 3], "i2")):
        assert all((a == b).all() for a, b in zip(net.scaled(x_mean=mean, x_std=2).weights, want.weights))


def test_scaled_twice_is_scaled_by_both(rng):
    net = random_net(rng, (3, 5, 2), "float64", activations=["relu", "identity"]).mlp()
    x = rng.standard_normal((9, 3))
    twice = net.scaled(x_mean=1.0, x_std=2.0, y_std=3.0).scaled(x_mean=4.0, x_std=5.0, y_mean=6.0)
    want = 6 + 3 * net(((x - 4) / 5 - 1) / 2, device="cpu")
    np.testing.assert_allclose(twice(x, device="cpu"), want, rtol=1e-12, atol=1e-12)


def test_an_infinite_feature(rng):
    net = MLP([np.eye(2, dtype="f4")])
    x = np.array([[np.inf, 1.0]], "f4")
    assert net.scaled(x_std=2.0)(x, device="cpu")[0, 0] == np.inf
    assert np.isnan(net.scaled(x_std=2.0, scaling="apart")(x, device="cpu")).any(), "as the docstring warns"


def test_nothing_can_follow_a_softmax(rng):
    net = random_net(rng, (4, 3), "float64", activations=["softmax"]).mlp()
    with pytest.raises(ValueError, match="a layer or a scaling follows 'softmax', which is accepted at the end"):
        net.scaled(y_std=2.0)
    assert net.scaled(x_std=2.0).network.activations == ("softmax",)


REFUSED = {
    "a std of zero": ({"x_std": [1.0, 0.0, 1.0]}, r"x_std\[1\] is 0\.0; accepted: positive, finite numbers; for a feature"),
    "a negative std": ({"y_std": -1.0}, "y_std is -1.0; accepted: positive"),
    "a std of NaN": ({"x_std": np.nan}, "x_std is nan; accepted: positive"),
    "an infinite std": ({"x_std": np.inf}, "x_std is inf; accepted: positive"),
    "an infinite mean": ({"x_mean": [0, 0, -np.inf]}, r"x_mean\[2\] is -inf; accepted: finite numbers"),
    "a NaN mean": ({"y_mean": [np.nan, 0]}, r"y_mean\[0\] is nan; accepted: finite numbers"),
    "a wrong length": ({"x_mean": [0, 0]}, r"x_mean has shape \(2,\); accepted: one number, or one for each of the 3 features"),
    "a wrong rank": ({"y_std": np.ones((1, 2))}, r"y_std has shape \(1, 2\); accepted: one number, or one for each of the 2"),
    "an unknown way": ({"scaling": "both"}, "scaling is 'both'; accepted: 'fold'"),
    "a std beyond float32": ({"x_std": 1e-300}, "x_mean, x_std makes weights or biases that float32 cannot hold"),
    "a std beyond float64": ({"x_std": 5e-324}, "x_mean, x_std makes weights or biases that float32 cannot hold"),
    "a vanishing std": ({"x_std": 1e60, "scaling": "apart"}, "a scale of a layer of its own would vanish"),
    "a mean beyond float32": ({"x_mean": 1e300}, "x_mean, x_std makes weights or biases that float32 cannot hold"),
    "y beyond float32": ({"y_mean": 1e300}, "y_mean, y_std makes weights or biases that float32 cannot hold"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scaled_by_is_refused(rng, name):
    arguments, message = REFUSED[name]
    net = random_net(rng, (3, 5, 2), "float32", activations=["relu", "identity"]).mlp()
    with pytest.raises(ValueError, match=message):
        net.scaled(**arguments)


def test_what_is_no_number_is_a_type_error(rng):
    net = random_net(rng, (3, 2), "float32").mlp()
    for bad in ("mean", [1j, 0, 0], np.array(["a", "b", "c"])):
        with pytest.raises(TypeError, match=r"x_mean is a .* of dtype"):
            net.scaled(x_mean=bad)


def test_an_output_is_not_folded_where_its_weights_would_vanish():
    """1e-3 * 1e-5 is 0 in float16, and 64 of them are not."""
    net = MLP([np.full((1, 64), 1000.0), np.full((64, 1), 1e-3)], dtype="f2")
    x = np.ones((1, 1), "f2")
    wanted = float(net(x, device="cpu")[0, 0]) * 1e-5
    for scaling in ("auto", "apart"):
        assert net.scaled(y_std=1e-5, scaling=scaling)(x, device="cpu")[0, 0] == pytest.approx(wanted, rel=5e-3)
    assert net.scaled(y_std=0.5).network.sizes == (1, 64, 1)


def test_a_mean_beyond_float64_is_refused_quietly():
    if np.finfo(np.longdouble).max == np.finfo(np.float64).max:
        pytest.skip("longdouble is float64 here")
    with pytest.raises(ValueError, match="x_mean is inf"):
        MLP([[[1.0]]]).scaled(x_mean=np.longdouble("1e4000"))
