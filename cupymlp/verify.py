"""Compare a network's results with cupy.matmul and with the float64 reference, in units of the proven error bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._checks import Device, as_numpy, check_call, check_device
from ._gpu import cupy_or_error, device_numbers, gpu_problem
from .activations import activation_of, parameter_of
from .mlp import MLP
from .network import numpy_dtype
from .reference import Order, error_in_bounds, forward_and_bound

__all__ = ["Comparison", "Report", "random_mlp", "verify"]

CANONICAL_SIZES = (48, 64, 40, 24)
REPEATS = 5
ROWS_ALONE = 8
IN_BLOCKS = ("row", "tile", "layer")  # schedules that sum float16 and bfloat16 networks in blocks, too


@dataclass(frozen=True)
class Comparison:
    """How far a result is from another one.

    Attributes
    ----------
    name
        What was compared with what.
    max_error
        The largest absolute difference of finite elements.
    in_bounds
        The largest difference in units of the bound; at most ``limit`` if all is well.
    limit
        1 against the reference; 2 between two results that may each be off by the bound.
    row, column
        Where that is (rows in C order of the leading axes).
    not_claimed
        Elements whose sums can exceed the dtype's range: the bound says nothing of them.
    """

    name: str
    max_error: float
    in_bounds: float
    limit: float
    row: int
    column: int
    not_claimed: int

    @property
    def ok(self) -> bool:
        """Whether every element is within the limit."""
        return self.in_bounds <= self.limit


@dataclass(frozen=True)
class Report:
    """What `verify` found: print it, or ask `ok`.

    Attributes
    ----------
    network, precision, device, batch
        What was verified, on what.
    comparisons
        With what it was compared.
    repeats_equal
        Whether the same call gave the same bits each time.
    rows_equal
        Whether rows had the same bits in the batch and alone; None where that is not promised (a note tells), or not tried.
    notes
        What else is worth knowing, one line each.
    """

    network: str
    precision: str
    device: str
    batch: int
    comparisons: tuple[Comparison, ...]
    repeats_equal: bool
    rows_equal: bool | None
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether everything held."""
        return all(c.ok for c in self.comparisons) and self.repeats_equal and self.rows_equal is not False

    def __str__(self) -> str:
        lines = [f"{self.network}, precision {self.precision}, {self.batch:,} rows, on {self.device}", *self.notes]
        lines.append(f"{'compared with':<34} {'max error':>10} {'in bounds':>10} {'limit':>6} {'worst at':>14}")
        for c in self.comparisons:
            place = f"({c.row}, {c.column})"
            unclaimed = f"  ({c.not_claimed:,} elements can overflow)" if c.not_claimed else ""
            lines.append(
                f"{c.name:<34} {c.max_error:>10.2e} {c.in_bounds:>10.4f} {c.limit:>6.0f} {place:>14}"
                f"{'' if c.ok else '  TOO FAR'}{unclaimed}"
            )
        lines.append(f"bits equal across {REPEATS} repeats: {_yes(self.repeats_equal)}")
        if self.rows_equal is not None:
            lines.append(f"bits equal, rows in the batch and alone: {_yes(self.rows_equal)}")
        lines.append("verified" if self.ok else "FAILED")
        return "\n".join(lines)


def _yes(answer: bool) -> str:
    return "yes" if answer else "NO"


def random_mlp(
    sizes: Sequence[int], seed: int = 0, *, bias: bool = False, dtype: str = "float32", **options: Any
) -> MLP:
    """A network with normally distributed weights, scaled so that activations stay near 1.

    Parameters
    ----------
    sizes
        (K, hidden widths ..., N).
    seed
        Of ``numpy.random.default_rng``.
    bias
        Whether the layers have biases.
    dtype
        ``float16``, ``bfloat16``, ``float32`` or ``float64``.
    **options
        Passed to `MLP`. Weights are drawn in the ``in_out`` layout and handed over in the layout asked for.
    """
    rng, wanted = np.random.default_rng(seed), numpy_dtype(dtype)
    pairs = list(zip(sizes, sizes[1:], strict=False))
    weights = [(rng.standard_normal((k, n)) * np.sqrt(2 / max(k, 1))).astype(wanted) for k, n in pairs]
    biases = [rng.standard_normal(n).astype(wanted) for _, n in pairs] if bias else None
    if options.get("weight_layout") == "out_in":
        weights = [w.T for w in weights]
    return MLP(weights, biases, **options)


