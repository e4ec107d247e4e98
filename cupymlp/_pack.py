"""Weights -> the one buffer that a kernel reads, in the layout that its plan names.

``vectors``: ``Packed weights`` of common.cuh, for row, tile and layer. ``tensor``: that of tensor.cuh, for mma and wgmma.
``arrays``: plain matrices, for matmul. A packed buffer makes a thread's 16-byte loads lie beside its neighbours', and makes
the caller's weight layout cost nothing after construction. Works on NumPy and on CuPy arrays alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .network import Network, numpy_dtype
from .plan import VECTOR_BYTES, layer_vectors, packed_bytes
from .schedules.matmul import array_offsets, arrays_bytes
from .schedules.mma import header_bytes, math_of, padded, tensor_bytes

__all__ = ["LAYOUTS", "pack"]


def pack(xp: Any, layout: str, network: Network, weights: Sequence[Any], biases: Sequence[Any]) -> Any:
    """Pack the layers' weights and biases into one buffer.

    Parameters
    ----------
    xp
        ``numpy`` or ``cupy``: what the arrays belong to, and the result.
    layout
        A name of `LAYOUTS`.
    weights
        One array (K, N) a layer, in the ``in_out`` layout.
    biases
        One array (N,) a layer, or None where the layer has none.

    Returns
    -------
    array
        1-D; padding is zero.
    """
    return LAYOUTS[layout](xp, network, weights, biases)


def _vectors(xp: Any, network: Network, weights: Sequence[Any], biases: Sequence[Any]) -> Any:
    """Of the network's dtype, ``packed_bytes(network)`` long."""
    per_vector = VECTOR_BYTES // network.itemsize
    packed = xp.zeros(packed_bytes(network) // network.itemsize, dtype=numpy_dtype(network.dtype))
    start = 0
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        k, n = weight.shape
        end = start + layer_vectors(network, layer) * per_vector
        groups = -(-k // per_vector)
        vectors = packed[start : start + groups * n * per_vector].reshape(groups, n, per_vector)
        for element in range(per_vector):
            rows = weight[element::per_vector]
            vectors[: len(rows), :, element] = rows
        if bias is not None:
            at = start + groups * n * per_vector
            packed[at : at + n] = bias
        start = end
    return packed


def _arrays(xp: Any, network: Network, weights: Sequence[Any], biases: Sequence[Any]) -> Any:
    """Of the network's dtype, ``arrays_bytes(network)`` bytes."""
    packed = xp.zeros(arrays_bytes(network) // network.itemsize, dtype=numpy_dtype(network.dtype))
    for weight, bias, (at, bias_at) in zip(weights, biases, array_offsets(network), strict=True):
        start = at // network.itemsize
        packed[start : start + weight.size].reshape(weight.shape)[...] = weight
        if bias is not None:
            start = bias_at // network.itemsize
            packed[start : start + bias.size] = bias
    return packed


# --- tensor -------------------------------------------------------------------------------------------------------------
# In integer arithmetic, and in float64, because CuPy's float32 arithmetic flushes subnormal numbers.


def _tensor(xp: Any, network: Network, weights: Sequence[Any], biases: Sequence[Any]) -> Any:
    """Of int32, ``tensor_bytes(network)`` bytes."""
    math = math_of(network)
    packed = xp.zeros(tensor_bytes(network) // 4, dtype=np.int32)
    arrays = [a for a in [*weights, *biases] if a is not None and a.size]
    finite = [(_float32_bits(a) >> 23 & 255 != 255).all() for a in arrays]
    packed[network.depth] = xp.stack(finite).all() if finite else 1
    start = header_bytes(network) // 4
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if math == "split3":
            high, low, exponent = _split(xp, weight)
            packed[layer] = exponent
            matrices = [high, low]
        elif math == "tf32":
            matrices = [_round_to_tf32(xp, weight)]
        else:
            matrices = [weight.view(np.uint16)]
        k, n = weight.shape
        columns = padded(n, 8)
        slots = xp.asarray(k_of_slots(network, layer))
        for matrix in matrices:
            rows = xp.zeros((len(slots), columns), dtype=matrix.dtype)
            rows[:k, :n] = matrix
            per_vector = VECTOR_BYTES // matrix.itemsize
            steps = len(slots) // (2 * per_vector)
            end = start + rows.size * matrix.itemsize // 4
            to = packed[start:end].view(matrix.dtype).reshape(steps, columns // 8, 2, 8, per_vector)
            to[...] = rows[slots].reshape(steps, 2, per_vector, columns // 8, 8).transpose(0, 3, 1, 4, 2)
            start = end
        if bias is not None:
            packed[start : start + n] = _float32_bits(bias)
            start += columns
    if math == "split3":
        packed[start:] = _vectors(xp, network, weights, biases).view(np.int32)
    return packed


def k_of_slots(network: Network, layer: int) -> NDArray[Any]:
    """The k of every slot of a layer: "Slots" of tensor.cuh."""
    position = np.arange(padded(network.sizes[layer], 16))
    if math_of(network) == "tf32":
        step, slot = np.divmod(position, 8)
        odd, lane = np.divmod(slot, 4)
        k = 16 * (step // 2) + 4 * lane + 2 * (step % 2) + odd if layer == 0 else 8 * step + 2 * lane + odd
    elif layer == 0:
        step, slot = np.divmod(position, 16)
        half, in_half = np.divmod(slot, 8)
        k = 16 * step + 4 * (in_half // 2) + 2 * half + in_half % 2
    else:
        k = position
    return np.asarray(k)


def _split(xp: Any, weight: Any) -> tuple[Any, Any, Any]:
    """float32 as the high and the low float16 part of weight / 2**exponent, and the exponent."""
    bits = weight.view(np.uint32).astype(np.int64)
    field = bits >> 23 & 255
    exponent = (field.max() if weight.size else xp.zeros((), dtype=np.int64)).clip(1, 253) - 127
    digits = bits & 0x7FFFFF | (field > 0) << 23
    scaled = xp.ldexp(digits.astype(np.float64), (xp.maximum(field, 1) - 150 - exponent).astype(np.int32))
    scaled = xp.where(bits >> 31 != 0, -scaled, scaled)
    high = scaled.astype(np.float16)
    return high, (scaled - high).astype(np.float16), exponent


def _round_to_tf32(xp: Any, weight: Any) -> Any:
    """The bits of float32 rounded to 11 bits, ties away from zero. Infinity stays, and NaN stays a quiet one."""
    bits = weight.view(np.uint32)
    special = bits & np.uint32(0x7F800000) == np.uint32(0x7F800000)
    nan = special & (bits & np.uint32(0x7FFFFF) != np.uint32(0))
    rounded = xp.where(special, bits, bits + np.uint32(0x1000))
    return xp.where(nan, bits | np.uint32(0x400000), rounded) & np.uint32(0xFFFFE000)


def _float32_bits(array: Any) -> Any:
    """The bits of the numbers as float32, which holds those of every narrower dtype."""
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16).astype(np.int32) << 16
    return array.astype(np.float32).view(np.int32)


LAYOUTS: dict[str, Callable[[Any, Network, Sequence[Any], Sequence[Any]], Any]] = {
    "vectors": _vectors,
    "tensor": _tensor,
    "arrays": _arrays,
}
