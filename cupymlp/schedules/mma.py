"""mma: many rows a warp on tensor cores by mma.sync, all layers in one launch (cuda_src/mlp_mma.cu).

The sizes of the packed layout "tensor" (cuda_src/tensor.cuh, `cupymlp._pack`) are here, too: wgmma reads the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..activations import activation_of
from ..network import Network
from ..plan import (
    Access,
    Device,
    KernelPlan,
    Plan,
    PlanError,
    held_widths,
    multiply_adds,
    network_options,
    packed_bytes,
    vectors,
)

__all__ = ["layer_bytes", "math_of", "padded", "plan_mma", "tensor_bytes", "tensor_options"]

PACKING = 150.0  # us a layer: some dozen calls of CuPy
# The cost model, fitted to benchmarks/sweep-*: us, and us a layer; bytes of weights a us; bytes of x and y, and products of
# operands, a us and multiprocessor; with activations in shared memory, us of a warp's tile for each product of a row.
MMA_LAUNCH, MMA_STAGED_BYTES, MMA_BYTES = 1.15, 35_000, 30_000
MMA_LAYER = {"tf32": 0.24, "split3": 0.44, "float16": 0.25, "bfloat16": 0.26}
MMA_PRODUCTS = {"tf32": 1_520_000, "split3": 400_000, "float16": 1_200_000, "bfloat16": 1_200_000}
MMA_ROW = 0.00136  # us of a multiprocessor
MMA_SHARED = {"tf32": 3.0e-4, "split3": 4.1e-4, "float16": 1.55e-4, "bfloat16": 1.55e-4}
MMA_SHARED_PRODUCTS = {"tf32": 175_000, "split3": 129_000, "float16": 400_000, "bfloat16": 400_000}
SHAPE_PRODUCTS = {"tf32": 900_000, "split3": 500_000, "float16": 1_800_000, "bfloat16": 1_800_000}
SHAPE_L2_BYTES = 40_000
OVERLAP = 0.25  # of the shorter of memory and products that the longer does not hide
# Registers a thread by warps a block, and what a kernel needs beside activations, sums and prefetched rows.
REGISTERS = {16: 128, 12: 168, 8: 255}
REGISTERS_BESIDE = {"tf32": 56, "split3": 80, "float16": 76, "bfloat16": 76}
REGISTERS_OF_ACTIVATIONS = 24  # of those that take more than a few instructions
UNROLLED_MOST = 4000  # mma instructions: with activations in registers all loops are unrolled

_MATHS = {
    ("tf32", "float32"): "tf32",
    ("split3", "float32"): "split3",
    ("ieee", "float16"): "float16",
    ("ieee", "bfloat16"): "bfloat16",
}


# --- The packed layout "tensor" -----------------------------------------------------------------------------------------


def math_of(network: Network) -> str:
    """How tensor cores compute this network: a name of ``enum class Math`` of tensor.cuh.

    Raises PlanError if they do not.
    """
    try:
        return _MATHS[network.precision, network.dtype]
    except KeyError:
        raise PlanError(
            f"computes tf32, split3, and float16 or bfloat16 networks, and this is {network.dtype} with "
            f"precision={network.precision!r}"
        ) from None


def parts(network: Network) -> int:
    """Arrays that stand for a layer's weights: 2 (high, low) for split3, else 1."""
    return 2 if math_of(network) == "split3" else 1


def element_bytes(network: Network) -> int:
    """Bytes of one weight in one part."""
    return 4 if math_of(network) == "tf32" else 2


