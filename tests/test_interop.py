"""Other libraries' arrays on a GPU: the same bits, nothing copied, and work in the order of both libraries' streams.

A producer is slow here: its stream spins, and then writes what the call must read. One section a library; a library that is not
installed is skipped. The decisions are tested without a GPU in test_interop_host.py.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from importlib import metadata
from importlib.util import find_spec

import numpy as np
import pytest
from support import CANONICAL, c_loop, random_net, same_bits
from test_gpu import VIEWS, Allocations, nodes, spin, unaligned

import cupymlp

SECONDS = 0.1  # that a slow producer takes: a call takes a thousandth of it
BATCH = 64


def missing(library):
    """Why a library cannot be tested on a GPU; None if it can. Asks no device: this runs when tests are collected."""
    if find_spec(library) is None:
        return f"{library} is not installed"
    if library == "torch" and metadata.version("torch").endswith("+cpu"):
        return "torch is installed without CUDA"
    if library == "jax" and not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return "jax is installed without its CUDA plugin"
    return None


def needs(library):
    """A GPU test of a library.

    Without the library it is skipped, and is no GPU test then: of those CUPYMLP_REQUIRE_GPU=1 lets none be skipped, and it asks
    for a GPU, not for every library. What a library warns of is not ours to mend.
    """
    problem = missing(library)
    mark = pytest.mark.gpu if problem is None else pytest.mark.skip(reason=problem)
    return lambda test: mark(pytest.mark.filterwarnings("default")(test))


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def net(rng):
    return random_net(rng, CANONICAL, biases=[True, False, True], activations=["relu", "relu", "identity"])


@pytest.fixture
def fresh(rng):
    return rng.standard_normal((BATCH, 48)).astype("f4")


def warm(cupy, net):
    """The net, its kernel compiled and its weights uploaded for calls with BATCH rows, and the spinning kernel compiled."""
    mlp = net.mlp()
    x, out = cupy.zeros((BATCH, 48), "f4"), cupy.zeros((BATCH, 24), "f4")
    mlp(x, out=out)
    mlp(x)
    spin(cupy, 1e-6)
    cupy.copyto(x, cupy.asarray(x.get()))
    cupy.cuda.Device().synchronize()
    return mlp


class Handle:
    """A stream by its address, as CuPy takes it."""

    def __init__(self, address):
        self.address = address

    def __cuda_stream__(self):
        return 0, int(self.address)


def external(cupy, address):
    return cupy.cuda.Stream.from_external(Handle(address))


def streams(cupy):
    """Streams of every kind, any of which may be current."""
    return {
        "non-blocking": cupy.cuda.Stream(non_blocking=True),
        "blocking": cupy.cuda.Stream(),
        "legacy": cupy.cuda.Stream.null,
        "per thread": cupy.cuda.Stream.ptds,
    }


KINDS = ("non-blocking", "blocking", "legacy", "per thread")


# --- The protocols ------------------------------------------------------------------------------------------------------


class Interface:
    """Another library's array, known by ``__cuda_array_interface__`` alone."""

    def __init__(self, array, *, read_only=False, **entries):
        self.array, self.dtype = array, array.dtype
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
            "data": (array.data.ptr if array.size else 0, read_only),
            "version": 3,
            **entries,
        }


class DLPack:
    """Another library's array, known by DLPack alone; written on a stream of that library, or on CuPy's current one."""

    def __init__(self, array, stream=None):
        self.array, self.stream = array, stream

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        with self.stream or contextlib.nullcontext():
            return self.array.__dlpack__(**options)


class Refuses(Interface):
    """Known by both, but not handed out by DLPack."""

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        raise BufferError("not by DLPack")


def late(cupy, stream, array, value):
    """Write value into the array on a stream that is busy for a while; they are on the device already."""
    with stream:
        spin(cupy, SECONDS)
        cupy.copyto(array, value)


