"""The activation table: exact functions, limits, the error bound, the CPU path, and what users may write."""

from __future__ import annotations

import numpy as np
import pytest
from support import Net, odd_values, random_net

from cupymlp import MLP, fused_mlp, verify
from cupymlp._normal_tail import COEFFICIENTS, POLE, normal_tail
from cupymlp._source import find_cuda_src
from cupymlp.activations import ACTIVATIONS, activation_of, parameter_of, spec_text
from cupymlp.network import DTYPES, Network, numpy_dtype
from cupymlp.reference import error_in_bounds, forward_and_bound
from cupymlp.verify import random_mlp

mpmath = pytest.importorskip("mpmath")
INF = np.inf
ELEMENTWISE = [name for name, row in ACTIVATIONS.items() if not row.over_row]
OVER_ROW = [name for name, row in ACTIVATIONS.items() if row.over_row]


def specs_of(name):
    """The activation with its default, and with parameters that float32 has not and has exactly."""
    row = ACTIVATIONS[name]
    return [name] if row.parameter is None else [(name, p) for p in (row.parameter.default, 0.1, 0.25, 30.0)]


def apply(spec, v):
    out = np.empty_like(v)
    with np.errstate(all="ignore"):
        activation_of(spec).apply(v, out, parameter_of(spec, v.dtype.name))
    return out


def one_feature(spec, dtype, width=1, precision="ieee"):
    """A network whose sums are x."""
    network = Network((width, width), (spec,), (False,), dtype, precision)
    return Net(network, [np.eye(width).astype(numpy_dtype(dtype))], [None])


# --- The functions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_reference_and_the_cpu_path_are_within_their_bounds_of_the_exact_function(activation_errors, name):
    for spec in specs_of(name):
        found = activation_errors.measure_reference(spec, 300)
        assert found["max in bounds"] <= 1, (spec, found)
        for dtype in DTYPES:
            found = activation_errors.measure(spec, dtype, "cpu", 300 if dtype == "float64" else 3000)
            assert found["max in bounds"] <= 1, (spec, dtype, found)


def test_the_tail_of_the_normal_distribution(activation_errors):
    """Its coefficients are those of the interpolation that they are said to be, and it is as accurate as is said."""
    for size, found in COEFFICIENTS.items():
        with mpmath.mp.workdps(60):
            count = len(found)
            angles = [mpmath.pi * (k + mpmath.mpf(1) / 2) / count for k in range(count)]
            nodes = [mpmath.cos(angle) for angle in angles]
            values = []
            for t in nodes:
                a = POLE * (1 + t) / (1 - t) / mpmath.sqrt(2)
                values.append(mpmath.erfc(a) * mpmath.exp(a * a) / 2)
            matrix = mpmath.matrix(count, count)
            for i, t in enumerate(nodes):
                for n in range(count):
                    matrix[i, n] = t**n
            want = [float(c) for c in mpmath.lu_solve(matrix, mpmath.matrix(values))]
        assert found == tuple(want)
        dtype = np.dtype(f"f{size}")
        a = np.concatenate([10.0 ** np.linspace(-20, 0, 100), np.linspace(1, 9, 100), [0]]).astype(dtype)
        with mpmath.mp.workdps(40):
            exact = [mpmath.erfc(mpmath.mpf(float(v)) / mpmath.sqrt(2)) / 2 for v in a]
            off = [float(abs(mpmath.mpf(float(y)) - e)) for y, e in zip(normal_tail(a), exact)]
        assert max(off) < 3 * np.finfo(dtype).eps / 2
    with np.errstate(all="ignore"):
        assert normal_tail(np.array([50.0])) == 0


def test_the_benchmark_sees_a_wrong_function(activation_errors, monkeypatch):
    monkeypatch.setitem(activation_errors.EXACT, "tanh", lambda v, _: mpmath.tanh(v) * (1 + mpmath.mpf(2) ** -48))
    assert activation_errors.measure_reference("tanh", 300)["max in bounds"] > 1


