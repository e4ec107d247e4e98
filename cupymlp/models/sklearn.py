"""scikit-learn's MLPClassifier and MLPRegressor, with the scalers around them, by their fitted attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .._checks import network_dtype, type_name
from . import Found, check_finite
from ._builder import Affine, Builder

__all__ = ["read_estimator"]

OUTPUTS = ("raw", "predict", "predict_proba")
ACTIVATION_OF = {"identity": "identity", "logistic": "sigmoid", "tanh": "tanh", "relu": "relu"}
OUT_ACTIVATION_OF = {"identity": "identity", "logistic": "sigmoid", "softmax": "softmax", "exp": "exp"}
SCALERS = ("StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler")


def read_estimator(estimator: Any, output: str, dtype: DTypeLike | None) -> Found:
    """Read a fitted estimator; `cupymlp.MLP.from_sklearn` documents the arguments and errors."""
    if output not in OUTPUTS:
        raise ValueError(
            f"output is {output!r}; accepted: 'raw', the last layer's sums without the output function, 'predict' for "
            "regressors, 'predict_proba' for classifiers"
        )
    before, network, after = _parts(estimator)
    coefs = _fitted(network, "coefs_")
    if network.activation not in ACTIVATION_OF:
        raise ValueError(
            f"the estimator's activation is {network.activation!r}; accepted: {', '.join(map(repr, ACTIVATION_OF))}"
        )
    for name, arrays in (("coefs_", coefs), ("intercepts_", network.intercepts_)):
        for i, array in enumerate(arrays):
            check_finite(f"the estimator's {name}[{i}]", array)
    builder = Builder(network_dtype([v.dtype for v in (*coefs, *network.intercepts_)], dtype))
    for step in before:
        builder.scale(f"the {type_name(step)}", _scaler(step))
    for weight, bias in zip(coefs[:-1], network.intercepts_[:-1], strict=True):
        builder.dense(weight, bias)
        builder.activate(ACTIVATION_OF[network.activation])
    last, out_activation = _last_layer(network, output)
    builder.dense(*last)
    if after is not None and output == "raw" and network.out_activation_ != "identity":
        raise ValueError(
            f"output is 'raw', and the {type_name(after)} of the target comes after the output function "
            f"{network.out_activation_!r}: use output='predict'"
        )
    builder.activate(out_activation)
    if after is not None:
        scaler = _scaler(after)
        builder.scale(
            f"the {type_name(after)} of the target", Affine.of(scaler.offset, 1 / scaler.factor, scaler.center)
        )
    return builder.found()


def _parts(estimator: Any) -> tuple[list[Any], Any, Any]:
    """The scalers before the network, the network, and the scaler of a regressor's target, if there is one."""
    if _is_a(estimator, "Pipeline"):
        *steps, (name, last) = estimator.steps
        before = [step for _, step in steps if step is not None and step != "passthrough"]
        if last is None or isinstance(last, str):
            raise TypeError(
                f"the Pipeline's last step {name!r} is {last!r}; accepted: an MLPClassifier or MLPRegressor"
            )
        inner, network, after = _parts(last)
        return [*before, *inner], network, after
    if _is_a(estimator, "TransformedTargetRegressor"):
        before, network, after = _parts(_fitted(estimator, "regressor_"))
        if estimator.func is not None or estimator.inverse_func is not None:
            raise ValueError(
                "the TransformedTargetRegressor has a func; accepted: a transformer, one of " + ", ".join(SCALERS)
            )
        if estimator.transformer is None:
            return before, network, after
        if after is not None:
            raise TypeError("two TransformedTargetRegressors, one inside the other, have transformers; accepted: one")
        return before, network, _fitted(estimator, "transformer_")
    if not hasattr(estimator, "hidden_layer_sizes") or not hasattr(estimator, "activation"):
        inside = ""
        if hasattr(estimator, "best_estimator_"):
            inside = ". Pass its best_estimator_"
        raise TypeError(
            f"estimator is a {type_name(estimator)}; accepted: a fitted MLPClassifier or MLPRegressor, or a Pipeline or "
            f"TransformedTargetRegressor with one{inside}"
        )
    return [], estimator, None


def _last_layer(network: Any, output: str) -> tuple[tuple[Any, Any], str]:
    """The last layer's weight and bias, and its activation."""
    weight, bias = network.coefs_[-1], network.intercepts_[-1]
    if output == "raw":
        return (weight, bias), "identity"
    classes = hasattr(network, "predict_proba")
    if classes != (output == "predict_proba"):
        hint = "predict_proba', whose largest column is the class that its classes_ name" if classes else "predict'"
        raise ValueError(f"output is {output!r} and the estimator a {type_name(network)}: use output='{hint}")
    if network.out_activation_ not in OUT_ACTIVATION_OF:
        raise ValueError(
            f"the estimator's out_activation_ is {network.out_activation_!r}; accepted: "
            f"{', '.join(map(repr, OUT_ACTIVATION_OF))}"
        )
    if network.out_activation_ == "logistic" and weight.shape[1] == 1 and not _is_multilabel(network):
        # One sum z, and two columns: 1 - sigmoid(z) is sigmoid(-z).
        weight, bias = np.concatenate([-weight, weight], axis=1), np.concatenate([-bias, bias])
    return (weight, bias), OUT_ACTIVATION_OF[network.out_activation_]


def _is_multilabel(network: Any) -> bool:
    binarizer = getattr(network, "_label_binarizer", None)
    return str(getattr(binarizer, "y_type_", "")).startswith("multilabel")


def _scaler(step: Any) -> Affine:
    """What a scaler does to its inputs."""
    known = next((name for name in SCALERS if _is_a(step, name)), None)
    if known is None:
        raise ValueError(
            f"the step {type_name(step)} cannot be part of a network; accepted: {', '.join(SCALERS)}. Apply it to x before, "
            "and pass the rest"
        )
    if known in ("MinMaxScaler", "MaxAbsScaler") and getattr(step, "clip", False):
        raise ValueError(f"the {known} has clip=True, which is no part of a network; accepted: clip=False")
    scale = _fitted(step, "scale_")  # None with with_std=False, with_scaling=False
    if known == "MinMaxScaler":
        return Affine.of(center=-step.min_ / scale, factor=scale)
    center = {"StandardScaler": "mean_", "RobustScaler": "center_"}.get(known)
    middle = None if center is None or not _centers(step) else _fitted(step, center)
    return Affine.of(0.0 if middle is None else middle, 1.0 if scale is None else 1 / scale)


def _centers(step: Any) -> bool:
    return bool(getattr(step, "with_mean", True) and getattr(step, "with_centering", True))


def _fitted(estimator: Any, attribute: str) -> Any:
    if not hasattr(estimator, attribute):
        raise ValueError(f"the {type_name(estimator)} is not fitted: call its fit first")
    return getattr(estimator, attribute)


def _is_a(estimator: Any, name: str) -> bool:
    """Whether it is scikit-learn's class of this name, or one derived of it; without importing scikit-learn."""
    return any(c.__name__ == name and c.__module__.split(".")[0] == "sklearn" for c in type(estimator).__mro__)