WRAPPED = {
    "interface": lambda array, stream: Interface(array, stream=stream.ptr or 1),
    "DLPack": DLPack,
    "refused by DLPack": lambda array, stream: Refuses(array, stream=stream.ptr or 1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("consumer", KINDS)
@pytest.mark.parametrize("producer", KINDS)
@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_call_reads_what_a_slow_producer_writes_and_the_host_does_not_wait(
    cupy, net, fresh, wrap, producer, consumer
):
    mlp = warm(cupy, net)
    source, sink = streams(cupy)[producer], streams(cupy)[consumer]
    x, value, out = cupy.zeros((BATCH, 48), "f4"), cupy.asarray(fresh), cupy.zeros((BATCH, 24), "f4")
    cupy.cuda.Device().synchronize()
    late(cupy, source, x, value)
    with sink:
        mlp(WRAPPED[wrap](x, source), out=out)
        assert not sink.done
    sink.synchronize()
    assert same_bits(out.get(), c_loop(net, fresh))


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [{"version": 2}, {"stream": None}], ids=str)
def test_without_a_stream_in_the_interface_nothing_waits(cupy, net, fresh, entries):
    """As the interface says. It also shows that the tests of waiting can fail: this call reads what was there before."""
    mlp = warm(cupy, net)
    source, sink = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x, value, out = cupy.zeros((BATCH, 48), "f4"), cupy.asarray(fresh), cupy.zeros((BATCH, 24), "f4")
    cupy.cuda.Device().synchronize()
    late(cupy, source, x, value)
    with sink:
        mlp(Interface(x, **entries), out=out)
    sink.synchronize()
    assert not source.done
    assert same_bits(out.get(stream=sink), c_loop(net, np.zeros_like(fresh)))
    source.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", WRAPPED)
def test_out_is_written_after_what_its_producer_still_writes(cupy, net, fresh, wrap):
    mlp = warm(cupy, net)
    source, sink = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x, out, sevens = cupy.asarray(fresh), cupy.zeros((BATCH, 24), "f4"), cupy.full((BATCH, 24), 7, "f4")
    cupy.cuda.Device().synchronize()
    late(cupy, source, out, sevens)
    foreign = WRAPPED[wrap](out, source)
    with sink:
        assert mlp(x, out=foreign) is foreign
    cupy.cuda.Device().synchronize()
    assert same_bits(out.get(), c_loop(net, fresh))


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", WRAPPED)
def test_weights_are_read_after_their_producer(cupy, net, fresh, wrap):
    source, sink = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    spin(cupy, 1e-6)
    biases = [None if b is None else cupy.asarray(b) for b in net.biases]
    x = cupy.asarray(fresh)
    for call in ("fused", "fused", "MLP"):
        first, value = cupy.zeros((48, 64), "f4"), cupy.asarray(net.weights[0])
        rest = [cupy.asarray(w) for w in net.weights[1:]]
        cupy.cuda.Device().synchronize()
        late(cupy, source, first, value)
        weights = [WRAPPED[wrap](first, source), *rest]
        with sink:
            y = cupymlp.fused_mlp(x, *weights, biases=biases) if call == "fused" else cupymlp.MLP(weights, biases)(x)
        sink.synchronize()
        assert same_bits(y.get(), c_loop(net, fresh)), call


@pytest.mark.gpu
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("wrap", [Interface, DLPack])
def test_strides_of_other_libraries(cupy, net, rng, wrap, view):
    x = rng.standard_normal((5, 7, 48)).astype("f4")
    gpu_x = VIEWS[view](cupy, cupy.asarray(x))
    out = VIEWS[view](cupy, cupy.full((5, 7, 24), np.nan, "f4"))
    foreign_out = wrap(out)
    mlp = net.mlp()
    mlp(gpu_x, out=out)
    out[...] = np.nan
    with Allocations(cupy) as allocations:
        assert mlp(wrap(gpu_x), out=foreign_out) is foreign_out
        assert allocations.count == 0
    assert same_bits(out.get(), c_loop(net, x.reshape(35, 48)).reshape(5, 7, 24))
    assert same_bits(gpu_x.get(), x)


@pytest.mark.gpu
def test_any_address_by_the_interface(cupy, net, rng):
    x = rng.standard_normal((5, 48)).astype("f4")
    assert same_bits(net.mlp()(Interface(unaligned(cupy, x))).get(), c_loop(net, x))
    weights = [Interface(unaligned(cupy, w)) for w in net.weights]
    biases = [None if b is None else Interface(unaligned(cupy, b)) for b in net.biases]
    assert same_bits(cupymlp.MLP(weights, biases)(Interface(cupy.asarray(x))).get(), c_loop(net, x))
    assert same_bits(cupymlp.fused_mlp(Interface(cupy.asarray(x)), *weights, biases=biases).get(), c_loop(net, x))


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [Interface, DLPack])
def test_empty_broadcast_and_0_dimensional_arrays(cupy, net, wrap):
    mlp = net.mlp()
    assert mlp(wrap(cupy.zeros((0, 48), "f4"))).shape == (0, 24)
    assert mlp(wrap(cupy.zeros((3, 0, 48), "f4"))).shape == (3, 0, 24)
    out = wrap(cupy.zeros((0, 24), "f4"))
    assert mlp(wrap(cupy.zeros((0, 48), "f4")), out=out) is out
    one = cupy.broadcast_to(cupy.full((), 2, "f4"), (4, 48))
    assert same_bits(mlp(wrap(one)).get(), c_loop(net, np.full((4, 48), 2, "f4")))
    with pytest.raises(ValueError, match="x is 0-dimensional"):
        mlp(wrap(cupy.zeros((), "f4")))


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [lambda array: array, Interface, DLPack], ids=["CuPy", "interface", "DLPack"])
def test_managed_memory(cupy, net, rng, wrap):
    x = rng.standard_normal((5, 48)).astype("f4")
    gpu_x = cupy.ndarray((5, 48), "f4", memptr=cupy.cuda.malloc_managed(x.nbytes))
    out = cupy.ndarray((5, 24), "f4", memptr=cupy.cuda.malloc_managed(5 * 24 * 4))
    gpu_x.set(x)
    assert gpu_x.__dlpack_device__()[0] == 13
    foreign_out = wrap(out)
    assert net.mlp()(wrap(gpu_x), out=foreign_out) is foreign_out
    assert same_bits(out.get(), c_loop(net, x))


