"""Plans of several launches: rounds of rows, the scratch memory between launches, and cuBLAS's products.

Scratch memory belongs to a stream, or to the CUDA graphs that are captured on one: what runs in order shares it, what may run
side by side does not. It grows, and is never freed, since a captured graph may hold its address.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._compile import kernel_for
from ._gpu import cupy_or_error, device_numbers
from .network import Network
from .plan import VECTOR_BYTES, Access, Plan, layer_vectors
from .schedules.layer import layer_scratch, layer_steps
from .schedules.matmul import array_offsets, matmul_scratch, matmul_steps
from .schedules.steps import Step

__all__ = ["Chain", "cublas_reads", "record", "refuse_in_capture"]

PER_THREAD_STREAM = 2  # the address that stands for each thread's own default stream

# cuBLAS's names for types. Pedantic float32 takes no TF32, whatever a handle or the environment says.
_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_32F_PEDANTIC, _COMPUTE_64F = 68, 69, 70
_NO_TRANSPOSE, _TRANSPOSE, _DEFAULT_ALGORITHM = 0, 1, -1
_LARGEST_INT = 2**31 - 1


def refuse_in_capture(
    why: str = "the first call with these shapes, strides and dtypes compiles a kernel and allocates memory, which a stream "
    "that captures a CUDA graph does not allow: make the same call once before the capture",
) -> None:
    """Raise RuntimeError, with this message, if the current stream captures a CUDA graph."""
    cupy = cupy_or_error("a call on the GPU")
    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(why)


# --- Scratch memory -----------------------------------------------------------------------------------------------------


class _Memory:
    """Scratch memory of one stream. Its lock keeps two threads' launches on that stream from mixing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.address = 0
        self.size = 0


_memories: dict[tuple[int, int, int, bool], _Memory] = {}
_spares: dict[int, tuple[int, int]] = {}  # for each device one address and size that the next capture may take
_kept: list[Any] = []  # all that was ever allocated
_memories_lock = threading.Lock()


def _memory(stream: Any, device_id: int, capturing: bool) -> _Memory:
    thread = threading.get_ident() if stream.ptr == PER_THREAD_STREAM else 0
    key = (device_id, stream.ptr, thread, capturing)
    memory = _memories.get(key)
    if memory is None:
        with _memories_lock:
            memory = _memories.setdefault(key, _Memory())
    return memory


def _grow(memory: _Memory, size: int, device_id: int, capturing: bool) -> None:
    """Make it at least as large. Within a capture nothing can be allocated: it takes what earlier calls have put aside."""
    with _memories_lock:
        spare_address, spare_size = _spares.get(device_id, (0, 0))
        if capturing and memory.size < size:
            if spare_size < size:
                refuse_in_capture()
            memory.address, memory.size = spare_address, spare_size
            del _spares[device_id]
        if not capturing and memory.size < size:
            memory.address, memory.size = _allocate(size), size
        if not capturing and spare_size < size:
            _spares[device_id] = _allocate(size), size


def _allocate(size: int) -> int:
    cupy = cupy_or_error("a call on the GPU")
    _kept.append(cupy.cuda.Memory(size))
    return int(_kept[-1].ptr)


# --- Launches -----------------------------------------------------------------------------------------------------------


def record(numbers: Sequence[int]) -> NDArray[np.void]:
    """64-bit integers as one kernel argument that is passed by value."""
    return np.array(numbers, dtype=np.int64).view(f"V{8 * len(numbers)}")


@dataclass(frozen=True)
class _LayerWeights:
    """A layer's weights: the argument of mlp_layer, or where they are, with strides in elements."""

    argument: Any
    weight: int = 0
    bias: int = 0
    k_stride: int = 0
    j_stride: int = 0
    bias_stride: int = 0

    @property
    def bias_argument(self) -> NDArray[np.void]:
        """The argument of bias_act and softmax: struct Weights of common.cuh with the bias alone."""
        return record([0, self.bias, 0, 0, self.bias_stride])


