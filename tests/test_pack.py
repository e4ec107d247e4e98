"""The packed layouts, element by element against what the headers of cuda_src say of them."""

from __future__ import annotations

import ctypes
import math
import struct

import numpy as np
import pytest
from support import NETS, odd_values, random_net

from cupymlp._pack import pack
from cupymlp.network import numpy_dtype
from cupymlp.schedules.mma import tensor_bytes

KINDS = {
    "tf32": ("float32", "tf32"),
    "split3": ("float32", "split3"),
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
}


def k_of_slot(kind, layer, step, slot):
    """The definition, lane by lane: slots that lane t reads, and the k that they stand for."""
    table = {}
    for t in range(4):
        if kind == "tf32":
            here = (t, t + 4)
            first = 16 * (step // 2) + 4 * t + 2 * (step % 2) if layer == 0 else 8 * step + 2 * t
        elif layer == 0:
            here, first = (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9), 16 * step + 4 * t
        else:
            return 16 * step + slot
        table |= {s: first + i for i, s in enumerate(here)}
    return table[slot]


def round_to_tf32(v):
    """To 11 significant bits, ties away from zero."""
    if not math.isfinite(v) or v == 0:
        return v
    exponent = max(math.frexp(v)[1], -125)
    unit = math.ldexp(1.0, exponent - 11)
    return math.copysign(math.floor(abs(v) / unit + 0.5) * unit, v)


def float32_of(v):
    return ctypes.c_float(v).value


def expected(net, kind):
    """What the buffer holds, as a dictionary from the byte to (format, number)."""
    network = net.network
    wide = kind == "tf32"
    held = {}
    exponents = []
    start = -(-4 * (network.depth + 1) // 16) * 16
    for layer, (weight, bias) in enumerate(zip(net.weights, net.biases)):
        k_count, n_count = weight.shape
        columns = -(-n_count // 8) * 8
        steps = -(-k_count // 16) * (2 if wide else 1)
        largest = max((abs(float(w)) for w in weight.ravel()), default=0.0)
        exponent = min(max(math.frexp(largest)[1] - 1, -126), 126) if largest else -126
        exponents.append(exponent if kind == "split3" else 0)
        for part in range(2 if kind == "split3" else 1):
            for step in range(steps):
                for slot in range(8 if wide else 16):
                    k = k_of_slot(kind, layer, step, slot)
                    for n in range(columns):
                        w = float(weight[k, n]) if k < k_count and n < n_count else 0.0
                        if kind == "split3":
                            v = math.ldexp(w, -exponent)
                            high = float(np.float16(v))
                            w = float(np.float16(v - high)) if part else high
                        elif wide:
                            w = round_to_tf32(w)
                        per_vector = 4 if wide else 8
                        half, element = divmod(slot, per_vector)
                        vector = ((step * (columns // 8) + n // 8) * 2 + half) * 8 + n % 8
                        at = start + vector * 16 + element * (16 // per_vector)
                        held[at] = ({"tf32": "f", "bfloat16": "b"}.get(kind, "e"), w)
            start += steps * columns * 32
        if bias is not None:
            held |= {start + 4 * n: ("f", float(bias[n]) if n < n_count else 0.0) for n in range(columns)}
            start += 4 * columns
    finite = all(np.isfinite(a.astype("f4")).all() for a in [*net.weights, *net.biases] if a is not None)
    held |= {4 * i: ("i", e) for i, e in enumerate([*exponents, int(finite)])}
    return held, start


def number_at(data, at, form):
    if form == "b":
        return struct.unpack("<f", b"\0\0" + data[at : at + 2])[0]
    return struct.unpack_from("<" + form, data, at)[0]


def compare(net, kind):
    packed = pack(np, "tensor", net.network, net.weights, net.biases)
    data = packed.tobytes()
    held, end = expected(net, kind)
    for at, (form, value) in held.items():
        got = number_at(data, at, form)
        assert got == value or (math.isnan(got) and math.isnan(value)), (at, form, got, value)
    size = {"i": 4, "f": 4, "e": 2, "b": 2}
    covered = np.zeros(len(data), bool)
    for at, (form, _) in held.items():
        covered[at : at + size[form]] = True
    if kind == "split3":
        vectors = pack(np, "vectors", net.network, net.weights, net.biases).tobytes()
        assert data[end:] == vectors
        covered[end:] = True
    assert len(data) == tensor_bytes(net.network) == end + (len(vectors) if kind == "split3" else 0)
    assert not np.frombuffer(data, "u1")[~covered].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [s for s in NETS if max(s) <= 130], ids=str)
def test_tensor_is_what_its_header_says(rng, sizes, kind):
    compare(random_net(rng, sizes, *KINDS[kind][:1], precision=KINDS[kind][1]), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [-140, -126, -60, 60, 124])
def test_tensor_of_any_scale(rng, kind, exponent):
    dtype, precision = KINDS[kind]
    net = random_net(rng, (5, 17, 3), dtype, biases=[True, False], precision=precision)
    if dtype == "float16":
        exponent = exponent // 10
    for weight in net.weights:
        weight[...] = np.ldexp(weight.astype("f4"), exponent).astype(numpy_dtype(dtype))
    compare(net, kind)


@pytest.mark.parametrize("kind", ["tf32", "float16", "bfloat16"])
def test_tensor_keeps_infinity_and_nan(rng, kind):
    dtype, precision = KINDS[kind]
    net = random_net(rng, (20, 9, 4), dtype, biases=[True, True], precision=precision)
    net.weights[0][...] = odd_values(rng, (20, 9), dtype)
    net.biases[1][...] = odd_values(rng, 4, dtype)
    net.weights[0][0, :3] = [np.nan, np.inf, -np.inf]
    compare(net, kind)


def test_a_signalling_nan_stays_a_nan_without_its_low_bits():
    net = random_net(np.random.default_rng(0), (1, 1), biases=[False], precision="tf32")
    net.weights[0].view("u4")[...] = 0xFF800001
    packed = pack(np, "tensor", net.network, net.weights, net.biases)
    assert packed.view("u4")[4] == 0xFFC00000


@pytest.mark.parametrize("where", ["weights", "biases"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_split3_says_that_something_is_not_finite(rng, where, value):
    net = random_net(rng, (5, 17, 3), biases=[True, False], precision="split3")
    assert pack(np, "tensor", net.network, net.weights, net.biases)[2] == 1
    getattr(net, where)[0].flat[7] = value
    assert pack(np, "tensor", net.network, net.weights, net.biases)[2] == 0


def test_transposed_weights_pack_as_their_copies(rng):
    for dtype, precision in KINDS.values():
        net = random_net(rng, (20, 9), dtype, precision=precision)
        transposed = [np.ascontiguousarray(w.T).T for w in net.weights]
        a = pack(np, "tensor", net.network, net.weights, net.biases)
        assert a.tobytes() == pack(np, "tensor", net.network, transposed, net.biases).tobytes()