@pytest.mark.gpu
def test_pinned_host_memory_by_the_interface(cupy, net, rng):
    x = rng.standard_normal((5, 48)).astype("f4")
    memory = cupy.cuda.alloc_pinned_memory(x.nbytes)
    np.frombuffer(memory, "f4", x.size).reshape(x.shape)[...] = x
    pinned = Interface(cupy.zeros((5, 48), "f4"))
    pinned.__cuda_array_interface__["data"] = (memory.ptr, False)
    assert same_bits(net.mlp()(pinned).get(), c_loop(net, x))


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [Interface, DLPack])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes_of_other_libraries(cupy, rng, wrap, dtype):
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, (9, 7, 5), dtype)
    x = rng.standard_normal((6, 9)).astype(net.weights[0].dtype)
    y = net.mlp()(wrap(cupy.asarray(x)))
    assert y.dtype == x.dtype
    assert same_bits(y.get(), net.mlp()(cupy.asarray(x)).get())
    again = cupymlp.MLP([wrap(cupy.asarray(w)) for w in net.weights])
    assert all(same_bits(a, b) for a, b in zip(again.weights, net.weights, strict=True))
    big_endian = Interface(cupy.zeros((6, 9), "f4"), typestr=">f4")
    with pytest.raises(TypeError, match=r"x is a .*Interface whose memory cannot be used \(.*big-endian"):
        net.mlp()(big_endian)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [None, 1, "another", "the one that captures"])
def test_a_capture_takes_arrays_with_the_interface(cupy, net, rng, stream):
    mlp = net.mlp()
    x, out = cupy.zeros((16, 48), "f4"), cupy.zeros((16, 24), "f4")
    sink = cupy.cuda.Stream(non_blocking=True)
    other = cupy.cuda.Stream(non_blocking=True)
    named = {"another": other.ptr, "the one that captures": sink.ptr}.get(stream, stream)
    foreign_x, foreign_out = Interface(x, stream=named), Interface(out, stream=named)
    mlp(foreign_x, out=foreign_out)
    cupy.cuda.Device().synchronize()
    with sink:
        sink.begin_capture()
        mlp(foreign_x, out=foreign_out)
        graph = sink.end_capture()
        assert nodes(graph) == 1
        for seed in (1, 2):
            new = np.random.default_rng(seed).standard_normal((16, 48)).astype("f4")
            x[...] = cupy.asarray(new)
            graph.launch(sink)
            sink.synchronize()
            assert same_bits(out.get(), c_loop(net, new))


