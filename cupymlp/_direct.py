"""A kernel's launch by the driver's own call, with arguments that are filled in place.

CuPy's Function takes apart whatever arguments it gets, at every call. Here only two of them change from call to call, the
addresses of x and out; the rest is written once. With it a call with all its checks costs the host no more than a bare
RawKernel call without any (benchmarks/latency-h200.json).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._gpu import cupy_or_error

__all__ = ["direct_launch"]

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class _Arguments:
    """A kernel's arguments as the driver takes them: the address of a list of the addresses of values."""

    __slots__ = ("_addresses", "_numbers", "address", "values")

    def __init__(self, weights: int, rows: Sequence[int]) -> None:
        self._numbers = np.array([0, 0, weights, *rows], np.int64)
        first = self._numbers.ctypes.data
        self._addresses = np.array([first, first + 8, first + 16, first + 24], np.int64)
        self.address = self._addresses.ctypes.data
        self.values = self._numbers.data  # [0]: the address of x, [1]: of out


def direct_launch(
    function: Any, grid: int, block: int, shared_bytes: int, weights: int, rows: Sequence[int], device_id: int
) -> Callable[[int, int], int]:
    """A launch that is ready but for two addresses: ``launch(x, out)``.

    It goes to the current stream of the device, which must be the current one, and returns the stream's address.

    Parameters
    ----------
    function
        CuPy's Function of a RawModule, for the device; the caller keeps it.
    grid, block, shared_bytes
        Of the launch.
    weights
        The address of the packed weights, which the caller keeps.
    rows
        The 64-bit integers of the kernel's Rows argument.
    device_id
        The device.
    """
    cuda = cupy_or_error("a call on the GPU").cuda
    launch_kernel, current_stream, set_device = (
        cuda.driver.launchKernel,
        cuda.get_current_stream,
        cuda.runtime.setDevice,
    )
    driver_error = cuda.driver.CUDADriverError
    kernel = function.ptr
    free: list[_Arguments] = []

    # A function and not a class with __call__: that would cost 0.2 us more.
    def launch(x: int, out: int) -> int:
        # Arguments in use stay out of the list: another thread, or a signal handler, that launches the same takes others.
        arguments = free.pop() if free else _Arguments(weights, rows)
        values = arguments.values
        values[0] = x
        values[1] = out
        stream: int = current_stream(device_id).ptr
        try:
            launch_kernel(kernel, grid, 1, 1, block, 1, 1, shared_bytes, stream, arguments.address, 0)
        except driver_error as error:
            if error.status != NO_CONTEXT:
                raise
            # The first use of CUDA by this thread: the driver's call, unlike the runtime's, makes no context current.
            set_device(device_id)
            launch_kernel(kernel, grid, 1, 1, block, 1, 1, shared_bytes, stream, arguments.address, 0)
        free.append(arguments)
        return stream

    return launch
