"""The same network on the CPU: NumPy, a block of rows at a time, so that hidden layers stay in cache.

It goes through NumPy's BLAS, which sums in an order of its own: it meets the error bound, not the kernels' bits. float16 and
bfloat16 networks are computed in float32 and rounded once a layer. Every ``precision`` is computed as ``ieee`` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._strides import merge_axes
from .activations import ActivationSpec, activation_of, parameter_of
from .network import Network, numpy_dtype
from .plan import cpu_block_rows

__all__ = ["run_cpu"]


def run_cpu(
    network: Network,
    weights: Sequence[NDArray[np.floating]],
    biases: Sequence[NDArray[np.floating] | None],
    x: NDArray[Any],
    out: NDArray[np.floating],
) -> None:
    """Compute ``out = network(x)``.

    Parameters
    ----------
    weights, biases
        One (K, N) array a layer and one (N,) array or None, of the network's ``sum_dtype``.
    x
        Shape (..., K), any strides and byte order, of a dtype that widens to the network's. Not empty.
    out
        Shape (..., N), of the network's dtype in either byte order, any strides; shares no memory with x.
    """
    rows = math.prod(x.shape[:-1])
    step = min(rows, _block_rows(network))
    dtype = network.sum_dtype
    convert, in_place = not _is_plain(x, dtype), _is_plain(out, dtype)
    buffers = [np.empty((step, n), dtype) for n in network.sizes[1:-1]]
    with np.errstate(all="ignore"):  # infinities and NaN are results here, as they are on the GPU
        if rows == step and not convert and in_place:  # small and simple: nothing to be cut or copied
            last = out.reshape(rows, network.sizes[-1])
            _layers(network, weights, biases, x.reshape(rows, network.sizes[0]), [*buffers, last])
            return
        x_rows, out_rows = _Rows(x), _Rows(out)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            h = x_rows[start, count]
            if convert:
                h = h.astype(dtype)
            last = out_rows[start, count] if in_place else np.empty((count, network.sizes[-1]), dtype)
            _layers(network, weights, biases, h, [*(buffer[:count] for buffer in buffers), last])
            if not in_place:
                out_rows[start, count] = last


def _layers(
    network: Network,
    weights: Sequence[NDArray[np.floating]],
    biases: Sequence[NDArray[np.floating] | None],
    h: NDArray[Any],
    into: Sequence[NDArray[np.floating]],
) -> None:
    """All layers of some rows, each into an array of its own."""
    storage = None if network.dtype == network.sum_dtype else numpy_dtype(network.dtype)
    functions = _functions(network.activations, network.sum_dtype)
    for weight, bias, (apply, parameter), to in zip(weights, biases, functions, into, strict=True):
        h = np.matmul(h, weight, out=to)
        if bias is not None:
            h += bias
        apply(h, h, parameter)
        if storage is not None:
            h[...] = h.astype(storage)


_block_rows = cache(cpu_block_rows)


@cache
def _functions(activations: tuple[ActivationSpec, ...], dtype: str) -> list[tuple[Callable[..., object], float]]:
    """Each layer's activation in NumPy and its parameter."""
    return [(activation_of(spec).apply, parameter_of(spec, dtype)) for spec in activations]


def _is_plain(array: NDArray[Any], dtype: str) -> bool:
    """Whether BLAS can work on the array itself."""
    return array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned  # byte order is part of a dtype


class _Rows:
    """An array (..., features) addressed by ranges of rows in C order of its leading axes, without copying it whole."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._shape = array.shape[:-1]
        self._is_view = True
        if array.ndim == 1:
            array = array[np.newaxis]
        elif array.flags.c_contiguous:
            array = array.reshape(math.prod(self._shape), array.shape[-1])
        elif array.ndim > 2:
            shape, (strides,) = merge_axes(self._shape, array.strides[:-1])
            self._is_view = len(shape) <= 1
            if self._is_view:
                merged = (math.prod(self._shape), array.shape[-1])
                array = np.lib.stride_tricks.as_strided(array, merged, (*(strides or (0,)), array.strides[-1]))
        self._array = array

    def _index(self, rows: tuple[int, int]) -> Any:
        start, count = rows
        if self._is_view:
            return slice(start, start + count)
        return np.unravel_index(np.arange(start, start + count), self._shape)

    def __getitem__(self, rows: tuple[int, int]) -> NDArray[Any]:
        return self._array[self._index(rows)]  # type: ignore[no-any-return]

    def __setitem__(self, rows: tuple[int, int], value: NDArray[Any]) -> None:
        self._array[self._index(rows)] = value