@pytest.mark.gpu
def test_a_capture_refuses_dlpack_alone_and_goes_on(cupy, net):
    mlp = net.mlp()
    x, out = cupy.zeros((16, 48), "f4"), cupy.zeros((16, 24), "f4")
    mlp(x, out=out)
    cupy.cuda.Device().synchronize()
    sink = cupy.cuda.Stream(non_blocking=True)
    with sink:
        sink.begin_capture()
        with pytest.raises(
            RuntimeError, match=r"x is a .*DLPack without __cuda_array_interface__, and the current stream"
        ):
            mlp(DLPack(x, cupy.cuda.Stream(non_blocking=True)), out=out)
        mlp(x, out=out)
        assert nodes(sink.end_capture()) == 1


@pytest.mark.gpu
def test_external_streams_as_current_ones(cupy, net, fresh):
    mlp = warm(cupy, net)
    owner = cupy.cuda.Stream(non_blocking=True)
    with pytest.warns(DeprecationWarning, match="ExternalStream is deprecated"):
        old = cupy.cuda.ExternalStream(owner.ptr)
    for stream in (external(cupy, owner.ptr), old):
        x, value, out = cupy.zeros((BATCH, 48), "f4"), cupy.asarray(fresh), cupy.zeros((BATCH, 24), "f4")
        cupy.cuda.Device().synchronize()
        with stream:
            spin(cupy, SECONDS)
            cupy.copyto(x, value)
            mlp(x, out=out)
            assert not owner.done
        owner.synchronize()
        assert same_bits(out.get(), c_loop(net, fresh))


# --- torch --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
    return torch


def cuda(torch, array):
    return torch.tensor(array, device="cuda")


@needs("torch")
def test_torch_tensors_in_and_out(cupy, torch, net, fresh):
    mlp = warm(cupy, net)
    x, want = cuda(torch, fresh), c_loop(net, fresh)
    y = mlp(x)
    assert isinstance(y, cupy.ndarray)
    assert same_bits(y.get(), want)
    assert same_bits(torch.from_dlpack(y).cpu().numpy(), want)
    out = torch.full((BATCH, 24), torch.nan, device="cuda")
    address = out.data_ptr()
    with Allocations(cupy) as allocations:
        assert mlp(x, out=out) is out
        assert allocations.count == 0
    cupy.cuda.Device().synchronize()
    assert out.data_ptr() == address
    assert same_bits(out.cpu().numpy(), want)
    assert same_bits(x.cpu().numpy(), fresh)
    weights = [cuda(torch, w) for w in net.weights]
    biases = [None if b is None else cuda(torch, b) for b in net.biases]
    assert same_bits(cupymlp.fused_mlp(x, *weights, biases=biases).get(), want)
    assert same_bits(cupymlp.MLP(weights, biases)(fresh), want)
    with pytest.raises(TypeError, match=r"x is a torch\.Tensor and out a numpy\.ndarray: .* not mixed"):
        mlp(x, out=np.zeros((BATCH, 24), "f4"))


@needs("torch")
@pytest.mark.parametrize("consumer", KINDS)
def test_a_call_follows_torchs_current_stream(cupy, torch, net, fresh, consumer):
    mlp = warm(cupy, net)
    sink, side = streams(cupy)[consumer], torch.cuda.Stream()
    x, value = torch.zeros((BATCH, 48), device="cuda"), cuda(torch, fresh)
    out, sevens = torch.zeros((BATCH, 24), device="cuda"), torch.full((BATCH, 24), 7.0, device="cuda")
    mlp(x, out=out)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        with external(cupy, side.cuda_stream):
            spin(cupy, SECONDS)
        x.copy_(value)
        out.copy_(sevens)
        with sink:
            mlp(x, out=out)
            assert not sink.done
    torch.cuda.synchronize()
    assert same_bits(out.cpu().numpy(), c_loop(net, fresh))


@needs("torch")
def test_on_torchs_own_stream_torch_goes_on_without_waiting(cupy, torch, net, fresh):
    mlp = warm(cupy, net)
    side = torch.cuda.Stream()
    x, value, out = torch.zeros((BATCH, 48), device="cuda"), cuda(torch, fresh), torch.zeros((BATCH, 24), device="cuda")
    torch.cuda.synchronize()
    stream = side if hasattr(side, "__cuda_stream__") else Handle(side.cuda_stream)
    with torch.cuda.stream(side), cupy.cuda.Stream.from_external(stream):
        spin(cupy, SECONDS)
        x.copy_(value)
        mlp(x, out=out)
        twice = out * 2
    side.synchronize()
    assert same_bits(twice.cpu().numpy(), c_loop(net, fresh) * 2)