LIMITS = {  # at -inf and +inf, at -+1000, and at -+1e30 where that is another number; parameters 1 and 0.25
    "identity": (-INF, INF, -1000, 1000),
    "relu": (0, INF, 0, 1000),
    "leaky_relu": (-INF, INF, -250, 1000),
    "elu": (-0.25, INF, -0.25, 1000),
    "celu": (-0.25, INF, -0.25, 1000),
    "selu": (-1.7580993408473766, INF, -1.7580993408473766, 1050.7009873554805),
    "gelu": (0, INF, 0, 1000),
    "gelu_tanh": (0, INF, 0, 1000),
    "silu": (0, INF, 0, 1000),
    "tanh": (-1, 1, -1, 1),
    "sigmoid": (0, 1, 0, 1),
    "softplus": (0, INF, 0, 1000),
    "softsign": (-1, 1, -1000 / 1001, 1000 / 1001),
    "sin": (np.nan, np.nan, np.sin(-250), np.sin(250)),
    "exp": (0, INF, 0, INF),
    "hard_sigmoid": (0, 1, 0, 1),
    "hard_swish": (0, INF, 0, 1000),
    "relu6": (0, 6, 0, 6),
    "squareplus": (0, INF, 2 / (1000 + np.sqrt(1000004)), (1000 + np.sqrt(1000004)) / 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_limits_and_nan(name, dtype):
    spec = (name, 0.25) if ACTIVATIONS[name].parameter else name
    with np.errstate(over="ignore"):
        x = np.array([-INF, INF, -1000, 1000, np.nan, -1e30, 1e30]).astype(numpy_dtype(dtype))
    y = MLP([np.ones((1, 1))], out_activation=spec, dtype=dtype)(x[:, None], device="cpu")[:, 0].astype("f8")
    wanted = np.array(LIMITS[name]).astype(numpy_dtype(dtype)).astype("f8")
    np.testing.assert_allclose(y[:4], wanted, rtol=4 * float(np.finfo("f4").eps) if dtype != "float64" else 1e-14)
    assert np.isnan(y[4])
    if name == "sin":
        assert np.isnan(y[5:]).all() if dtype == "float16" else (np.abs(y[5:]) <= 1).all()
    else:
        far = {"softsign": (-1, 1), "squareplus": (1e-30, 1e30), "selu": (LIMITS["selu"][0], 1.0507009873554805e30)}
        low, high = far.get(name, (LIMITS[name][0], LIMITS[name][1]))
        high = 1e30 if high == INF and name != "exp" else high
        low = {"identity": -1e30, "leaky_relu": -0.25e30}.get(name, low)
        with np.errstate(over="ignore"):
            wanted = np.array([low, high]).astype(numpy_dtype(dtype)).astype("f8")
        np.testing.assert_allclose(
            y[5:], wanted, rtol=1e-2 if dtype == "bfloat16" else 1e-3 if dtype == "float16" else 1e-6
        )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_in_place_and_lipschitz(name, rng):
    for spec in specs_of(name):
        row, parameter = activation_of(spec), parameter_of(spec)
        v = np.concatenate([rng.standard_normal(500) * 10, np.linspace(-7, 7, 500)])
        out = apply(spec, v[None])[0]
        again = v[None].copy()
        with np.errstate(all="ignore"):
            row.apply(again, again, parameter)
        np.testing.assert_array_equal(out, again[0])
        if row.lipschitz is not None:
            slopes = np.abs(np.diff(out)) / np.abs(np.diff(v))
            steepest = row.lipschitz(parameter)
            assert slopes.max() <= steepest * (1 + 1e-9)
            if name != "sin":  # whose period the points do not follow at omega = 30
                assert slopes.max() >= 0.95 * steepest


# --- softmax --------------------------------------------------------------------------------------------------------------


def exact_softmax(row, logarithm):
    with mpmath.mp.workdps(40):
        v = [mpmath.mpf(float(x)) for x in row]
        total = mpmath.log(sum(map(mpmath.exp, v)))
        return [x - total if logarithm else mpmath.exp(x - total) for x in v]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 100])
@pytest.mark.parametrize("name", OVER_ROW)
def test_softmax_is_within_the_bound_of_the_exact_one(rng, name, width, dtype):
    net = one_feature(name, dtype, width)
    x = (rng.standard_normal((6, width)) * np.array([[0.1], [1], [10], [100], [1e4], [1]])).astype(numpy_dtype(dtype))
    x[5] = x[5, 0]  # all equal
    y = net.mlp(dtype=dtype)(x, device="cpu")
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert np.isfinite(bound).all()
    assert error_in_bounds(y, want, bound).max() <= 1
    exact = [exact_softmax(row, name == "log_softmax") for row in x]
    for result in (want, y):
        off = [[float(abs(mpmath.mpf(float(a)) - b)) for a, b in zip(*rows)] for rows in zip(result, exact)]
        assert (np.array(off) <= bound).all()
    if name == "softmax":
        assert np.abs(y.astype("f8").sum(-1) - 1).max() < (1e-6 if dtype in {"float32", "float64"} else 0.05)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OVER_ROW)
def test_softmax_of_infinities_and_nan_is_the_formulas(name, dtype):
    rows = [[0, -INF, 0], [-INF, -INF, 3], [-INF, -INF, -INF], [0, INF, 0], [INF, INF, 0], [0, np.nan, 0], [np.nan] * 3]
    y = apply(name, np.array(rows, dtype))
    half = [0.5, 0, 0.5] if name == "softmax" else [np.log(0.5), -INF, np.log(0.5)]
    one = [0, 0, 1] if name == "softmax" else [-INF, -INF, 0]
    np.testing.assert_allclose(y[:2], np.array([half, one], dtype), rtol=1e-6)
    assert np.isnan(y[2:]).all()
    network = Network((1, 3), (name,), (False,), dtype)
    for row, result in zip(rows, y):
        want, bound = forward_and_bound(network, [np.array([row], dtype)], [None], [1.0])
        assert (error_in_bounds(result, want, bound) <= 1).all()
        assert np.isfinite(bound).all()


