"""Other libraries' arrays, with stand-ins for them and for CuPy: which protocol is asked, who waits, what is refused.

Whether CUDA then does what it was asked for is tested in test_interop.py.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from cupymlp import _checks, _gpu
from cupymlp._checks import as_cupy, as_numpy, library_of, read_layers

CPU, CUDA, PINNED, MANAGED, ROCM = 1, 2, 3, 13, 10
SIDE, CONSUMER = 0xABC0, 0xDEF0  # addresses of streams
MEMORY = {0x1000: 0, 0x2000: 1, 0x3000: -2}  # addresses, and the device that each is on


class CudaError(RuntimeError):
    """As CuPy's."""


class Driver:
    """A stand-in for CuPy that notes what it is asked for."""

    def __init__(self):
        self.log = []
        self.typestrs = []
        self.device = 0
        self.streams = {0: CONSUMER, 1: 0}  # the current one of each device
        self.capturing = set()
        self.cuda = SimpleNamespace(
            Device=self._device,
            Event=lambda disable_timing: SimpleNamespace(ptr=7, disable_timing=disable_timing),
            get_current_stream=lambda: SimpleNamespace(
                ptr=self.streams[self.device], is_capturing=lambda: self.streams[self.device] in self.capturing
            ),
            runtime=SimpleNamespace(
                CUDARuntimeError=CudaError,
                pointerGetAttributes=lambda address: SimpleNamespace(device=MEMORY[address]),
                streamIsCapturing=lambda stream: stream in self.capturing,
                eventRecord=lambda event, stream: self.log.append(("record", self.device, stream)),
                streamWaitEvent=lambda stream, event: self.log.append(("wait", self.device, stream)),
            ),
        )

    @contextlib.contextmanager
    def _device(self, device):
        before, self.device = self.device, self.device if device is None else device
        yield
        self.device = before

    def from_dlpack(self, array):
        device = array.__dlpack_device__()[1]
        stream = self.streams[device] or 1
        try:
            array.__dlpack__(stream=stream, max_version=(1, 0), copy=None)
        except TypeError:
            array.__dlpack__(stream=stream)
        return view_of(device, "float32")

    def asarray(self, array):
        interface = array.__cuda_array_interface__
        self.log.append(("asarray", self.device, interface.get("stream", "none")))
        address = interface["data"][0]
        self.typestrs.append(interface["typestr"])
        view = view_of(MEMORY[address] if address else self.device, interface["typestr"])
        view.owner = array
        return view


def view_of(device, dtype):
    view = SimpleNamespace(data=SimpleNamespace(device_id=device), dtype=np.dtype(dtype), shape=(4, 3))
    view.view = lambda dtype: view_of(device, dtype)
    return view


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    for module in (_gpu, _checks):
        monkeypatch.setattr(module, "cupy_or_error", lambda _: driver)
    return driver


class Tensor:
    """Known by DLPack alone."""

    def __init__(self, device=(CUDA, 0), *, read_only=False, refuses=None):
        self.device, self.read_only, self.refuses = device, read_only, refuses
        self.asked = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.asked.append(options)
        if self.refuses is not None:
            raise self.refuses
        array = np.zeros(3, "f4")
        array.flags.writeable = not self.read_only
        try:
            return array.__dlpack__(max_version=options.get("max_version"))
        except TypeError:  # numpy 2.0
            pytest.skip("this NumPy exports no DLPack 1.0")


class OldTensor(Tensor):
    """From before DLPack 1.0."""

    def __dlpack__(self, stream=None):
        return super().__dlpack__(stream=stream)


class Interface:
    """Known by ``__cuda_array_interface__`` alone."""

    def __init__(self, address=0x1000, *, read_only=False, **entries):
        entries = {"shape": (4, 3), "typestr": "<f4", "version": 3, **entries}
        self.__cuda_array_interface__ = {**entries, "data": (address, read_only)}


class Both(Tensor):
    def __init__(self, *arguments, interface=None, **options):
        super().__init__(*arguments, **options)
        self.__cuda_array_interface__ = (interface or Interface()).__cuda_array_interface__


class OnlyDLPackMayBeAsked(Tensor):
    @property
    def __cuda_array_interface__(self):
        pytest.fail("asked for the interface")


# --- Where an array belongs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "library"),
    [
        (Tensor((CUDA, 0)), "gpu"),
        (Tensor((MANAGED, 0)), "gpu"),
        (Interface(), "gpu"),
        (Both(), "gpu"),
        (Tensor((CPU, 0)), "numpy"),
        (Tensor((PINNED, 0)), "numpy"),
        (Tensor((ROCM, 0)), "numpy"),
        (Both((CPU, 0)), "numpy"),  # what DLPack says, for it is asked first
        (np.zeros(3), "numpy"),
        ([1.0, 2.0], "numpy"),
    ],
)
def test_an_array_is_gpu_or_numpy_by_its_own_word(array, library):
    assert library_of("x", array) == library


