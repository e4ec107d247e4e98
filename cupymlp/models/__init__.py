"""Importers: other libraries' trained networks, one file a library.

None of them imports the library that it reads. The package onnx, which reads a file format, is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Found", "check_finite"]


@dataclass(frozen=True)
class Found:
    """What an importer found: the arguments of `cupymlp.MLP`, not checked yet.

    Attributes
    ----------
    weights
        One (in, out) array a layer.
    biases
        One (out,) array or None a layer.
    activations
        One a hidden layer, as `cupymlp.MLP` takes them.
    out_activation
        The output layer's.
    dtype
        The network's, if its arrays are given in a wider one; None: as asked, or that of the arrays.
    """

    weights: Sequence[Any]
    biases: Sequence[Any]
    activations: Sequence[Any]
    out_activation: Any = "identity"
    dtype: str | None = None


def check_finite(name: str, array: Any) -> None:
    """Raise a ValueError that names the array unless all its numbers are finite: a trained network that is broken."""
    wrong = ~np.isfinite(np.asarray(array, np.float64))
    if wrong.any():
        raise ValueError(
            f"{name} has NaN or infinite numbers, {int(wrong.sum())} of {wrong.size}; accepted: finite ones"
        )
