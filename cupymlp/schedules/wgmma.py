"""wgmma: many rows a warpgroup on Hopper's own tensor-core instructions, all layers in one launch (cuda_src/mlp_wgmma.cu)."""

from __future__ import annotations

from dataclasses import replace

from ..network import Network
from ..plan import Access, Device, KernelPlan, Plan, PlanError, multiply_adds, network_options
from .mma import (
    OVERLAP,
    math_of,
    packing_microseconds,
    padded,
    plain_row_bytes,
    staged_bytes,
    tensor_bytes,
    tensor_options,
)

__all__ = ["plan_wgmma"]

# The cost model, fitted to benchmarks/sweep-*: us, and us a layer; bytes of weights a us; bytes of x and y, and products of
# operands, a us and multiprocessor.
WGMMA_LAUNCH, WGMMA_STAGED_BYTES, WGMMA_BYTES = 1.38, 58_000, 34_600
WGMMA_LAYER = {"tf32": 0.262, "split3": 0.413, "float16": 0.27, "bfloat16": 0.27}
WGMMA_ROW = 0.0012  # us of a multiprocessor
WGMMA_PRODUCTS = {"tf32": 2_030_000, "split3": 784_000, "float16": 2_610_000, "bfloat16": 2_610_000}
WIDEST = 128  # activations and sums of a lane's rows stay in registers
X_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "float32": 4}


def warp_bytes(network: Network, x_itemsize: int) -> int:
    """Shared memory of one warp: ``WARP_BYTES`` of mlp_wgmma.cu."""
    plain = plain_row_bytes(network) if math_of(network) == "split3" else 0
    ring = 2 * padded(16 * network.sizes[0] * x_itemsize, 128)
    return ring + padded(16 * network.sizes[-1] * network.itemsize, 128) + padded(plain, 128)


def shared_bytes(network: Network, x_itemsize: int, warpgroups: int) -> int:
    """Shared memory of a block: ``MLP_SHARED_BYTES``."""
    warps = 4 * warpgroups
    barriers = padded(8 * (1 + 2 * warps), 128)
    return barriers + padded(staged_bytes(network), 128) + warps * warp_bytes(network, x_itemsize)


def lane_registers(network: Network) -> int:
    """Registers of a lane: a layer's sums and its input, or the next layer's, and 32 for everything else."""
    in_16 = {"split3": 8, "tf32": 8}.get(math_of(network), 4)  # for 16 features of an input
    inputs = [-(-k // 16) * in_16 for k in network.sizes]
    sums = [-(-n // 8) * 4 for n in network.sizes[1:]]
    both = [s + max(a, b) for a, s, b in zip(inputs, sums, [*inputs[1:-1], 0], strict=False)]
    return max(both) + 32


def warpgroups_of(network: Network) -> int:
    """Warpgroups a block, by registers: 65,536 of a multiprocessor, in eights a thread."""
    return max(1, min(5, 65536 // (128 * lane_registers(network))))


def microseconds(network: Network, batch: int, device: Device) -> float:
    """The GPU time of a call: the launch, the weights, a tile's way through the layers, then memory and tensor cores."""
    math = math_of(network)
    moved = batch * (network.sizes[0] + network.sizes[-1]) * network.itemsize / (WGMMA_BYTES * device.multiprocessors)
    products = batch * multiply_adds(network) / (WGMMA_PRODUCTS[math] * device.multiprocessors)
    latency = WGMMA_LAUNCH + WGMMA_LAYER[math] * network.depth + staged_bytes(network) / WGMMA_STAGED_BYTES
    rows = batch * WGMMA_ROW / device.multiprocessors
    return latency + rows + max(moved, products) + OVERLAP * min(moved, products)


def plan_wgmma(network: Network, batch: int, device: Device, access: Access) -> Plan:
    """Many rows a warpgroup. Raises PlanError if it is another GPU, or the network is too wide."""
    math = math_of(network)
    if device.compute_capability != 90:
        raise PlanError(f"needs a Hopper GPU (sm_90), and {device.name} is sm_{device.compute_capability}")
    if max(network.sizes) > WIDEST or min(network.sizes) == 0:
        raise PlanError(f"keeps activations in registers, for widths of 1 to {WIDEST}")
    x_itemsize = X_BYTES[access.x_dtype or network.dtype]
    warpgroups = warpgroups_of(network)
    while warpgroups and shared_bytes(network, x_itemsize, warpgroups) > device.shared_bytes:
        warpgroups -= 1
    if warpgroups == 0:
        raise PlanError(
            f"the weights and the rows of one warpgroup need {shared_bytes(network, x_itemsize, 1):,} bytes of shared memory, "
            f"and {device.name} gives a block {device.shared_bytes:,}"
        )
    shared = shared_bytes(network, x_itemsize, warpgroups)
    tiles = -(-batch // 64)
    options = (
        *network_options(network, replace(access, packed=True)),
        *tensor_options(network),
        f"-DMLP_WARPGROUPS={warpgroups}",
        f"-DMLP_SHARED_BYTES={shared}",
        "-arch=sm_90a",
    )
    kernel = KernelPlan(
        "mlp_wgmma", options, (max(1, min(tiles, device.multiprocessors)),), (128 * warpgroups,), shared
    )
    return Plan(
        schedule="wgmma",
        network=network,
        batch=batch,
        device=device.name,
        launches=1 if batch and network.sizes[-1] else 0,
        weight_bytes=tensor_bytes(network),
        kernels=(kernel,),
        layout="tensor",
        microseconds=microseconds(network, batch, device) + packing_microseconds(network, access),
        notes=(f"{math}, 64 rows a warpgroup, {warpgroups} warpgroups a block",),
    )
