"""Network + batch + device numbers -> Plan. Pure functions of their arguments: no GPU and no CuPy.

A schedule is one way to compute the network on a GPU: one file ``cuda_src/mlp_<schedule>.cu``. `SCHEDULES` is the
table of them; each entry answers with a plan, or with the reason why it is not taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .network import Network

__all__ = ["CONTIGUOUS", "SCHEDULES", "Access", "Device", "Plan", "PlanError", "layer_vectors", "plan_cpu", "plan_gpu"]

VECTOR_BYTES = 16
CPU_BLOCK_BYTES = 512 * 1024  # activations of one block of rows on the CPU: a common L2 cache


class PlanError(ValueError):
    """No schedule can run this network on this device; the message says what is missing, and how much."""


@dataclass(frozen=True)
class Device:
    """The numbers of a GPU that planning needs.

    Attributes
    ----------
    name
        As the driver reports it.
    compute_capability
        10 * major + minor: 90 for an H100 or H200.
    multiprocessors
        Streaming multiprocessors.
    shared_bytes
        The most shared memory that one block can be given, in bytes (the opt-in limit).
    max_grid
        The most blocks in a grid's first dimension.
    """

    name: str
    compute_capability: int
    multiprocessors: int
    shared_bytes: int
    max_grid: int = 2**31 - 1


@dataclass(frozen=True)
class Access:
    """How a kernel reads x and writes y; the kernel is compiled for it.

    Attributes
    ----------
    x_dtype
        The dtype name of x; None for the network's own.
    x, y
        ``contiguous``, ``strided`` or ``unaligned``: an ``Access`` of common.cuh.
    batch_dims
        Leading axes that the kernel walks through strides; 0 if x and y are both contiguous.
    packed
        Whether the weights come packed (an `MLP`) or as the caller's own arrays (`fused_mlp`).
    """

    x_dtype: str | None = None
    x: str = "contiguous"
    y: str = "contiguous"
    batch_dims: int = 0
    packed: bool = True


CONTIGUOUS = Access()


@dataclass(frozen=True)
class Plan:
    """How one call will run: print it.

    Attributes
    ----------
    schedule
        ``row`` or ``cpu``.
    network, batch
        What is computed, and for how many rows.
    device
        The name of the device.
    launches
        Kernel launches of one call.
    grid, block
        The launch configuration; empty on the CPU.
    shared_bytes
        Dynamic shared memory of a block, in bytes.
    weight_bytes
        Weights and biases as the kernel reads them, in bytes, padding included.
    registers
        Registers a thread, once the kernel is compiled; None before.
    notes
        What else is worth knowing, one line each.
    not_taken
        ``(schedule, reason)`` for every other schedule.
    options
        The compiler options that make the source this plan's kernel.
    """

    schedule: str
    network: Network
    batch: int
    device: str
    launches: int
    weight_bytes: int
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared_bytes: int = 0
    registers: int | None = None
    notes: tuple[str, ...] = ()
    not_taken: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        rows = [
            ("network", self.network.describe()),
            ("precision", self.network.precision),
            ("batch", f"{self.batch:,} rows"),
            ("device", self.device),
            ("schedule", self.schedule),
            ("launches", str(self.launches)),
        ]
        if self.grid:
            registers = "not compiled yet" if self.registers is None else str(self.registers)
            rows += [
                ("grid", str(self.grid)),
                ("block", str(self.block)),
                ("shared", f"{self.shared_bytes:,} bytes a block"),
                ("registers", f"{registers} a thread" if self.registers is not None else registers),
            ]
        rows.append(("weights", f"{self.weight_bytes:,} bytes"))
        rows += [("", note) for note in self.notes]
        rows += [("not taken", f"{name}: {reason}") for name, reason in self.not_taken]
        return "\n".join(f"{label:<10} {text}".rstrip() for label, text in rows)


def vectors(network: Network, elements: int) -> int:
    """16-byte vectors that hold this many elements of the network's dtype."""
    return -(-elements * network.itemsize // VECTOR_BYTES)


def layer_vectors(network: Network, layer: int) -> int:
    """16-byte vectors of one layer's packed weights and bias: ``layer_vectors`` of common.cuh."""
    k, n = network.sizes[layer : layer + 2]
    return vectors(network, k) * n + (vectors(network, n) if network.biases[layer] else 0)


def packed_bytes(network: Network) -> int:
    """Bytes of all packed weights and biases."""
    return VECTOR_BYTES * sum(layer_vectors(network, layer) for layer in range(network.depth))


# --- The CPU ------------------------------------------------------------------------------------------------


def cpu_block_rows(network: Network) -> int:
    """Rows that the CPU path takes at a time, so that two neighbouring layers' activations stay in cache."""
    widest = max(a + b for a, b in zip(network.sizes, network.sizes[1:], strict=False))
    return max(16, CPU_BLOCK_BYTES // max(1, widest * network.itemsize))


def plan_cpu(network: Network, batch: int, why: str) -> Plan:
    """The plan of the CPU path. ``why``: the reason why no GPU schedule is taken."""
    weights = sum(k * n for k, n in zip(network.sizes, network.sizes[1:], strict=False))
    weights += sum(n for n, bias in zip(network.sizes[1:], network.biases, strict=True) if bias)
    return Plan(
        schedule="cpu",
        network=network,
        batch=batch,
        device="CPU",
        launches=0,
        weight_bytes=weights * network.itemsize,
        notes=(f"NumPy, {cpu_block_rows(network):,} rows at a time",),
        not_taken=tuple((name, why) for name in SCHEDULES),
    )


# --- The row schedule: cuda_src/mlp_row.cu --------------------------------------------------------------------

# Measured on an H200, benchmarks/row-choices-h200.json: a block covers the widest layer, since a thread that computes two
# outputs takes nearly twice as long; past 256 threads 16 rows win 6 % (512 wide) and 1,024 rows lose 18 %.
ROW_BLOCK_LEAST, ROW_BLOCK_MOST = 64, 256
# Weights that a thread keeps in registers or has on their way to them: 192 registers of its 255, the rest being for sums,
# addresses and activations; 160 where some are read when needed, which takes more addresses.
ROW_HELD_BYTES, ROW_MIXED_BYTES = 768, 640
# Products whose weights a thread asks for at a time in layers that are not held. More hide more latency; fewer let more
# blocks share a multiprocessor, which is better once there are more blocks than multiprocessors.
ROW_GROUP_MOST, ROW_GROUP_SHARING = 64, 32
SUM_BLOCK = 16  # of common.cuh: a group is a multiple of it


def row_block(network: Network) -> int:
    """Threads a block: the multiple of 32 that covers the widest layer, at least 64."""
    return min(ROW_BLOCK_MOST, max(ROW_BLOCK_LEAST, -(-max(network.sizes[1:]) // 32) * 32))


def row_held(network: Network, block: int) -> tuple[int, int]:
    """How many layers, from the first, are held in registers from the start, and the group size that leaves for the others.

    All of them if their weights fit; else as many as leave room for a group.
    """
    per_thread = [
        -(-n // block) * vectors(network, k) * VECTOR_BYTES
        for k, n in zip(network.sizes, network.sizes[1:], strict=False)
    ]
    if sum(per_thread) <= ROW_HELD_BYTES:
        return network.depth, ROW_GROUP_MOST
    room = ROW_MIXED_BYTES - ROW_GROUP_SHARING * network.itemsize
    held = 0
    while per_thread[held] <= room:  # ends before the last layer, since not all of them fit
        room -= per_thread[held]
        held += 1
    left = room // network.itemsize + ROW_GROUP_SHARING
    return held, min(ROW_GROUP_MOST, left // SUM_BLOCK * SUM_BLOCK)


def activation_bytes(network: Network) -> int:
    """Shared memory for one row's activations, in bytes: ``MLP_SHARED_BYTES`` of mlp_row.cu."""
    inputs = network.sizes[:-1]
    return VECTOR_BYTES * sum(vectors(network, max(inputs[parity::2], default=0)) for parity in (0, 1))


def plan_row(network: Network, batch: int, device: Device, access: Access) -> Plan:
    """One row a block, all layers in one launch. Raises PlanError if a row does not fit in shared memory."""
    shared = activation_bytes(network)
    if shared > device.shared_bytes:
        raise PlanError(
            f"one row's activations need {shared:,} bytes of shared memory, and {device.name} gives a block "
            f"{device.shared_bytes:,}"
        )
    block = row_block(network)
    held, group = row_held(network, block)
    if batch > device.multiprocessors:
        group = min(group, ROW_GROUP_SHARING)
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
        grid=(min(batch, device.max_grid),),
        block=(block,),
        shared_bytes=shared,
        notes=(note,),
        options=options,
    )


# --- Choosing ---------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Network, int, Device, Access], Plan]] = {"row": plan_row}

_C_TYPES = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "half_bits",
    "bfloat16": "bfloat16_bits",
    "float32": "float",
    "float64": "double",
}


def readable_dtypes() -> tuple[str, ...]:
    """Names of the dtypes of x that the kernels can read (and widen to the network's)."""
    return tuple(_C_TYPES)


def network_options(network: Network, access: Access) -> tuple[str, ...]:
    """The -D options of common.cuh."""
    return (
        f"-DMLP_T={_C_TYPES[network.dtype]}",
        "-DMLP_SIZES=" + ",".join(map(str, network.sizes)),
        "-DMLP_ACTIVATIONS=" + ",".join(f"Act::{name}" for name in network.activations),
        "-DMLP_BIASES=" + ",".join(str(int(bias)) for bias in network.biases),
        f"-DMLP_PACKED={int(access.packed)}",
        f"-DMLP_X_T={_C_TYPES[access.x_dtype or network.dtype]}",
        f"-DMLP_X_ACCESS=Access::{access.x}",
        f"-DMLP_Y_ACCESS=Access::{access.y}",
        f"-DMLP_BATCH_DIMS={access.batch_dims}",
    )


def plan_gpu(network: Network, batch: int, device: Device, access: Access = CONTIGUOUS) -> Plan:
    """The plan of a call on a GPU.

    Raises
    ------
    PlanError
        If no schedule can run the network on the device.
    """
    reasons = [("cpu", "the arrays are on the GPU, or go there (device='cpu' keeps NumPy arrays on the CPU)")]
    for name, make in SCHEDULES.items():
        try:
            plan = make(network, batch, device, access)
        except PlanError as error:
            reasons.append((name, str(error)))
            continue
        return replace(plan, not_taken=tuple(reasons))
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons[1:])
    raise PlanError(
        f"no schedule can run the network {network.describe()}: {why}. Use narrower layers, or NumPy arrays with "
        "device='cpu'"
    )