@needs("torch")
def test_a_cuda_graph_of_torchs(cupy, torch, net):
    mlp = warm(cupy, net)
    x, out = torch.zeros((BATCH, 48), device="cuda"), torch.zeros((BATCH, 24), device="cuda")
    mlp(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), external(cupy, torch.cuda.current_stream().cuda_stream):
        x.add_(1)
        mlp(x, out=out)
        out.mul_(2)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out.cpu().numpy(), c_loop(net, np.full((BATCH, 48), 3, "f4")) * 2)


@needs("torch")
def test_torch_tensors_that_record_gradients_are_to_be_detached(cupy, torch, net):
    linear = torch.nn.Linear(48, 5).cuda()
    x = torch.zeros((4, 48), device="cuda", requires_grad=True)
    with pytest.raises(
        TypeError, match=r"weights\[0\] is a torch.*Parameter whose memory cannot be used \(.*detach\(\)"
    ):
        cupymlp.MLP([linear.weight], [linear.bias], weight_layout="out_in")
    mlp = cupymlp.MLP([linear.weight.detach()], [linear.bias.detach()], weight_layout="out_in")
    with pytest.raises(TypeError, match=r"x is a torch\.Tensor whose memory cannot be used \(.*detach\(\)"):
        mlp(x)
    with pytest.raises(TypeError, match=r"out is a torch\.Tensor whose memory cannot be used \(.*detach\(\)"):
        mlp(x.detach(), out=torch.zeros((4, 5), device="cuda", requires_grad=True))
    with torch.no_grad():
        y = mlp(torch.ones((4, 48), device="cuda")).get()
        want = linear(torch.ones((4, 48), device="cuda")).cpu().numpy()
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)


@needs("torch")
def test_torch_tensors_on_the_host_are_numpy(cupy, torch, net, fresh):
    mlp, x = net.mlp(), torch.tensor(fresh)
    y = mlp(x)
    assert isinstance(y, np.ndarray)
    assert same_bits(y, c_loop(net, fresh))
    assert same_bits(mlp(x.pin_memory()), y)
    assert mlp(x, device="cpu").shape == (BATCH, 24)
    for bad, message in [
        (x.clone().requires_grad_(), r"x is a torch\.Tensor that NumPy makes no array of \(.*detach"),
        (x.bfloat16(), r"x is a torch\.Tensor that NumPy makes no array of \(.*BFloat16"),
        (torch.zeros((4, 48), device="meta"), r"x is a torch\.Tensor that "),
    ]:
        with pytest.raises(TypeError, match=message):
            mlp(bad)
    with pytest.raises(TypeError, match=r"out is a torch\.Tensor; accepted: a NumPy array"):
        mlp(x, out=torch.zeros((BATCH, 24)))
    with pytest.raises(TypeError, match=r"x is a torch\.Tensor and out a torch\.Tensor: .* not mixed"):
        mlp(x.cuda(), out=torch.zeros((BATCH, 24)))


@needs("torch")
def test_strides_and_shapes_of_torch(cupy, torch, net, rng):
    data = rng.standard_normal((6, 100)).astype("f4")
    base, mlp = cuda(torch, data), net.mlp()
    for view in (
        lambda a: a[:, 3:99:2],
        lambda a: a[::2, 1:49],
        lambda a: a.T[:48].T,
        lambda a: a[:1, :48].expand(7, 48) if hasattr(a, "expand") else np.broadcast_to(a[:1, :48], (7, 48)),
        lambda a: a[:, :48].reshape(2, 3, 48).swapaxes(0, 1),
        lambda a: a[0, 5:53],
        lambda a: a[:0, :48],
    ):
        x = np.ascontiguousarray(view(data))
        want = c_loop(net, x.reshape(-1, 48)).reshape(*x.shape[:-1], 24)
        assert same_bits(mlp(view(base)).get(), want)
    fortran = base[:, :48].T.contiguous().T
    assert same_bits(mlp(fortran).get(), c_loop(net, data[:, :48]))
    out = torch.zeros((24, 6), device="cuda")
    mlp(fortran, out=out.T)
    cupy.cuda.Device().synchronize()
    assert same_bits(out.T.contiguous().cpu().numpy(), c_loop(net, data[:, :48]))
    with pytest.raises(ValueError, match="x is 0-dimensional"):
        mlp(torch.tensor(1.0, device="cuda"))
    with pytest.raises(TypeError, match=r"x is a torch\.Tensor whose memory cannot be used \(.*layout"):
        mlp(base[:, :48].to_sparse())
    with pytest.raises(TypeError, match=r"x has dtype float64 and the network is float32"):
        mlp(base[:, :48].double())
    with pytest.raises(TypeError, match=r"x has dtype complex64"):
        mlp(base[:, :48].to(torch.complex64))


