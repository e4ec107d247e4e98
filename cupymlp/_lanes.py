"""Lanes: the buffers of `MLP.map`'s GPU engine, in page-locked memory and on the GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lane", "PageLocked", "Rows", "Shapes"]

HUGE_PAGE = 2 << 20


class Shapes:
    """What the longest chunk has."""

    def __init__(self, rows: int, k: int, n: int, x_dtype: np.dtype[Any], y_dtype: np.dtype[Any]) -> None:
        self.x, self.y = (rows, k), (rows, n)
        self.x_dtype, self.y_dtype = x_dtype, y_dtype
        self.y_at = _whole(rows * k * x_dtype.itemsize, 512)  # as the allocators of device memory align
        self.y_end = self.y_at + rows * n * y_dtype.itemsize
        self.bytes = _whole(max(1, self.y_end), HUGE_PAGE if self.y_end > HUGE_PAGE else 4096)

    def arrays(self, memory: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Views of a lane's host memory: x and y."""
        x = memory[: self.x[0] * self.x[1] * self.x_dtype.itemsize].view(self.x_dtype).reshape(self.x)
        return x, memory[self.y_at : self.y_end].view(self.y_dtype).reshape(self.y)


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class PageLocked:
    """Host memory that the GPU reads and writes, until the with block ends.

    NumPy's memory, page-locked afterwards: Linux backs it with huge pages where it is allowed to, so that locking it takes a
    third, and giving it back a tenth, of what CUDA's own page-locked memory takes.
    """

    def __init__(self, cupy: Any, size: int) -> None:
        self._runtime = cupy.cuda.runtime
        self._size = size

    def __enter__(self) -> PageLocked:
        memory = np.empty(self._size + HUGE_PAGE, np.uint8)
        first = -memory.ctypes.data % HUGE_PAGE
        self._memory: Any = memory[first : first + self._size]
        self._address = self._memory.ctypes.data
        try:
            self._runtime.hostRegister(self._address, self._size, 0)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, which may come when the call is done, or before it was made
                with contextlib.suppress(Exception):
                    self._runtime.hostUnregister(self._address)
            self._memory = None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.hostUnregister(self._address)
        self._memory = None

    def take(self, start: int, stop: int) -> NDArray[np.uint8]:
        """These bytes of it."""
        return self._memory[start:stop]  # type: ignore[no-any-return]


@dataclass
class Rows:
    """The first so many rows of a lane's buffers, and how they are copied: the arguments of cudaMemcpyAsync."""

    host_x: NDArray[Any]
    host_y: NDArray[Any]
    x: Any
    y: Any
    upload: tuple[int, ...]
    download: tuple[int, ...]
    graph: Any = None  # of upload, kernel and download, once they have run and if that is one launch


class Lane:
    """A stream, an event and buffers for one chunk: x and y in page-locked memory, x and y on the GPU."""

    def __init__(self, cupy: Any, shapes: Shapes, host: NDArray[np.uint8], stream: Any, done: Any) -> None:
        def on_device(shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
            """From CuPy's current allocator."""
            memory = cupy.cuda.alloc(max(1, shape[0] * shape[1] * dtype.itemsize))
            return cupy.ndarray(shape, dtype, memptr=memory)

        self.stream, self.done = stream, done
        self._runtime = cupy.cuda.runtime
        self._buffers: Any = (
            *shapes.arrays(host),
            on_device(shapes.x, shapes.x_dtype),
            on_device(shapes.y, shapes.y_dtype),
        )
        self._rows: dict[int, Rows] = {}

    def rows(self, count: int) -> Rows:
        """The first rows. Kept: slicing CuPy's arrays in every chunk halved the rate (benchmarks/exploration-h200.txt)."""
        rows = self._rows.get(count)
        if rows is None:
            host_x, host_y, x, y = (buffer[:count] for buffer in self._buffers)
            runtime, stream = self._runtime, self.stream.ptr
            rows = self._rows[count] = Rows(
                host_x,
                host_y,
                x,
                y,
                (x.data.ptr, host_x.ctypes.data, x.nbytes, runtime.memcpyHostToDevice, stream),
                (host_y.ctypes.data, y.data.ptr, y.nbytes, runtime.memcpyDeviceToHost, stream),
            )
        return rows

    def free(self) -> None:
        """Let go of everything, whoever still holds the lane (an exception's traceback may)."""
        self._buffers = self.stream = self.done = None
        self._rows.clear()
