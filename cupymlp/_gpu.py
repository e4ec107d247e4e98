"""CuPy, looked up when it is needed: importing cupymlp must work without CuPy and must touch no device."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

from .plan import Device

__all__ = ["cupy_or_error", "device_numbers", "gpu_problem", "is_cupy_array", "is_foreign_gpu_array", "view_foreign"]

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


def is_foreign_gpu_array(array: object) -> bool:
    """Whether this is another library's array on a CUDA device (by DLPack or ``__cuda_array_interface__``)."""
    if is_cupy_array(array):
        return False
    device = getattr(array, "__dlpack_device__", None)
    if device is not None and hasattr(array, "__dlpack__"):
        return int(device()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged
    return hasattr(array, "__cuda_array_interface__")


def view_foreign(array: Any) -> Any:
    """A CuPy array on the same memory as another library's GPU array, ordered after that library's work on it."""
    cupy = cupy_or_error("an array on a GPU")
    if hasattr(array, "__dlpack__"):
        return cupy.from_dlpack(array)
    return cupy.asarray(array)


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
