"""The unmodified .cu files, compiled for the host and run with real threads: bits, and what the sanitizers say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    CANONICAL,
    NETS,
    HostError,
    c_loop,
    odd_values,
    random_net,
    run_on_host,
    same_bits,
)

from cupymlp.plan import Access, readable_dtypes

DTYPES = ("float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_bits_equal_the_c_loop(rng, sizes, dtype):
    net = random_net(rng, sizes, dtype)
    x = odd_values(rng, (7, sizes[0]), dtype)
    assert same_bits(run_on_host(net, x), c_loop(net, x))


@pytest.mark.parametrize("sanitizer", ["address+undefined", "thread"])
@pytest.mark.parametrize("sizes", [CANONICAL, (17, 33, 65, 2), (130, 10), (3, 100, 2, 70), (7, 0, 4)], ids=str)
def test_sanitizers_have_nothing_to_say(rng, sizes, sanitizer):
    """A grid of two blocks for five rows, so that blocks go round, too."""
    net = random_net(rng, sizes)
    x = rng.standard_normal((5, sizes[0])).astype("f4")
    assert same_bits(run_on_host(net, x, sanitizer=sanitizer, grid=2), c_loop(net, x))


@pytest.mark.parametrize("group", [16, 32, 48, 64])
def test_bits_do_not_depend_on_the_group(rng, group):
    net = random_net(rng, (130, 70, 90, 7))
    x = odd_values(rng, (4, 130), "float32")
    edit = {f"-DMLP_GROUP={g}": f"-DMLP_GROUP={group}" for g in (16, 32, 48, 64)}
    assert same_bits(run_on_host(net, x, plan_edit=edit), c_loop(net, x))


@pytest.mark.parametrize("sanitizer", ["plain", "address+undefined"])
def test_the_callers_own_weights_through_strides(rng, sanitizer):
    """fused_mlp's arguments: pointers and strides of each layer; here a transposed weight and a reversed bias."""
    net = random_net(rng, (20, 70, 3), biases=[True, False])
    x = odd_values(rng, (5, 20), "float32")
    w1, w2, b1 = net.weights[0].T.copy(), net.weights[1], net.biases[0][::-1].copy()
    table_bytes = 5 * 8 * 2
    data = w1.tobytes() + w2.tobytes() + b1.tobytes()
    last_of_b1 = table_bytes + w1.nbytes + w2.nbytes + b1.nbytes - 4
    table = np.array(
        [table_bytes, table_bytes + w1.nbytes, last_of_b1, 0, 1, 3, 20, 1, -1, 0], np.int64
    )  # weights, biases, k strides, j strides, bias strides
    y = run_on_host(net, x, sanitizer=sanitizer, access=Access(packed=False), weights=table.tobytes() + data)
    assert same_bits(y, c_loop(net, x))


@pytest.mark.parametrize("source", [d for d in readable_dtypes() if d != "bfloat16"])
def test_narrower_x_is_widened(rng, source):
    code = np.dtype(source).str
    dtype = "float32" if np.result_type(code, "f4") == np.float32 else "float64"
    net = random_net(rng, (9, 5), dtype)
    if np.dtype(code).kind in "iu":
        x = rng.integers(np.iinfo(code).min, np.iinfo(code).max, (6, 9), code, endpoint=True)
    elif source == "bool":
        x = rng.integers(0, 2, (6, 9)).astype(bool)
    else:
        x = odd_values(rng, (6, 9), code)
    y = run_on_host(net, x, access=Access(x_dtype=source))
    assert same_bits(y, c_loop(net, x.astype(dtype)))


