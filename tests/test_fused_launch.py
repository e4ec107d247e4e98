"""What fused_mlp hands to its kernel, without a GPU: host_cupy.py follows the pointers and strides as the kernel does."""

from __future__ import annotations

import host_cupy
import numpy as np
import pytest
from host_cupy import host_array
from support import random_net

import cupymlp
from cupymlp import _checks, _launch


@pytest.fixture
def launches(monkeypatch):
    """Put the stand-in in CuPy's place; returns the list of kernels that were launched."""
    return host_cupy.install(monkeypatch).launches


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


class Foreign:
    """Another library's array on a GPU."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        raise AssertionError("only view_foreign may ask for it")


@pytest.mark.parametrize("with_out", [True, False])
def test_calls_on_other_libraries_arrays_are_remembered_too(launches, rng, monkeypatch, with_out):
    """Each plans once; the remembered call reads the arrays of its own call."""
    monkeypatch.setattr(_checks, "view_foreign", lambda what, array: (array.array, False))
    planned, plan = [], _launch.plan_gpu
    monkeypatch.setattr(_launch, "plan_gpu", lambda *arguments: planned.append(arguments) or plan(*arguments))
    for _ in range(3):
        net = random_net(rng, (6, 5, 3), "float64", biases=[True, False], activations=["relu", "identity"])
        weights, biases = arrays(net, "in_out")
        x = host_array(rng.standard_normal((7, 6)))
        out = Foreign(host_array(np.full((7, 3), np.nan))) if with_out else None
        foreign_biases = [None if b is None else Foreign(b) for b in biases]
        y = call(net, Foreign(x), [Foreign(w) for w in weights], foreign_biases, "in_out", out)
        assert (y is out) == with_out
        want = net.mlp()(np.asarray(x), device="cpu")
        np.testing.assert_allclose(y.array if with_out else y, want, rtol=1e-9, atol=1e-9)
    assert len(launches) == 3
    assert len(planned) == 1
