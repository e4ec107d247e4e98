"""layer: one launch a layer, a tile of rows and columns a block (cuda_src/mlp_layer.cu)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..network import Network
from ..plan import (
    Access,
    Device,
    KernelPlan,
    Plan,
    PlanError,
    compute_itemsize,
    need_precision,
    network_options,
    packed_bytes,
)
from .steps import (
    Scratch,
    Step,
    buffer_of,
    check_grid,
    ends_in_softmax,
    hidden_scratch,
    kernels_of,
    layer_access,
    one_layer,
    rows_at_once,
    rows_kernel,
)
from .tile import slab_bytes

__all__ = ["layer_scratch", "layer_steps", "plan_layer"]


@dataclass(frozen=True)
class Shape:
    """The shape of a layer kernel: the options of mlp_layer.cu, and the multiply-adds a us and multiprocessor."""

    rows: int
    columns: int
    row_warps: int
    column_warps: int
    chunk: int
    blocks: int
    rate: int

    @property
    def block_rows(self) -> int:
        """Rows of a block's tile."""
        return 4 * self.rows * self.row_warps

    @property
    def block_columns(self) -> int:
        """Columns of a block's tile."""
        return 8 * self.columns * self.column_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.column_warps

    def shared_bytes(self, itemsize: int) -> int:
        """``MLP_SHARED_BYTES``: two stages of rows and columns."""
        slabs = self.row_warps * slab_bytes(self.chunk, self.rows, itemsize)
        return 2 * (slabs + self.chunk * self.block_columns * itemsize)

    def options(self, itemsize: int) -> tuple[str, ...]:
        """The options of mlp_layer.cu and tile.cuh."""
        return (
            f"-DMLP_ROWS={self.rows}",
            f"-DMLP_COLUMNS={self.columns}",
            f"-DMLP_ROW_WARPS={self.row_warps}",
            f"-DMLP_COLUMN_WARPS={self.column_warps}",
            f"-DMLP_CHUNK={self.chunk}",
            f"-DMLP_BLOCKS={self.blocks}",
            f"-DMLP_SHARED_BYTES={self.shared_bytes(itemsize)}",
        )


# By the bytes of arithmetic, from the fewest instructions a product to the most blocks for few rows.
SHAPES = {
    4: (
        Shape(8, 8, 4, 2, 16, 1, 175_000),  # 128 x 128
        Shape(8, 8, 2, 2, 16, 2, 170_000),  # 64 x 128
        Shape(8, 8, 4, 1, 16, 2, 165_000),  # 128 x 64
        Shape(8, 4, 4, 1, 16, 3, 140_000),  # 128 x 32
        Shape(4, 4, 2, 2, 32, 3, 110_000),  # 32 x 64
        Shape(4, 4, 4, 1, 32, 3, 100_000),  # 64 x 32
        Shape(4, 2, 4, 1, 32, 3, 70_000),  # 64 x 16
        Shape(2, 4, 1, 2, 64, 3, 60_000),  # 8 x 64
        Shape(2, 2, 1, 2, 64, 3, 40_000),  # 8 x 32
        Shape(2, 1, 1, 2, 64, 3, 20_000),  # 8 x 16
    ),
    8: (
        Shape(4, 8, 4, 2, 16, 1, 90_000),  # 64 x 128
        Shape(4, 4, 4, 1, 16, 2, 80_000),  # 64 x 32
        Shape(2, 4, 1, 2, 32, 3, 50_000),  # 8 x 64
        Shape(2, 1, 1, 2, 32, 3, 20_000),  # 8 x 16
    ),
}
# The cost model, fitted to benchmarks/sweep-*: us, and bytes a us.
LAYER_LAUNCH = 1.15
SHAPE_CHUNK = 0.6  # us
LAYER_INPUT = {2: 0.0105, 4: 0.008, 8: 0.0085}  # of one k, where there is little to compute; by bytes of an element
LAYER_BYTES = 4_100_000  # of weights and activations from memory or the L2 cache, a us
MEASURED = 0.87  # of the rates of SHAPES
HALF_TIMES = 1.14  # what float16 and bfloat16 take for their conversions
NOT_HIDDEN = 0.8  # of the time that these bytes take


