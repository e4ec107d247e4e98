"""tile: many rows a block, all layers in one launch, all weights in shared memory (cuda_src/mlp_tile.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from ..network import Network
from ..plan import (
    VECTOR_BYTES,
    Access,
    Device,
    KernelPlan,
    Plan,
    PlanError,
    compute_itemsize,
    held_widths,
    need_precision,
    network_options,
    packed_bytes,
)

__all__ = ["plan_tile", "slab_bytes"]


@dataclass(frozen=True)
class Shape:
    """The shape of a tile kernel: ``MLP_ROWS``, ``MLP_COLUMNS`` and the most ``MLP_WARPS`` that its registers allow."""

    rows: int
    columns: int
    warps: int


# Measured on an H200 (canonical net, benchmarks/exploration-h200.txt): of 8, 4 and 2 rows a lane with 8, 12 and 16 warps, 4
# with 12 is the fastest at 2^20 rows, 2 with 16 at 2,048. 8 columns a lane read the fewest operands from shared memory.
SHAPES = {4: (Shape(4, 8, 12), Shape(2, 8, 16)), 8: (Shape(4, 4, 8), Shape(2, 4, 8))}
# The cost model, fitted to benchmarks/sweep-*: us; bytes a us; the rest by rows a lane: us of each input of a layer that a
# tile goes through, and multiply-adds a us and multiprocessor, with as many warps as registers allow.
TILE_LAUNCH, TILE_BYTES = 1.3, 26_000
TILE_INPUT = {2: 0.0112, 4: 0.0224}
TILE_MULTIPLY_ADDS = {2: 124_000, 4: 153_000}
TILE_ROW = 0.0035  # us of a multiprocessor
SUM_TIMES = {4: 1.0, 8: 2.0}  # float64 takes twice the time


def values(network: Network, elements: int) -> int:
    """16-byte vectors that hold this many elements of arithmetic."""
    return -(-elements * compute_itemsize(network) // VECTOR_BYTES)


def weight_values(network: Network) -> int:
    """16-byte vectors of all weights and biases in shared memory, columns padded to a multiple of 8."""
    layers = zip(network.sizes, network.sizes[1:], network.biases, strict=False)
    padded = [(k, -(-n // 8) * 8, bias) for k, n, bias in layers]
    return sum(values(network, k) * n + (values(network, n) if bias else 0) for k, n, bias in padded)


def slab_bytes(features: int, rows: int, itemsize: int) -> int:
    """Shared memory for a warp's activations in one layer, in bytes, with the gaps of cuda_src/tile.cuh.

    rows: of a lane. itemsize: of arithmetic.
    """
    piece = min(rows * itemsize, VECTOR_BYTES)
    gap = 2 if piece == VECTOR_BYTES else 4  # pieces, behind every four features
    return -(-features // 4) * (4 * 4 * rows * itemsize + gap * piece)


def slabs_bytes(network: Network, rows: int) -> int:
    """Shared memory for a warp's activations in even and in odd layers, in bytes."""
    itemsize = compute_itemsize(network)
    held = [-(-size * itemsize // VECTOR_BYTES) * VECTOR_BYTES // itemsize for size in held_widths(network)]
    return sum(slab_bytes(max(held[parity::2], default=0), rows, itemsize) for parity in (0, 1))


def microseconds(network: Network, batch: int, device: Device, shape: Shape, warps: int) -> float:
    """The GPU time of a call: the launch, the weights, a tile's way through the layers, and the work of the other tiles."""
    rows = 4 * shape.rows
    others = -(-batch // (rows * device.multiprocessors)) - 1  # on the busiest multiprocessor
    pairs = zip(network.sizes, network.sizes[1:], strict=False)
    times = SUM_TIMES[compute_itemsize(network)]
    work = times * sum(k * -(-n // 8) * 8 for k, n in pairs) / TILE_MULTIPLY_ADDS[shape.rows] + TILE_ROW
    latency = TILE_LAUNCH + weight_values(network) * VECTOR_BYTES / TILE_BYTES
    latency += times * TILE_INPUT[shape.rows] * sum(network.sizes[:-1])
    return latency + max(0, others) * rows * work * max(1.0, shape.warps / warps)


def plan_tile(network: Network, batch: int, device: Device, access: Access) -> Plan:
    """Many rows a block. Raises PlanError if the weights and one warp's activations do not fit in shared memory."""
    need_precision(network, "ieee")
    weights = VECTOR_BYTES * weight_values(network)
    candidates = []
    for shape in SHAPES[compute_itemsize(network)]:
        slab = slabs_bytes(network, shape.rows)
        warps = shape.warps if slab == 0 else min(shape.warps, (device.shared_bytes - weights) // slab)
        if network.sizes[0] > 64 and network.sizes[0] % 4:
            warps = min(warps, 12)  # many features that are loaded one by one take more registers
        if warps > 0:
            warps = warps if warps < 4 else warps // 4 * 4
            candidates.append(
                (microseconds(network, batch, device, shape, warps), shape, warps, weights + warps * slab)
            )
    if not candidates:
        least = weights + slabs_bytes(network, SHAPES[compute_itemsize(network)][-1].rows)
        raise PlanError(
            f"all weights and one warp's activations need {least:,} bytes of shared memory, and {device.name} gives a "
            f"block {device.shared_bytes:,}"
        )
    cost, shape, warps, shared = min(candidates, key=lambda c: c[0])
    rows = 4 * shape.rows
    tiles = -(-batch // rows)
    options = (
        *network_options(network, access),
        f"-DMLP_ROWS={shape.rows}",
        f"-DMLP_COLUMNS={shape.columns}",
        f"-DMLP_WARPS={warps}",
        f"-DMLP_SHARED_BYTES={shared}",
    )
    return Plan(
        schedule="tile",
        network=network,
        batch=batch,
        device=device.name,
        launches=1 if batch and network.sizes[-1] else 0,
        weight_bytes=packed_bytes(network),
        kernels=(KernelPlan("mlp_tile", options, (min(tiles, device.multiprocessors),), (32 * warps,), shared),),
        microseconds=cost,
        notes=(f"{rows} rows a warp, {warps} warps a block",),
    )
