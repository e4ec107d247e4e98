"""The reference and its bound: right, never too small, and small enough to see faults."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import c_loop, odd_values, random_net

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
    truth = exact(net, x)
    orders = [range, lambda n: range(n - 1, -1, -1), rng.permutation]
    results = [naive(net, x, order) for order in orders] + [c_loop(net, x[None])[0]]
    for j, value in enumerate(truth):
        assert abs(Fraction(float(y[j])) - value) <= Fraction(float(bound[j]))
        for result in results:
            assert abs(Fraction(float(result[j])) - Fraction(float(y[j]))) <= Fraction(float(bound[j]))


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


def test_infinities_and_nan_are_compared_exactly(rng):
    net = random_net(rng, (6, 5, 4), biases=[True, False], activations=["relu", "identity"])
    x = odd_values(rng, (400, 6), "float32")
    with np.errstate(all="ignore"):
        y, bound = forward_and_bound(net.network, net.weights, net.biases, x)
        good = c_loop(net, x)
        assert error_in_bounds(good, y, bound).max() <= 1
        assert np.isnan(y).any()
        assert np.isinf(y).any()
    claimed = ~np.isinf(bound)
    for special in (np.isnan(y), np.isinf(y)):
        for value in (0.0, 1.0):
            wrong = np.where(special & claimed, np.float32(value), good)
            assert error_in_bounds(wrong, y, bound).max() == np.inf
    wrong = np.where(np.isfinite(y) & claimed, np.float32(np.nan), good)
    assert error_in_bounds(wrong, y, bound).max() == np.inf


def test_nothing_is_claimed_where_sums_can_overflow():
    net = random_net(np.random.default_rng(0), (2, 1), biases=[False], activations=["identity"])
    net.weights[0][...] = 1
    big = np.finfo("f4").max / 2
    y, bound = forward_and_bound(net.network, net.weights, net.biases, [[big, big], [big, -big], [1.0, 1.0]])
    assert np.isinf(bound[:2]).all()
    assert np.isfinite(bound[2]).all()
    assert error_in_bounds(np.array([[np.inf], [0], [2]], "f4"), y, bound).tolist() == [[0], [0], [0]]


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0, 2), (3, 0)])
def test_empty_layers(sizes):
    net = random_net(np.random.default_rng(0), sizes, biases=[True] + [False] * (len(sizes) - 2))
    y, bound = forward_and_bound(net.network, net.weights, net.biases, np.ones((2, sizes[0])))
    assert y.shape == bound.shape == (2, sizes[-1])
    assert np.isfinite(bound).all()
