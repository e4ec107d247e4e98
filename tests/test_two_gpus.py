"""Arrays on any device, whichever is current."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support import CANONICAL, c_loop, random_net, same_bits
from test_gpu import spin
from test_interop import SECONDS, DLPack, Handle, Interface

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


# --- Other libraries' arrays --------------------------------------------------------------------------------------------


def slow_producer(cupy, value):
    """Zeros on device 1, a stream there on which value is written into them late, and where it is until then."""
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        array, source = cupy.zeros(value.shape, "f4"), cupy.asarray(value)
        spin(cupy, 1e-6)
        cupy.cuda.Device(1).synchronize()
        with stream:
            spin(cupy, SECONDS)
            cupy.copyto(array, source)
    return array, stream, source


WRAPPED = {
    "interface": lambda array, stream: Interface(array, stream=stream.ptr),
    "DLPack": DLPack,
}


@pytest.mark.parametrize("wrap", [Interface, DLPack])
def test_other_libraries_arrays_run_on_their_device_and_out_is_written_in_place(cupy, rng, wrap):
    """CuPy's asarray would copy an array of another device to the current one."""
    net = random_net(rng, CANONICAL, activations=["relu", "relu", "identity"])
    x = rng.standard_normal((9, 48)).astype("f4")
    want = c_loop(net, x)
    for device in (1, 0):
        with cupy.cuda.Device(device):
            gpu_x, out = cupy.asarray(x), cupy.zeros((9, 24), "f4")
            weights = [cupy.asarray(w) for w in net.weights]
            biases = [None if b is None else cupy.asarray(b) for b in net.biases]
        foreign_out = wrap(out)
        foreign = [wrap(w) for w in weights], [None if b is None else wrap(b) for b in biases]
        with cupy.cuda.Device(1 - device):
            assert net.mlp()(wrap(gpu_x), out=foreign_out) is foreign_out
            y = cupymlp.fused_mlp(wrap(gpu_x), *foreign[0], biases=foreign[1])
            copied = cupymlp.MLP(*foreign)
            assert cupy.cuda.runtime.getDevice() == 1 - device
        assert y.device.id == device
        with cupy.cuda.Device(device):
            assert same_bits(out.get(), want)
            assert same_bits(y.get(), want)
        assert all(same_bits(a, b) for a, b in zip(copied.weights, net.weights, strict=True))


@pytest.mark.parametrize("wrap", WRAPPED)
def test_the_current_stream_of_device_1_waits_for_a_producer_there(cupy, rng, wrap):
    net = random_net(rng, CANONICAL)
    x = rng.standard_normal((64, 48)).astype("f4")
    mlp, sinks = net.mlp(), []
    with cupy.cuda.Device(1):
        out = cupy.zeros((64, 24), "f4")
        mlp(cupy.zeros((64, 48), "f4"), out=out)
        sinks.append(cupy.cuda.Stream(non_blocking=True))
        sinks[0].use()
    late_x, stream, _source = slow_producer(cupy, x)
    with cupy.cuda.Device(0):
        mlp(WRAPPED[wrap](late_x, DeviceStream(cupy, 1, stream)), out=out)
    with cupy.cuda.Device(1):
        assert not sinks[0].done
        sinks[0].synchronize()
        assert same_bits(out.get(), c_loop(net, x))
        cupy.cuda.Stream.null.use()


class DeviceStream(contextlib.AbstractContextManager):
    """A stream of a device that need not be the current one, as DLPack's producer enters it."""

    def __init__(self, cupy, device, stream):
        self.device, self.stream, self.ptr = cupy.cuda.Device(device), stream, stream.ptr

    def __enter__(self):
        self.device.__enter__()
        self.stream.__enter__()

    def __exit__(self, *error):
        self.stream.__exit__(*error)
        self.device.__exit__(*error)


@pytest.mark.parametrize("wrap", WRAPPED)
def test_weights_of_device_1_are_copied_after_their_producer(cupy, rng, wrap):
    weight = rng.standard_normal((6, 5)).astype("f4")
    for unalign in (False, True):
        late, stream, _source = slow_producer(cupy, np.pad(weight.ravel(), 1))
        if unalign:
            late = cupy.ndarray((31,), "f4", memptr=late.data + 2)  # every element across two of the producer's
            want = np.pad(weight.ravel(), 1).view("u1")[2:-2].view("f4")
        else:
            want = np.pad(weight.ravel(), 1)
        wrapped = WRAPPED[wrap](late[:30].reshape(6, 5), DeviceStream(cupy, 1, stream))
        with cupy.cuda.Device(0):
            assert same_bits(cupymlp.MLP([wrapped]).weights[0], want[:30].reshape(6, 5))


