"""How fast `MLP.map` takes rows from host memory and back, beside what the link to the GPU carries in the same run."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._gpu import cupy_or_error
from ..verify import random_mlp
from .timing import Timing, rounded

__all__ = ["map_rows", "map_table"]

LINK_BYTES = 256 << 20  # of a copy that measures the link
LINK_COPIES = 10
BLOCK_ROWS = 1 << 18
CHECKED_ROWS = 1000


def map_rows(sizes: Sequence[int], gigabytes: float, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Measure, and yield a row for the link and one for each place of x: an array, a memory map, the path of its file.

    Parameters
    ----------
    sizes
        Widths of the network, float32.
    gigabytes
        10^9 bytes of x in host memory; out takes more, and so does the file, in the folder for temporary files. Without room
        for it there is an array alone.
    """
    cupy = cupy_or_error("bench map")
    net = random_mlp(sizes, seed)
    count = max(CHECKED_ROWS, int(gigabytes * 1e9) // (sizes[0] * 4))
    x, out = _filled(count, sizes[0], seed), _filled(count, sizes[-1], seed)
    share = out.nbytes / x.nbytes
    link = _link(cupy, share)
    yield {
        "subject": "the link, both ways at once",
        "x_bytes_per_second": float(f"{link:.4g}"),
        "out_bytes_per_second": float(f"{link * share:.4g}"),
    }
    net(x[:1], device="cuda")

    def measured(source: Any, subject: str) -> dict[str, Any]:
        cupy.get_default_memory_pool().free_all_blocks()  # what the one before took is counted again
        free_before = free_least = cupy.cuda.runtime.memGetInfo()[0]
        net.map(source, out=out)  # compiles, and has the system's pages ready

        def progress(_done: int, _total: int) -> None:
            nonlocal free_least
            free_least = min(free_least, cupy.cuda.runtime.memGetInfo()[0])

        seconds = []
        for i in range(rounds):
            out.fill(np.nan)
            start = time.perf_counter()
            net.map(source, out=out, progress=progress if i == 0 else None)
            seconds.append(time.perf_counter() - start)
        for first in (0, count // 2, count - CHECKED_ROWS):
            rows = slice(first, first + CHECKED_ROWS)
            if not np.array_equal(net(x[rows], device="cuda"), out[rows]):
                raise RuntimeError(f"rows {first:,} to {first + CHECKED_ROWS:,} of map are not those of a call")
        timing = Timing.of(seconds)
        return {
            "subject": subject,
            "rows": count,
            "x_bytes": x.nbytes,
            "out_bytes": out.nbytes,
            "seconds": rounded(timing),
            "rows_per_second": float(f"{count / timing.median:.4g}"),
            "of_link": float(f"{x.nbytes / timing.median / link:.3g}"),
            "gpu_bytes": free_before - free_least,
        }

    yield measured(x, "net.map(x, out=out)")
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < 1.2 * x.nbytes:
            return
        file = Path(folder, "x.npy")
        np.save(file, x)
        yield measured(np.load(file, mmap_mode="r"), "net.map(np.load(path, mmap_mode='r'), out=out)")
        yield measured(file, "net.map(path, out=out)")


def _filled(rows: int, features: int, seed: int) -> NDArray[np.float32]:
    """Random rows, repeated: every page is there before anything is timed."""
    array = np.empty((rows, features), np.float32)
    block = np.random.default_rng(seed).standard_normal((BLOCK_ROWS, features), np.float32)

    def fill(first: int) -> None:
        part = array[first : first + BLOCK_ROWS]
        part[...] = block[: len(part)]

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(0, rows, BLOCK_ROWS)))
    return array


def _link(cupy: Any, share: float) -> float:
    """Bytes a second to the GPU while ``share`` times as many come back, from and to page-locked memory."""
    cuda = cupy.cuda
    up, down = LINK_BYTES, max(1, int(LINK_BYTES * share))
    host = [cuda.PinnedMemoryPointer(cuda.PinnedMemory(size), 0) for size in (up, down)]
    there = [cupy.ones(size, np.uint8) for size in (up, down)]
    streams = [cuda.Stream(non_blocking=True) for _ in range(2)]
    cuda.Device().synchronize()

    def copies(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            cuda.runtime.memcpyAsync(
                there[0].data.ptr, host[0].ptr, up, cuda.runtime.memcpyHostToDevice, streams[0].ptr
            )
            cuda.runtime.memcpyAsync(
                host[1].ptr, there[1].data.ptr, down, cuda.runtime.memcpyDeviceToHost, streams[1].ptr
            )
        for stream in streams:
            stream.synchronize()
        return time.perf_counter() - start

    copies(2)
    return LINK_COPIES * up / copies(LINK_COPIES)


def map_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    link, *measured = rows
    return "\n".join(
        [
            f"{link['subject']}: {link['x_bytes_per_second'] / 1e9:.1f} GB/s there, "
            f"{link['out_bytes_per_second'] / 1e9:.1f} GB/s back",
            *(
                f"{found['subject']}: {found['rows']:,} rows, {found['x_bytes'] / 1e9:.1f} GB, "
                f"in {found['seconds']['median']:.2f} s: {found['rows_per_second'] / 1e6:.0f} million rows/s, "
                f"{found['of_link']:.2f} of the link; {found['gpu_bytes'] / 1e6:.0f} MB of the GPU"
                for found in measured
            ),
        ]
    )