@pytest.mark.parametrize("error", [BufferError, ValueError, RuntimeError])
def test_an_array_that_does_not_tell_its_device_is_named(error):
    class Sharded(Tensor):
        def __dlpack_device__(self):
            raise error("only for unsharded arrays")

    with pytest.raises(
        TypeError, match=r"weights\[1\] is a .*Sharded that does not tell its device \(only for unshard"
    ):
        library_of("weights[1]", Sharded())


def test_a_host_array_that_numpy_cannot_take_is_named():
    class RecordsGradients:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("Use tensor.detach().numpy() instead.")

    with pytest.raises(TypeError, match=r"x is a .*RecordsGradients that NumPy makes no array of \(Use tensor\.detach"):
        as_numpy("x", RecordsGradients())


# --- DLPack -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "stream"), [(0, CONSUMER), (1, 1)])
def test_dlpack_is_first_and_gets_the_current_stream_of_the_arrays_device(driver, device, stream):
    tensor = OnlyDLPackMayBeAsked((CUDA, device))
    assert as_cupy("x", tensor).data.device_id == device
    assert tensor.asked == [{"stream": stream, "max_version": (1, 0), "copy": None}]
    assert driver.device == 0
    assert driver.log == []  # the producer's affair


def test_a_producer_from_before_dlpack_1(driver):
    tensor = OldTensor()
    as_cupy("out", tensor, writable=True)
    assert tensor.asked == [{"stream": CONSUMER}]


def test_for_the_per_thread_stream_the_producer_makes_the_legacy_stream_wait(driver):
    driver.streams[0] = 2
    tensor = Tensor()
    as_cupy("x", tensor)
    assert tensor.asked[0]["stream"] == 1


def test_where_dlpack_is_refused_the_interface_is_asked(driver):
    tensor = Both(refuses=BufferError("no"), interface=Interface(stream=SIDE))
    assert as_cupy("x", tensor).data.device_id == 0
    assert driver.log == [("asarray", 0, None), ("record", 0, SIDE), ("wait", 0, CONSUMER)]


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(refuses=BufferError("use tensor.detach()")),
        Both(refuses=BufferError("use tensor.detach()"), interface=Interface(mask=Interface())),
        Tensor(refuses=NotImplementedError("use tensor.detach()")),
        Tensor(refuses=ValueError("use tensor.detach()")),
    ],
)
def test_a_refusal_names_the_argument_and_gives_the_librarys_reason(driver, tensor):
    reason = r"whose memory cannot be used \(use tensor\.detach\(\)\); accepted: a dense array"
    with pytest.raises(TypeError, match=rf"^biases\[0\] is a .*{type(tensor).__name__} {reason}"):
        as_cupy("biases[0]", tensor)
    assert driver.device == 0


def test_an_error_of_the_gpu_is_not_hidden_behind_a_refusal(driver):
    """DLPack is refused, and the interface is tried."""

    def broken(_):
        raise CudaError("an illegal memory access was encountered")

    driver.cuda.runtime.pointerGetAttributes = broken
    with pytest.raises(CudaError, match="an illegal memory access"):
        as_cupy("x", Both(refuses=BufferError("use tensor.detach()")))


def test_a_runtime_error_is_a_refusal_only_of_what_records_gradients(driver):
    tensor = Tensor(refuses=RuntimeError("Can't export"))
    with pytest.raises(RuntimeError, match="Can't export") as raised:
        as_cupy("x", tensor)
    assert raised.value.__notes__[0].startswith("cupymlp asked for the memory of an argument: x is a ")
    tensor.requires_grad = True
    with pytest.raises(TypeError, match=r"x is a .*Tensor whose memory cannot be used \(Can't export\)"):
        as_cupy("x", tensor)


# --- __cuda_array_interface__ -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [{"version": 2}, {"stream": None}])
def test_without_a_stream_nothing_is_waited_for(driver, entries):
    as_cupy("x", Interface(**entries))
    assert [what for what, *_ in driver.log] == ["asarray"]


@pytest.mark.parametrize(("stream", "waited_for"), [(1, 1), (2, 2), (SIDE, SIDE), (0, 1)])
def test_the_current_stream_waits_for_the_one_that_is_named(driver, stream, waited_for):
    """And CuPy is not shown it, for it would make the host wait. 0 is not allowed, and can only mean a default stream."""
    as_cupy("x", Interface(stream=stream))
    assert driver.log == [("asarray", 0, None), ("record", 0, waited_for), ("wait", 0, CONSUMER)]


@pytest.mark.parametrize(("current", "stream"), [(CONSUMER, CONSUMER), (0, 1), (0, 0), (2, 2)])
def test_a_stream_does_not_wait_for_itself(driver, current, stream):
    driver.streams[0] = current
    as_cupy("x", Interface(stream=stream))
    assert [what for what, *_ in driver.log] == ["asarray"]


def test_an_array_of_another_device_is_viewed_and_waited_for_there(driver):
    view = as_cupy("x", Interface(0x2000, stream=SIDE))
    assert view.data.device_id == 1
    assert driver.log == [("asarray", 1, None), ("record", 1, SIDE), ("wait", 1, 0)]
    assert driver.device == 0


def test_an_empty_array_has_no_address(driver):
    driver.device = 1
    assert as_cupy("x", Interface(0, shape=(0, 3))).data.device_id == 1


def test_the_view_keeps_the_array(driver):
    array = Interface(stream=SIDE)
    assert as_cupy("x", array).owner._array is array
    assert array.__cuda_array_interface__["stream"] == SIDE


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Interface(mask=Interface()), "it has a mask, which would be lost"),
        (Interface(0x3000), "its address is not in a GPU's memory"),
    ],
)
def test_an_interface_that_cannot_be_used_is_named(driver, array, reason):
    with pytest.raises(TypeError, match=rf"x is a .*Interface whose memory cannot be used \({reason}\)"):
        as_cupy("x", array)


@pytest.mark.parametrize("entry", ["data", "typestr"])
def test_an_interface_that_lacks_an_entry_is_named(driver, entry):
    array = Interface()
    del array.__cuda_array_interface__[entry]
    with pytest.raises(TypeError, match=rf"x is a .*Interface whose memory cannot be used \('{entry}'\)"):
        as_cupy("x", array)


def test_two_bytes_of_anything_are_bfloat16_if_the_array_says_so(driver):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = Interface(typestr="<V2")
    array.dtype = "torch.bfloat16"  # what str(tensor.dtype) is
    assert as_cupy("x", array).dtype == ml_dtypes.bfloat16
    assert array.__cuda_array_interface__["typestr"] == "<V2"
    array.dtype = np.dtype("V2")
    assert as_cupy("x", array).dtype == np.dtype("V2")
    assert driver.typestrs == ["<u2", "<V2"]


# --- In a capture -------------------------------------------------------------------------------------------------------


def test_in_a_capture_the_interface_is_asked_and_nothing_outside_the_graph_is_waited_for(driver):
    driver.capturing = {CONSUMER}
    for stream in (1, SIDE):
        tensor = Both(interface=Interface(stream=stream))
        as_cupy("x", tensor)
        assert tensor.asked == []
    assert [what for what, *_ in driver.log] == ["asarray"] * 2
    driver.capturing = {CONSUMER, SIDE}
    as_cupy("x", Interface(stream=SIDE))
    assert driver.log[-2:] == [("record", 0, SIDE), ("wait", 0, CONSUMER)]


def test_in_a_capture_dlpack_alone_is_refused(driver):
    driver.capturing = {CONSUMER}
    tensor = Tensor()
    with pytest.raises(
        RuntimeError, match=r"x is a .*Tensor without __cuda_array_interface__, and the current stream capt"
    ):
        as_cupy("x", tensor)
    assert tensor.asked == []
    as_cupy("x", Tensor((CUDA, 1)))  # whose stream does not capture


# --- Read-only ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [Tensor(read_only=True), Interface(read_only=True), Both(interface=Interface(read_only=True))],
    ids=["DLPack", "interface", "the one that says so"],
)
def test_read_only_arrays_are_read_and_not_written(driver, array):
    as_cupy("x", array)
    with pytest.raises(ValueError, match=r"^out is read-only: it is a .*\. Pass an array that can be written"):
        as_cupy("out", array, writable=True)


@pytest.mark.parametrize("array", [Tensor(), Interface(), Both(), OldTensor()])
def test_other_arrays_are_written(driver, array):
    assert as_cupy("out", array, writable=True).data.device_id == 0


def test_jax_arrays_are_never_written(driver, monkeypatch):
    """Their DLPack has no flag, and bfloat16 ones have no interface that would say so."""
    jax = ModuleType("jax")
    jax.Array = OldTensor
    monkeypatch.setitem(sys.modules, "jax", jax)
    as_cupy("x", OldTensor())
    with pytest.raises(ValueError, match="out is read-only"):
        as_cupy("out", OldTensor(), writable=True)


# --- Weights ------------------------------------------------------------------------------------------------------------


def test_weights_need_no_more_than_a_protocol(driver):
    """The stand-ins have neither shape nor dtype; Warp's arrays have a dtype that NumPy takes for object."""
    odd = Interface()
    odd.shape, odd.dtype = (12,), int
    layers = read_layers("MLP", [odd], None, "in_out")
    assert (layers.sizes, layers.on_gpu, layers.weights[0].dtype) == ([4, 3], True, np.float32)
    assert read_layers("MLP", [Tensor()], None, "in_out").sizes == [4, 3]
