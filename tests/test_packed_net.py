"""A network's repeated calls on CuPy arrays, single launches, without a GPU: host_cupy.py follows the addresses."""

from __future__ import annotations

import host_cupy
import numpy as np
import pytest
from host_cupy import host_array
from support import random_net

import cupymlp
from cupymlp import _recorders
from cupymlp._launch import PackedNet


@pytest.fixture
def gpu(monkeypatch):
    return host_cupy.install(monkeypatch)


@pytest.fixture
def net(rng):
    return random_net(rng, (6, 9, 6), "float64")


@pytest.fixture
def packed(gpu, net):
    return PackedNet(net.network, net.weights, net.biases, lambda *_: None, "row")


def right(net, x, y):
    want = net.mlp()(np.array(x), device="cpu")
    np.testing.assert_allclose(np.array(y), want, rtol=1e-9, atol=1e-9)


def drawn(rng, *shape):
    return host_array(rng.standard_normal(shape))


def poisoned(*shape):
    return host_array(np.full(shape, np.nan))


def test_repeated_calls_read_and_write_the_arrays_of_each_call(gpu, net, packed, rng):
    for rows in (5, 5, 7, 5, 7):
        x, y = drawn(rng, rows, 6), poisoned(rows, 6)
        assert packed(x, y) is y
        right(net, x, y)
        right(net, x, packed(x))
    assert len(gpu.launches) == 10


def test_a_call_prepares_the_one_that_writes_what_it_returns(gpu, net, packed, rng):
    """So that it can be captured."""
    x = drawn(rng, 5, 6)
    y = packed(x)
    gpu.stream.capturing = True
    y[...] = np.nan
    right(net, x, packed(x, y))


def strided(array, strides):
    view = np.lib.stride_tricks.as_strided(array, array.shape, strides)
    assert view.flags.c_contiguous  # the strides of axes of length 1 do not count
    return view.view(host_cupy.HostArray)


def test_layouts_are_told_apart(gpu, net, packed, rng):
    """Views of one shape, in turn: what was prepared for one must not serve another."""
    one = drawn(rng, 1, 6)
    for _ in range(2):
        x = drawn(rng, 8, 6)
        wide, tall = drawn(rng, 8, 12), drawn(rng, 6, 8)
        for view in (x, x[::-1], wide[:, ::2], wide[:, 11::-2], tall.T, np.broadcast_to(x[:1], (8, 6)).view(type(x))):
            right(net, view, packed(view))
            right(net, view, packed(view, poisoned(8, 6)))
            out = poisoned(8, 12)[:, ::2]
            right(net, view, packed(view, out))
        for view in (one, strided(one, (8, 8)), strided(one, (4096, 8))):
            right(net, view, packed(view))


@pytest.mark.parametrize("shift", range(-9, 10))
def test_arrays_that_overlap_are_read_before_they_are_written(gpu, net, packed, rng, shift):
    memory = drawn(rng, 30, 6)
    x, out = memory[10:15], memory[10 + shift : 15 + shift]
    copy = np.array(x)
    packed(x, out)
    right(net, copy, out)
    assert len(gpu.copies) == (abs(shift) < 5)


OVERLAP = "x and out overlap, and a copy of x would not live as long as the graph"


def test_arrays_that_overlap_are_refused_in_a_capture(gpu, packed, rng):
    """The copy would be freed after the call, and each launch of the graph would write to whatever is there by then."""
    memory = drawn(rng, 30, 6)
    packed(memory[10:15], memory[12:17])
    before = np.array(memory)
    gpu.stream.capturing = True
    with pytest.raises(RuntimeError, match=OVERLAP):
        packed(memory[10:15], memory[12:17])
    assert np.array_equal(memory, before)


# --- fused_mlp ----------------------------------------------------------------------------------------------------------


def test_fused_mlp_refuses_in_a_capture_what_needs_a_copy(gpu, rng):
    weights, x = [drawn(rng, 6, 6), drawn(rng, 6, 6)], drawn(rng, 6, 6)
    out = poisoned(6, 6)

    def call(x, out, weights):
        return cupymlp.fused_mlp(x, *weights, out=out)

    call(x, out, weights)
    call(x, weights[0], weights)
    copies = len(gpu.copies)
    gpu.stream.capturing = True
    assert call(x, out, weights) is out
    with pytest.raises(RuntimeError, match="out overlaps x or a weight, and a copy of it would not live as long"):
        call(x, weights[0], weights)
    assert len(gpu.copies) == copies


def test_fused_mlp_refuses_to_pack_in_a_capture(gpu, rng):
    """121 layers outgrow a kernel's arguments, so that the weights are packed at each call, by CuPy."""
    sizes = (6, *[8] * 119, 8, 3)
    weights = [host_array(rng.standard_normal(s) * 0.3) for s in zip(sizes, sizes[1:])]
    x, out = drawn(rng, 4, 6), poisoned(4, 3)
    cupymlp.fused_mlp(x, *weights, out=out)
    gpu.stream.capturing = True
    with pytest.raises(
        RuntimeError, match=r"packs the weights at each call for this network and schedule, .* use an MLP"
    ):
        cupymlp.fused_mlp(x, *weights, out=out)


def test_fused_mlp_converts_nothing_in_a_capture(gpu, rng):
    x, out = drawn(rng, 4, 6), poisoned(4, 3)
    weight = host_array(rng.standard_normal((6, 3)).astype("f4"))
    cupymlp.fused_mlp(x, weight, out=out)
    gpu.stream.capturing = True
    with pytest.raises(RuntimeError, match="whose weights have to be converted"):
        cupymlp.fused_mlp(x, weight, out=out)


def test_what_is_captured_is_kept(gpu, packed, rng, monkeypatch):
    """And can be called again."""
    kept = []
    monkeypatch.setitem(_recorders.recorders, 9, kept)
    x, y, weight = drawn(rng, 5, 6), poisoned(5, 6), drawn(rng, 6, 6)
    packed(x, y)
    assert kept == []
    gpu.stream.ptr = 9
    packed(x, y)
    cupymlp.fused_mlp(x, weight, out=y)
    want = np.array(y)
    assert [arguments[-1] is y for _, arguments in kept] == [True, True]
    gpu.stream.ptr = 0
    y[...] = np.nan
    for call, arguments in kept:
        assert call(*arguments) is y
    assert np.array_equal(y, want)
