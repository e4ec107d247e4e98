"""mlp_mma.cu, unmodified, on the host: tensor cores by exact products in float32. Every element within the proven bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support import CANONICAL, H200, NETS, HostError, launch_on_host, odd_values, random_net, same_bits

from cupymlp._pack import pack
from cupymlp.network import numpy_dtype
from cupymlp.plan import CONTIGUOUS, Access, PlanError
from cupymlp.reference import error_in_bounds, forward_and_bound
from cupymlp.schedules import plan_gpu
from cupymlp.schedules.mma import (
    Shape,
    kernel_of,
    shapes,
    staged_bytes,
    warp_bytes,
)

KINDS = {
    "tf32": ("float32", "tf32"),
    "split3": ("float32", "split3"),
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
}
REGISTERS_STAGED = {"registers": True, "staged": True, "tiles": 2}
SHARED_GLOBAL = {"registers": False, "staged": False, "tiles": 1}
WAYS = (
    REGISTERS_STAGED,
    SHARED_GLOBAL,
    {"registers": True, "staged": True, "tiles": 1, "prefetch": False},
    {"registers": False, "staged": True, "tiles": 2, "chunk": 3},
)


def make_net(rng, kind, sizes, **options):
    dtype, precision = KINDS[kind]
    return random_net(rng, sizes, dtype, precision=precision, **options)


def shape(network, *, registers, staged, tiles, warps=2, prefetch=True, chunk=8):
    weights = staged_bytes(network) if staged else 0
    a_warp = warp_bytes(network, tiles, registers=registers)
    return Shape(warps, tiles, registers, prefetch, staged, chunk, max(16, weights + warps * a_warp))


def run(net, x, way, *, access=CONTIGUOUS, y_bytes=None, rows=None, grid=2, **options):
    network = net.network
    kernel = kernel_of(network, len(x), H200, access, shape(network, **way))
    dtype, n = numpy_dtype(network.dtype), network.sizes[-1]
    out = launch_on_host(
        kernel,
        x if isinstance(x, bytes) else np.ascontiguousarray(x).tobytes(),
        b"\xff" * (len(x) * n * dtype.itemsize if y_bytes is None else y_bytes),
        pack(np, "tensor", network, net.weights, net.biases).tobytes(),
        np.int64(len(x)).tobytes() if rows is None else rows,
        grid=grid,
        **options,
    )
    return np.frombuffer(out, dtype).reshape(len(x), n) if y_bytes is None else out


def rows_of_every_kind(rng, count, features, dtype):
    """Ordinary rows, rows scaled up and down, rows of mixed scales, subnormal ones, odd ones, zeros."""
    exponents = np.array([-60, -30, -8, 8, 30, 60])
    if dtype == "float16":
        exponents = np.array([-20, -14, -8, -3, 3, 8])
    x = rng.standard_normal((count, features))
    kind = np.arange(count) % 5
    scale = 2.0 ** rng.choice(exponents, (count, 1))
    x = np.where((kind == 1)[:, None], x * scale, x)
    x = np.where((kind == 2)[:, None], x * 2.0 ** rng.choice(exponents, x.shape), x)
    x = x.astype(np.float32).astype(numpy_dtype(dtype))
    x[kind == 3] = odd_values(rng, (int((kind == 3).sum()), features), dtype)
    if dtype != "float16":
        x[7::10] = (rng.standard_normal((len(x[7::10]), features)) * 2.0**-130).astype(np.float32).astype(x.dtype)
    if count > 9:
        x[9] = 0
    return x


def check(net, x, y):
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    worst = error_in_bounds(y, want, bound)
    assert worst.max(initial=0) <= 1, (worst.max(), np.argwhere(worst > 1)[:5])
    if y.size:
        assert (np.isfinite(want) & np.isfinite(bound)).mean() > 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_every_result_is_within_the_bound(rng, sizes, kind):
    """One way of the four for each, in turn; tests below hold the ways to the same bits."""
    ways = WAYS if max(sizes) <= 130 else WAYS[1::2]
    way = ways[(NETS.index(sizes) + list(KINDS).index(kind)) % len(ways)]
    net = make_net(rng, kind, sizes)
    x = rows_of_every_kind(rng, 37, sizes[0], net.network.dtype)
    check(net, x, run(net, x, way))


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_give_the_same_bits(rng, kind):
    net = make_net(rng, kind, (17, 33, 65, 2), biases=[True] * 3)
    x = rows_of_every_kind(rng, 53, 17, net.network.dtype)
    first, *others = [run(net, x, way) for way in (WAYS if kind == "split3" else WAYS[:2])]
    check(net, x, first)
    assert all(same_bits(first, y) for y in others)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_batch_and_the_row(rng, kind):
    net = make_net(rng, kind, (20, 40, 6), biases=[True, False])
    x = rows_of_every_kind(rng, 100, 20, net.network.dtype)
    whole = run(net, x, REGISTERS_STAGED)
    check(net, x, whole)
    for start, count in ((0, 1), (3, 15), (3, 16), (50, 17), (67, 33)):
        assert same_bits(run(net, x[start : start + count], REGISTERS_STAGED), whole[start : start + count])


@pytest.mark.parametrize("exponents", [(-60, 60), (60, -60), (-100, -20), (60, 60), (-140, 100)], ids=str)
def test_split3_takes_weights_of_any_scale(rng, exponents):
    net = make_net(rng, "split3", (20, 40, 6), biases=[True, True], activations=["relu", "identity"])
    for layer, exponent in enumerate(exponents):
        net.weights[layer] *= np.float32(2.0**exponent)
        net.biases[layer] *= np.float32(2.0 ** max(exponent, -40))
    x = rng.standard_normal((40, 20)).astype("f4")
    check(net, x, run(net, x, REGISTERS_STAGED))


@pytest.mark.parametrize("where", ["weights", "biases"])
def test_split3_of_infinite_weights_is_plain(rng, where):
    net = make_net(rng, "split3", (20, 40, 6), biases=[True, True])
    getattr(net, where)[1].flat[5] = np.inf
    x = rows_of_every_kind(rng, 20, 20, "float32")
    y = run(net, x, SHARED_GLOBAL)
    want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert error_in_bounds(y, want, bound).max() <= 1


def test_split3_is_as_accurate_as_float32(rng):
    """Far inside its bound: the sums of 64 products of numbers near 1, within 2^-20 of the sizes' sum."""
    net = make_net(rng, "split3", (64, 24), biases=[False], activations=["identity"])
    x = rng.standard_normal((48, 64)).astype("f4") * np.float32(2.0**40)
    want, _ = forward_and_bound(net.network, net.weights, net.biases, x)
    size = np.abs(x.astype("f8")) @ np.abs(net.weights[0].astype("f8"))
    assert (np.abs(run(net, x, REGISTERS_STAGED) - want) / size).max() < 2.0**-20


