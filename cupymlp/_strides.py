"""Which leading axes of strided arrays can be walked as one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["byte_bounds", "merge_axes"]


def merge_axes(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring axes wherever every array's strides allow it.

    Parameters
    ----------
    shape
        The common shape; no length is 0.
    *strides
        One sequence of strides an array, as long as ``shape``, in any unit.

    Returns
    -------
    shape, strides
        The fewest axes that visit the same elements in the same order; axes of length 1 are gone.

    Examples
    --------
    >>> merge_axes((4, 3), (12, 4), (24, 8))
    ((12,), [(4,), (8,)])
    >>> merge_axes((4, 3), (12, 4), (100, 8))
    ((4, 3), [(12, 4), (100, 8)])
    """
    merged: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, length in enumerate(shape):
        if length == 1:
            continue
        if merged and all(s[-1] == length * own[axis] for s, own in zip(steps, strides, strict=True)):
            merged[-1] *= length
            for s, own in zip(steps, strides, strict=True):
                s[-1] = own[axis]
        else:
            merged.append(length)
            for s, own in zip(steps, strides, strict=True):
                s.append(own[axis])
    return tuple(merged), [tuple(s) for s in steps]


def byte_bounds(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """First and one-past-last byte that an array touches, relative to its first element; (0, 0) if it has none.

    Examples
    --------
    >>> byte_bounds((4, 3), (-12, 4), 4)
    (-36, 12)
    """
    if 0 in shape:
        return 0, 0
    reach = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize
