"""CuPy, looked up when it is needed: importing cupymlp must work without CuPy and must touch no device."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from types import ModuleType
from typing import Any

from .network import numpy_dtype
from .plan import Device

__all__ = [
    "cupy_or_error",
    "declares_read_only",
    "device_numbers",
    "gpu_problem",
    "is_cupy_array",
    "is_foreign_gpu_array",
    "view_foreign",
]

_INSTALL = "install CuPy with 'pip install cupy-cuda12x' or 'pip install cupy-cuda13x', whichever suits the driver"


@cache
def gpu_problem() -> str | None:
    """Why no GPU can be used, in one line; None if one can. Asked once a process."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); {_INSTALL}"
    except OSError as error:  # it makes its cache folder when it is imported
        return f"CuPy cannot be imported ({error}); set CUPY_CACHE_DIR to a folder that can be written"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no usable CUDA driver or device ({error})"
    return None if count else "there is no CUDA device"


def cupy_or_error(asked: str) -> ModuleType:
    """The cupy module, if a GPU can be used.

    Raises
    ------
    RuntimeError
        If not; the message says what was asked and why it cannot be had.
    """
    problem = gpu_problem()
    if problem is not None:
        raise RuntimeError(f"{asked} needs a CUDA GPU, and {problem}. NumPy arrays with device='cpu' need none")
    import cupy

    return cupy  # type: ignore[no-any-return]


def is_cupy_array(array: object) -> bool:
    """Whether this is a CuPy array. Does not import CuPy: who holds a CuPy array has imported it."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


# --- Other libraries' arrays ------------------------------------------------------------------------------------------

_INTERFACE = "__cuda_array_interface__"
_CUDA_DEVICES = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged
_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2  # the addresses that stand for CUDA's two default streams

# What libraries and CuPy raise for an array that they cannot hand over. Any other error is not about the array.
_UNUSABLE = (AttributeError, BufferError, LookupError, NotImplementedError, TypeError, ValueError)


def is_foreign_gpu_array(array: object) -> bool:
    """Whether this is another library's array on a CUDA device (by DLPack or ``__cuda_array_interface__``)."""
    if is_cupy_array(array):
        return False
    if _has_dlpack(array):
        return int(array.__dlpack_device__()[0]) in _CUDA_DEVICES  # type: ignore[attr-defined]
    return hasattr(array, _INTERFACE)


def declares_read_only(array: Any) -> bool:
    """Whether another library's array says, other than by DLPack, that it must not be written."""
    jax = sys.modules.get("jax")
    if isinstance(array, getattr(jax, "Array", ())):  # its DLPack does not say so, and for bfloat16 it has no interface
        return True
    interface = getattr(array, _INTERFACE, None)
    return interface is not None and bool(interface["data"][1])


def view_foreign(what: str, array: Any) -> tuple[Any, bool]:
    """A CuPy array on the memory of another library's GPU array, and whether its DLPack or interface calls it read-only.

    CuPy's current stream of the array's device waits for what the array's producer has under way; the host does not wait. By
    DLPack the producer is told that stream and does it; ``__cuda_array_interface__`` names the producer's stream, if any.

    A stream that captures a CUDA graph cannot wait for work outside the graph, and to try ends the capture. So DLPack, whose
    producers try, is left alone there.

    Parameters
    ----------
    what
        The argument and its type, as "x is a torch.Tensor", for messages.
    array
        What `is_foreign_gpu_array` accepts.

    Raises
    ------
    TypeError
        If the library does not hand out its memory, or CuPy cannot use it.
    RuntimeError
        If there is no GPU; within a capture, if there is only DLPack.
    """
    cupy = cupy_or_error("an array on a GPU")
    try:
        if not _has_dlpack(array):
            return _view_by_interface(cupy, array)
        with cupy.cuda.Device(int(array.__dlpack_device__()[1])):
            if not _captures(cupy):
                return _view_by_dlpack(cupy, array)
            if hasattr(array, _INTERFACE):
                return _view_by_interface(cupy, array)
        raise RuntimeError(
            f"{what} without __cuda_array_interface__, and the current stream captures a CUDA graph, which DLPack may end; "
            "accepted in a capture: CuPy arrays, and arrays with that interface. Make one with cupy.from_dlpack before it"
        )
    except Exception as error:
        # torch raises RuntimeErrors too for tensors that record gradients.
        if isinstance(error, _UNUSABLE) or getattr(array, "requires_grad", False):
            raise TypeError(
                f"{what} whose memory cannot be used ({error}); accepted: a dense array of real numbers on one CUDA device. "
                "Convert it to one first"
            ) from error
        error.add_note(f"cupymlp asked for the memory of an argument: {what}")
        raise


