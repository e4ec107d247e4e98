"""Network: the frozen description of a multilayer perceptron. It holds no arrays, and needs no library but NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .activations import ActivationSpec, spec_text

__all__ = ["DTYPES", "PRECISIONS", "Network", "numpy_dtype", "precision_takes"]

_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # known without ml_dtypes
DTYPES: tuple[str, ...] = tuple(_ITEMSIZES)
PRECISIONS: tuple[str, ...] = ("ieee", "tf32", "split3", "library")


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of this name; that of bfloat16 comes from the package ml_dtypes, imported when it is asked for.

    Raises
    ------
    ImportError
        If bfloat16 is asked for and ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise ImportError(
            f"bfloat16 arrays need the package ml_dtypes, which cannot be imported ({error}): pip install ml-dtypes, or use "
            "float16 or float32"
        ) from error
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def precision_takes(precision: str, dtype: str) -> bool:
    """Whether networks of this dtype can have this precision."""
    return precision in ("ieee", "library") or dtype == "float32"


@dataclass(frozen=True)
class Network:
    """Sizes, activations, biases, dtype and precision of a multilayer perceptron.

    Layer ``l`` maps ``sizes[l]`` features to ``sizes[l + 1]``. Already checked: `cupymlp.MLP` and
    `cupymlp.fused_mlp` make these from what a user passes, after their checks.

    Attributes
    ----------
    sizes
        ``(K, hidden widths ..., N)``, at least two numbers, each 0 or more.
    activations
        One a layer, the output's last: a name of `cupymlp.activations.ACTIVATIONS`, or ``(name, parameter)`` for those that
        have one.
    biases
        Whether each layer has a bias.
    dtype
        The name of the dtype of weights and of every layer's outputs, one of `cupymlp.network.DTYPES`.
    precision
        The arithmetic, one of `cupymlp.network.PRECISIONS`.
    """

    sizes: tuple[int, ...]
    activations: tuple[ActivationSpec, ...]
    biases: tuple[bool, ...]
    dtype: str
    precision: str = "ieee"

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.sizes) - 1

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the network's dtype."""
        return _ITEMSIZES[self.dtype]

    @property
    def sum_dtype(self) -> str:
        """The name of the dtype of sums, biases and activations; results are rounded from it to ``dtype`` once a layer."""
        return "float64" if self.dtype == "float64" else "float32"

    def describe(self) -> str:
        """``48-64-40-24 float32, relu relu identity, no bias``: one line for tables and errors."""
        sizes = "-".join(map(str, self.sizes))
        if all(self.biases):
            bias = "bias"
        elif any(self.biases):
            bias = "bias in layer " + ", ".join(str(i + 1) for i, b in enumerate(self.biases) if b)
        else:
            bias = "no bias"
        return f"{sizes} {self.dtype}, {' '.join(map(spec_text, self.activations))}, {bias}"
