"""scikit-learn's MLPClassifier and MLPRegressor, by their fitted attributes."""

from __future__ import annotations

from typing import Any

from .._checks import type_name
from ..activations import ACTIVATIONS
from . import Found

__all__ = ["read_estimator"]

OUTPUTS = ("raw",)


def read_estimator(estimator: Any, output: str) -> Found:
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
    hidden = [estimator.activation] * (len(estimator.coefs_) - 1)
    return Found(list(estimator.coefs_), list(estimator.intercepts_), hidden)
