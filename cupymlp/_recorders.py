"""What is captured into CUDA graphs: the arrays and weights that a graph reads and writes, to be kept as long as the graph.

A module of its own, with next to nothing in it, since every call looks at it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["keep", "recorders"]

# By the address of the stream that captures: the calls. Empty unless somebody captures by `cupymlp.capture`.
recorders: dict[int, list[tuple[Any, tuple[Any, ...]]]] = {}


def keep(stream: int, call: Any, arguments: tuple[Any, ...]) -> None:
    """Keep a call and its arguments, the last of which is its out, if `cupymlp.capture` captures the stream."""
    found = recorders.get(stream)
    if found is not None:
        found.append((call, arguments))