def layer_microseconds(k: int, n: int, rows: int, itemsize: int, device: Device, shape: Shape) -> float:
    """The GPU time of one launch: waves of blocks, as long as their products or a k after the other, and memory."""
    tiles = -(-rows // shape.block_rows) * -(-n // shape.block_columns)
    sharing = min(shape.blocks, -(-tiles // device.multiprocessors))
    waves = -(-tiles // (device.multiprocessors * sharing))
    products = (
        shape.block_rows
        * shape.block_columns
        * sharing
        / (MEASURED * shape.rate)
        * (HALF_TIMES if itemsize == 2 else 1.0)
    )
    memory = (k * n + rows * (k + n)) * itemsize / LAYER_BYTES
    return LAYER_LAUNCH + waves * k * max(products, LAYER_INPUT[itemsize]) + NOT_HIDDEN * memory


def shape_cost(k: int, n: int, rows: int, itemsize: int, device: Device, shape: Shape) -> float:
    """What shapes are compared by: few warps and many chunks count more than in the GPU time, which was measured later."""
    tiles = -(-rows // shape.block_rows) * -(-n // shape.block_columns)
    sharing = min(shape.blocks, -(-tiles // device.multiprocessors))
    waves = -(-tiles // (device.multiprocessors * sharing))
    busy = min(1.0, shape.threads * sharing / 256)  # fewer warps leave schedulers idle
    products = shape.block_rows * shape.block_columns * sharing / (shape.rate * busy)
    compute = waves * (k * products + min(shape.chunk, k) * SHAPE_CHUNK / shape.chunk) + SHAPE_CHUNK
    latency = waves * -(-k // shape.chunk) * SHAPE_CHUNK
    return max(compute, latency, (k * n + rows * (k + n)) * itemsize / LAYER_BYTES)


def best_shape(k: int, n: int, rows: int, network: Network, device: Device) -> tuple[float, Shape]:
    """The shape that is expected to be the fastest for one layer, and its time."""
    sums = compute_itemsize(network)
    fits = [
        shape
        for shape in SHAPES[sums]
        if shape.shared_bytes(sums) <= device.shared_bytes and tiles(shape, rows, n) <= device.max_grid
    ]
    if not fits:
        check_grid(device, min(tiles(shape, rows, n) for shape in SHAPES[sums]))
        least = min(shape.shared_bytes(sums) for shape in SHAPES[sums])
        raise PlanError(
            f"a tile needs {least:,} bytes of shared memory, and {device.name} gives a block {device.shared_bytes:,}"
        )
    shape = min(fits, key=lambda shape: shape_cost(k, n, rows, network.itemsize, device, shape))
    return layer_microseconds(k, n, rows, network.itemsize, device, shape), shape


def tiles(shape: Shape, rows: int, n: int) -> int:
    """Blocks of a launch."""
    return -(-rows // shape.block_rows) * -(-n // shape.block_columns)


def layer_kernel(network: Network, layer: int, rows: int, shape: Shape, access: Access) -> KernelPlan:
    """The launch of one layer; access is this layer's."""
    sums = compute_itemsize(network)
    options = (
        *network_options(one_layer(network, layer), access),
        *shape.options(sums),
    )
    grid = tiles(shape, rows, network.sizes[layer + 1])
    return KernelPlan("mlp_layer", options, (grid,), (shape.threads,), shape.shared_bytes(sums))


def layer_scratch(network: Network) -> Scratch:
    """The buffers, by bytes a row: hidden activations, and the last layer's sums if softmax follows."""
    scratch = hidden_scratch(network)
    if not ends_in_softmax(network):
        return scratch
    return Scratch({**scratch.row_bytes, "sums": network.sizes[-1] * compute_itemsize(network)})


def layer_steps(network: Network, batch: int, device: Device, access: Access) -> tuple[list[Step], list[Shape], float]:
    """The launches of a round, their shapes, and the GPU time that all rounds are expected to take."""
    rows = rows_at_once(batch, layer_scratch(network))
    steps, shapes, cost = [], [], 0.0
    for layer, (k, n) in enumerate(zip(network.sizes, network.sizes[1:], strict=False)):
        if n == 0:
            continue  # nothing to compute
        layer_cost, shape = best_shape(k, n, max(1, rows), network, device)
        cost += layer_cost
        shapes.append(shape)
        source = "x" if layer == 0 else buffer_of(layer)
        last = layer == network.depth - 1
        its_access = layer_access(network, layer, access)
        if not (last and ends_in_softmax(network)):
            kernel = layer_kernel(network, layer, rows, shape, its_access)
            target = "y" if last else buffer_of(layer + 1)
            steps.append(Step(layer, source, target, kernel, its_access.batch_dims > 0))
            continue
        x_dims, y_dims = (0 if a == "contiguous" else its_access.batch_dims for a in (its_access.x, its_access.y))
        to_sums = replace(its_access, y="contiguous", batch_dims=x_dims, y_dtype=network.sum_dtype)
        kernel = layer_kernel(network, layer, rows, shape, to_sums)
        steps.append(Step(layer, source, "sums", kernel, x_dims > 0))
        to_y = Access(network.sum_dtype, "contiguous", its_access.y, y_dims, packed=False)
        added = replace(network, biases=(False,) * network.depth)  # by mlp_layer
        steps.append(Step(layer, "sums", "y", rows_kernel("softmax", added, layer, rows, to_y, device), y_dims > 0))
        cost += LAYER_LAUNCH
    return steps, shapes, cost * (batch / rows if rows else 0)


def plan_layer(network: Network, batch: int, device: Device, access: Access) -> Plan:
    """One launch a layer. Raises PlanError if the GPU cannot launch it."""
    need_precision(network, "ieee")
    scratch = layer_scratch(network)
    rows = rows_at_once(batch, scratch)
    steps, shapes, cost = layer_steps(network, batch, device, access)
    found = dict.fromkeys(f"{shape.block_rows} x {shape.block_columns}" for shape in shapes)
    rounds = -(-batch // rows) if rows else 0
    return Plan(
        schedule="layer",
        network=network,
        batch=batch,
        device=device.name,
        launches=rounds * len(steps) if network.sizes[-1] else 0,
        weight_bytes=packed_bytes(network),
        kernels=kernels_of(steps),
        rows_at_once=rows,
        scratch_bytes=scratch.total(rows),
        microseconds=cost,
        notes=(f"rows x columns a block: {', '.join(found)}",),
    )
