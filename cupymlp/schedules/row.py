"""row: one row a block, all layers in one launch (cuda_src/mlp_row.cu)."""

from __future__ import annotations

import math

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
    multiply_adds,
    need_precision,
    network_options,
    packed_bytes,
    vectors,
)

__all__ = ["plan_row"]

# Measured on an H200, benchmarks/row-choices-h200.json: a block covers the widest layer, since a thread that computes two
# outputs takes nearly twice as long; past 256 threads 16 rows win 6 % (512 wide) and 1,024 rows lose 18 %.
ROW_BLOCK_LEAST, ROW_BLOCK_MOST = 64, 256
# Weights that a thread keeps in registers or has on their way to them: 192 registers of its 255, the rest being for sums,
# addresses and activations; 160 where some are read when needed, which takes more addresses. float16 and bfloat16 ones are
# half as large and take twice the registers again when they are used.
ROW_HELD_BYTES = {"float16": 448, "bfloat16": 432, "float32": 768, "float64": 768}
ROW_MIXED_BYTES = {"float16": 384, "bfloat16": 352, "float32": 640, "float64": 640}
ROW_SPARE_BYTES = 64  # that ptxas needs besides on sm_100 and newer
# Products whose weights a thread asks for at a time in layers that are not held. More hide more latency; fewer let more
# blocks share a multiprocessor, which is better once there are more blocks than multiprocessors.
ROW_GROUP_MOST, ROW_GROUP_SHARING = 64, 32
# The cost model, fitted to benchmarks/sweep-*: us; multiply-adds a us and multiprocessor.
ROW_LAUNCH, ROW_HELD_LAYER, ROW_READ = 0.89, 0.23, 0.414
ROW_BLOCK_START = 0.0815  # us of a multiprocessor
ROW_MULTIPLY_ADDS = {"float16": 47_200, "bfloat16": 42_300, "float32": 36_100, "float64": 17_000}


def row_block(network: Network) -> int:
    """Threads a block: the multiple of 32 that covers the widest layer, at least 64."""
    return min(ROW_BLOCK_MOST, max(ROW_BLOCK_LEAST, -(-max(network.sizes[1:]) // 32) * 32))


def row_held(network: Network, block: int, group: int, spare: int = 0) -> int:
    """How many layers, from the first, are held in registers from the start.

    All of them if their weights fit and leave ``spare`` bytes; else as many as leave room for a group of products.
    """
    per_thread = [
        -(-n // block) * vectors(network, k) * VECTOR_BYTES
        for k, n in zip(network.sizes, network.sizes[1:], strict=False)
    ]
    if sum(per_thread) <= ROW_HELD_BYTES[network.dtype] - spare:
        return network.depth
    room = ROW_MIXED_BYTES[network.dtype] - group * network.itemsize
    held = 0
    while per_thread[held] <= room:  # ends before the last layer, since not all of them fit
        room -= per_thread[held]
        held += 1
    return held


def activation_bytes(network: Network) -> int:
    """Shared memory for one row's activations, in bytes: ``MLP_SHARED_BYTES`` of mlp_row.cu."""
    held = held_widths(network)
    group_bytes = VECTOR_BYTES // network.itemsize * compute_itemsize(network)
    return group_bytes * sum(vectors(network, max(held[parity::2], default=0)) for parity in (0, 1))


def microseconds(network: Network, batch: int, device: Device, block: int, held: int) -> float:
    """The GPU time of a call: a row's way through the layers, and what a multiprocessor takes for all its rows.

    A layer that is not held is read in groups, one after the other, for each output of a thread.
    """
    layers = list(zip(network.sizes, network.sizes[1:], strict=False))
    reads = sum(-(-n // block) * -(-k // ROW_GROUP_MOST) for k, n in layers[held:])
    a_row = ROW_BLOCK_START + multiply_adds(network) / ROW_MULTIPLY_ADDS[network.dtype]
    work = batch * a_row / device.multiprocessors
    return ROW_LAUNCH + ROW_HELD_LAYER * held + math.hypot(ROW_READ * reads, work)  # the one hides part of the other


def plan_row(network: Network, batch: int, device: Device, access: Access) -> Plan:
    """One row a block, all layers in one launch. Raises PlanError if a row does not fit in shared memory."""
    need_precision(network, "ieee")
    shared = activation_bytes(network)
    if shared > device.shared_bytes:
        raise PlanError(
            f"one row's activations need {shared:,} bytes of shared memory, and {device.name} gives a block "
            f"{device.shared_bytes:,}"
        )
    block = row_block(network)
    group = ROW_GROUP_MOST if batch <= device.multiprocessors and network.itemsize <= 4 else ROW_GROUP_SHARING
    held = row_held(network, block, group, ROW_SPARE_BYTES if device.compute_capability >= 100 else 0)
    options = (
        *network_options(network, access),
        f"-DMLP_BLOCK={block}",
        f"-DMLP_GROUP={group if held < network.depth else ROW_GROUP_MOST}",
        f"-DMLP_HELD={held}",
        f"-DMLP_SHARED_BYTES={shared}",
    )
    if held == network.depth:
        note = "weights of all layers are held in registers from the start"
    else:
        note = (
            f"weights of {held} of {network.depth} layers are held from the start, the others read by {group} products"
        )
    return Plan(
        schedule="row",
        network=network,
        batch=batch,
        device=device.name,
        launches=1 if batch and network.sizes[-1] else 0,
        weight_bytes=packed_bytes(network),
        kernels=(KernelPlan("mlp_row", options, (min(batch, device.max_grid),), (block,), shared),),
        microseconds=microseconds(network, batch, device, block, held),
        notes=(note,),
    )
