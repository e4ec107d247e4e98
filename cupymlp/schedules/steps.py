"""The steps of schedules that take several launches, and the memory between them. Pure functions, as all planning.

A batch is processed in rounds of rows, so that hidden activations need little memory and stay in the L2 cache. A step reads
one array and writes one: ``x``, ``y``, or a buffer of the scratch memory, with a row a row of the round. ``even`` holds the
activations of even layers (of layer 0 the copy of x, if one is made), ``odd`` those of odd layers, ``sums`` products that are
not in the network's dtype yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..activations import activation_of
from ..network import Network
from ..plan import Access, Device, KernelPlan, PlanError, network_options

__all__ = [
    "Scratch",
    "Step",
    "buffer_of",
    "check_grid",
    "ends_in_softmax",
    "hidden_scratch",
    "kernels_of",
    "layer_access",
    "one_layer",
    "rows_at_once",
    "rows_kernel",
]

SCRATCH_BYTES = 32 << 20  # most of an H200's 50 MB of L2 cache
ROUND_ROWS = 128  # a round is a multiple of it: of the rows of every tile
LEAST_ROWS = 4096  # of a round, for layers so wide that fewer would leave multiprocessors idle
BLOCK, BLOCKS_OF_A_MULTIPROCESSOR = 256, 8  # of bias_act and softmax
PART_BYTES = 256  # a buffer begins at a multiple of it


@dataclass(frozen=True)
class Step:
    """One launch.

    Attributes
    ----------
    layer
        The layer that it belongs to, from 0; -1 for the copy of x.
    source, target
        Names of arrays.
    kernel
        What is launched; None: the layer's matrix product, by cuBLAS.
    strided
        Whether the kernel takes the strides of the call's x and y, not only the number of rows.
    """

    layer: int
    source: str
    target: str
    kernel: KernelPlan | None = None
    strided: bool = False


@dataclass(frozen=True)
class Scratch:
    """Scratch memory: how many bytes a row takes in each buffer."""

    row_bytes: dict[str, int]

    @property
    def bytes_of_a_row(self) -> int:
        """Of all buffers."""
        return sum(self.row_bytes.values())

    def offsets(self, rows: int) -> dict[str, int]:
        """Where each buffer begins, in bytes, if each has this many rows."""
        at, offsets = 0, {}
        for name, size in self.row_bytes.items():
            offsets[name] = at
            at += -(-rows * size // PART_BYTES) * PART_BYTES
        return offsets

    def total(self, rows: int) -> int:
        """Bytes of all buffers."""
        return sum(-(-rows * size // PART_BYTES) * PART_BYTES for size in self.row_bytes.values())


def buffer_of(activations: int) -> str:
    """The buffer of the inputs of this layer."""
    return "odd" if activations % 2 else "even"


def hidden_scratch(network: Network, first: int = 1) -> Scratch:
    """Scratch for the inputs of layers first, first + 1, ..."""
    widest = {"even": 0, "odd": 0}
    for layer in range(first, network.depth):
        name = buffer_of(layer)
        widest[name] = max(widest[name], network.sizes[layer])
    return Scratch({name: width * network.itemsize for name, width in widest.items() if width})


def rows_at_once(batch: int, scratch: Scratch) -> int:
    """The rows of a round: rounds of equal size, as few as the scratch memory allows."""
    row_bytes = scratch.bytes_of_a_row
    if row_bytes == 0:
        return batch
    most = max(LEAST_ROWS, SCRATCH_BYTES // row_bytes // ROUND_ROWS * ROUND_ROWS)
    rounds = max(1, -(-batch // most))
    return min(batch, -(-batch // rounds // ROUND_ROWS) * ROUND_ROWS) if rounds > 1 else batch


def one_layer(network: Network, layer: int) -> Network:
    """The network of this layer alone."""
    return Network(
        network.sizes[layer : layer + 2],
        network.activations[layer : layer + 1],
        network.biases[layer : layer + 1],
        network.dtype,
        network.precision,
    )


def layer_access(network: Network, layer: int, access: Access) -> Access:
    """How one layer's kernel reads and writes: the call's x and y at the ends, contiguous arrays between layers."""
    first, last = layer == 0, layer == network.depth - 1
    x = access.x if first else "contiguous"
    y = access.y if last else "contiguous"
    dims = 0 if x == y == "contiguous" else access.batch_dims
    return Access(access.x_dtype if first else None, x, y, dims, access.packed)


def ends_in_softmax(network: Network) -> bool:
    """Whether a function of whole rows follows the last layer: a launch of its own."""
    return activation_of(network.activations[-1]).over_row and network.sizes[-1] > 0


def rows_kernel(name: str, network: Network, layer: int, rows: int, access: Access, device: Device) -> KernelPlan:
    """bias_act or softmax, for the outputs of a layer, or, for layer -1, the copy of x."""
    width = network.sizes[layer + 1]
    activation, bias = (network.activations[layer], network.biases[layer]) if layer >= 0 else ("identity", False)
    like = Network((width, width), (activation,), (bias,), network.dtype, network.precision)
    threads_of_a_row = 32 if name == "softmax" else -(-width // 4)
    options = (*network_options(like, access), f"-DMLP_BLOCK={BLOCK}")
    most = min(BLOCKS_OF_A_MULTIPROCESSOR * device.multiprocessors, device.max_grid)
    return KernelPlan(name, options, (max(1, min(-(-rows * threads_of_a_row // BLOCK), most)),), (BLOCK,))


def check_grid(device: Device, blocks: int) -> None:
    """Raise PlanError if a grid of this many blocks cannot be launched."""
    if blocks > device.max_grid:
        raise PlanError(f"needs a grid of {blocks:,} blocks, and {device.name} takes {device.max_grid:,}")


def kernels_of(steps: Sequence[Step]) -> tuple[KernelPlan, ...]:
    """The steps' own kernels."""
    return tuple(step.kernel for step in steps if step.kernel is not None)