def verify(net: MLP, x: Any = None, *, batch: int = 16, seed: int = 0, device: Device = None) -> Report:
    """Run the network and compare every element with the float64 reference and, on a GPU, with cupy.matmul.

    Parameters
    ----------
    net
        The network.
    x
        NumPy array (..., K); None: normally distributed numbers, ``batch`` rows of them.
    batch, seed
        For the x that is drawn.
    device
        ``"cuda"``, ``"cpu"``, or None: the GPU if there is one.

    Returns
    -------
    Report
        Print it; ``report.ok`` tells whether everything held.

    Examples
    --------
    >>> import cupymlp
    >>> from cupymlp.verify import random_mlp
    >>> cupymlp.verify(random_mlp((3, 5, 2)), device="cpu").ok
    True
    """
    check_device(device)
    network = net.network
    if x is None:
        x = np.random.default_rng(seed).standard_normal((batch, network.sizes[0])).astype(net.dtype)
    x = as_numpy("x", x)
    check_call(network, x.shape, x.dtype, None, None)
    rows = math.prod(x.shape[:-1])
    problem = gpu_problem()
    on_gpu = device == "cuda" or (device is None and problem is None)
    weights = [w.T for w in net.weights] if net.weight_layout == "out_in" else list(net.weights)
    reference, bound = forward_and_bound(network, weights, net.biases, x)
    comparisons, notes = [], []
    rows_equal = None
    if on_gpu:
        cupy = cupy_or_error("device='cuda'")
        gpu_x = cupy.asarray(x)
        results = [net(gpu_x).get() for _ in range(REPEATS)]
        flat, alone = gpu_x.reshape(rows, network.sizes[0]), results[0].reshape(rows, network.sizes[-1])
        some = {i * (rows - 1) // (ROWS_ALONE - 1) for i in range(ROWS_ALONE)} if rows else set()
        rows_equal = all(_same_bits(net(flat[i]).get(), alone[i]) for i in some)
        if not _rows_promised(net):
            notes.append(
                f"bits {'equal' if rows_equal else 'differ'}, rows in the batch and alone; that they are equal is not promised "
                f"for {network.dtype} with precision={network.precision!r}"
                + ("" if network.precision == "library" else " unless schedule= pins one")
            )
            rows_equal = None
        sharper = forward_and_bound(network, weights, net.biases, x, order=_order(net))[1]
        comparisons.append(_compare("float64 reference", results[0], reference, sharper, 1.0))
        chain = _cupy_chain(cupy, net, weights, x)
        own = _compare("cupy.matmul with the reference", chain, reference, bound, 1.0)
        if own.ok:
            comparisons.append(_compare("cupy.matmul", results[0], chain.astype(np.float64), bound, 2.0))
        else:
            notes.append(
                f"cupy.matmul itself is {own.in_bounds:.3g} bounds from the reference (is CUPY_TF32 set?), so it is no measure"
            )
        name = device_numbers(cupy.cuda.runtime.getDevice()).name
    else:
        if device is None:
            notes.append(f"no GPU, so the CPU path is verified: {problem}")
        results = [net(x, device="cpu") for _ in range(REPEATS)]
        comparisons.append(_compare("float64 reference", results[0], reference, bound, 1.0))
        name = "the CPU"
    return Report(
        network=network.describe(),
        precision=network.precision,
        device=name,
        batch=rows,
        comparisons=tuple(comparisons),
        repeats_equal=all(_same_bits(results[0], other) for other in results[1:]),
        rows_equal=rows_equal,
        notes=tuple(notes),
    )


def _order(net: MLP) -> Order:
    """The order of summation that the network has on a GPU, as the bound knows it."""
    exact = net.network.dtype == net.network.sum_dtype
    return "blocks" if net.network.precision == "ieee" and (exact or net.schedule in IN_BLOCKS) else "any"


def _rows_promised(net: MLP) -> bool:
    """Whether a row has the same bits whatever the batch size: not where schedules of different orders may be taken."""
    if net.network.precision == "library":
        return False
    return net.network.dtype == net.network.sum_dtype or net.schedule is not None


def _cupy_chain(cupy: Any, net: MLP, weights: Sequence[NDArray[Any]], x: NDArray[Any]) -> NDArray[Any]:
    """The network of x by cupy.matmul in the dtype of the sums; activations and the rounding to the network's by NumPy."""
    dtype = net.network.sum_dtype
    h = x.astype(dtype)
    for weight, bias, spec in zip(weights, net.biases, net.network.activations, strict=True):
        v = cupy.matmul(cupy.asarray(h), cupy.asarray(weight.astype(dtype)))
        if bias is not None:
            v += cupy.asarray(bias.astype(dtype))
        h = v.get()
        with np.errstate(all="ignore"):
            activation_of(spec).apply(h, h, parameter_of(spec, dtype))
            h = h.astype(net.dtype).astype(dtype)
    return h.astype(net.dtype)


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.tobytes() == b.tobytes()


def _compare(
    name: str, result: NDArray[Any], reference: NDArray[np.float64], bound: NDArray[np.float64], limit: float
) -> Comparison:
    if result.size == 0:
        return Comparison(name, 0.0, 0.0, limit, 0, 0, 0)
    units = error_in_bounds(result, reference, bound)
    with np.errstate(all="ignore"):
        errors = np.abs(result.astype(np.float64) - reference)
    finite = errors[np.isfinite(errors)]
    row, column = divmod(int(np.argmax(units)), result.shape[-1])
    return Comparison(
        name=name,
        max_error=float(finite.max()) if finite.size else 0.0,
        in_bounds=float(units.max()),
        limit=limit,
        row=row,
        column=column,
        not_claimed=int(np.isinf(bound).sum()),
    )