@pytest.mark.parametrize("name", OVER_ROW)
def test_an_error_of_the_sums_is_carried_through_softmax(rng, name):
    """Sums of large numbers that cancel, in float32, whose errors are of the size of the results."""
    net = random_net(rng, (300, 20), biases=[False], activations=[name])
    x = (rng.standard_normal((50, 300)) * 100).astype("f4")
    order = rng.permutation(300)
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    sums = np.zeros((50, 20), "f4")
    for k in order:
        sums += x[:, k : k + 1] * net.weights[0][k]
    worst = error_in_bounds(apply(name, sums), want, bound)
    assert 1e-4 < worst.max() <= 1


# --- The bound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_cpu_path_is_within_the_bound_through_layers(rng, name, dtype):
    """Hidden and last, beside odd numbers: infinities, NaN, subnormal and huge ones."""
    spec = specs_of(name)[-2 if ACTIVATIONS[name].parameter else -1]
    hidden = "tanh" if ACTIVATIONS[name].over_row else spec
    net = random_net(rng, (9, 12, 7, 5), dtype, biases=[True, False, True], activations=[hidden, "relu", spec])
    x = rng.standard_normal((400, 9)).astype(numpy_dtype(dtype))
    x[200:] = odd_values(rng, (200, 9), dtype)
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    y = net.mlp(dtype=dtype)(x, device="cpu")
    assert error_in_bounds(y, want, bound).max() <= 1
    claimed = np.isfinite(bound[:200]) & np.isfinite(want[:200])
    assert claimed.mean() > (0.3 if name == "exp" else 0.95)
    small = np.abs(bound[:200])[claimed] / np.maximum(1, np.abs(want[:200][claimed]))
    assert np.median(small) < {"float64": 1e-12, "float32": 1e-3, "float16": 0.3, "bfloat16": 3}[dtype]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_bound_sees_another_function(rng, name):
    """float32 results of an activation that is off by 20 ulp, or, where sums cancel, by 20 units of v's."""
    spec = specs_of(name)[0]
    net = one_feature(spec, "float32")
    x = (np.exp2(rng.uniform(-6, 2, 500)) * rng.choice([-1, 1], 500)).astype("f4")[:, None]
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    wrong = want + 40 * 2.0**-24 * np.maximum(np.abs(want), np.abs(x) if ACTIVATIONS[name].of_input else 0)
    assert error_in_bounds(wrong, want, bound).max() > 1


def test_nothing_is_claimed_where_exp_may_overflow():
    for dtype, last in (("float32", 88.0), ("float64", 709.0), ("float16", 11.0)):
        net = one_feature("exp", dtype)
        x = np.array([[last], [last * 1.01], [last * 2], [INF], [-INF]])
        want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
        assert np.isfinite(bound[[0, 3, 4]]).all()
        assert np.isinf(bound[2]).all()
        y = np.array([[np.exp(last)], [INF], [INF], [INF], [0]])
        assert error_in_bounds(y, want, bound).max() <= 1
        assert error_in_bounds(np.zeros((5, 1)), want, bound)[[0, 3]].min() > 1


# --- What users write -----------------------------------------------------------------------------------------------------


def test_a_name_with_its_parameter_is_one_activation():
    eye = [np.eye(2)] * 3
    both = [("leaky_relu", 0.25), ("leaky_relu", 0.25), "identity"]
    assert list(MLP(eye, activation=("leaky_relu", 0.25)).network.activations) == both
    assert (
        list(MLP(eye, activation=[("leaky_relu", 0.25), ["leaky_relu", np.float32(0.25)]]).network.activations) == both
    )
    assert list(MLP(eye, activation=("relu", "tanh")).network.activations) == ["relu", "tanh", "identity"]
    assert list(MLP(eye, activation=["relu", ("elu", 0.5)]).network.activations) == ["relu", ("elu", 0.5), "identity"]
    assert MLP(eye, activation="elu").network.activations == (("elu", 1.0), ("elu", 1.0), "identity")
    net = MLP(eye, activation=("leaky_relu", -0.0), out_activation=("sin", 30))
    assert net.network.activations[0] == ("leaky_relu", 0.0)
    assert np.copysign(1, net.network.activations[0][1]) == 1
    assert hash(net.network) == hash(MLP(eye, activation=("leaky_relu", 0), out_activation=("sin", 30.0)).network)
    assert repr(net) == "<cupymlp.MLP 2-2-2-2 float64, leaky_relu:0.0 leaky_relu:0.0 sin:30.0, no bias>"
    assert spec_text("relu") == "relu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slope", [0.25, 0.1])