@pytest.mark.parametrize(("kind", "way"), [("split3", REGISTERS_STAGED), ("bfloat16", SHARED_GLOBAL)])
@pytest.mark.parametrize("sanitizer", ["address+undefined", "thread"])
def test_sanitizers_have_nothing_to_say(rng, kind, way, sanitizer):
    net = make_net(rng, kind, (17, 33, 10), biases=[True, True])
    x = rows_of_every_kind(rng, 39, 17, net.network.dtype)
    check(net, x, run(net, x, way, sanitizer=sanitizer))


@pytest.mark.parametrize("kind", ["tf32", "float16"])
def test_addresses_that_allow_no_wide_access(rng, kind):
    net = make_net(rng, kind, (20, 8, 6))
    x = rows_of_every_kind(rng, 35, 20, net.network.dtype)
    size = net.network.itemsize
    check(net, x, run(net, x, REGISTERS_STAGED, past=(size, size), sanitizer="address+undefined"))


@pytest.mark.parametrize(
    ("kind", "access", "way"),
    [
        ("split3", "strided", SHARED_GLOBAL),
        ("tf32", "unaligned", REGISTERS_STAGED),
        ("float16", "unaligned", SHARED_GLOBAL),
    ],
)
def test_strides_and_addresses(rng, kind, access, way):
    """x reversed along its features, every other row; y between rows and features that must stay."""
    net = make_net(rng, kind, (18, 24, 7))
    dtype = numpy_dtype(net.network.dtype)
    x_memory = rows_of_every_kind(rng, 2 * 35, 18, net.network.dtype)
    x = x_memory[::2, ::-1]
    y_memory = np.frombuffer(b"\xff" * (35 * 2 * 9 * dtype.itemsize), dtype).reshape(35, 2, 9).copy()
    y = y_memory[:, 1, 1:8]
    start = (x.__array_interface__["data"][0] - x_memory.__array_interface__["data"][0], 10 * dtype.itemsize)
    rows = np.array([35, x.strides[1], y.strides[1], 35, x.strides[0], y.strides[0]], np.int64)
    out = run(
        net, x_memory.tobytes(), way, access=Access(net.network.dtype, access, access, 1), y_bytes=y_memory.nbytes,
        rows=rows.tobytes(), starts=start, past=(1, 3) if access == "unaligned" else (0, 0), sanitizer="address+undefined",
    )  # fmt: skip
    y_memory[...] = np.frombuffer(out, dtype).reshape(y_memory.shape)
    check(net, x, y)
    y[...] = np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]
    assert y_memory.tobytes() == b"\xff" * y_memory.nbytes


