"""NumPy in, NumPy out on the GPU.

Small arrays go through staging memory that is kept for the next call: page-locked host memory, which the kernel itself reads
and writes, and a CUDA graph of the launch. A call copies x in, launches the graph, waits, and copies the result out. Staging
memory belongs to a thread, a network and a shape; a few shapes are kept. Larger arrays are copied to the GPU and back. (Page-
locked copies in the graph were never the fastest: benchmarks/exploration-h200.txt.)
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._gpu import cupy_or_error, gpu_problem
from ._launch import PackedNet
from .network import numpy_dtype

__all__ = ["Host"]

# Bytes of x and out together up to which the kernel reads and writes host memory (on an H200 the copies are as fast from 1 MB).
MAPPED_BYTES = 1 << 20
KEPT_SHAPES = 8  # of a network, in a thread

_forked = threading.Event()  # set in the child of a process that had used CUDA


def _note_fork() -> None:
    if gpu_problem.cache_info().currsize:
        _forked.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class _Staging:
    """Host memory for x and for the result, and the graph between them, on the current device."""

    def __init__(self, net: PackedNet, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        cupy = cupy_or_error("device='cuda'")
        cuda = cupy.cuda
        device_id = cuda.runtime.getDevice()
        self._host: list[Any] = []  # keeps the memory

        def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            size = math.prod(shape) * dtype.itemsize
            memory = cuda.alloc_pinned_memory(size)
            self._host.append(memory)
            return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)

        def on_device(array: Any) -> Any:
            """One address space: the device reads and writes host memory where it is."""
            memory = cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, device_id)
            rows = (math.prod(array.shape[:-1]), array.shape[-1])  # NumPy has more axes than CuPy
            return cupy.ndarray(rows, array.dtype, memptr=cuda.MemoryPointer(memory, 0))

        self._x = pinned(shape, dtype.newbyteorder("="))
        self._out = pinned((*shape[:-1], net.network.sizes[-1]), numpy_dtype(net.network.dtype))
        self._arrays = on_device(self._x), on_device(self._out)  # what the graph reads and writes
        self._graph: Any = None
        self._launch, self._wait = cuda.runtime.graphLaunch, cuda.runtime.streamSynchronize
        # The graph of several launches would keep scratch memory forever.
        if not net.launches_once(self._arrays[0]):
            return
        self._x[...] = 0
        self._stream = cuda.Stream(non_blocking=True)
        with self._stream:
            net(*self._arrays)  # compiles, and uploads the weights
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                net(*self._arrays)
            finally:
                self._graph = self._stream.end_capture()

    @property
    def usable(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def takes(self, out: NDArray[Any]) -> bool:
        """Whether the result can be copied into this array, without any check."""
        return out.shape == self._out.shape and out.dtype == self._out.dtype and out.flags.writeable

    def run(self, x: NDArray[Any], out: NDArray[Any] | None) -> NDArray[Any]:
        """Compute the network of x; returns the result, in out or in a new array."""
        self._x[...] = x
        self._launch(self._graph.graphExec, self._stream.ptr)
        self._wait(self._stream.ptr)
        if out is None:
            return self._out.copy()  # type: ignore[no-any-return]
        out[...] = self._out
        return out


class Host:
    """A network's calls on NumPy arrays on the GPU, from any thread.

    Parameters
    ----------
    net
        The network.
    """

    def __init__(self, net: PackedNet) -> None:
        self._net = net
        self._thread = threading.local()
        self._can_stage = net.network.precision != "library"  # cuBLAS cannot be captured
        self._current_device = cupy_or_error("device='cuda'").cuda.runtime.getDevice

    def replay(self, x: NDArray[Any], out: Any) -> NDArray[Any] | None:
        """The network of x on the current device, if such a call was made before and nothing is wrong with out; else None."""
        try:
            kept = self._thread.kept
        except AttributeError:  # the thread's first call
            return None
        if _forked.is_set():
            return None
        key = (self._current_device(), x.shape, x.dtype)
        # Out of the table while it is used: a signal handler that calls the same takes another, and one that failed is not
        # used again.
        staging: _Staging | None = kept.pop(key, None)
        if staging is None:
            return None
        if not staging.usable or (out is not None and not (type(out) is np.ndarray and staging.takes(out))):
            kept[key] = staging
            return None
        y = staging.run(x, out)
        kept[key] = staging
        return y

    def run(self, x: NDArray[Any], out: NDArray[np.floating]) -> None:
        """Compute ``out = net(x)`` on the current device; returns when out is there.

        Parameters
        ----------
        x
            Shape (..., K), not empty, any strides and byte order.
        out
            Shape (..., N), of the network's dtype in either byte order, any strides. x is read before it is written.

        Raises
        ------
        RuntimeError
            In the forked child of a process that had used the GPU.
        """
        if _forked.is_set():
            raise RuntimeError(
                "CUDA cannot be used in this process, which was forked from one that had used it: start processes with "
                "multiprocessing.get_context('spawn'), or pass device='cpu'"
            )
        if not (self._can_stage and x.size and x.nbytes + out.nbytes <= MAPPED_BYTES):
            self._copy(x, out)
            return
        kept = self._thread.__dict__.setdefault("kept", {})
        key = (self._current_device(), x.shape, x.dtype)
        staging = kept.pop(key, None) or _Staging(self._net, x.shape, x.dtype)
        if staging.usable:
            staging.run(x, out)
        else:
            self._copy(x, out)
        kept[key] = staging
        if len(kept) > KEPT_SHAPES:
            del kept[next(iter(kept))]  # the one that has not been used for longest

    def _copy(self, x: NDArray[Any], out: NDArray[np.floating]) -> None:
        """Upload, launch, download."""
        cupy = cupy_or_error("device='cuda'")
        rows = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("="))
        if rows.ndim > 2:  # NumPy has more axes than CuPy
            rows = rows.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        on_gpu = cupy.ndarray(rows.shape, rows.dtype)
        on_gpu.set(rows)  # 8 us less than cupy.asarray, which goes through pinned memory
        result = self._net(on_gpu)
        if out.ndim <= 2 and out.flags.c_contiguous and out.dtype.isnative and out.flags.aligned:
            result.get(out=out)
        else:
            out[...] = result.get().reshape(out.shape)
