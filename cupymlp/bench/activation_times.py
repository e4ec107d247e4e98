"""What activations cost: the time of one network with each of them, as a ratio to its time with relu."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from .._gpu import cupy_or_error, gpu_problem
from ..activations import ACTIVATIONS, ActivationSpec, spec_text
from ..mlp import MLP
from ..network import numpy_dtype, precision_takes
from ..verify import CANONICAL_SIZES, random_mlp, verify
from .timing import Subject, measure, rounded

__all__ = ["BATCHES", "CPU_BATCHES", "DTYPES", "PRECISIONS", "activation_rows", "activation_table"]

BATCHES = (16, 1 << 20)
CPU_BATCHES = (16, 1 << 12)
DTYPES, PRECISIONS = ("float32", "float16"), ("ieee", "tf32", "split3")
PARAMETERS = {"sin": 30.0}  # instead of the default, where others are usual
VERIFIED_ROWS = 64


def _specs() -> Iterator[tuple[ActivationSpec, ActivationSpec]]:
    """The hidden layers' and the last layer's; relu first."""
    yield "relu", "identity"
    for row in ACTIVATIONS.values():
        if row.over_row:
            yield "relu", row.name
        elif row.name != "relu":
            spec = row.name if row.parameter is None else (row.name, PARAMETERS.get(row.name, row.parameter.default))
            yield spec, "identity"


def activation_rows(
    sizes: Sequence[int] = CANONICAL_SIZES,
    batches: Sequence[int] | None = None,
    dtypes: Sequence[str] = DTYPES,
    precisions: Sequence[str] = PRECISIONS,
    rounds: int = 7,
    seed: int = 0,
    device: str | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Verify, measure, and yield a row of the table for each activation, batch, dtype and precision.

    A row has ``network``, ``precision``, ``batch``, ``activation`` (of the hidden layers; softmax: of the last), ``schedule``,
    ``us`` (a dictionary with ``median``, ``low`` and ``high``: GPU time on a GPU, else the round trip of the CPU path) and
    ``ratio`` to relu.

    Raises
    ------
    RuntimeError
        If a network is wrong, or if there is no GPU and ``device`` is ``"cuda"``.
    """
    on_gpu = device == "cuda" or (device is None and gpu_problem() is None)
    cupy = cupy_or_error("bench activations on the GPU") if on_gpu else None
    batches = batches or (BATCHES if on_gpu else CPU_BATCHES)
    for dtype in dtypes:
        # On the CPU all precisions are computed in one way.
        for precision in [p for p in precisions if precision_takes(p, dtype)] if on_gpu else ["ieee"]:
            nets = list(_networks(sizes, dtype, precision, seed, "cuda" if on_gpu else "cpu"))
            for batch in batches:
                progress(f"{dtype} {precision}, {batch:,} rows")
                yield from _rows(nets, batch, rounds, seed, cupy)


def _networks(sizes: Sequence[int], dtype: str, precision: str, seed: int, device: Any) -> Iterator[tuple[str, MLP]]:
    for hidden, last in _specs():
        net = random_mlp(
            sizes, seed, dtype=dtype, precision=precision, activation=hidden, out_activation=last, bias=True
        )
        report = verify(net, batch=VERIFIED_ROWS, seed=seed, device=device)
        if not report.ok:
            raise RuntimeError(f"the network is wrong, so it is not measured:\n{report}")
        yield (f"{last} of the output" if last != "identity" else spec_text(hidden)), net


def _rows(nets: Sequence[tuple[str, MLP]], batch: int, rounds: int, seed: int, cupy: Any) -> Iterator[dict[str, Any]]:
    network = nets[0][1].network
    dtype = numpy_dtype(network.dtype)
    x: Any = np.random.default_rng(seed).standard_normal((batch, network.sizes[0]), dtype=np.float32).astype(dtype)
    if cupy is not None:
        x = cupy.asarray(x)
    y = (np if cupy is None else cupy).empty((batch, network.sizes[-1]), dtype)
    device: Any = "cpu" if cupy is None else None
    kind = "round_trip" if cupy is None else "gpu"
    subjects = [Subject(name, partial(net, x, y, device=device), (kind,)) for name, net in nets]
    relu = None
    for (_, net), (subject, timings) in zip(nets, measure(subjects, rounds, cupy), strict=True):
        timing = timings[kind]
        relu = relu or timing.median
        yield {
            "network": "-".join(map(str, network.sizes)) + f" {network.dtype}",
            "precision": network.precision,
            "batch": batch,
            "activation": subject.name,
            "schedule": net.plan(batch, "cpu" if cupy is None else "cuda").schedule,
            "us": rounded(timing),
            "ratio": float(f"{timing.median / relu:.4g}"),
        }


def activation_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line an activation, one column a dtype, precision and batch: the time of relu, and ratios to it."""
    columns = list(dict.fromkeys((r["network"], r["precision"], r["batch"]) for r in rows))
    names = list(dict.fromkeys(r["activation"] for r in rows))
    found = {(r["activation"], r["network"], r["precision"], r["batch"]): r for r in rows}
    lines = [
        " " * 26 + "".join(f"{network.rpartition(' ')[2] + ' ' + precision:>18}" for network, precision, _ in columns),
        " " * 26 + "".join(f"{f'{batch:,} rows':>18}" for _, _, batch in columns),
    ]
    for name in names:
        cells = [found[name, *column] for column in columns]
        texts = [f"{c['us']['median']:.4g} us" if name == names[0] else f"{c['ratio']:.2f}" for c in cells]
        lines.append(f"{name:<26}" + "".join(f"{text:>18}" for text in texts))
    return "\n".join(lines)