def test_a_number_that_was_broadcast_on_device_1(cupy, rng):
    """All strides are 0, from which CuPy alone would conclude that there is no memory to ask for its device."""
    net = random_net(rng, CANONICAL)
    with cupy.cuda.Device(1):
        x = Interface(cupy.broadcast_to(cupy.full((), 2, "f4"), (4, 48)))
    y = net.mlp()(x)
    assert y.device.id == 1
    with cupy.cuda.Device(1):
        assert same_bits(y.get(), c_loop(net, np.full((4, 48), 2, "f4")))


@pytest.mark.parametrize("wrap", [lambda array: array, Interface, DLPack], ids=["CuPy", "interface", "DLPack"])
def test_mixed_devices_name_the_device_of_every_argument(cupy, rng, wrap):
    net = random_net(rng, CANONICAL, biases=[True, False, True])
    home = {
        "x": (9, 48), "weights[0]": (48, 64), "weights[1]": (64, 40), "weights[2]": (40, 24),
        "biases[0]": (64,), "biases[2]": (24,), "out": (9, 24),
    }  # fmt: skip
    for current in (0, 1):
        for stray in home:
            arrays = {}
            for name, shape in home.items():
                with cupy.cuda.Device(int(name == stray)):
                    arrays[name] = cupy.full(shape, 3, "f4")
            given = {name: wrap(array) for name, array in arrays.items()}
            message = ", ".join(f"{name} on device {int(name == stray)}" for name in home)
            with cupy.cuda.Device(current):
                with pytest.raises(ValueError) as raised:  # noqa: PT011, the whole message is compared
                    cupymlp.fused_mlp(
                        given["x"], *(given[f"weights[{i}]"] for i in range(3)),
                        biases=[given["biases[0]"], None, given["biases[2]"]], out=given["out"],
                    )  # fmt: skip
                assert str(raised.value) == f"the arrays are on different devices: {message}. Move them to one"
                if stray in ("x", "out"):
                    where = f"x is on device {int(stray == 'x')} and out on device {int(stray == 'out')}"
                    with pytest.raises(ValueError, match=where):
                        net.mlp()(given["x"], out=given["out"])
                assert cupy.cuda.runtime.getDevice() == current
            with cupy.cuda.Device(int(stray == "out")):
                assert (arrays["out"] == 3).all()


@pytest.mark.filterwarnings("default")
def test_torch_tensors_of_device_1(cupy, rng):
    torch = pytest.importorskip("torch")
    net = random_net(rng, CANONICAL, activations=["relu", "relu", "identity"])
    x = rng.standard_normal((64, 48)).astype("f4")
    value = torch.tensor(x, device="cuda:1")
    late, out = torch.zeros((64, 48), device="cuda:1"), torch.zeros((64, 24), device="cuda:1")
    weights = [torch.tensor(w, device="cuda:1") for w in net.weights]
    biases = [None if b is None else torch.tensor(b, device="cuda:1") for b in net.biases]
    mlp = net.mlp()
    mlp(late, out=out)
    with cupy.cuda.Device(1):
        spin(cupy, 1e-6)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device="cuda:1")
    with torch.cuda.stream(side):  # which makes device 1 torch's, and CUDA's, current one
        with cupy.cuda.Stream.from_external(side if hasattr(side, "__cuda_stream__") else Handle(side.cuda_stream)):
            spin(cupy, SECONDS)
        late.copy_(value)
        with cupy.cuda.Device(0):
            assert mlp(late, out=out) is out
            assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert same_bits(out.cpu().numpy(), c_loop(net, x))
    y = cupymlp.fused_mlp(value, *weights, biases=biases)
    assert y.device.id == 1
    with cupy.cuda.Device(1):
        assert same_bits(y.get(), c_loop(net, x))
    with pytest.raises(ValueError, match="x is on device 1 and out on device 0"):
        mlp(value, out=torch.zeros((64, 24), device="cuda:0"))
