"""The latency table: one small network at small batches, beside the floors and the ways to do without this library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._compile import kernel_for
from .._gpu import cupy_or_error, device_numbers, gpu_problem
from .._pack import pack
from ..activations import ActivationSpec, activation_of, parameter_of
from ..fused import fused_mlp
from ..mlp import MLP
from ..schedules import plan_gpu
from ..verify import CANONICAL_SIZES, Report, random_mlp, verify
from .timing import Subject, measure, rounded

__all__ = ["BATCHES", "latency_rows", "verified"]

BATCHES = (1, 16, 256, 1024)

EMPTY = "empty kernel"
LOAD_STORE = "kernel of one load and one store"
RAW = "bare RawKernel call"
CALL_OUT = "net(x, out=y)"
CALL = "net(x)"
CUPY_EMPTY = "cupy.empty"
GRAPH = "bare graph launch"
BOUND = "net.bind(x, out=y)()"
FUSED = "fused_mlp(x, W1, ..., out=y)"
CUPY_CHAIN = "CuPy: matmul, maximum, ..."
NUMPY_GPU = "NumPy to NumPy on the GPU"
NUMPY_COPIES = "the same by asarray and asnumpy"
NUMPY_CPU = "NumPy to NumPy on the CPU"
NUMPY_CHAIN = "NumPy: matmul, maximum, ..."

_FLOOR_SOURCE = """
extern "C" __global__ void empty() {}
extern "C" __global__ void load_store(const float* x, float* y) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    y[i] = x[i];
}
"""


def verified(sizes: Sequence[int], seed: int) -> Report:
    """The report on the network that is about to be measured, in both weight layouts; raises if it is wrong."""
    for layout in ("out_in", "in_out"):
        report = verify(random_mlp(sizes, seed, weight_layout=layout), batch=max(BATCHES))
        if not report.ok:
            raise RuntimeError(f"the network is wrong, so it is not measured:\n{report}")
    return report


def latency_rows(
    sizes: Sequence[int] = CANONICAL_SIZES, batches: Sequence[int] = BATCHES, rounds: int = 15, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Measure, and yield a row of the table for each subject and batch.

    A row has ``network``, ``precision``, ``batch``, ``subject``, ``note``, and ``gpu_us``, ``host_us`` and
    ``round_trip_us``, each None or a dictionary with ``median``, ``low`` and ``high``.
    """
    net = random_mlp(sizes, seed)
    cupy = cupy_or_error("benchmark") if gpu_problem() is None else None
    for batch in batches:
        x = np.random.default_rng(seed).standard_normal((batch, sizes[0])).astype(net.dtype)
        subjects = _cpu_subjects(net, x)
        if cupy is not None:
            subjects = _gpu_subjects(cupy, net, random_mlp(sizes, seed, weight_layout="out_in"), x) + subjects
        for subject, timings in measure(subjects, rounds, cupy):
            yield {
                "network": net.network.describe(),
                "precision": net.network.precision,
                "batch": batch,
                "subject": subject.name,
                "note": subject.note,
                **{f"{kind}_us": rounded(timings.get(kind)) for kind in ("gpu", "host", "round_trip")},
            }


def _gpu_subjects(cupy: Any, net: MLP, transposed: MLP, x: NDArray[Any]) -> list[Subject]:
    batch = len(x)
    gpu_x = cupy.asarray(x)
    y = cupy.full((batch, net.network.sizes[-1]), np.nan, net.dtype)
    host_y = np.empty(y.shape, net.dtype)
    weights = [cupy.asarray(w) for w in net.weights]
    floors = cupy.RawModule(code=_FLOOR_SOURCE)
    empty, load_store = floors.get_function("empty"), floors.get_function("load_store")
    plenty = cupy.random.default_rng(0).random(batch * 64, dtype=np.float32)
    into = cupy.empty_like(plenty)
    device_id = gpu_x.data.device_id
    plan = plan_gpu(net.network, batch, device_numbers(device_id), schedule="row")  # one launch, whatever net(x) takes
    (row,) = plan.kernels
    raw = kernel_for(row, device_id).raw
    arguments = (gpu_x, y, cupy.asarray(pack(np, plan.layout, net.network, net.weights, net.biases)), batch)

    step = net.bind(gpu_x, out=y)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        net(gpu_x, out=y)
        graph = stream.end_capture()

    def copies() -> Any:
        return cupy.asnumpy(net(cupy.asarray(x)))

    everything = ("gpu", "host", "round_trip")
    no_graph = "CuPy refuses cuBLAS calls while a graph is captured"
    return [
        Subject(EMPTY, lambda: empty((batch,), (64,), ()), everything),
        Subject(LOAD_STORE, lambda: load_store((batch,), (64,), (plenty, into)), everything),
        Subject(RAW, lambda: raw(row.grid, row.block, arguments, shared_mem=row.shared_bytes), everything),
        Subject(CALL_OUT, lambda: net(gpu_x, out=y), everything),
        Subject(CALL_OUT + ", out_in", lambda: transposed(gpu_x, out=y), everything),
        Subject(CALL, lambda: net(gpu_x), ("host", "round_trip")),
        Subject(CUPY_EMPTY, lambda: cupy.empty(y.shape, y.dtype), ("host",)),
        Subject(GRAPH, graph.launch, ("host", "round_trip")),
        Subject(BOUND, step, ("host", "round_trip")),
        Subject(FUSED, lambda: fused_mlp(gpu_x, *weights, out=y), everything),
        Subject(CUPY_CHAIN, partial(_chain, gpu_x, weights, net.network.activations), ("host", "round_trip"), no_graph),
        Subject(NUMPY_GPU, lambda: net(x, out=host_y, device="cuda"), ("round_trip",)),
        Subject(NUMPY_COPIES, copies, ("round_trip",)),
    ]


def _cpu_subjects(net: MLP, x: NDArray[Any]) -> list[Subject]:
    out = np.empty((len(x), net.network.sizes[-1]), net.dtype)
    return [
        Subject(NUMPY_CPU, lambda: net(x, out=out, device="cpu"), ("round_trip",)),
        Subject(NUMPY_CHAIN, partial(_chain, x, net.weights, net.network.activations), ("round_trip",)),
    ]


def _chain(h: Any, weights: Sequence[Any], activations: Sequence[ActivationSpec]) -> Any:
    """The way without this library, NumPy's or CuPy's: one call a matmul, one an activation."""
    for weight, spec in zip(weights, activations, strict=True):
        h = h @ weight
        if spec != "identity":
            activation_of(spec).apply(h, h, parameter_of(spec))
    return h
