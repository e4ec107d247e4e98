"""Importers: other libraries' trained networks, one file a library.

None of them imports the library that it reads. The package onnx, which reads a file format, is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Found"]


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
    """

    weights: Sequence[Any]
    biases: Sequence[Any]
    activations: Sequence[Any]
    out_activation: Any = "identity"
