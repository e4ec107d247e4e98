"""ONNX models: multilayer perceptrons as PyTorch's, scikit-learn's and other exporters write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike, NDArray

from .._files import replacing
from ..network import Network
from . import Found
from ._onnx.file import RefusedError, open_model
from ._onnx.graph import Graph
from ._onnx.operators import OPERATORS
from ._onnx.reader import Reader
from ._onnx.writer import as_written, make_model

__all__ = ["read_onnx", "write_onnx"]


def read_onnx(model: Any, output: str | None, dtype: DTypeLike | None) -> Found:
    """Read a model; `cupymlp.MLP.from_onnx` documents the arguments and errors."""
    if output is not None and not isinstance(output, str):
        raise TypeError(f"output is a {type(output).__name__}; accepted: the name of a tensor, or None")
    name = repr(os.fspath(model)) if isinstance(model, str | os.PathLike) else "the ONNX model"
    try:
        proto, source = open_model(model)
        found = Reader(Graph(proto, source), OPERATORS, proto.ByteSize(), dtype).read(output)
    except RefusedError as error:
        raise ValueError(f"{name} cannot be read as an MLP: {error}") from error
    return as_written(proto, found)


def write_onnx(
    path: str | os.PathLike[str],
    network: Network,
    weights: Sequence[NDArray[Any]],
    biases: Sequence[NDArray[Any] | None],
    opset: int,
) -> None:
    """Write a model; weights in_out. `cupymlp.MLP.to_onnx` documents it."""
    data = make_model(network, weights, biases, opset)
    with replacing(path) as temporary:
        temporary.write_bytes(data)