class Chain:
    """The launches of a plan. It is called as CuPy's Function of a single kernel is.

    Parameters
    ----------
    plan, access
        What to launch, and how x and out are read and written.
    device_id
        The current device.
    """

    def __init__(self, plan: Plan, access: Access, device_id: int) -> None:
        network, device = plan.network, device_numbers(device_id)
        steps: Sequence[Step]
        if plan.schedule == "layer":
            steps, _, _ = layer_steps(network, plan.batch, device, access)
            scratch = layer_scratch(network)
        else:
            steps = matmul_steps(network, plan.rows_at_once, device, access)
            scratch = matmul_scratch(network, access)
        kernels: list[Any] = [None if s.kernel is None else kernel_for(s.kernel, device_id).launcher() for s in steps]
        self._steps = list(zip(steps, kernels, strict=True))
        self._cublas = None if plan.layout == "vectors" else _Cublas(network)
        self._network, self._access = network, access
        self._batch, self._rows = plan.batch, plan.rows_at_once
        self._device_id = device_id
        self._offsets, self._scratch_bytes = scratch.offsets(self._rows), scratch.total(self._rows)

    def __call__(self, _grid: Any, _block: Any, arguments: tuple[Any, Any, Any, Any], _shared_bytes: int) -> None:
        """Launch everything on the current stream. The arguments are those of a kernel: x, out, weights, rows."""
        x, out, weights, rows = arguments
        stream = cupy_or_error("a call on the GPU").cuda.get_current_stream()
        capturing = stream.is_capturing()
        if capturing and self._cublas is not None:
            raise RuntimeError(
                "precision='library' calls cuBLAS, which CuPy does not let a CUDA graph capture: call it outside the "
                "capture, or use another precision"
            )
        layers = self._weights_of_layers(weights)
        addresses = {"x": x.data.ptr, "y": out.data.ptr}
        memory = _memory(stream, self._device_id, capturing)
        with memory.lock:
            if self._scratch_bytes:
                if memory.size < self._scratch_bytes or not capturing:
                    _grow(memory, self._scratch_bytes, self._device_id, capturing)
                addresses |= {name: memory.address + offset for name, offset in self._offsets.items()}
            for first in range(0, self._batch, self._rows):
                self._round(stream, addresses, layers, rows, first, min(self._rows, self._batch - first))

    def _round(
        self, stream: Any, addresses: dict[str, int], layers: list[_LayerWeights], rows: Any, first: int, count: int
    ) -> None:
        """All steps, for count rows from first on."""
        cublas: Any = self._cublas  # there is one if a step has no kernel
        for step, kernel in self._steps:
            source = addresses.get(step.source, 0)  # an array of no features is nowhere, and is not read
            target = addresses[step.target]
            source_first = first if step.source in {"x", "y"} else 0
            target_first = first if step.target in {"x", "y"} else 0
            weights = layers[max(step.layer, 0)]
            if step.kernel is None:
                cublas.product(stream, step.layer, source, source_first, weights, target, target_first, count)
                continue
            argument = weights.argument if step.kernel.name == "mlp_layer" else weights.bias_argument
            arguments = (source, target, argument, rows if step.strided else count, source_first, target_first, count)
            kernel((step.kernel.grid[0], 1, 1), (step.kernel.block[0], 1, 1), arguments, step.kernel.shared_bytes)

    def _weights_of_layers(self, weights: Any) -> list[_LayerWeights]:
        """What every layer's launches read, out of the packed weights or of the table of the caller's own."""
        network = self._network
        if not self._access.packed:  # struct Weights of common.cuh
            table = weights.view(np.int64).reshape(5, network.depth).T.tolist()
            return [_LayerWeights(record(layer), *layer) for layer in table]
        start = weights.data.ptr
        if self._cublas is None:
            vectors = np.cumsum([0, *(layer_vectors(network, layer) for layer in range(network.depth - 1))])
            return [_LayerWeights(start + VECTOR_BYTES * int(at)) for at in vectors]
        arrays = zip(array_offsets(network), network.sizes[1:], strict=True)
        return [_LayerWeights(None, start + at, start + bias, n, 1, 1) for (at, bias), n in arrays]


# --- cuBLAS -------------------------------------------------------------------------------------------------------------


def cublas_reads(k: int, n: int, k_stride: int, j_stride: int) -> tuple[int, int] | None:
    """How cuBLAS reads a (K, N) matrix with these strides: the operation and the leading dimension; None if it cannot.

    cuBLAS's matrices are column-major: the transpose of a matrix in C order is read as it is.
    """
    if (n <= 1 or j_stride == 1) and (k <= 1 or n <= k_stride <= _LARGEST_INT):
        return _NO_TRANSPOSE, max(k_stride if k > 1 else n, 1)
    if (k <= 1 or k_stride == 1) and (n <= 1 or k <= j_stride <= _LARGEST_INT):
        return _TRANSPOSE, max(j_stride if n > 1 else k, 1)
    return None


class _Cublas:
    """Products of a network's layers, in its dtype, or in float32 for float16 and bfloat16."""

    def __init__(self, network: Network) -> None:
        cupy = cupy_or_error("precision='library'")
        try:
            self._gemm = cupy.cuda.cublas.gemmEx
        except ImportError as error:
            raise RuntimeError(
                f"precision='library' needs cuBLAS, which CuPy cannot load ({error}): install the package that CuPy "
                "names, or use another precision"
            ) from error
        self._handle = cupy.cuda.device.get_cublas_handle
        self._zero = cupy.cuda.runtime.memsetAsync
        self._network = network
        self._type, self._sum_type = _CUDA_TYPES[network.dtype], _CUDA_TYPES[network.sum_dtype]
        self._compute = {"float32": _COMPUTE_32F_PEDANTIC, "float64": _COMPUTE_64F}.get(network.dtype, _COMPUTE_32F)
        self._scalars = np.array([1, 0], network.sum_dtype)

    def product(
        self,
        stream: Any,
        layer: int,
        source: int,
        source_first: int,
        weights: _LayerWeights,
        target: int,
        target_first: int,
        count: int,
    ) -> None:
        """``target (count, N) = source (count, K) @ weights``, both contiguous."""
        k, n = self._network.sizes[layer : layer + 2]
        size, sum_size = self._network.itemsize, self._scalars.itemsize
        source += source_first * k * size
        target += target_first * n * sum_size
        if k == 0:
            self._zero(target, 0, count * n * sum_size, stream.ptr)
            return
        operation, leading = cublas_reads(k, n, weights.k_stride, weights.j_stride) or (0, 0)
        one = self._scalars.ctypes.data
        self._gemm(
            self._handle(), operation, _NO_TRANSPOSE, n, count, k,
            one, weights.weight, self._type, leading, source, self._type, k,
            one + sum_size, target, self._sum_type, n, self._compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip
