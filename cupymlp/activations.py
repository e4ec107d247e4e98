"""The activation table: one row an activation, for the kernels, the CPU path and the reference alike.

To add one: a row here, a value of ``enum class Act`` and a branch of ``activate`` in ``cuda_src/common.cuh``. The
planner, the importers, the saved files and the tests read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACTIVATIONS", "Activation"]


@dataclass(frozen=True)
class Activation:
    """One elementwise activation function.

    Attributes
    ----------
    name
        What users write, and the name in the kernels' ``enum class Act``.
    apply
        ``apply(v, out)``: the function of ``v`` in NumPy, written to ``out``, which may be ``v`` itself. Works in
        the dtype of ``v``: the CPU path calls it in the network's, the reference in float64.
    lipschitz
        The least L with ``|f(a) - f(b)| <= L |a - b|``: how much it can enlarge an error.
    """

    name: str
    apply: Callable[[NDArray[np.floating], NDArray[np.floating]], object]
    lipschitz: float


def _identity(v: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    if out is not v:
        out[...] = v


def _relu(v: NDArray[np.floating], out: NDArray[np.floating]) -> None:
    np.maximum(v, 0, out=out)  # NaN stays NaN


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("identity", _identity, lipschitz=1.0),
        Activation("relu", _relu, lipschitz=1.0),
    )
}