def padded(count: int, multiple: int) -> int:
    """The count rounded up."""
    return -(-count // multiple) * multiple


def header_bytes(network: Network) -> int:
    """Bytes before the first layer: the exponents and the flag ``finite``."""
    return padded(4 * (network.depth + 1), 16)


def layer_bytes(network: Network, layer: int) -> int:
    """Bytes of one layer's weights and bias."""
    k, n = padded(network.sizes[layer], 16), padded(network.sizes[layer + 1], 8)
    return parts(network) * k * n * element_bytes(network) + (4 * n if network.biases[layer] else 0)


def staged_bytes(network: Network) -> int:
    """Bytes that tensor cores need: the header and all layers; ``STAGED_BYTES`` of tensor.cuh."""
    return header_bytes(network) + sum(layer_bytes(network, layer) for layer in range(network.depth))


def tensor_bytes(network: Network) -> int:
    """Bytes of the whole packed buffer; split3's ends with the float32 weights in the layout ``vectors``."""
    return staged_bytes(network) + (packed_bytes(network) if math_of(network) == "split3" else 0)


def tensor_options(network: Network) -> tuple[str, ...]:
    """The -D options of tensor.cuh, beside those of common.cuh."""
    return (f"-DMLP_MATH={math_of(network)}",)


# --- The plan -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A way to run mlp_mma.cu, by the names of its options."""

    warps: int
    tiles: int
    registers: bool
    prefetch: bool
    staged: bool
    chunk: int
    shared: int


def fragment_registers(network: Network) -> int:
    """32-bit registers of a lane's part of 16 rows x 8 k: ``FRAGMENT_REGISTERS`` of tensor.cuh."""
    return element_bytes(network) * parts(network)


def fragments(network: Network, layer: int) -> int:
    """Fragments of a layer's input, for 16 rows."""
    return padded(network.sizes[layer], 16) // 8


def slab_bytes(network: Network, tiles: int) -> int:
    """Shared memory for one warp's activations, in bytes: ``SLAB_BYTES`` of mlp_mma.cu."""
    counts = [fragments(network, layer) for layer in range(network.depth)]
    return sum(max(counts[parity::2], default=0) for parity in (0, 1)) * tiles * 32 * 4 * fragment_registers(network)


def plain_row_bytes(network: Network) -> int:
    """Shared memory of a row that is not for tensor cores: ``PLAIN_ROW_BYTES`` of plain_row.cuh."""
    held = held_widths(network)
    return 16 * sum(vectors(network, max(held[parity::2], default=0)) for parity in (0, 1))


def warp_bytes(network: Network, tiles: int, *, registers: bool) -> int:
    """Shared memory of a warp: ``WARP_BYTES`` of mlp_mma.cu."""
    plain = plain_row_bytes(network) if parts(network) == 2 else 0
    return plain if registers else max(plain, slab_bytes(network, tiles))


def registers_needed(network: Network, access: Access, tiles: int, *, prefetch: bool) -> int:
    """An estimate of a thread's registers where activations are in registers."""
    per_fragment = fragment_registers(network)
    held = max(
        fragments(network, layer) * per_fragment + padded(network.sizes[layer + 1], 8) // 2
        for layer in range(network.depth)
    )
    rows_ahead = fragments(network, 0) * (8 if access.x_dtype in ("int64", "uint64") else 4) if prefetch else 0
    beside = REGISTERS_BESIDE[math_of(network)] + 12 * access.batch_dims
    if any(activation_of(spec).long for spec in network.activations):
        beside += REGISTERS_OF_ACTIVATIONS
    return tiles * (held + rows_ahead) + beside


def instructions(network: Network, tiles: int) -> int:
    """Instructions ``mma.sync`` for a tile of rows."""
    step = 32 // element_bytes(network)
    times = 3 if parts(network) == 2 else 1
    layers = zip(network.sizes, network.sizes[1:], strict=False)
    return tiles * times * sum(padded(k, 16) // step * padded(n, 8) // 8 for k, n in layers)


def shapes(network: Network, device: Device, access: Access) -> Iterator[Shape]:
    """All ways to run the network that fit the device."""
    staged_size = staged_bytes(network)
    for tiles in (1, 2):
        for staged in (True, False):
            weights = staged_size if staged else 0
            fitting = Shape(0, tiles, True, False, staged, 8, 0)
            if staged and instructions(network, tiles) <= UNROLLED_MOST:
                scratch = warp_bytes(network, tiles, registers=True)
                for prefetch in (True, False):
                    need = registers_needed(network, access, tiles, prefetch=prefetch)
                    warps = next((w for w, most in REGISTERS.items() if need <= most), 0)
                    shared = max(16, weights + warps * scratch)
                    if warps and shared <= device.shared_bytes:
                        yield replace(fitting, warps=warps, prefetch=prefetch, shared=shared)
            slab = warp_bytes(network, tiles, registers=False)
            warps = min(16, max(0, device.shared_bytes - weights) // max(slab, 1))
            if warps:
                warps = warps if warps < 4 else warps // 4 * 4
                yield replace(fitting, warps=warps, registers=False, shared=max(16, weights + warps * slab))


def microseconds(network: Network, batch: int, device: Device, shape: Shape) -> float:
    """The GPU time of a call: the launch, the weights, a tile's way through the layers, then memory and tensor cores."""
    math, products = math_of(network), multiply_adds(network)
    latency = MMA_LAUNCH + MMA_LAYER[math] * network.depth
    latency += staged_bytes(network) / MMA_STAGED_BYTES if shape.staged else 0.0
    if not shape.registers:
        work = batch * (products / MMA_SHARED_PRODUCTS[math] + MMA_ROW) / device.multiprocessors
        return latency + max(shape.tiles * products * MMA_SHARED[math], work)
    moved = batch * (network.sizes[0] + network.sizes[-1]) * network.itemsize / (MMA_BYTES * device.multiprocessors)
    work = batch * products / (MMA_PRODUCTS[math] * device.multiprocessors)
    rows = batch * MMA_ROW / device.multiprocessors
    return latency + rows + max(moved, work) + OVERLAP * min(moved, work)


def shape_cost(network: Network, batch: int, device: Device, shape: Shape) -> float:
    """What shapes are compared by: busy multiprocessors, tiles in registers and weights in shared memory are preferred.

    Not the GPU time: how the shapes differ has not been measured.
    """
    tiles = -(-batch // (16 * shape.tiles))
    rounds = -(-tiles // (device.multiprocessors * shape.warps))
    busy = min(shape.warps, -(-tiles // device.multiprocessors))
    rate = min(1.0, busy * shape.tiles / 16) * (1.0 if shape.registers else 0.5)
    products = rounds * busy * 16 * shape.tiles * multiply_adds(network) / (SHAPE_PRODUCTS[math_of(network)] * rate)
    if not shape.staged:
        products = max(products, rounds * busy * staged_bytes(network) / SHAPE_L2_BYTES)
    moved = batch * (network.sizes[0] + network.sizes[-1]) * network.itemsize / (MMA_BYTES * device.multiprocessors)
    staging = staged_bytes(network) / MMA_STAGED_BYTES if shape.staged else 0.0
    return staging + max(products, moved * (1.0 if shape.prefetch else 1.1))


def packing_microseconds(network: Network, access: Access) -> float:
    """What a call of `fused_mlp` takes for packing the caller's own weights, by CuPy."""
    return 0.0 if access.packed else PACKING * network.depth


def need_tensor_cores(device: Device) -> None:
    """Raise PlanError unless the device has tensor cores that take tf32 and bfloat16."""
    if device.compute_capability < 80:
        raise PlanError(f"needs tensor cores of sm_80 or newer, and {device.name} is sm_{device.compute_capability}")


def kernel_of(network: Network, batch: int, device: Device, access: Access, shape: Shape) -> KernelPlan:
    """The kernel of this shape, and its launch."""
    options = (
        *network_options(network, replace(access, packed=True)),
        *tensor_options(network),
        f"-DMLP_WARPS={shape.warps}",
        f"-DMLP_TILES={shape.tiles}",
        f"-DMLP_REGISTERS={int(shape.registers)}",
        f"-DMLP_PREFETCH={int(shape.prefetch)}",
        f"-DMLP_STAGED={int(shape.staged)}",
        f"-DMLP_CHUNK={shape.chunk}",
        f"-DMLP_SHARED_BYTES={shape.shared}",
    )
    blocks = min(-(-batch // (16 * shape.tiles)), device.multiprocessors)
    return KernelPlan("mlp_mma", options, (blocks,), (32 * shape.warps,), shape.shared)


def plan_mma(network: Network, batch: int, device: Device, access: Access) -> Plan:
    """Many rows a warp on tensor cores.

    Raises PlanError for other precisions, for older devices, and if a warp's activations do not fit in shared memory.
    """
    math = math_of(network)
    need_tensor_cores(device)
    candidates = list(shapes(network, device, access))
    if not candidates:
        raise PlanError(
            f"two neighbouring layers' activations of 16 rows need {slab_bytes(network, 1):,} bytes of shared memory, and "
            f"{device.name} gives a block {device.shared_bytes:,}"
        )
    shape = min(candidates, key=lambda s: shape_cost(network, batch, device, s))
    cost = microseconds(network, batch, device, shape) + packing_microseconds(network, access)
    return Plan(
        schedule="mma",
        network=network,
        batch=batch,
        device=device.name,
        launches=1 if batch and network.sizes[-1] else 0,
        weight_bytes=tensor_bytes(network),
        layout="tensor",
        kernels=(kernel_of(network, batch, device, access, shape),),
        microseconds=cost,
        notes=(
            f"{math} on tensor cores, {16 * shape.tiles} rows a warp, {shape.warps} warps a block",
            f"activations in {'registers' if shape.registers else 'shared memory'}, weights in "
            f"{'shared' if shape.staged else 'global'} memory",
        ),
    )
