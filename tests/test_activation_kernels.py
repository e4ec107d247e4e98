"""Activations in the kernels, compiled for the host: every function by itself, then in every schedule, within the proven bound.

The host's elementary functions stand for CUDA's: what is tested here is everything around them. benchmarks/activation_errors.py
and test_activations_gpu.py have CUDA's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support import (
    H200,
    HostError,
    Net,
    activations_on_host,
    launch_on_host,
    odd_values,
    random_net,
    run_on_host,
    same_bits,
)
from test_mma_host import REGISTERS_STAGED, SHARED_GLOBAL, WAYS, run

from cupymlp._pack import pack
from cupymlp.activations import ACTIVATIONS, activation_of, parameter_of
from cupymlp.network import Network, numpy_dtype
from cupymlp.plan import Access, Device
from cupymlp.reference import error_in_bounds, forward_and_bound
from cupymlp.schedules import plan_gpu
from cupymlp.schedules.layer import layer_steps
from cupymlp.schedules.matmul import matmul_steps

pytest.importorskip("ml_dtypes")
INF = np.inf
ELEMENTWISE = [name for name, row in ACTIVATIONS.items() if not row.over_row]
SPECS = [
    spec
    for name in ELEMENTWISE
    for spec in ([name] if ACTIVATIONS[name].parameter is None else [(name, p) for p in (0.25, 0.1, 30.0)])
]
ONE_SM = Device("one multiprocessor", 90, 1, 232448)
# Between them all functions, each before padded columns, where f(0) is not 0 for some, and as a last layer's.
FIRST = (("leaky_relu", 0.1), "sigmoid", "gelu", "exp")
SECOND = ("softplus", ("sin", 3.0), "squareplus", ("celu", 0.25))
THIRD = ("hard_swish", "silu", "elu", "softmax")
SIZES = (9, 13, 18, 7, 5)


def check(net, x, y):
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    worst = error_in_bounds(y, want, bound)
    assert worst.max() <= 1, (worst.max(), np.argwhere(worst > 1)[:5])
    claimed = np.isfinite(bound[: len(x) // 2]) & np.isfinite(want[: len(x) // 2])
    assert claimed.mean() > 0.9
    return want, bound


def some_rows(rng, count, features, dtype):
    """Ordinary ones, then odd ones."""
    x = rng.standard_normal((count, features)).astype(numpy_dtype(dtype))
    x[count // 2 :] = odd_values(rng, (count - count // 2, features), dtype)
    return x


# --- Functions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_function_is_within_its_bound(rng, dtype):
    """Numbers of every size, subnormal ones and those around where formulas change, limits and NaN."""
    sizes = np.exp2(np.concatenate([rng.uniform(-10, 8, 3000), rng.uniform(-160, 127, 1000)]))
    edges = [0.0, 3.0, 6.0, 16.0, 30.0, 50.0, 88.7228, 709.7827, 1000.0, 1e6, 2.0**60, 2.0**100, 3e38, INF, np.nan]
    near = [np.nextafter(e, 0) for e in edges] + [np.nextafter(e, INF) for e in edges]
    with np.errstate(over="ignore"):
        v = np.concatenate([sizes, edges, near]).astype(dtype)
    v = np.concatenate([v, -v])
    results = activations_on_host(dtype, [(spec, v) for spec in SPECS])
    for spec, y in zip(SPECS, results, strict=True):
        network = Network((1, 1), (spec,), (False,), dtype)
        want, bound = forward_and_bound(network, [np.ones((1, 1))], [None], v[:, None])
        worst = error_in_bounds(y[:, None], want, bound)
        assert worst.max() <= 1, (spec, v[np.argmax(worst)], y[np.argmax(worst)], want[np.argmax(worst)])


def test_functions_of_single_operations_are_defined_to_the_bit(rng):
    v = np.concatenate([odd_values(rng, 4000, "float32"), rng.standard_normal(4000).astype("f4") * 4])
    with np.errstate(all="ignore"):
        slope = np.float32(0.1)
        sixth = np.float32(1 / 6)
        far = np.float32(2.0**100)
        hard = np.where(np.isnan(v), v, np.clip(v + np.float32(3), 0, 6)) * sixth
        clipped = np.clip(v, -far, far)
        low = np.where(v < -3, np.float32(-3), v)
        hard_low = np.clip(low + np.float32(3), 0, 6) * sixth
        want = {
            "identity": v,
            "relu": np.where(v <= 0, np.float32(0), v),
            ("leaky_relu", 0.1): np.where(v < 0, v * slope, v),
            "relu6": np.where(v <= 0, np.float32(0), np.where(v > 6, np.float32(6), v)),
            "hard_sigmoid": hard,
            "hard_swish": low * hard_low,
            "softsign": clipped / (np.abs(clipped) + np.float32(1)),
        }
    for spec, y in zip(want, activations_on_host("float32", [(spec, v) for spec in want]), strict=True):
        assert same_bits(y, want[spec]), (spec, v[y != want[spec]][:5])


# --- Schedules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [("float32", FIRST), ("float32", SECOND), ("float64", THIRD), ("float16", FIRST), ("bfloat16", THIRD)],
    ids=str,
)
def test_row_and_tile(rng, activations, dtype):
    """To the same bits."""
    net = random_net(rng, SIZES, dtype, biases=[True, False, True, True], activations=[*map(filled, activations)])
    x = some_rows(rng, 40, 9, dtype)
    y = run_on_host(net, x[-6:])
    many = run_on_host(net, x, schedule="tile", device=ONE_SM)
    check(net, x, many)
    assert same_bits(y, many[-6:])


def filled(spec):
    row = activation_of(spec)
    return spec if row.parameter is None or not isinstance(spec, str) else (spec, row.parameter.default)


@pytest.mark.parametrize(
    ("dtype", "spec"), [("float32", "softplus"), ("float16", "gelu_tanh"), ("float64", ("leaky_relu", -2.0))], ids=str
)
def test_layer(rng, dtype, spec):
    net = random_net(rng, (33, 18), dtype, biases=[True], activations=[spec])
    x = some_rows(rng, 70, 33, dtype)
    check(net, x, run_on_host(net, x, schedule="layer", device=ONE_SM))


@pytest.mark.parametrize("kind", ["tf32", "split3", "float16", "bfloat16"])
def test_mma(rng, kind):
    """The activations of a padded column are not 0; nor may they be among a row's largest."""
    dtype = kind if "float" in kind else "float32"
    activations = FIRST if kind in {"tf32", "float16"} else SECOND
    net = random_net(
        rng, SIZES, dtype, biases=[False, True, True, False], activations=[*map(filled, activations)],
        precision="ieee" if dtype == kind else kind,
    )  # fmt: skip
    x = some_rows(rng, 40, 9, dtype)
    y = run(net, x, REGISTERS_STAGED)
    check(net, x, y)
    if kind == "split3":
        assert same_bits(run(net, x, SHARED_GLOBAL), y)


