"""What no network can beat, measured beside it: an empty kernel, a copy of the same bytes, the FMA peak."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .buffers import Buffers
from .timing import Timing

__all__ = ["FLOOR_NOTES", "Floors"]

FLOOR_NOTES = {
    "empty kernel": "a launch of min(batch, multiprocessors) blocks of 64 threads that do nothing",
    "copy kernel": "reads the bytes of x and writes those of y, 16 bytes a thread at a time",
    "memcpy": "the driver's copy, device to device, of half the bytes of x and y together",
    "FMA peak": "chains of fused multiply-adds in registers on all multiprocessors; in float64 for float64, else in float32",
}

BLOCK = 256
UNROLL = 4
FMA_CHAINS, FMA_UNROLL = 16, 8
FMA_BLOCKS = 8  # a multiprocessor: 2048 threads
FMA_ROUNDS = 4096
FMA_SAMPLES = 9

# No address or value is known to the compiler, so that every load and every FMA stays.
_SOURCE = r"""
extern "C" __global__ void empty() {}

// in: in_vectors vectors, of which a block reads in_share <= BLOCK * UNROLL; out likewise.
extern "C" __global__ void __launch_bounds__(BLOCK) copy(
    const uint4* __restrict__ in, uint4* out, long long in_vectors, long long out_vectors, int in_share, int out_share) {
    const uint4* from = in + blockIdx.x * static_cast<long long>(in_share);
    uint4* to = out + blockIdx.x * static_cast<long long>(out_share);
    const long long in_left = in_vectors - blockIdx.x * static_cast<long long>(in_share);
    const long long out_left = out_vectors - blockIdx.x * static_cast<long long>(out_share);
    uint4 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int i = u * BLOCK + threadIdx.x;
        v[u] = i < in_share && i < in_left ? from[i] : make_uint4(1, 2, 3, 4);
    }
    unsigned int mixed = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int i = u * BLOCK + threadIdx.x;
        if (i < out_share && i < out_left) to[i] = v[u];
        mixed ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (mixed == 0x9e3779b9u) out[0] = v[0];  // hardly ever: keeps the loads whose values are not written
}

extern "C" __global__ void __launch_bounds__(BLOCK) fma_peak(REAL* out, int rounds, REAL a, REAL b) {
    REAL v[FMA_CHAINS];
#pragma unroll
    for (int c = 0; c < FMA_CHAINS; ++c) v[c] = static_cast<REAL>(threadIdx.x + c) * static_cast<REAL>(0.01);
    for (int r = 0; r < rounds; ++r) {
#pragma unroll
        for (int u = 0; u < FMA_UNROLL; ++u) {
#pragma unroll
            for (int c = 0; c < FMA_CHAINS; ++c) v[c] = fma(v[c], a, b);
        }
    }
    REAL sum = 0;
#pragma unroll
    for (int c = 0; c < FMA_CHAINS; ++c) sum += v[c];
    if (sum == static_cast<REAL>(12345.678)) out[0] = sum;
}
"""


class Floors:
    """The floors on one device.

    Parameters
    ----------
    cupy, stream
        The module, and the stream that the calls go to.
    multiprocessors
        Of the device.
    """

    def __init__(self, cupy: Any, stream: Any, multiprocessors: int) -> None:
        self._cupy, self._stream, self._multiprocessors = cupy, stream, multiprocessors
        self._modules: dict[str, Any] = {}
        module = self._module("float")
        self._empty, self._copy = module.get_function("empty"), module.get_function("copy")

    def _module(self, real: str) -> Any:
        if real not in self._modules:
            values = {
                "BLOCK": BLOCK,
                "UNROLL": UNROLL,
                "FMA_CHAINS": FMA_CHAINS,
                "FMA_UNROLL": FMA_UNROLL,
                "REAL": real,
            }
            options = tuple(f"-D{name}={value}" for name, value in values.items())
            self._modules[real] = self._cupy.RawModule(code=_SOURCE, options=options)
        return self._modules[real]

    def empty(self, batch: int) -> None:
        """Launch nothing to do."""
        self._empty((max(1, min(batch, self._multiprocessors)),), (64,), ())

    def copy(self, buffers: Buffers, index: int) -> None:
        """Read one set's x and write its y."""
        reads, writes = -(-buffers.in_bytes // 16), -(-buffers.out_bytes // 16)
        blocks = max(1, -(-max(reads, writes) // (BLOCK * UNROLL)))
        shares = (np.int32(-(-reads // blocks)), np.int32(-(-writes // blocks)))
        arguments = (*buffers.copy_arguments(index), np.int64(reads), np.int64(writes), *shares)
        self._copy((blocks,), (BLOCK,), arguments)

    def memcpy(self, buffers: Buffers, index: int) -> None:
        """Copy half the bytes that the kernel reads and writes."""
        runtime = self._cupy.cuda.runtime
        to, source, size = buffers.memcpy_arguments(index)
        runtime.memcpyAsync(to, source, size, runtime.memcpyDeviceToDevice, self._stream.ptr)

    def warm_up(self, seconds: float) -> None:
        """Keep the GPU busy for a while."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.fma_peak("float32")

    def fma_peak(self, dtype: str) -> Timing:
        """Fused multiply-adds a second, in float64 or float32: the median and quartiles of some samples."""
        real = np.dtype("float64" if dtype == "float64" else "float32")
        kernel = self._module("double" if dtype == "float64" else "float").get_function("fma_peak")
        blocks = FMA_BLOCKS * self._multiprocessors
        fmas = blocks * BLOCK * FMA_CHAINS * FMA_UNROLL * FMA_ROUNDS
        rates = []
        with self._stream:
            out = self._cupy.zeros(1, real)
            arguments = (out, np.int32(FMA_ROUNDS), real.type(-0.9), real.type(0.7))
            start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            for sample in range(FMA_SAMPLES + 3):
                start.record(self._stream)
                kernel((blocks,), (BLOCK,), arguments)
                end.record(self._stream)
                end.synchronize()
                if sample >= 3:  # the first are the warm-up
                    rates.append(fmas / (float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e-3))
        return Timing.of(rates)
