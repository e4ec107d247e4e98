"""scikit-learn's MLPClassifier and MLPRegressor, by their fitted attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._checks import type_name
from ..activations import ACTIVATIONS

__all__ = ["FoundNetwork", "read_estimator"]

OUTPUTS = ("raw",)


@dataclass(frozen=True)
class FoundNetwork:
    """What `cupymlp.MLP` needs of an estimator; weights are in_out, as scikit-learn keeps them."""

    weights: list[Any]
    biases: list[Any]
    activation: str
    out_activation: str


def read_estimator(estimator: Any, output: str) -> FoundNetwork:
    """Read a fitted estimator; `cupymlp.MLP.from_sklearn` documents the arguments and errors."""
    if output not in OUTPUTS:
        raise ValueError(f"output is {output!r}; accepted: 'raw', the last layer's sums without the output function")
    if not hasattr(estimator, "hidden_layer_sizes") or not hasattr(estimator, "activation"):
        raise TypeError(f"estimator is a {type_name(estimator)}; accepted: a fitted MLPClassifier or MLPRegressor")
    if not hasattr(estimator, "coefs_"):
        raise ValueError(f"the {type_name(estimator)} is not fitted: call its fit first")
    if estimator.activation not in ACTIVATIONS:
        raise ValueError(
            f"the estimator's activation is {estimator.activation!r}; accepted: {', '.join(map(repr, ACTIVATIONS))}"
        )
    return FoundNetwork(list(estimator.coefs_), list(estimator.intercepts_), estimator.activation, "identity")