# --- softmax --------------------------------------------------------------------------------------------------------------


def softmax_net(rng, sizes, dtype="float32", name="softmax", precision="ieee"):
    depth = len(sizes) - 1
    activations = ["tanh"] * (depth - 1) + [name]
    return random_net(rng, sizes, dtype, biases=[True] * depth, activations=activations, precision=precision)


def two_launches(net, x, steps, sums, sanitizer="plain"):
    """The last two steps of a plan: sums of the last layer are there, or come of mlp_layer; then softmax of them."""
    n = net.network.sizes[-1]
    bias = net.biases[-1] if net.network.biases[-1] and "-DMLP_BIASES=1" in steps[-1].kernel.options else np.zeros(0)
    weights = np.array([0, 40, 0, 0, 1], np.int64).tobytes() + bias.tobytes()
    y = launch_on_host(
        steps[-1].kernel, sums, b"\xff" * (len(x) * n * net.network.itemsize), weights,
        np.int64(len(x)).tobytes(), round_=(0, 0, len(x)), sanitizer=sanitizer, grid=2,
    )  # fmt: skip
    return np.frombuffer(y, numpy_dtype(net.network.dtype)).reshape(len(x), n)


@pytest.mark.parametrize(
    ("n", "dtype", "name"),
    [
        (1, "bfloat16", "softmax"),
        (70, "float64", "softmax"),
        (300, "float32", "log_softmax"),
    ],
)
def test_softmax_of_ieee_schedules_has_the_same_bits(rng, n, dtype, name):
    """row, tile and layer: one order of the sum, whoever has which features."""
    net = softmax_net(rng, (9, n), dtype, name)
    x = some_rows(rng, 37, 9, dtype)
    y = run_on_host(net, x, schedule="tile", device=ONE_SM)
    check(net, x, y)
    assert same_bits(run_on_host(net, x[-9:]), y[-9:])
    steps, _, _ = layer_steps(net.network, len(x), H200, Access())
    packed = pack(np, "vectors", net.network, net.weights, net.biases).tobytes()
    itemsize = np.dtype(net.network.sum_dtype).itemsize
    sums = launch_on_host(
        steps[0].kernel, x.tobytes(), b"\xff" * (len(x) * n * itemsize), packed, np.int64(len(x)).tobytes(),
        round_=(0, 0, len(x)),
    )  # fmt: skip
    assert same_bits(two_launches(net, x, steps, sums, "address+undefined" if n == 300 else "plain"), y)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_infinities_and_nan(rng, name):
    """Rows of biases: what the sums are does not pass a product."""
    rows = [[0, -INF, 0], [-INF, -INF, 3], [-INF, -INF, -INF], [0, INF, 0], [INF, INF, 0], [0, np.nan, 0], [np.nan] * 3]
    net = Net(Network((3, 3), (name,), (True,), "float32", "library"), [np.eye(3, dtype="f4")], [np.zeros(3, "f4")])
    steps = matmul_steps(net.network, len(rows), H200, Access())
    y = two_launches(net, rows, steps, np.array(rows, "f4").tobytes())
    for row, result in zip(rows, y):
        network = Network((1, 3), (name,), (False,), "float32")
        want, bound = forward_and_bound(network, [np.array([row], "f4")], [None], [1.0])
        assert error_in_bounds(result, want, bound).max() <= 1
        one = Net(network, [np.array([row], "f4")], [None])
        if name == "softmax":  # the weights are an argument: one compilation for all rows
            got = run_on_host(one, np.ones((1, 1), "f4"), schedule="tile")
            assert error_in_bounds(got, want, bound).max() <= 1


