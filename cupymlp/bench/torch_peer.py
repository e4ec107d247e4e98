"""PyTorch as a peer, if it is installed: eager, and torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .buffers import Buffers
from .cases import Case
from .peers import Entry
from .samplers import Call, Sampler, WallSampler, warm_ups

__all__ = ["TorchPeer"]

EAGER = "torch eager"
COMPILED = "torch.compile"
COMPILE_MODE = "max-autotune-no-cudagraphs"  # the graph is captured here, as everybody's is
COMPILE_BATCHES_LEAST = 16  # every batch size is compiled anew; one row is left out


class TorchPeer:
    """PyTorch on the current GPU.

    Parameters
    ----------
    compile_seconds
        What torch.compile may take in all; 0 leaves it out.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    RuntimeError
        If it finds no GPU.
    """

    name = "torch"

    def __init__(self, compile_seconds: float) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
        self._torch = torch
        self._engine = _TorchEngine(torch)
        self._left = compile_seconds

    def entries(self, case: Case, net: Any, buffers: Buffers) -> Iterator[Entry]:
        """Eager, and compiled while there is time for compiling."""
        torch = self._torch
        # TF32 for float32 products, or not: what torch.backends.cuda.matmul.allow_tf32 says, for torch.compile as well.
        torch.set_float32_matmul_precision("high" if case.group.precision == "tf32" else "highest")
        dtype = getattr(torch, case.group.dtype)
        x = [
            torch.from_dlpack(buffers.x_bytes(i)).view(dtype).reshape(case.batch, case.group.sizes[0])
            for i in range(buffers.sets)
        ]
        weights = [_tensor(torch, w, dtype) for w in net.weights]
        relu = [name == "relu" for name in net.network.activations]

        def chain(h: Any) -> Any:
            for weight, with_relu in zip(weights, relu, strict=True):
                h = h @ weight
                if with_relu:
                    h = torch.relu(h)
            return h

        yield Entry(EAGER, "peer", _call(torch, chain, x), self._engine)
        if self._left > 0 and case.batch >= COMPILE_BATCHES_LEAST:
            start = time.perf_counter()
            torch.compiler.reset()
            call = _call(torch, torch.compile(chain, mode=COMPILE_MODE, dynamic=False), x)
            self._engine.wait(call(0))
            seconds = time.perf_counter() - start
            self._left -= seconds
            yield Entry(COMPILED, "peer", call, self._engine, note=f"{COMPILE_MODE}, compiled in {seconds:.0f} s")

    def free(self) -> None:
        """Return cached memory to the device."""
        self._torch.cuda.empty_cache()


def _tensor(torch: Any, array: Any, dtype: Any) -> Any:
    """A host array of any dtype, bfloat16 too, as a GPU tensor."""
    data = np.ascontiguousarray(array)
    return torch.from_numpy(data.view(np.uint8).copy()).view(dtype).reshape(data.shape).cuda()


def _call(torch: Any, function: Callable[[Any], Any], x: list[Any]) -> Call:
    def call(index: int) -> Any:
        with torch.no_grad():
            return function(x[index])

    return call


class _TorchEngine:
    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def wait(self, _: Any) -> None:
        self._torch.cuda.synchronize()

    def sampler(self, call: Call, calls: int, sets: int) -> Sampler:
        try:
            return _TorchGraph(self._torch, call, calls, sets)
        except RuntimeError:  # something in it cannot be captured
            self._torch.cuda.synchronize()
            return WallSampler("wall", call, self.wait, calls, sets)


class _TorchGraph:
    method = "graph"

    def __init__(self, torch: Any, call: Call, calls: int, sets: int) -> None:
        self.calls = calls
        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for i in range(3):  # on this stream, as PyTorch asks for
                call(i % sets)
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Relaxed, as CuPy captures: what the garbage collector may free meanwhile does not break it.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="relaxed"):
            for i in range(calls):
                self._result = call(i % sets)
        self._warm_ups = 1

    def sample(self) -> float:
        torch = self._torch
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            for _ in range(self._warm_ups):
                self._graph.replay()
            start.record()
            self._graph.replay()
            end.record()
        end.synchronize()
        microseconds = float(start.elapsed_time(end)) * 1e3
        self._warm_ups = warm_ups(microseconds)
        return microseconds / self.calls
