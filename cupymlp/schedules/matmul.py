"""matmul: cuBLAS's matrix products, and one kernel for bias and activation a layer (cuda_src/bias_act.cu, softmax.cu)."""

from __future__ import annotations

from ..network import Network
from ..plan import VECTOR_BYTES, Access, Device, Plan, PlanError, compute_itemsize
from .layer import plan_layer
from .row import plan_row
from .steps import Scratch, Step, buffer_of, ends_in_softmax, hidden_scratch, kernels_of, rows_at_once, rows_kernel
from .tile import plan_tile

__all__ = ["array_offsets", "arrays_bytes", "matmul_scratch", "matmul_steps", "plan_matmul"]

# The cost model, in us, and in multiply-adds or bytes a us of an H200's 132 multiprocessors: float32's near
# benchmarks/sweep-*, the others guesses; no choice rests on them.
GEMM_LEAST = 4.0
GEMM_MULTIPLY_ADDS = {"float16": 300e6, "bfloat16": 300e6, "float32": 22e6, "float64": 24e6}
KERNEL_LEAST, KERNEL_BYTES = 2.5, 4.1e6
MULTIPROCESSORS = 132


# --- The weight layout "arrays": each layer's (K, N) matrix in C order, then its bias, each at a multiple of 16 bytes ---------


def array_offsets(network: Network) -> list[tuple[int, int]]:
    """Where each layer's weights and bias begin, in bytes; the bias of a layer that has none begins where it would."""
    offsets, at = [], 0
    for layer in range(network.depth):
        k, n = network.sizes[layer : layer + 2]
        bias = at + _padded(k * n * network.itemsize)
        offsets.append((at, bias))
        at = bias + (_padded(n * network.itemsize) if network.biases[layer] else 0)
    return offsets


def arrays_bytes(network: Network) -> int:
    """Bytes of all weights and biases."""
    pairs = zip(network.sizes, network.sizes[1:], network.biases, strict=False)
    size = network.itemsize
    return sum(_padded(k * n * size) + (_padded(n * size) if bias else 0) for k, n, bias in pairs)


def _padded(size: int) -> int:
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES


# --- The plan ---------------------------------------------------------------------------------------------------------------


def needs_copy(network: Network, access: Access) -> bool:
    """Whether x must be brought into a contiguous array of the network's dtype first."""
    return network.sizes[0] > 0 and (access.x != "contiguous" or access.x_dtype not in (None, network.dtype))


def _kernel_access(network: Network, layer: int, access: Access) -> Access:
    """How bias_act reads sums and writes a layer's outputs."""
    y = access.y if layer == network.depth - 1 else "contiguous"
    return Access(network.sum_dtype, "contiguous", y, access.batch_dims if y != "contiguous" else 0, packed=False)


def _cublas_writes(network: Network, layer: int, access: Access) -> bool:
    """Whether the product goes where the layer's outputs go: no other dtype, no strides."""
    return network.itemsize > 2 and _kernel_access(network, layer, access).y == "contiguous"


def matmul_steps(network: Network, rows: int, device: Device, access: Access) -> list[Step]:
    """The launches of a round."""
    steps = []
    source = "x"
    if needs_copy(network, access):
        source = buffer_of(0)
        its_access = Access(access.x_dtype, access.x, "contiguous", access.batch_dims, packed=False)
        kernel = rows_kernel("bias_act", network, -1, rows, its_access, device)
        steps.append(Step(-1, "x", source, kernel, its_access.batch_dims > 0))
    for layer, n in enumerate(network.sizes[1:]):
        target = "y" if layer == network.depth - 1 else buffer_of(layer + 1)
        if n > 0:
            products = target if _cublas_writes(network, layer, access) else "sums"
            steps.append(Step(layer, source, products))
            if products != target or network.biases[layer] or network.activations[layer] != "identity":
                its_access = _kernel_access(network, layer, access)
                last = layer == network.depth - 1
                name = "softmax" if last and ends_in_softmax(network) else "bias_act"
                kernel = rows_kernel(name, network, layer, rows, its_access, device)
                steps.append(Step(layer, products, target, kernel, its_access.batch_dims > 0))
        source = target
    return steps


def matmul_scratch(network: Network, access: Access) -> Scratch:
    """The buffers, by bytes a row."""
    scratch = hidden_scratch(network, 0 if needs_copy(network, access) else 1)
    sums = max(
        (n for layer, n in enumerate(network.sizes[1:]) if not _cublas_writes(network, layer, access)), default=0
    )
    return Scratch({**scratch.row_bytes, "sums": sums * compute_itemsize(network)}) if sums else scratch


def microseconds(network: Network, rows: int, device: Device, steps: list[Step]) -> float:
    """The GPU time of a round."""
    share = device.multiprocessors / MULTIPROCESSORS
    time = 0.0
    for step in steps:
        if step.kernel is None:
            products = rows * network.sizes[step.layer] * network.sizes[step.layer + 1]
            time += max(GEMM_LEAST, products / (GEMM_MULTIPLY_ADDS[network.dtype] * share))
        else:
            moved = rows * network.sizes[step.layer + 1] * (network.itemsize + compute_itemsize(network))
            time += max(KERNEL_LEAST, moved / (KERNEL_BYTES * share))
    return time


def plan_matmul(network: Network, batch: int, device: Device, access: Access) -> Plan:
    """Products by cuBLAS, and one kernel a layer. Raises PlanError unless cuBLAS's order of sums was asked for."""
    scratch = matmul_scratch(network, access)
    rows = rows_at_once(batch, scratch)
    steps = matmul_steps(network, rows, device, access)
    cost = microseconds(network, rows, device, steps) * (batch / rows if rows else 0)
    if network.precision != "library":
        raise PlanError(f"sums in cuBLAS's order: only with precision='library'; {cost:.3g} us expected")
    rounds = -(-batch // rows) if rows else 0
    return Plan(
        schedule="matmul",
        network=network,
        batch=batch,
        device=device.name,
        launches=rounds * len(steps) if network.sizes[-1] else 0,
        weight_bytes=arrays_bytes(network),
        kernels=kernels_of(steps),
        layout="arrays",
        rows_at_once=rows,
        scratch_bytes=scratch.total(rows),
        microseconds=cost,
        notes=("matrix products by cuBLAS, which a CUDA graph cannot capture", _wins_from(network, batch, device)),
    )


def _wins_from(network: Network, batch: int, device: Device) -> str:
    """From which widths cuBLAS is expected to be faster than the schedules with one order of summation."""
    for width in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        sizes, layers = (width,) * (network.depth + 1), network.depth
        times = []
        for make in (plan_row, plan_tile, plan_layer):
            like = Network(sizes, ("relu",) * layers, (True,) * layers, network.dtype)
            try:
                times.append(make(like, batch, device, Access()).microseconds or 0.0)
            except PlanError:
                continue
        scratch = matmul_scratch(like, Access())
        rows = rows_at_once(batch, scratch)
        rounds = batch / rows if rows else 0
        if times and microseconds(like, rows, device, matmul_steps(like, rows, device, Access())) * rounds < min(times):
            return f"expected to be faster than precision='ieee' for layers about {width:,} and more wide"
    return "not expected to be faster than precision='ieee' at this batch size"
