"""Activations on a GPU: every one in every schedule, dtype and precision, within the proven bound; limits, softmax, bits."""

from __future__ import annotations

import numpy as np
import pytest
from support import Net, odd_values, random_net, same_bits
from test_activations import ELEMENTWISE, INF, LIMITS, OVER_ROW, one_feature, specs_of
from test_gpu_schedules import result, runs

from cupymlp import MLP
from cupymlp.activations import ACTIVATIONS
from cupymlp.network import Network, numpy_dtype
from cupymlp.plan import PlanError
from cupymlp.reference import error_in_bounds, forward_and_bound

pytestmark = pytest.mark.gpu

IEEE = ("row", "tile", "layer")
WAYS = [
    *((schedule, dtype, "ieee") for schedule in IEEE for dtype in ("float32", "float64", "float16", "bfloat16")),
    *(
        (schedule, dtype, precision)
        for schedule in ("mma", "wgmma")
        for dtype, precision in (("float32", "tf32"), ("float32", "split3"), ("float16", "ieee"), ("bfloat16", "ieee"))
    ),
    *(("matmul", dtype, "library") for dtype in ("float32", "float64", "float16", "bfloat16")),
]
# All elementwise ones, three a network; which is where changes from way to way.
GROUPS = [ELEMENTWISE[i::7] for i in range(7)]


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def spec_of(name):
    return specs_of(name)[0] if ACTIVATIONS[name].parameter is None else (name, {"sin": 3.0}.get(name, 0.1))


def order_of(schedule, precision):
    return "blocks" if schedule in IEEE and precision == "ieee" else "any"


def check(net, x, y, schedule):
    network = net.network
    want, bound = forward_and_bound(network, net.weights, net.biases, x, order=order_of(schedule, network.precision))
    worst = error_in_bounds(y, want, bound)
    assert worst.max(initial=0) <= 1, (network, worst.max(), np.argwhere(worst > 1)[:5])
    return np.isfinite(want) & np.isfinite(bound)


def test_every_group_has_every_activation():
    assert sorted(name for group in GROUPS for name in group) == sorted(ELEMENTWISE)


@pytest.mark.parametrize(("schedule", "dtype", "precision"), WAYS)
@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_every_activation_in_every_schedule(cupy, rng, group, schedule, dtype, precision):
    """Odd widths, whose padding has activations that are not 0; ordinary rows, then odd ones; the same bits in any batch."""
    turn = WAYS.index((schedule, dtype, precision)) % len(group)
    activations = [spec_of(name) for name in (*group[turn:], *group[:turn])]
    sizes = (33, *(17, 19, 13)[: len(activations) - 1], 5)
    net = random_net(
        rng, sizes, dtype, biases=[True, False, True][: len(activations)], activations=activations, precision=precision
    )
    if not runs(cupy, net.network, schedule):
        pytest.skip(f"{schedule} does not run on this GPU")
    x = rng.standard_normal((300, 33)).astype(numpy_dtype(dtype))
    x[200:] = odd_values(rng, (100, 33), dtype)
    mlp = net.mlp(dtype=dtype, schedule=schedule)
    y = result(cupy, mlp, x)
    claimed = check(net, x, y, schedule)
    assert claimed[:200].mean() > (0.2 if "exp" in group else 0.9)
    if precision != "library":
        for batch in (1, 17, 129):
            assert same_bits(result(cupy, mlp, x, batch), y[:batch])


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ieee_schedules_have_the_same_bits(cupy, rng, group, dtype):
    activations = [spec_of(name) for name in group]
    net = random_net(rng, (33, *(17, 19, 13)[: len(group) - 1], 5), dtype, activations=activations)
    x = rng.standard_normal((200, 33)).astype(dtype)
    first, *others = [result(cupy, net.mlp(schedule=schedule), x) for schedule in IEEE]
    assert all(same_bits(first, y) for y in others)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cudas_functions_are_within_the_bound_of_the_exact_ones(cupy, activation_errors, name, dtype):
    """One feature: nothing but the function. Numbers of every size, and around where formulas change."""
    for spec in specs_of(name):
        found = activation_errors.measure(spec, dtype, "cuda", 500 if dtype == "float64" else 20000)
        assert found["max in bounds"] <= 1, (spec, found)
        net = one_feature(spec, dtype)
        edges = [
            0.0,
            3.0,
            6.0,
            16.0,
            22.0,
            30.0,
            50.0,
            87.3,
            88.7,
            88.8,
            104.0,
            709.7,
            745.0,
            1e3,
            1e6,
            1.1e6,
            1e12,
            2.0**60,
            3e38,
        ]
        x = np.array([s * e for e in edges for s in (1, -1, 1 + 1e-6, -1 - 1e-6, 1e-20, -1e-39)]).astype(dtype)[:, None]
        y = MLP(net.weights, out_activation=spec, dtype=dtype)(x, device="cuda")
        check(net, x, y, "row")


@pytest.mark.parametrize(
    ("schedule", "dtype", "precision"),
    [("row", "float32", "ieee"), ("tile", "float64", "ieee"), ("layer", "bfloat16", "ieee"), ("mma", "float32", "tf32"),
     ("wgmma", "float32", "split3"), ("wgmma", "float16", "ieee"), ("matmul", "float32", "library")],
)  # fmt: skip
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_limits_and_nan(cupy, name, schedule, dtype, precision):
    spec = (name, 0.25) if ACTIVATIONS[name].parameter else name
    net = one_feature(spec, dtype, precision=precision)
    if not runs(cupy, net.network, schedule):
        pytest.skip(f"{schedule} does not run on this GPU")
    x = np.array([-INF, INF, -1000, 1000, np.nan]).astype(numpy_dtype(dtype))[:, None]
    y = result(cupy, net.mlp(dtype=dtype, schedule=schedule), x)[:, 0].astype("f8")
    with np.errstate(over="ignore"):
        wanted = np.array(LIMITS[name]).astype(numpy_dtype(dtype)).astype("f8")
    close = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    np.testing.assert_allclose(y[:4], wanted, rtol=2e-3 if precision == "tf32" and name == "sin" else close)
    assert np.isnan(y[4])


