"""Network: the frozen description of a multilayer perceptron. It holds no arrays and imports no library but NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["DTYPES", "PRECISIONS", "Network"]

DTYPES: tuple[str, ...] = ("float32", "float64")
PRECISIONS: tuple[str, ...] = ("ieee",)


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
        One name of `cupymlp.activations.ACTIVATIONS` a layer, the output's last.
    biases
        Whether each layer has a bias.
    dtype
        The name of the dtype of weights, sums and outputs, one of `DTYPES`.
    precision
        The arithmetic, one of `PRECISIONS`.
    """

    sizes: tuple[int, ...]
    activations: tuple[str, ...]
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
        return np.dtype(self.dtype).itemsize

    def describe(self) -> str:
        """``48-64-40-24 float32, relu relu identity, no bias``: one line for tables and errors."""
        sizes = "-".join(map(str, self.sizes))
        if all(self.biases):
            bias = "bias"
        elif any(self.biases):
            bias = "bias in layer " + ", ".join(str(i + 1) for i, b in enumerate(self.biases) if b)
        else:
            bias = "no bias"
        return f"{sizes} {self.dtype}, {' '.join(self.activations)}, {bias}"
