"""What a plan is, and the arithmetic of sizes that plans share. No GPU and no CuPy.

`cupymlp.schedules` makes plans: a schedule is one way to compute the network on a GPU, one file of that package and one
``cuda_src/mlp_<schedule>.cu``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .activations import activation_of, parameter_of
from .network import Network

__all__ = ["CONTIGUOUS", "Access", "Device", "KernelPlan", "Plan", "PlanError", "layer_vectors", "network_options"]

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
    y_dtype
        The dtype name of y; None for the network's own. Another one is for what the next launch reads.
    """

    x_dtype: str | None = None
    x: str = "contiguous"
    y: str = "contiguous"
    batch_dims: int = 0
    packed: bool = True
    y_dtype: str | None = None


CONTIGUOUS = Access()


@dataclass(frozen=True)
class KernelPlan:
    """One kernel of a plan: what is compiled, and how it is launched.

    Attributes
    ----------
    name
        Of the kernel, and of its file in cuda_src.
    options
        The compiler options that make the file this kernel.
    grid, block
        The launch configuration.
    shared_bytes
        Dynamic shared memory of a block, in bytes.
    registers
        Registers a thread, once the kernel is compiled; None before.
    """

    name: str
    options: tuple[str, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0
    registers: int | None = None


@dataclass(frozen=True)
class Plan:
    """How one call will run: print it.

    Attributes
    ----------
    schedule
        A name of `cupymlp.schedules.SCHEDULES`, or ``cpu``.
    network, batch
        What is computed, and for how many rows.
    device
        The name of the device.
    launches
        Kernel launches of one call.
    weight_bytes
        Weights and biases as the kernels read them, in bytes, padding included.
    kernels
        The kernels, in the order of their first launch; none on the CPU.
    layout
        How the weights are laid out for these kernels: a name of `cupymlp._pack.LAYOUTS`.
    rows_at_once
        The rows that a launch takes; a larger batch is several rounds of launches.
    scratch_bytes
        Memory for hidden activations on the device, in bytes; kept by the network.
    microseconds
        What the cost model expects of the GPU, if there is such an estimate.
    notes
        What else is worth knowing, one line each.
    not_taken
        ``(schedule, reason)`` for every other schedule.
    """

    schedule: str
    network: Network
    batch: int
    device: str
    launches: int
    weight_bytes: int
    kernels: tuple[KernelPlan, ...] = ()
    layout: str = "vectors"
    rows_at_once: int = 0
    scratch_bytes: int = 0
    microseconds: float | None = None
    notes: tuple[str, ...] = ()
    not_taken: tuple[tuple[str, str], ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid of the first kernel; empty on the CPU."""
        return self.kernels[0].grid if self.kernels else ()

    @property
    def block(self) -> tuple[int, ...]:
        """The block of the first kernel; empty on the CPU."""
        return self.kernels[0].block if self.kernels else ()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the first kernel, in bytes."""
        return self.kernels[0].shared_bytes if self.kernels else 0

    @property
    def registers(self) -> int | None:
        """Registers a thread of the first kernel, once it is compiled; None before."""
        return self.kernels[0].registers if self.kernels else None

    def __str__(self) -> str:
        rows = [
            ("network", self.network.describe()),
            ("precision", self.network.precision),
            ("batch", f"{self.batch:,} rows"),
            ("device", self.device),
            ("schedule", self.schedule),
            ("launches", str(self.launches)),
        ]
        for kernel in self.kernels:
            registers = "not compiled yet" if kernel.registers is None else f"{kernel.registers} a thread"
            rows += [
                ("kernel", kernel.name),
                ("grid", str(kernel.grid)),
                ("block", str(kernel.block)),
                ("shared", f"{kernel.shared_bytes:,} bytes a block"),
                ("registers", registers),
            ]
        rows.append(("weights", f"{self.weight_bytes:,} bytes"))
        if self.scratch_bytes:
            rows.append(("scratch", f"{self.scratch_bytes:,} bytes, {self.rows_at_once:,} rows at a time"))
        if self.microseconds is not None:
            rows.append(("expected", f"{self.microseconds:.3g} us on the GPU, by the cost model"))
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


def held_widths(network: Network) -> tuple[int, ...]:
    """Widths of the activations that a row leaves in shared memory: layers' inputs, and outputs that softmax follows."""
    return network.sizes if activation_of(network.activations[-1]).over_row else network.sizes[:-1]


def compute_itemsize(network: Network) -> int:
    """Bytes of one element in arithmetic: float64 for float64, else float32."""
    return 8 if network.dtype == "float64" else 4


def multiply_adds(network: Network) -> int:
    """Multiply-adds of one row."""
    return sum(k * n for k, n in zip(network.sizes, network.sizes[1:], strict=False))


def need_precision(network: Network, *precisions: str) -> None:
    """Raise PlanError unless the network wants one of these precisions."""
    if network.precision not in precisions:
        raise PlanError(f"computes {' or '.join(precisions)}, and precision={network.precision!r} was asked for")


def _c_number(value: float, network: Network) -> str:
    """A number that the arithmetic has, exactly, as C writes it."""
    return value.hex() + ("" if network.sum_dtype == "float64" else "f")


def network_options(network: Network, access: Access) -> tuple[str, ...]:
    """The -D options of common.cuh."""
    return (
        f"-DMLP_S={_C_TYPES[network.dtype]}",
        f"-DMLP_T={'double' if network.dtype == 'float64' else 'float'}",
        "-DMLP_SIZES=" + ",".join(map(str, network.sizes)),
        "-DMLP_ACTIVATIONS=" + ",".join(f"Act::{activation_of(spec).name}" for spec in network.activations),
        "-DMLP_PARAMETERS="
        + ",".join(_c_number(parameter_of(a, network.sum_dtype), network) for a in network.activations),
        "-DMLP_BIASES=" + ",".join(str(int(bias)) for bias in network.biases),
        f"-DMLP_PACKED={int(access.packed)}",
        f"-DMLP_X_T={_C_TYPES[access.x_dtype or network.dtype]}",
        f"-DMLP_Y_T={_C_TYPES[access.y_dtype or network.dtype]}",
        f"-DMLP_X_ACCESS=Access::{access.x}",
        f"-DMLP_Y_ACCESS=Access::{access.y}",
        f"-DMLP_BATCH_DIMS={access.batch_dims}",
    )


def cpu_block_rows(network: Network) -> int:
    """Rows that the CPU path takes at a time, so that two neighbouring layers' activations stay in cache."""
    widest = max(a + b for a, b in zip(network.sizes, network.sizes[1:], strict=False))
    return max(16, CPU_BLOCK_BYTES // max(1, widest * compute_itemsize(network)))