def _has_dlpack(array: object) -> bool:
    return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")


def _captures(cupy: Any) -> bool:
    stream = cupy.cuda.get_current_stream()
    return stream.ptr > _LEGACY_STREAM and bool(stream.is_capturing())


class _Export:
    """An array as `cupy.from_dlpack` asks for it. CuPy does not look at the flag that says read-only: here it is kept."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.read_only = False

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: int, **options: Any) -> object:
        if stream == _PER_THREAD_STREAM:
            stream = _LEGACY_STREAM  # torch refuses the other; whatever waits in this one holds up the other too
        capsule: object = self._array.__dlpack__(stream=stream, **options)
        self.read_only = _is_read_only(capsule)
        return capsule


def _view_by_dlpack(cupy: Any, array: Any) -> tuple[Any, bool]:
    export = _Export(array)
    try:
        return cupy.from_dlpack(export), export.read_only
    except BufferError as refusal:
        try:
            return _view_by_interface(cupy, array)
        except cupy.cuda.runtime.CUDARuntimeError:
            raise  # this one is not about the array
        except (*_UNUSABLE, RuntimeError):  # torch's, for a tensor that records gradients
            raise refusal from None


class _VersionedTensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


_READ_ONLY_FLAG = 1
_VERSIONED = b"dltensor_versioned"
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _is_read_only(capsule: object) -> bool:
    """Whether a DLPack capsule, not yet consumed, is flagged so. Before DLPack 1.0 there were no flags."""
    if not _capsule_is_valid(capsule, _VERSIONED):
        return False
    tensor = _VersionedTensor.from_address(_capsule_pointer(capsule, _VERSIONED))
    return bool(tensor.flags & _READ_ONLY_FLAG)


class _WithoutStream:
    """An array's interface less its stream: CuPy would make the host wait for it. CuPy's view keeps this, and so the array."""

    def __init__(self, array: Any, interface: dict[str, Any]) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**interface, "stream": None}


def _view_by_interface(cupy: Any, array: Any) -> tuple[Any, bool]:
    interface = dict(getattr(array, _INTERFACE))
    if interface.get("mask") is not None:
        raise ValueError("it has a mask, which would be lost")
    address, read_only = interface["data"]
    # typestr has no bfloat16: libraries write two bytes of anything.
    bfloat16 = interface["typestr"][1:] == "V2" and str(getattr(array, "dtype", "")).rpartition(".")[2] == "bfloat16"
    if bfloat16:
        interface.update(typestr="<u2", descr=[("", "<u2")])
    device_id = cupy.cuda.runtime.pointerGetAttributes(address).device if address else -1
    with cupy.cuda.Device(device_id if device_id >= 0 else None):  # where it lies: to another device CuPy would copy it
        view = cupy.asarray(_WithoutStream(array, interface))
        if view.data.device_id < 0:
            raise ValueError("its address is not in a GPU's memory")
        if interface.get("stream") is not None:
            _wait_for(cupy, interface["stream"] or _LEGACY_STREAM)
    return view.view(numpy_dtype("bfloat16")) if bfloat16 else view, bool(read_only)


def _wait_for(cupy: Any, producer: int) -> None:
    """Make the current stream wait for what is now on another stream of the current device; the host does not wait.

    A stream that captures waits only for one that captures too: the rest is not part of the graph.
    """
    stream, runtime = cupy.cuda.get_current_stream(), cupy.cuda.runtime
    if producer == (stream.ptr or _LEGACY_STREAM):
        return
    if _captures(cupy) and not (producer > _LEGACY_STREAM and runtime.streamIsCapturing(producer)):
        return
    event = cupy.cuda.Event(disable_timing=True)
    runtime.eventRecord(event.ptr, producer)
    runtime.streamWaitEvent(stream.ptr, event.ptr)


# --- Devices ----------------------------------------------------------------------------------------------------------


@cache
def device_numbers(device_id: int) -> Device:
    """What planning needs to know of a device, asked of the driver once."""
    cupy = cupy_or_error("planning for a GPU")
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    name = properties["name"]
    return Device(
        name=name.decode() if isinstance(name, bytes) else str(name),
        compute_capability=10 * properties["major"] + properties["minor"],
        multiprocessors=properties["multiProcessorCount"],
        shared_bytes=properties.get("sharedMemPerBlockOptin") or properties["sharedMemPerBlock"],
        max_grid=properties["maxGridSize"][0],
    )
