"""The launch: weights on a device, arguments, shared memory, current stream.

Two kinds of call share it. An `MLP` has packed weights, uploaded once a device, and remembers what it prepared for each
combination of shapes, strides and dtypes, so that a repeated call costs a dictionary look-up and the launch. `fused_mlp`
passes the caller's own weight arrays.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._chain import Chain, cublas_reads, record, refuse_in_capture
from ._compile import kernel_for
from ._direct import direct_launch
from ._gpu import cupy_or_error, device_numbers
from ._pack import pack
from ._recorders import keep, recorders
from ._strides import byte_bounds, merge_axes
from .network import Network, numpy_dtype
from .plan import CONTIGUOUS, Access
from .schedules import plan_gpu

__all__ = ["FusedCall", "PackedNet", "aligned", "find_fused", "fused_key", "overlap", "remember_fused"]

PREPARED_CALLS = 256  # remembered by an MLP; past that it starts afresh
ALIGNMENT_BITS = 7  # of an address: what the largest element needs to be 0
ARGUMENT_BYTES = 4096 - 512  # of kernel arguments that every driver takes, less those that are not weights


@dataclass(frozen=True)
class _Call:
    """Everything about a call that its shapes, strides, dtypes and device determine."""

    launcher: Any  # CuPy's Function, or a Chain of them; None if there is nothing to compute
    chain: bool
    layout: str  # of the weights that the kernel reads
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    rows: Any  # the kernel's Rows argument: the batch size, or a record that begins with it
    x_bounds: tuple[int, int]  # bytes that x touches, from its first element
    out_bounds: tuple[int, int]
    out_shape: tuple[int, ...]


def _prepare(network: Network, schedule: str | None, x: Any, out: Any, *, packed: bool) -> _Call:
    """Plan, compile and describe a call on the current device; out is None if it is still to be allocated."""
    shape, x_strides, x_dtype = x.shape, x.strides, x.dtype
    out_shape = (*shape[:-1], network.sizes[-1])
    batch = math.prod(shape[:-1])
    if batch == 0 or network.sizes[-1] == 0:
        return _Call(None, False, "", (0, 0, 0), (0, 0, 0), 0, None, (0, 0), (0, 0), out_shape)
    x_itemsize, out_itemsize = x_dtype.itemsize, network.itemsize
    out_strides = _c_strides(out_shape, out_itemsize) if out is None else out.strides
    if any(length > 1 and step == 0 for length, step in zip(out_shape, out_strides, strict=True)):
        raise ValueError(
            "out is a broadcast array, whose elements share memory: pass an array with room for every element"
        )
    whole = _is_aligned(x) and (out is None or _is_aligned(out))
    device_id = x.data.device_id
    axes, (x_steps, out_steps) = merge_axes(shape[:-1], x_strides[:-1], out_strides[:-1])
    x_name = x_dtype.name
    contiguous = (
        whole
        and len(axes) <= 1
        and _is_plain(axes, x_steps, shape[-1], x_strides[-1], x_itemsize)
        and _is_plain(axes, out_steps, out_shape[-1], out_strides[-1], out_itemsize)
    )
    rows: Any
    if contiguous:
        access = Access(x_name, packed=packed) if x_name != network.dtype or not packed else CONTIGUOUS
        rows = batch
    else:
        kind = "strided" if whole else "unaligned"
        axes, x_steps, out_steps = axes or (1,), x_steps or (0,), out_steps or (0,)
        access = Access(x_name, kind, kind, len(axes), packed)
        rows = record([batch, x_strides[-1], out_strides[-1], *axes, *x_steps, *out_steps])
    refuse_in_capture()
    plan = plan_gpu(network, batch, device_numbers(device_id), access, schedule)
    chain = plan.rows_at_once > 0
    return _Call(
        launcher=Chain(plan, access, device_id) if chain else kernel_for(plan.kernels[0], device_id).launcher(),
        chain=chain,
        layout=plan.layout,
        grid=(0, 0, 0) if chain else (plan.grid[0], 1, 1),
        block=(0, 0, 0) if chain else (plan.block[0], 1, 1),
        shared_bytes=plan.shared_bytes,
        rows=rows,
        x_bounds=byte_bounds(shape, x_strides, x_itemsize),
        out_bounds=byte_bounds(out_shape, out_strides, out_itemsize),
        out_shape=out_shape,
    )


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _is_plain(axes: tuple[int, ...], steps: tuple[int, ...], features: int, feature_step: int, itemsize: int) -> bool:
    """Whether rows follow each other without gaps, feature by feature."""
    return (features <= 1 or feature_step == itemsize) and (not axes or steps[0] == features * itemsize)


def _overlap(x_pointer: int, x_bounds: tuple[int, int], out_pointer: int, out_bounds: tuple[int, int]) -> bool:
    return (
        x_pointer + x_bounds[0] < out_pointer + out_bounds[1] and out_pointer + out_bounds[0] < x_pointer + x_bounds[1]
    )


def overlap(x: Any, out: Any) -> bool:
    """Whether two arrays share memory, as far as the bytes from the first to the last one of each say."""
    x_bytes, out_bytes = (byte_bounds(a.shape, a.strides, a.dtype.itemsize) for a in (x, out))
    return _overlap(x.data.ptr, x_bytes, out.data.ptr, out_bytes)


def _remember(known: dict[Any, Any], key: Any, call: Any, lock: threading.Lock) -> None:
    with lock:
        if len(known) >= PREPARED_CALLS:
            known.clear()
        known[key] = call


class _Prepared:
    """A call of a `PackedNet` that needs nothing but addresses."""

    __slots__ = ("direct", "launcher", "nearest_above", "nearest_below", "out_shape", "rows", "weights")

    def __init__(self, call: _Call, weights: Any, device_id: int) -> None:
        # The distances of x from out, by their first elements, between which they overlap.
        self.nearest_below = call.out_bounds[0] - call.x_bounds[1]
        self.nearest_above = call.out_bounds[1] - call.x_bounds[0]
        self.out_shape = call.out_shape
        self.launcher, self.weights, self.rows = call.launcher, weights, call.rows
        self.direct: Callable[[int, int], int] | None = None
        if call.launcher is not None and not call.chain:
            rows = [call.rows] if isinstance(call.rows, int) else call.rows.view(np.int64).tolist()
            place = (call.grid[0], call.block[0], call.shared_bytes)
            self.direct = direct_launch(call.launcher, *place, weights.data.ptr, rows, device_id)


class PackedNet:
    """A network's packed weights, on the host and on every device that has used them, and its calls on CuPy arrays.

    Parameters
    ----------
    network
        What to compute.
    weights, biases
        One (K, N) array a layer and one (N,) array or None, NumPy, of the network's dtype.
    check
        ``check(shape, dtype, out_shape, out_dtype)`` raises what a user should see if x or out does not fit; the last two
        are None if there is no out. Called when a combination is first seen.
    schedule
        Force this one; None: the planner chooses.
    """

    def __init__(
        self,
        network: Network,
        weights: Sequence[NDArray[Any]],
        biases: Sequence[NDArray[Any] | None],
        check: Callable[..., None],
        schedule: str | None = None,
    ) -> None:
        self._network = network
        self._weights, self._biases = weights, biases
        self._check = check
        self._schedule = schedule
        self._dtype = numpy_dtype(network.dtype)
        self._on_device: dict[tuple[int, str], Any] = {}
        self._calls: dict[tuple[Any, ...], _Prepared] = {}
        self._latest: tuple[Any, Any] = (None, None)  # the key and the value that were used last
        self._lock = threading.Lock()
        self._cupy = cupy_or_error("a call on the GPU")
        self._current_device = self._cupy.cuda.runtime.getDevice
        self._ndarray = self._cupy.ndarray

    def __call__(self, x: Any, out: Any = None) -> Any:
        """The network of x (a CuPy array), on x's device and its current stream, in out or in a new CuPy array."""
        return self.run(x, out)

    def run(self, x: Any, out: Any) -> Any:
        """The same: a plain method, which costs less to call."""
        memory = x.data
        device_id = memory.device_id
        if device_id != self._current_device():
            with self._cupy.cuda.Device(device_id):
                return self.run(x, out)
        pointer = memory.ptr
        key: tuple[Any, ...]
        if out is None:
            out_pointer = 0
            key = (device_id, x.shape, x._c_contiguous or x.strides, x.dtype, pointer & ALIGNMENT_BITS)
        else:
            to = out.data
            out_pointer = to.ptr
            bits = (pointer | out_pointer) & ALIGNMENT_BITS
            # CuPy's own mark: strides are a tuple to be made, and follow from the shape of a contiguous array.
            layout, to_layout = x._c_contiguous or x.strides, out._c_contiguous or out.strides
            key = (device_id, x.shape, layout, x.dtype, bits, out.shape, to_layout, out.dtype, to.device_id)
        latest, call = self._latest  # comparing tuples takes a third of hashing them
        if key != latest:
            call = self._calls.get(key) or self._prepare(key, x, out)
            self._latest = key, call
        if out is None:
            out = self._ndarray(call.out_shape, self._dtype)
            out_pointer = out.data.ptr
        elif call.nearest_below < pointer - out_pointer < call.nearest_above:
            # They overlap; as NumPy: the answer of arrays that do not.
            refuse_in_capture(
                "x and out overlap, and a copy of x would not live as long as the graph that the current stream captures: pass "
                "arrays that do not overlap"
            )
            return self.run(_copy(x), out)
        if call.direct is not None:
            stream = call.direct(pointer, out_pointer)
            if recorders:
                keep(stream, self, (x, out))
        elif call.launcher is not None:
            call.launcher((0, 0, 0), (0, 0, 0), (x, out, call.weights, call.rows), 0)
            if recorders:
                keep(self._cupy.cuda.get_current_stream().ptr, self, (x, out))
        return out

    @property
    def network(self) -> Network:
        """What it computes."""
        return self._network

    def launches_once(self, x: Any) -> bool:
        """Whether a call on an x like this, and a contiguous out, is one launch of one kernel."""
        access = CONTIGUOUS if x.dtype.name == self._network.dtype else Access(x.dtype.name)
        batch = math.prod(x.shape[:-1])
        plan = plan_gpu(self._network, batch, device_numbers(x.data.device_id), access, self._schedule)
        return plan.rows_at_once == 0

    def _prepare(self, key: tuple[Any, ...], x: Any, out: Any) -> _Prepared:
        """Check and prepare what was not seen before."""
        if out is None:
            self._check(x.shape, x.dtype, None, None)
        else:
            self._check(x.shape, x.dtype, out.shape, out.dtype)
            if out.data.device_id != x.data.device_id:
                raise ValueError(
                    f"x is on device {x.data.device_id} and out on device {out.data.device_id}: pass an out on x's device"
                )
        call = _prepare(self._network, self._schedule, x, out, packed=True)
        device_id = x.data.device_id
        weights = None
        if call.launcher is not None:
            self._upload(device_id, call.layout)
            weights = self._on_device[device_id, call.layout]
        prepared = _Prepared(call, weights, device_id)
        _remember(self._calls, key, prepared, self._lock)
        if out is None:  # and the call that then gives what this one returns
            with_out = (*key, call.out_shape, True, self._dtype, device_id)
            _remember(self._calls, with_out, prepared, self._lock)
        return prepared

    def _upload(self, device_id: int, layout: str) -> None:
        """Put the weights on the current device, once. Waits until they are there: any stream may read them next."""
        with self._lock:
            if (device_id, layout) in self._on_device:
                return
            refuse_in_capture()
            packed = pack(np, layout, self._network, self._weights, self._biases)
            # Memory of its own, not the pool's: freeing it waits for the kernels that may still read it, on any stream.
            memory = self._cupy.cuda.MemoryPointer(self._cupy.cuda.Memory(max(packed.nbytes, 16)), 0)
            weights = self._cupy.ndarray(packed.shape, packed.dtype, memptr=memory)
            stream = self._cupy.cuda.get_current_stream()
            weights.set(packed, stream=stream)
            stream.synchronize()
            self._on_device[device_id, layout] = weights


