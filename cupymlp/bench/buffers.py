"""The data that GPU calls read and write: several sets of x and y, in memory that the copy floor moves, too."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cases import Case

__all__ = ["Buffers", "random_pool"]

POOL_ELEMENTS = 2**22
ALIGNMENT = 256
CHECKED_ROWS = 1024  # from the front, and from the back


def random_pool(dtype: Any, seed: int, elements: int = POOL_ELEMENTS) -> Any:
    """Random normal numbers on the host, of any dtype; larger arrays repeat them."""
    return np.random.default_rng(seed).standard_normal(elements, dtype=np.float32).astype(dtype)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Buffers:
    """Sets of x (batch, K) and y (batch, N), side by side in one piece of memory a set, x filled with random numbers.

    Parameters
    ----------
    cupy, stream
        The module, and where the filling is queued; it is done when the constructor returns.
    case
        The shapes and the number of bytes.
    dtype
        The NumPy dtype of x and y.
    sets
        How many.
    pool
        Of `random_pool`.
    """

    def __init__(self, cupy: Any, stream: Any, case: Case, dtype: Any, sets: int, pool: Any) -> None:
        self._cupy, self._stream, self._case = cupy, stream, case
        self.sets = sets
        self.in_bytes, self.out_bytes = case.in_bytes, case.out_bytes
        self._out_start = _padded(self.in_bytes)
        size = self.bytes_of_a_set(case)
        sizes = case.group.sizes
        with stream:
            random_bytes = cupy.asarray(pool.view(np.uint8))
            self.memory = [cupy.empty(size, np.uint8) for _ in range(sets)]
            for memory in self.memory:
                self._fill(memory, random_bytes)
            self.x = [cupy.ndarray((case.batch, sizes[0]), dtype, memptr=m.data) for m in self.memory]
            self.y = [
                cupy.ndarray((case.batch, sizes[-1]), dtype, memptr=m.data + self._out_start) for m in self.memory
            ]
        stream.synchronize()

    @staticmethod
    def bytes_of_a_set(case: Case) -> int:
        """Memory of one set: x, y, and what the copy floor needs past them."""
        return _padded(case.in_bytes) + _padded(case.out_bytes) + 2 * ALIGNMENT

    def _fill(self, memory: Any, random_bytes: Any) -> None:
        """The random bytes again and again, doubling what is there."""
        done = min(memory.nbytes, random_bytes.nbytes)
        memory[:done] = random_bytes[:done]
        while done < memory.nbytes:
            step = min(done, memory.nbytes - done)
            memory[done : done + step] = memory[:step]
            done += step

    def x_bytes(self, index: int) -> Any:
        """One set's x as a CuPy array of bytes, for other libraries."""
        return self.memory[index][: self.in_bytes]

    def copy_arguments(self, index: int) -> tuple[Any, Any]:
        """Where the copy kernel reads and writes, as pointers: x and y of a set."""
        start = self.memory[index].data.ptr
        return np.uint64(start), np.uint64(start + self._out_start)

    def memcpy_arguments(self, index: int) -> tuple[int, int, int]:
        """Destination, source and bytes of a copy of half as much as the kernel reads and writes together."""
        half = -(-(self.in_bytes + self.out_bytes) // 2)
        start = self.memory[index].data.ptr
        return start + -(-half // 16) * 16, start, half

    def check(self, call: Any) -> None:
        """Run the call on poisoned results: raises RuntimeError if any element is left, or is no number."""
        with self._stream:
            y = self.y[0]
            self.memory[0][self._out_start :] = 0xFF  # a NaN in every dtype
            call(0)
            ends = [self._cupy.asnumpy(_bytes_of(self._cupy, part)) for part in (y[:CHECKED_ROWS], y[-CHECKED_ROWS:])]
        values = np.concatenate(ends).view(y.dtype).astype(np.float64)
        if not np.isfinite(values).all():
            bad = int((~np.isfinite(values)).sum())
            raise RuntimeError(
                f"{self._case.group} at {self._case.batch} rows left {bad} of {values.size} elements unwritten or not finite"
            )


def _bytes_of(cupy: Any, array: Any) -> Any:
    """A contiguous CuPy array as bytes, whatever CuPy makes of its dtype."""
    return cupy.ndarray((array.nbytes,), np.uint8, memptr=array.data)
