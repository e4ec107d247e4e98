"""Weights -> the one buffer that every kernel reads: ``Packed weights`` of common.cuh says how it is laid out.

A packed buffer makes a thread's 16-byte loads lie beside its neighbours', and makes the caller's weight layout cost
nothing after construction. Works on NumPy and on CuPy arrays alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .network import Network
from .plan import VECTOR_BYTES, layer_vectors, packed_bytes

__all__ = ["pack"]


def pack(xp: Any, network: Network, weights: Sequence[Any], biases: Sequence[Any]) -> Any:
    """Pack the layers' weights and biases into one buffer.

    Parameters
    ----------
    xp
        ``numpy`` or ``cupy``: what the arrays belong to, and the result.
    weights
        One array (K, N) a layer, in the ``in_out`` layout.
    biases
        One array (N,) a layer, or None where the layer has none.

    Returns
    -------
    array
        1-D, of the network's dtype, ``packed_bytes(network)`` long; padding is zero.
    """
    per_vector = VECTOR_BYTES // network.itemsize
    packed = xp.zeros(packed_bytes(network) // network.itemsize, dtype=network.dtype)
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