def test_bfloat16_x_is_widened(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    net = random_net(rng, (9, 5))
    x = rng.standard_normal((6, 9)).astype(ml_dtypes.bfloat16)
    y = run_on_host(net, x.view("u2"), access=Access(x_dtype="bfloat16"))
    assert same_bits(y, c_loop(net, x.astype("f4")))


@pytest.mark.parametrize("kind", ["strided", "unaligned"])
@pytest.mark.parametrize("sanitizer", ["plain", "address+undefined"])
@settings(max_examples=12)
@given(data=st.data())
def test_strides_and_addresses(kind, sanitizer, data):
    """x and y as views of larger arrays, with any order of axes, gaps and reversed axes."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    net = random_net(np.random.default_rng(7), (5, 4), biases=[True], activations=["relu"])
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2)))
    order = data.draw(st.permutations(range(3)))
    gaps = [data.draw(st.integers(1, 3)) for _ in range(3)]
    flips = [data.draw(st.booleans()) for _ in range(3)]

    def view(features):
        """A view of memory, its strides in bytes, the memory and where the first element is in it."""
        full = (*shape, features)
        memory = np.full(np.prod([full[a] * gaps[a] for a in order]), np.nan, "f4")
        array = memory.reshape([full[a] * gaps[a] for a in order]).transpose(np.argsort(order))
        array = array[tuple(slice(0, f * g, g) for f, g in zip(full, gaps, strict=True))]
        array = array[tuple(slice(None, None, -1) if flip else slice(None) for flip in flips)]
        start = array.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
        return array, memory, start

    x, x_memory, x_start = view(5)
    y, y_memory, y_start = view(4)
    x[...] = rng.standard_normal(x.shape)
    rows = np.array(
        [shape[0] * shape[1], x.strides[-1], y.strides[-1], *shape, *x.strides[:-1], *y.strides[:-1]], np.int64
    )
    past = (1, 3) if kind == "unaligned" else (0, 0)
    out = run_on_host(
        net,
        np.empty((len(x_memory), 0)),
        sanitizer=sanitizer,
        grid=3,
        access=Access("float32", kind, kind, 2),
        rows=rows.tobytes(),
        x_bytes=x_memory.tobytes(),
        y_bytes=y_memory.nbytes,
        past=past,
        starts=(x_start, y_start),
    )
    y_memory[...] = np.frombuffer(out, "f4")
    want = c_loop(net, np.ascontiguousarray(x).reshape(-1, 5)).reshape(*shape, 4)
    assert same_bits(np.ascontiguousarray(y), want)
    y[...] = np.frombuffer(b"\xff" * 4, "f4")[0]
    assert y_memory.tobytes() == b"\xff" * y_memory.nbytes  # nothing else was written


# --- The tests can fail: each fault goes red -------------------------------------------------------------------------

FAULTS = {
    "a barrier dropped": ("__syncthreads();\n        run_layers<L + 1>", "run_layers<L + 1>", "thread"),
    "the first barrier dropped": ("__syncthreads();\n        run_layers<0>", "run_layers<0>", "thread"),
    "the barrier between rows dropped": ("__syncthreads();  // the next row", "  // the next row", "thread"),
    "a bound off by one": ("if (t < REST) f(", "if (t <= REST) f(", "address+undefined"),
    "the layout swapped": ("WEIGHTS_AT + static_cast<long long>(i) * N + j", "WEIGHTS_AT + j * vectors(K) + i", "plain"),
    "NaN swallowed": ("return negative(v) ? T(0) : v;", "return v > 0 ? v : T(0);", "plain"),
    "the bias skipped": ("T sum = bias;", "T sum = -T(0); (void)bias;", "plain"),
    "blocks added in another order": ("for (int c = 0; c < CHAINS; ++c) sum =", "for (int c = CHAINS - 1; c >= 0; --c) sum =",
                                      "plain"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(rng, fault):
    old, new, sanitizer = FAULTS[fault]
    net = random_net(rng, (40, 70, 33, 50), biases=[True] * 3, activations=["relu"] * 3)
    x = odd_values(rng, (6, 40), "float32")
    try:
        y = run_on_host(net, x, sanitizer=sanitizer, grid=2, edit=(old, new))
    except HostError as error:
        found = "Sanitizer" in str(error) or "runtime error" in str(error)
    else:
        found = not same_bits(y, c_loop(net, x))
    assert found