@pytest.mark.parametrize(
    ("kind", "source"), [("float16", "int8"), ("split3", "float16"), ("tf32", "int16"), ("tf32", "bool")]
)
def test_narrower_x_is_widened(rng, kind, source):
    net = make_net(rng, kind, (12, 5))
    x = (
        rng.integers(0, 2, (20, 12)).astype(source)
        if source == "bool"
        else rng.integers(-99, 99, (20, 12)).astype(source)
    )
    y = run(net, x, REGISTERS_STAGED, access=Access(x_dtype=source))
    check(net, x.astype(net.network.dtype), y)


# --- The plan -----------------------------------------------------------------------------------------------------------


def planned(kind, sizes, batch=1 << 20, device=H200, access=CONTIGUOUS):
    return plan_gpu(make_net(np.random.default_rng(0), kind, sizes).network, batch, device, access, "mma")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_a_plan_says_what_it_does(kind, sizes):
    plan = planned(kind, sizes)
    (kernel,) = plan.kernels
    assert plan.layout == "tensor"
    assert plan.launches == 1
    assert "-DMLP_PACKED=1" in planned(kind, sizes, access=Access(packed=False)).kernels[0].options
    assert kernel.shared_bytes <= H200.shared_bytes
    assert kernel.block[0] % 32 == 0
    assert kernel.grid == (132,)
    if max(sizes) <= 128 and min(sizes) > 0:
        assert "-DMLP_REGISTERS=1" in kernel.options
    for batch in (1, 16, 17, 100_000, 2**33):
        assert 1 <= planned(kind, sizes, batch).grid[0] <= 132


def test_older_devices_are_refused():
    turing = replace(H200, name="Tesla T4", compute_capability=75)
    with pytest.raises(PlanError, match="needs tensor cores of sm_80 or newer, and Tesla T4 is sm_75"):
        planned("tf32", CANONICAL, device=turing)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("float64", "ieee"), ("float16", "library")])
def test_other_precisions_are_refused(rng, dtype, precision):
    network = random_net(rng, CANONICAL, dtype, precision=precision).network
    with pytest.raises(PlanError, match="computes tf32, split3, and float16 or bfloat16 networks"):
        plan_gpu(network, 4096, H200, schedule="mma")


def test_rows_too_wide_are_refused_with_the_bytes():
    with pytest.raises(PlanError, match="need 262,144 bytes of shared memory, and NVIDIA H200 gives a block 232,448"):
        planned("tf32", (2048, 2048, 10))


def test_shapes_that_are_offered_fit(rng):
    for kind in KINDS:
        for sizes in (*NETS, (784, 256, 10), (512, 512, 512)):
            network = make_net(rng, kind, sizes).network
            for s in shapes(network, H200, CONTIGUOUS):
                assert s.shared <= H200.shared_bytes
                assert s.warps >= 1


# --- The tests can fail: each fault goes red -------------------------------------------------------------------------

FAULTS = {
    "a permutation of k wrong": (
        "convert(q[0].v[2 * h]), convert(q[0].v[2 * h + 1])", "convert(q[0].v[2 * h + 1]), convert(q[0].v[2 * h])",
        "tf32", "plain"),
    "padded columns not zeroed": (
        "if (tile * 8 + 2 * t + e % 2 >= N) v[e] = 0.0f;", "(void)tile, (void)t, (void)N, (void)v[e];", "tf32", "plain"),
    "the low part dropped": ("            add_step<1>(sum, in, s, high + s * STEP);\n", "", "split3", "plain"),
    "a row's exponent wrong": (
        "down[m][r] = power_of_two(-lane_rows", "down[m][r] = power_of_two(1 - lane_rows", "split3", "plain"),
    "infinite rows on tensor cores": ("lane_rows.plain |= 1u << (2 * m + r);", "lane_rows.plain |= 0;", "split3", "plain"),
    "the barrier after staging dropped": ("__syncthreads();\n    for (; tile", "for (; tile", "bfloat16", "thread"),
    "a plain row's barrier dropped": (
        "__syncwarp();\n    plain_layers<FIRST>", "plain_layers<FIRST>", "split3", "thread"),
    "rows beyond the batch stored": ("row >= context.rows.batch || (plain", "(plain", "float16", "address+undefined"),
    "the bias skipped": ("return add(sum, bias);", "return sum;", "float16", "plain"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(rng, fault):
    old, new, kind, sanitizer = FAULTS[fault]
    net = make_net(rng, kind, (5, 3, 4), biases=[True, True], activations=["relu", "identity"])
    for weight in net.weights:
        weight[...] = np.abs(weight.astype("f4")).astype(weight.dtype)
    x = np.abs(rng.standard_normal((39, 5))).astype(net.network.dtype)
    x[::7, 0] = np.inf
    try:
        y = run(net, x, REGISTERS_STAGED, sanitizer=sanitizer, edit=(old, new))
    except HostError as error:
        found = "Sanitizer" in str(error) or "runtime error" in str(error)
    else:
        want, bound = forward_and_bound(net.network, net.weights, net.biases, x)
        found = error_in_bounds(y, want, bound).max() > 1
    assert found