@needs("torch")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_of_torch(cupy, torch, rng, dtype):
    pytest.importorskip("ml_dtypes")
    net = random_net(rng, (9, 7, 5), dtype, activations=["relu", "identity"])
    x = rng.standard_normal((6, 9)).astype(net.weights[0].dtype)
    tensor = cuda(torch, x.astype("f8")).to(getattr(torch, dtype))
    weights = [cuda(torch, w.astype("f8")).to(getattr(torch, dtype)) for w in net.weights]
    biases = [None if b is None else cuda(torch, b.astype("f8")).to(getattr(torch, dtype)) for b in net.biases]
    want = net.mlp()(cupy.asarray(x)).get()
    assert same_bits(cupymlp.MLP(weights, biases)(tensor).get(), want)
    out = torch.zeros((6, 5), device="cuda", dtype=getattr(torch, dtype))
    assert cupymlp.fused_mlp(tensor, *weights, biases=biases, out=out) is out
    cupy.cuda.Device().synchronize()
    assert same_bits(
        out.double().cpu().numpy().astype(want.dtype), cupymlp.fused_mlp(tensor, *weights, biases=biases).get()
    )
    mlp, stream = net.mlp(), cupy.cuda.Stream(non_blocking=True)
    mlp(tensor, out=out)
    torch.cuda.synchronize()
    with stream:  # which asks for the interface, where bfloat16 is two bytes of anything
        stream.begin_capture()
        mlp(tensor, out=out)
        graph = stream.end_capture()
        out.zero_()
        torch.cuda.synchronize()
        graph.launch(stream)
    stream.synchronize()
    assert same_bits(out.double().cpu().numpy().astype(want.dtype), want)


# --- JAX ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax():
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # read when JAX first uses the GPU, which others use too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jax
    return jax


@needs("jax")
def test_jax_arrays_are_read_and_never_written(cupy, jax, net, fresh):
    mlp, x, want = warm(cupy, net), jax.numpy.asarray(fresh), c_loop(net, fresh)
    y = mlp(x)
    assert isinstance(y, cupy.ndarray)
    assert same_bits(y.get(), want)
    weights = [jax.numpy.asarray(w) for w in net.weights]
    biases = [None if b is None else jax.numpy.asarray(b) for b in net.biases]
    assert same_bits(cupymlp.fused_mlp(x, *weights, biases=biases).get(), want)
    assert same_bits(cupymlp.MLP(weights, biases)(x).get(), want)
    assert same_bits(np.asarray(x), fresh)
    out = jax.numpy.full((BATCH, 24), 3, "float32")
    with pytest.raises(ValueError, match=r"out is read-only: it is a jax"):
        mlp(x, out=out)
    assert (np.asarray(out) == 3).all()
    assert mlp(x[:0]).shape == (0, 24)
    with pytest.raises(ValueError, match="x is 0-dimensional"):
        mlp(jax.numpy.float32(1) + x[0, 0])


@needs("jax")
def test_a_call_reads_what_jax_is_still_computing(cupy, jax, net, fresh):
    mlp = warm(cupy, net)

    @jax.jit
    def slow(x, one):
        one = jax.lax.fori_loop(0, 300, lambda _, m: m @ m, one)  # some 0.1 s
        return x * one[0, 0]

    x, one, out = jax.numpy.asarray(fresh), jax.numpy.eye(4096), cupy.zeros((BATCH, 24), "f4")
    slow(0 * x, one).block_until_ready()
    sink = cupy.cuda.Stream(non_blocking=True)
    with sink:
        mlp(slow(x, one), out=out)
    sink.synchronize()
    assert same_bits(out.get(), c_loop(net, fresh))