def test_a_parameter_is_rounded_to_the_arithmetic_once(slope, dtype):
    """Not to float16, and not left in float64."""
    sums = "f8" if dtype == "float64" else "f4"
    x = np.array([[-3.0], [-1.5]]).astype(numpy_dtype(dtype))
    y = fused_mlp(x, np.ones((1, 1), x.dtype), out_activation=("leaky_relu", slope))
    want = (x.astype(sums) * np.dtype(sums).type(slope)).astype(x.dtype)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, want)
    assert parameter_of(("leaky_relu", 0.1), "float32") == float(np.float32(0.1)) != 0.1


def test_networks_with_activations_are_copied_and_called_by_fused_mlp(rng):
    W, V = rng.standard_normal((3, 4)), rng.standard_normal((4, 2))
    x = rng.standard_normal((5, 3))
    z = np.tanh(x @ W) @ V
    want = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    np.testing.assert_allclose(fused_mlp(x, W, V, activation="tanh", out_activation="softmax"), want)
    np.testing.assert_allclose(fused_mlp(x, W, V, activation=["tanh"], out_activation="log_softmax"), np.log(want))


def test_the_kernels_know_every_activation():
    text = (find_cuda_src() / "activations.cuh").read_text()
    names = text.partition("enum class Act {")[2].partition("}")[0]
    assert [n.strip() for n in names.replace("\n", " ").split(",") if n.strip()] == list(ACTIVATIONS)
    long = text.partition("is_long(Act act) {")[2].partition(";")[0]
    names = {name for name in ACTIVATIONS if f"Act::{name} " not in long and f"Act::{name}\n" not in long}
    assert names - set(OVER_ROW) == {name for name, row in ACTIVATIONS.items() if row.long}


# --- Bounds at their ends -----------------------------------------------------------------------------------------------


def test_the_bound_of_exp_where_it_is_too_small_a_number():
    """The rounding of the hidden layer moves v by hundreds, from where e^v is 0 in float64 to where it is not."""
    pytest.importorskip("ml_dtypes")
    weights = [np.eye(2), np.array([[179200.0], [-430]])]
    biases = [np.array([2**-8 * (1 + 2**-7), 0]), np.array([-180224.0])]
    net = MLP(weights, biases, "identity", "exp", dtype="bfloat16")
    x = np.ones((1, 2), net.dtype)
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    y = net(x, device="cpu")
    assert reference == 0 < y
    assert error_in_bounds(y, reference, bound) <= 1
    assert bound < 1e-9
    far = MLP([[[1.0]], [[1.0]]], None, "identity", "exp", dtype="f4")
    assert forward_and_bound(far.network, far.weights, far.biases, [[-1e10]])[1] < 1e-37


@pytest.mark.parametrize("name", OVER_ROW)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_softmax_is_between_0_and_1_and_so_is_its_error(name, dtype):
    """Of deep nets whose bound on the sums is large."""
    depth = 8 if name == "softmax" else 5  # the bound of a logarithm may be beyond float16
    net = random_mlp((10, *(64,) * depth, 5), dtype=dtype, bias=True, out_activation=name)
    x = np.random.default_rng(0).standard_normal((16, 10))
    _, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert np.isfinite(bound).all()
    if name == "softmax":
        assert (bound < 1.01).all()


def test_a_bound_is_a_number_or_infinite():
    net = MLP([[[1e30]], [[1.0]]], None, "sin", dtype="f4")
    x = np.array([[1e30]], "f4")
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert np.isinf(bound)
    assert verify(net, x, device="cpu").ok
    assert np.isinf(error_in_bounds([[123.0]], np.zeros((1, 1)), np.full((1, 1), np.nan)))
    exp = MLP([[[1.0]], [[1.0]]], None, "exp", dtype="f4")
    reference, bound = forward_and_bound(exp.network, exp.weights, exp.biases, [[-1e20]])
    assert error_in_bounds([[123.0]], reference, bound) > 1


def test_names_are_plain_strings_whatever_came():
    named = MLP([[[1.0]]], out_activation=np.str_("tanh"))
    assert type(named.network.activations[0]) is str
    assert named.__dask_tokenize__() == MLP([[[1.0]]], out_activation="tanh").__dask_tokenize__()


def test_parameters_that_python_or_the_kernels_cannot_hold():
    for given, said in [(("elu", 10**5000), "an integer beyond float64"), (("celu", 1e-40), "at least 1.17549e-38")]:
        with pytest.raises(ValueError, match=said):
            MLP([[[1.0]], [[1.0]]], activation=given, dtype="f4")
