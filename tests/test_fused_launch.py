"""What fused_mlp hands to its kernel, without a GPU: a stand-in for CuPy on host memory, and a launcher that follows the
pointers and strides (or unpacks the packed weights) as the kernel does. The kernel's own reading of them is tested in
test_host_kernels.py and test_gpu.py."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from support import H200, random_net

import cupymlp
from cupymlp import _gpu, _launch, fused
from cupymlp.plan import layer_vectors


class HostArray(np.ndarray):
    """A NumPy array with the attributes of a CuPy one that the launch reads."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)


def host_array(array):
    return np.array(array, copy=True).view(HostArray)


def at_address(pointer, shape, steps, dtype):
    size = np.dtype(dtype).itemsize
    first = np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype)
    return np.lib.stride_tricks.as_strided(first, shape, [s * size for s in steps])


def weights_by_table(network, table):
    """The layers' arrays by struct Weights of common.cuh."""
    depth = network.depth
    numbers = np.frombuffer(table.tobytes(), np.int64).reshape(5, depth).tolist()
    weights, biases = [], []
    for layer, (weight, bias, k_step, j_step, bias_step) in enumerate(zip(*numbers, strict=True)):
        k, n = network.sizes[layer : layer + 2]
        weights.append(at_address(weight, (k, n), (k_step, j_step), network.dtype))
        biases.append(at_address(bias, (n,), (bias_step,), network.dtype) if network.biases[layer] else None)
    return weights, biases


def weights_by_packing(network, packed):
    """The layers' arrays out of the packed buffer, index by index."""
    v = 16 // network.itemsize
    weights, biases, start = [], [], 0
    for layer in range(network.depth):
        k, n = network.sizes[layer : layer + 2]
        groups = -(-k // v)
        vectors = packed[start : start + groups * n * v].reshape(groups, n, v)
        weights.append(vectors.transpose(0, 2, 1).reshape(groups * v, n)[:k])
        at = start + groups * n * v
        biases.append(packed[at : at + n] if network.biases[layer] else None)
        start += layer_vectors(network, layer) * v
    return weights, biases


@pytest.fixture
def launches(monkeypatch):
    """Put the stand-in in CuPy's place; returns the list of plans that were launched."""
    done = []

    def launch(plan, grid, block, arguments, shared_bytes):
        x, out, table, _ = arguments
        done.append(plan)
        weights, biases = (weights_by_packing if isinstance(table, HostArray) else weights_by_table)(
            plan.network, table
        )
        h = np.asarray(x)
        for weight, bias, name in zip(weights, biases, plan.network.activations, strict=True):
            h = h @ weight if bias is None else h @ weight + bias
            h = np.maximum(h, 0) if name == "relu" else h
            # A kernel may write a row of out before another row reads its inputs: they must not share memory.
            assert not np.shares_memory(weight, out)
        assert not np.shares_memory(x, out)
        np.asarray(out)[...] = h

    cupy = ModuleType("cupy")
    cupy.ndarray = HostArray
    cupy.zeros = lambda shape, dtype: np.zeros(shape, dtype).view(HostArray)
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0),
        Device=lambda _: contextlib.nullcontext(),
        get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: False),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for module in (_gpu, _launch, fused):
        if hasattr(module, "cupy_or_error"):
            monkeypatch.setattr(module, "cupy_or_error", lambda _: cupy)
    monkeypatch.setattr(_launch, "device_numbers", lambda _: H200)
    monkeypatch.setattr(_launch, "kernel_for", lambda plan, _: SimpleNamespace(launcher=lambda: partial(launch, plan)))
    monkeypatch.setattr(_launch, "_copy", lambda array: np.array(array, order="C", copy=True).view(HostArray))
    monkeypatch.setattr(_launch, "_fused_calls", {})
    return done


def call(net, x, weights, biases, layout, out=None):
    hidden, last = net.network.activations[:-1], net.network.activations[-1]
    return cupymlp.fused_mlp(
        x, *weights, biases=biases, activation=hidden, out_activation=last, weight_layout=layout, out=out
    )


def arrays(net, layout):
    weights = [host_array(w.T if layout == "out_in" else w) for w in net.weights]
    return weights, [None if b is None else host_array(b) for b in net.biases]


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("sizes", [(5, 9, 4), (8, 8, 8), (6, *[8] * 119, 8, 3)], ids=["chain", "square", "deep"])
def test_the_first_call_and_the_remembered_ones_read_the_same_layout(launches, rng, sizes, layout):
    """Square layers would hide a swapped layout's shape, and 121 layers outgrow a kernel's arguments."""
    net = random_net(rng, sizes, "float64")
    weights, biases = arrays(net, layout)
    for _ in range(3):
        x = host_array(rng.standard_normal((7, sizes[0])))
        out = host_array(np.full((7, sizes[-1]), np.nan))
        assert call(net, x, weights, biases, layout, out) is out
        np.testing.assert_allclose(out, net.mlp()(np.asarray(x), device="cpu"), rtol=1e-9, atol=1e-9)
    assert len(launches) == 3
    assert len(_launch._fused_calls) == 1


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("which", ["x", "first weight", "last weight"])
def test_out_that_overlaps_an_input(launches, rng, which, layout):
    net = random_net(rng, (8, 8, 8), "float64")
    for _ in range(3):
        weights, biases = arrays(net, layout)
        x = host_array(rng.standard_normal((8, 8)))
        want = net.mlp()(np.asarray(x), device="cpu")
        out = {"x": x, "first weight": weights[0], "last weight": weights[1]}[which]
        assert call(net, x, weights, biases, layout, out) is out
        np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-9)