@needs("jax")
def test_bfloat16_of_jax(cupy, jax, rng):
    net = random_net(rng, (9, 7, 5), "bfloat16")
    x = rng.standard_normal((6, 9)).astype(net.weights[0].dtype)
    gpu_x = jax.numpy.asarray(x)
    assert same_bits(net.mlp()(gpu_x).get(), net.mlp()(cupy.asarray(x)).get())
    with pytest.raises(ValueError, match="out is read-only"):
        net.mlp()(gpu_x, out=jax.numpy.zeros((6, 5), "bfloat16"))


@needs("jax")
def test_jax_arrays_on_the_host_are_numpy(cupy, jax, net, fresh):
    x = jax.device_put(fresh, jax.devices("cpu")[0])
    y = net.mlp()(x)
    assert isinstance(y, np.ndarray)
    assert same_bits(y, c_loop(net, fresh))


# --- Numba --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def numba_cuda():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from numba import cuda
    return cuda


@needs("numba")
def test_numba_arrays_in_and_out(cupy, numba_cuda, net, fresh):
    mlp, want = warm(cupy, net), c_loop(net, fresh)
    x, out = numba_cuda.to_device(fresh), numba_cuda.to_device(np.zeros((BATCH, 24), "f4"))
    assert same_bits(mlp(x).get(), want)
    with Allocations(cupy) as allocations:
        assert mlp(x, out=out) is out
        assert allocations.count == 0
    cupy.cuda.Device().synchronize()
    assert same_bits(out.copy_to_host(), want)
    weights = [numba_cuda.to_device(w) for w in net.weights]
    biases = [None if b is None else numba_cuda.to_device(b) for b in net.biases]
    assert same_bits(cupymlp.fused_mlp(x, *weights, biases=biases).get(), want)
    assert same_bits(cupymlp.MLP(weights, biases)(x).get(), want)
    fortran = numba_cuda.to_device(np.asfortranarray(fresh))
    assert same_bits(mlp(fortran).get(), want)


@needs("numba")
def test_a_call_waits_for_the_stream_of_a_numba_array(cupy, numba_cuda, net, fresh):
    mlp = warm(cupy, net)
    stream = numba_cuda.stream()
    x = numba_cuda.to_device(np.zeros_like(fresh), stream=stream)
    assert x.__cuda_array_interface__["stream"] == int(stream)
    memory, value, out = cupy.asarray(x), cupy.asarray(fresh), cupy.zeros((BATCH, 24), "f4")
    cupy.cuda.Device().synchronize()
    late(cupy, external(cupy, int(stream)), memory, value)
    sink = cupy.cuda.Stream(non_blocking=True)
    with sink:
        mlp(x, out=out)
        assert not sink.done
    sink.synchronize()
    assert same_bits(out.get(), c_loop(net, fresh))


# --- Warp ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def wp():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import warp

        warp.config.quiet = True
        warp.init()
    return warp


@needs("warp")
def test_warp_arrays_in_and_out(cupy, wp, net, fresh):
    mlp, want = warm(cupy, net), c_loop(net, fresh)

    def device_array(array):
        return wp.array(array, dtype=wp.float32, device="cuda:0")

    x, out = device_array(fresh), device_array(np.zeros((BATCH, 24), "f4"))
    wp.synchronize()
    assert same_bits(mlp(x).get(), want)
    assert mlp(x, out=out) is out
    cupy.cuda.Device().synchronize()
    assert same_bits(out.numpy(), want)
    weights = [device_array(w) for w in net.weights]
    biases = [None if b is None else device_array(b) for b in net.biases]
    wp.synchronize()
    assert same_bits(cupymlp.fused_mlp(x, *weights, biases=biases).get(), want)
    assert same_bits(cupymlp.MLP(weights, biases)(x).get(), want)


@needs("warp")
def test_a_call_follows_warps_current_stream(cupy, wp, net, fresh):
    mlp = warm(cupy, net)
    x, value = (wp.array(a, dtype=wp.float32, device="cuda:0") for a in (np.zeros_like(fresh), fresh))
    out, sink, side = cupy.zeros((BATCH, 24), "f4"), cupy.cuda.Stream(non_blocking=True), wp.Stream("cuda:0")
    cupy.cuda.Device().synchronize()
    with wp.ScopedStream(side):
        with external(cupy, side.cuda_stream):
            spin(cupy, SECONDS)
        wp.copy(x, value)
        with sink:
            mlp(x, out=out)
            assert not sink.done
    sink.synchronize()
    assert same_bits(out.get(), c_loop(net, fresh))
