"""Arrays on any device, whichever is current."""

from __future__ import annotations

import numpy as np
import pytest
from support import CANONICAL, c_loop, random_net, same_bits

import cupymlp
from cupymlp._gpu import gpu_problem

pytestmark = pytest.mark.two_gpus


@pytest.fixture
def cupy():
    if (problem := gpu_problem()) is not None:
        pytest.skip(f"no GPU: {problem}")
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    return cupy


def test_arrays_of_device_1_run_on_device_1_while_device_0_is_current(cupy, rng):
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    x = rng.standard_normal((9, 48)).astype("f4")
    want = c_loop(net, x)
    for device in (1, 0, 1):
        with cupy.cuda.Device(device):
            gpu_x, out = cupy.asarray(x), cupy.zeros((9, 24), "f4")
        with cupy.cuda.Device(0):
            y = mlp(gpu_x)
            assert y.device.id == device
            assert mlp(gpu_x, out=out) is out
            assert cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(device):
            assert same_bits(y.get(), want)
            assert same_bits(out.get(), want)


def test_fused_mlp_runs_where_its_arrays_are(cupy, rng):
    net = random_net(rng, CANONICAL, biases=[False] * 3, activations=["relu", "relu", "identity"])
    x = rng.standard_normal((9, 48)).astype("f4")
    with cupy.cuda.Device(1):
        gpu_x, weights = cupy.asarray(x), [cupy.asarray(w) for w in net.weights]
    for _ in range(2):
        y = cupymlp.fused_mlp(gpu_x, *weights)
        assert y.device.id == 1
        with cupy.cuda.Device(1):
            assert same_bits(y.get(), c_loop(net, x))


def test_arrays_on_different_devices_are_an_error_that_names_each(cupy, rng):
    net = random_net(rng, CANONICAL)
    x = cupy.zeros((9, 48), "f4")
    with cupy.cuda.Device(1):
        out = cupy.zeros((9, 24), "f4")
        weights = [cupy.asarray(w) for w in net.weights]
    with pytest.raises(ValueError, match="x is on device 0 and out on device 1"):
        net.mlp()(x, out=out)
    with pytest.raises(ValueError, match=r"x on device 0, weights\[0\] on device 1"):
        cupymlp.fused_mlp(x, *weights)


def test_the_current_stream_is_that_of_xs_device(cupy, rng):
    """Work for device 1 goes on device 1's current stream, behind what is there already."""
    net = random_net(rng, CANONICAL)
    mlp = net.mlp()
    fresh = rng.standard_normal((64, 48)).astype("f4")
    with cupy.cuda.Device(1):
        x, out, source = cupy.zeros((64, 48), "f4"), cupy.zeros((64, 24), "f4"), cupy.asarray(fresh)
        mlp(x, out=out)
        cupy.cuda.Device(1).synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.use()
        for _ in range(200):
            cupy.copyto(x, source)
    with cupy.cuda.Device(0):
        mlp(x, out=out)
    with cupy.cuda.Device(1):
        stream.synchronize()
        assert same_bits(out.get(), c_loop(net, fresh))
        cupy.cuda.Stream.null.use()


def test_numpy_arrays_run_on_the_current_device(cupy, rng):
    net = random_net(rng, CANONICAL)
    x = rng.standard_normal((9, 48)).astype("f4")
    for device in (0, 1):
        with cupy.cuda.Device(device):
            assert same_bits(net.mlp()(x), c_loop(net, x))
            assert np.isfinite(net.mlp()(x)).all()