# --- softmax --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "schedule", "dtype", "precision"),
    # wgmma holds widths up to 128, and all weights of 1000 float64 outputs outgrow a block's shared memory.
    [
        (n, *way)
        for way in WAYS
        for n in (1, 3, 10, 100, 128, 1000)
        if n <= 128 or not (way[0] == "wgmma" or way[:2] == ("tile", "float64"))
    ],
)
def test_softmax_in_every_schedule(cupy, rng, n, schedule, dtype, precision):
    name = OVER_ROW[n % 2 if n < 100 else (n // 2) % 2]
    net = random_net(rng, (21, 14, n), dtype, biases=[True, True], activations=["tanh", name], precision=precision)
    if not runs(cupy, net.network, schedule):
        pytest.skip(f"{schedule} does not run on this GPU")
    x = rng.standard_normal((300, 21)).astype(numpy_dtype(dtype))
    x[200:] = odd_values(rng, (100, 21), dtype)
    mlp = net.mlp(dtype=dtype, schedule=schedule)
    y = result(cupy, mlp, x)
    assert check(net, x, y, schedule)[:200].all()
    if precision != "library":
        for batch in (1, 17, 129):
            assert same_bits(result(cupy, mlp, x, batch), y[:batch])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OVER_ROW)
@pytest.mark.parametrize("n", [3, 70, 1000])
def test_softmax_of_ieee_schedules_has_the_same_bits(cupy, rng, n, name, dtype):
    net = random_net(rng, (21, n), dtype, biases=[True], activations=[name])
    x = rng.standard_normal((200, 21)).astype(dtype)
    schedules = [schedule for schedule in IEEE if (schedule, dtype, n) != ("tile", "float64", 1000)]  # too large for it
    first, *others = [result(cupy, net.mlp(schedule=schedule), x) for schedule in schedules]
    assert all(same_bits(first, y) for y in others)


@pytest.mark.parametrize("schedule", [*IEEE, "mma", "wgmma", "matmul"])
@pytest.mark.parametrize("name", OVER_ROW)
def test_softmax_of_infinities_and_nan(cupy, name, schedule):
    """One feature of 1, so that a row of sums is a row of weights."""
    precision = {"mma": "tf32", "wgmma": "split3", "matmul": "library"}.get(schedule, "ieee")
    rows = [[0, -INF, 0], [-INF, -INF, 3], [-INF, -INF, -INF], [0, INF, 0], [INF, INF, 0], [0, np.nan, 0], [np.nan] * 3]
    for row in rows:
        network = Network((1, 3), (name,), (False,), "float32", precision)
        net = Net(network, [np.array([row], "f4")], [None])
        if not runs(cupy, network, schedule):
            pytest.skip(f"{schedule} does not run on this GPU")
        x = np.ones((20, 1), "f4")
        check(net, x, result(cupy, net.mlp(schedule=schedule), x), schedule)


@pytest.mark.parametrize("schedule", ["row", "layer", "matmul"])
def test_softmax_through_strides_and_in_graphs(cupy, rng, schedule):
    """y between others that must stay; rounds of rows; a bound call."""
    precision = "library" if schedule == "matmul" else "ieee"
    net = random_net(rng, (30, 40, 11), biases=[True, True], activations=["silu", "softmax"], precision=precision)
    mlp = net.mlp(schedule=schedule)
    x = rng.standard_normal((2, 70, 30)).astype("f4")
    memory = cupy.full((70, 2, 25), 7, "f4")
    out = memory[:, :, 1:23:2].transpose(1, 0, 2)
    assert mlp(cupy.asarray(x)[::-1], out=out) is out
    y = out.get()
    check(net, x[::-1], y, schedule)
    memory[:, :, 1:23:2] = 7
    assert (memory == 7).all()
    if schedule != "matmul":
        step = mlp.bind(cupy.asarray(x[::-1].copy()))
        assert same_bits(step().get(), y)


def test_fused_mlp_reads_the_callers_weights(cupy, rng):
    from cupymlp import fused_mlp

    net = random_net(rng, (20, 15, 6), biases=[True, True], activations=[("elu", 0.5), "log_softmax"])
    x = rng.standard_normal((50, 20)).astype("f4")
    weights = [cupy.asarray(w.T.copy()) for w in net.weights]
    biases = [cupy.asarray(b) for b in net.biases]
    for _ in range(2):  # the second is remembered
        y = fused_mlp(
            cupy.asarray(x), *weights, biases=biases, activation=[("elu", 0.5)], out_activation="log_softmax",
            weight_layout="out_in",
        )  # fmt: skip
        check(net, x, y.get(), "row")


def test_a_plan_that_cannot_hold_the_rows_of_softmax_says_so(cupy, rng):
    net = random_net(rng, (4, 100_000), activations=["softmax"])
    with pytest.raises(PlanError, match="row: one row's activations need"):
        net.mlp(schedule="row")(cupy.zeros((2, 4), "f4"))
    x = rng.standard_normal((3, 4)).astype("f4")
    check(net, x, result(cupy, net.mlp(), x), "layer")