@pytest.mark.parametrize(("kind", "n"), [("tf32", 100), ("split3", 3), ("split3", 100), ("float16", 1)])
def test_softmax_on_tensor_cores(rng, kind, n):
    """Where columns take several passes they are summed again, to the same bits; plain rows of split3 are row's."""
    dtype = kind if "float" in kind else "float32"
    net = softmax_net(
        rng, (9, 12, n), dtype, "log_softmax" if n == 100 else "softmax", "ieee" if dtype == kind else kind
    )
    x = some_rows(rng, 40, 9, dtype)
    y = run(net, x, REGISTERS_STAGED)
    check(net, x, y)
    if n == 100:
        assert same_bits(run(net, x, WAYS[3]), y)


@pytest.mark.parametrize(
    ("schedule", "edit"),
    [
        ("row", None),
        ("tile", None),
        ("row", ("__syncthreads();\n        const T* const numbers", "const T* const numbers")),
        ("tile", ("__syncwarp();\n        softmax_rows", "softmax_rows")),
    ],
)
def test_barriers_before_softmax(rng, schedule, edit):
    """ThreadSanitizer has nothing to say, and sees it if one is missing."""
    net = softmax_net(rng, (9, 41))  # so that lanes look at a column of another one
    x = some_rows(rng, 40, 9, "float32")
    options = {"schedule": schedule, "device": ONE_SM, "sanitizer": "thread", "grid": 1, "edit": edit}
    if edit is None:
        check(net, x, run_on_host(net, x, **options))
    else:
        with pytest.raises(HostError, match="ThreadSanitizer"):
            run_on_host(net, x, **options)


FAULTS = {
    "the parameter of another layer": ("constexpr T PARAMETER = parameters[L];", "constexpr T PARAMETER = parameters[0];"),
    "padding among the terms": (
        "FEATURES_OUT % 8 == 0 || tile * 8 + 2 * t + e % 2 < FEATURES_OUT",
        "tile >= 0 || t >= 0 || e >= 0",
    ),
    "padding not cleared": (
        "if (tile * 8 + 2 * t + e % 2 >= N) v[e] = 0.0f;",
        "if (tile * 8 + 2 * t + e % 2 >= N && v[e] > 1e30f) v[e] = 0.0f;",
    ),
    "the activation before the bias": (
        "if constexpr (biases[L]) return fused_multiply_add(sum, scale.second, bias);",
        "if constexpr (biases[L]) return add(activate<L>(sum), bias);",
    ),
    "columns counted twice": ("passes(L) == 1 || first + c >= next", "true || next"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(rng, fault):
    sizes, way = ((9, 12, 100), WAYS[3]) if fault == "columns counted twice" else ((9, 12, 13), SHARED_GLOBAL)
    net = random_net(
        rng, sizes, biases=[True, True], activations=[("leaky_relu", 0.5), "softmax"], precision="split3",
    )  # fmt: skip
    if fault == "the parameter of another layer":
        net = replace(net, network=replace(net.network, activations=("sigmoid", ("leaky_relu", 0.5))))
    if fault == "padding not cleared":  # it is multiplied by zeros: only what it does to a row's scale is seen
        net = replace(net, network=replace(net.network, activations=("exp", "softmax")))
        net.biases[0][:], net.biases[1][:] = -20, 0
        net.weights[1] *= np.float32(1e9)
    x = rng.standard_normal((40, 9)).astype("f4")
    y = run(net, x, way, edit=FAULTS[fault])
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert error_in_bounds(y, want, bound).max() > 1


def test_parameters_reach_the_kernel_to_the_bit():
    for dtype, slope in (("float32", 0.1), ("float64", 0.1), ("bfloat16", 0.1), ("float32", -2.0)):
        network = Network((3, 4, 2), (("leaky_relu", slope), "relu"), (False, False), dtype)
        (kernel,) = plan_gpu(network, 16, H200, schedule="row").kernels
        (option,) = [o for o in kernel.options if o.startswith("-DMLP_PARAMETERS=")]
        text = option.partition("=")[2].split(",")
        assert text[1] == ("0x0.0p+0" if dtype == "float64" else "0x0.0p+0f")
        assert float.fromhex(text[0].removesuffix("f")) == parameter_of(("leaky_relu", slope), network.sum_dtype)
        assert text[0].endswith("f") == (dtype != "float64")