# --- The caller's own weight arrays -----------------------------------------------------------------------------


class FusedCall:
    """One launch on the caller's own arrays, on their device: no weight is copied, packed or kept.

    Prepared for arrays of these shapes, strides, dtypes and alignments; called with any such arrays. Networks so deep that
    the layers' pointers and strides outgrow a kernel's arguments are packed at each call, and so are weights for tensor cores
    and those that cuBLAS cannot read for ``precision="library"``.

    Parameters
    ----------
    network
        What to compute.
    weight_layout
        Of the weights, here and in every call: a remembered call gets the caller's own arrays.
    weights, biases
        One CuPy array a layer, (K, N) or (N, K), and one (N,) or None, of the network's dtype, aligned, any strides.
    x, out
        CuPy arrays, already checked; out is None if the call allocates it.
    schedule
        Force this one; None: the planner chooses.
    """

    def __init__(
        self,
        network: Network,
        weight_layout: str,
        weights: Sequence[Any],
        biases: Sequence[Any],
        x: Any,
        out: Any,
        schedule: str | None = None,
    ) -> None:
        self._network = network
        self._weight_layout = weight_layout
        self._schedule = schedule
        self._packed = 5 * 8 * network.depth > ARGUMENT_BYTES
        self._call = _prepare(network, schedule, x, out, packed=self._packed)
        size = network.itemsize
        self._bounds = [(0, 0) if a is None else byte_bounds(a.shape, a.strides, size) for a in [*weights, *biases]]
        k_axis, j_axis = (1, 0) if weight_layout == "out_in" else (0, 1)
        self._strides = [
            *(w.strides[k_axis] // size for w in weights),
            *(w.strides[j_axis] // size for w in weights),
            *(0 if b is None else b.strides[0] // size for b in biases),
        ]
        if self._call.layout == "tensor":  # the plan is for packed weights whatever is asked
            self._packed = True
        elif self._call.layout == "arrays" and not self._packed and not self._cublas_reads_all():
            self._packed = True
            self._call = _prepare(network, schedule, x, out, packed=True)

    def _cublas_reads_all(self) -> bool:
        sizes, depth = self._network.sizes, self._network.depth
        strides = zip(sizes, sizes[1:], self._strides[:depth], self._strides[depth : 2 * depth], strict=False)
        return all(cublas_reads(*layer) is not None for layer in strides)

    def __call__(self, weights: Sequence[Any], biases: Sequence[Any], x: Any, out: Any) -> Any:
        """Launch, and return out. The device must be the current one."""
        call = self._call
        cupy = cupy_or_error("fused_mlp")
        if out is None:
            out = cupy.ndarray(call.out_shape, numpy_dtype(self._network.dtype))
        elif call.launcher is not None:
            inputs = [*weights, *biases, x]
            hit = [
                array is not None and _overlap(array.data.ptr, bounds, out.data.ptr, call.out_bounds)
                for array, bounds in zip(inputs, [*self._bounds, call.x_bounds], strict=True)
            ]
            if any(hit):
                refuse_in_capture(
                    "out overlaps x or a weight, and a copy of it would not live as long as the graph that the current stream "
                    "captures: pass arrays that do not overlap"
                )
                inputs = [_copy(array) if its_hit else array for array, its_hit in zip(inputs, hit, strict=True)]
                weights, biases, x = inputs[: len(weights)], inputs[len(weights) : -1], inputs[-1]
                apart = FusedCall(self._network, self._weight_layout, weights, biases, x, out, self._schedule)
                return apart(weights, biases, x, out)
        if call.launcher is not None:
            if self._packed:
                refuse_in_capture(
                    "fused_mlp packs the weights at each call for this network and schedule, in memory that would not live as "
                    "long as the graph that the current stream captures: use an MLP"
                )
                in_out = [w.T if self._weight_layout == "out_in" else w for w in weights]
                table = pack(cupy, call.layout, self._network, in_out, biases)
            else:
                pointers = [w.data.ptr for w in weights] + [0 if b is None else b.data.ptr for b in biases]
                table = record(pointers + self._strides)
            call.launcher(call.grid, call.block, (x, out, table, call.rows), call.shared_bytes)
            if recorders:
                keep(cupy.cuda.get_current_stream().ptr, self, (weights, biases, x, out))
        return out


_fused_calls: dict[tuple[Any, ...], FusedCall] = {}
_fused_lock = threading.Lock()


def find_fused(key: tuple[Any, ...] | None) -> FusedCall | None:
    """The call that was remembered under this key."""
    return None if key is None else _fused_calls.get(key)


def remember_fused(key: tuple[Any, ...] | None, call: FusedCall) -> None:
    """Keep a call for the next one like it."""
    if key is not None:
        _remember(_fused_calls, key, call, _fused_lock)


def fused_key(options: tuple[Any, ...], arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """What determines a fused call: None if the arrays are not all CuPy's own, on the current device."""
    cupy = sys.modules.get("cupy")
    try:
        hash(options)
    except TypeError:  # something that the checks will refuse
        return None
    if cupy is None:
        return None
    ndarray, here = cupy.ndarray, cupy.cuda.runtime.getDevice()
    key: list[Any] = [options, here]
    for array in arrays:
        if array is None:
            key.append(None)
            continue
        if type(array) is not ndarray:
            return None
        memory = array.data
        if memory.device_id != here:
            return None
        key.append((array.shape, array.strides, array.dtype, memory.ptr & ALIGNMENT_BITS))
    return tuple(key)


# --- Alignment --------------------------------------------------------------------------------------------------


def _is_aligned(array: Any) -> bool:
    """Whether every element lies at a multiple of its size, as CuPy's own kernels and most of ours need it."""
    size = array.dtype.itemsize
    return array.data.ptr % size == 0 and all(stride % size == 0 for stride in array.strides)


def _copy(array: Any) -> Any:
    """A C-contiguous copy, made byte by byte: unlike CuPy's own copy it reads elements at any address."""
    cupy = cupy_or_error("a call on the GPU")
    size = array.dtype.itemsize
    in_bytes = cupy.ndarray((*array.shape, size), np.uint8, memptr=array.data, strides=(*array.strides, 1))
    return in_bytes.copy(order="C").view(array.dtype).reshape(array.shape)


def aligned(array: Any) -> Any:
    """The CuPy array itself if its elements are aligned, else a copy."""
    return array if _is_aligned(array) else _copy(array)
