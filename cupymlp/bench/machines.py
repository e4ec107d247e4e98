"""The machine that a case is measured on: a GPU with its floors and peers, or the CPU with NumPy's chain."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from .._gpu import cupy_or_error, device_numbers
from .buffers import Buffers, random_pool
from .cases import ITEMSIZES, Case, Settings
from .floors import Floors
from .interleave import Measurement, measure_entries
from .peers import Entry, Peers, numpy_peer
from .samplers import CupyEngine, HostEngine
from .timing import Timing

__all__ = ["NET", "CpuBench", "GpuBench", "Machine", "TooLargeError"]

NET = "net(x, out=y)"
WARM_UP_SECONDS = 2.0  # once: at first launches were seen to be shorter, for a while
MEMORY_SHARE = 0.85  # of what is free


class TooLargeError(Exception):
    """A case does not fit into memory; the message says by how much."""


class Machine(Protocol):
    """Measures cases.

    Attributes
    ----------
    fma_rates
        Fused multiply-adds a second, by dtype (float32, float64).
    notes
        On peers that are not measured, by name.
    """

    fma_rates: dict[str, Timing]
    notes: dict[str, str]

    def measure(self, case: Case, net: Any, forced: Mapping[str, Any]) -> tuple[list[Measurement], int]:
        """Measure a net, the same net with forced schedules, and all beside it; returns how many sets of buffers, too."""


class CpuBench:
    """NumPy in, NumPy out, on the CPU."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.fma_rates: dict[str, Timing] = {}
        self.notes: dict[str, str] = {}

    def measure(self, case: Case, net: Any, forced: Mapping[str, Any]) -> tuple[list[Measurement], int]:  # noqa: ARG002
        """Round trips of the CPU path and, if peers are wanted, of NumPy's chain."""
        features = case.group.sizes[0]
        x = random_pool(net.dtype, self._settings.seed, case.batch * features).reshape(case.batch, features)
        out = np.empty((case.batch, case.group.sizes[-1]), net.dtype)
        entries = [Entry(NET, "net", lambda _: net(x, out=out, device="cpu"), HostEngine(), schedule="cpu")]
        if self._settings.peers and case.batch in self._settings.peer_batches:
            entries += numpy_peer(case, net, lambda: x)
        return measure_entries(entries, self._settings.rounds, sets=1), 1


class GpuBench:
    """The current GPU."""

    def __init__(self, settings: Settings) -> None:
        cupy = self._cupy = cupy_or_error("the sweep")
        self._settings = settings
        device = cupy.cuda.runtime.getDevice()
        self._cache_bytes = int(cupy.cuda.runtime.getDeviceProperties(device)["l2CacheSize"])
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._engine = CupyEngine(cupy, self._stream)
        self._floors = Floors(cupy, self._stream, device_numbers(device).multiprocessors)
        self._peers = Peers(cupy, self._engine, settings)
        self._pools: dict[str, Any] = {}
        self.notes = self._peers.notes
        self._floors.warm_up(WARM_UP_SECONDS)
        dtypes = {"float64" if dtype == "float64" else "float32" for dtype in settings.dtypes}
        self.fma_rates = {dtype: self._floors.fma_peak(dtype) for dtype in sorted(dtypes)}

    def measure(self, case: Case, net: Any, forced: Mapping[str, Any]) -> tuple[list[Measurement], int]:
        """All entries of a case, interleaved.

        Raises
        ------
        TooLargeError
            If the arrays do not fit.
        RuntimeError
            If the net leaves results unwritten.
        """
        self._free()
        sets = case.sets(self._cache_bytes)
        self._check_memory(case, sets)
        dtype = case.group.dtype
        if dtype not in self._pools:
            self._pools[dtype] = random_pool(net.dtype, self._settings.seed)
        try:
            with self._stream:
                buffers = Buffers(self._cupy, self._stream, case, net.dtype, sets, self._pools[dtype])
                found = measure_entries(self._entries(case, net, forced, buffers), self._settings.rounds, sets)
                buffers.check(_net_call(net, buffers))
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise TooLargeError(str(error)) from error
        return found, sets

    def _entries(self, case: Case, net: Any, forced: Mapping[str, Any], buffers: Buffers) -> Iterator[Entry]:
        floors, engine = self._floors, self._engine
        yield Entry("empty kernel", "floor", lambda _: floors.empty(case.batch), engine)
        yield Entry("copy kernel", "floor", lambda index: floors.copy(buffers, index), engine)
        yield Entry("memcpy", "floor", lambda index: floors.memcpy(buffers, index), engine)
        schedule = net.plan(case.batch, "cuda").schedule
        yield Entry(NET, "net", _net_call(net, buffers), engine, schedule)
        for name, same in forced.items():
            if name != schedule:
                yield Entry(f"schedule {name}", "net", _net_call(same, buffers), engine, name, forced=True)
        yield from self._peers.entries(case, net, buffers)

    def _check_memory(self, case: Case, sets: int) -> None:
        hidden = 2 * case.batch * max(case.group.sizes) * ITEMSIZES[case.group.dtype]
        need, free = sets * Buffers.bytes_of_a_set(case) + hidden, self._cupy.cuda.runtime.memGetInfo()[0]
        if need > MEMORY_SHARE * free:
            raise TooLargeError(f"it needs about {need:,} bytes on the GPU, of which {free:,} are free")

    def _free(self) -> None:
        gc.collect()
        self._peers.free()
        self._cupy.get_default_memory_pool().free_all_blocks()


def _net_call(net: Any, buffers: Buffers) -> Any:
    return lambda index: net(buffers.x[index], out=buffers.y[index])
