"""Keras models whose layers make a chain: Sequential, and Functional ones without branches. Keras is not imported.

Nothing of a file is run: layers are known by their class' name and module, and everything else is refused by the layer's name.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .._checks import network_dtype
from ..activations import ActivationSpec
from . import Found
from ._builder import Affine, Builder
from ._keras_files import KerasFile, Shapes, open_keras, shown
from ._keras_graph import Layer, foreign, layers_of

__all__ = ["read_keras"]

NOTHING_AT_INFERENCE = (
    "ActivityRegularization",
    "AlphaDropout",
    "Dropout",
    "Flatten",  # of one axis of features
    "GaussianDropout",
    "GaussianNoise",
    "Identity",
    "InputLayer",
)
# Keras' functions, by name; their parameters are those that Keras 3 gives them where a name is all there is.
FUNCTIONS: dict[str, ActivationSpec] = {
    "linear": "identity",
    "relu": "relu",
    "leaky_relu": ("leaky_relu", 0.2),
    "elu": ("elu", 1.0),
    "celu": ("celu", 1.0),
    "selu": "selu",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
    "softsign": "softsign",
    "exponential": "exp",
    "hard_sigmoid": "hard_sigmoid",
    "hard_silu": "hard_swish",
    "hard_swish": "hard_swish",
    "relu6": "relu6",
    "squareplus": "squareplus",
    "softmax": "softmax",
    "log_softmax": "log_softmax",
}
SMALLEST_DEVIATION = 1e-7  # keras.config.epsilon(), in Normalization


def read_keras(path: str | os.PathLike[str], dtype: DTypeLike | None) -> Found:
    """Read a file; `cupymlp.MLP.from_keras` documents the arguments and errors."""
    with open_keras(path) as file:
        features, layers = layers_of(file)
        reader = _Reader(file, features)
        for layer in layers:
            reader.read(layer)
    if not reader.dtypes:
        raise ValueError(f"{file.where} has no Dense layer; accepted: at least one")
    builder = Builder(network_dtype(reader.dtypes, dtype), features=features)
    for layer, part in reader.parts:
        try:
            part(builder)
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r} ({layer.class_name}) of {file.where}: {error}") from error
    return builder.found()


class _Reader:
    """Makes parts of a network of layers; arrays are read as they come, and scalings folded when all dtypes are known."""

    def __init__(self, file: KerasFile, features: int) -> None:
        self.file = file
        self.features = features
        self.dtypes: list[Any] = []
        self.parts: list[tuple[Layer, Any]] = []

    def read(self, layer: Layer) -> None:
        """One layer."""
        readers = {
            "Dense": self._dense,
            "BatchNormalization": self._batch_normalization,
            "Normalization": self._normalization,
            "Rescaling": self._rescaling,
            "Activation": self._activation_layer,
            "ELU": self._activation_layer,
            "LeakyReLU": self._activation_layer,
            "ReLU": self._activation_layer,
            "Softmax": self._activation_layer,
        }
        if layer.class_name in readers:
            readers[layer.class_name](layer)
        elif layer.class_name not in NOTHING_AT_INFERENCE:
            accepted = ", ".join(sorted([*readers, *NOTHING_AT_INFERENCE]))
            raise self.wrong(layer, f"cannot be part of a network; accepted: {accepted}")

    def wrong(self, layer: Layer, what: str) -> ValueError:
        """An error about a layer."""
        return ValueError(f"layer {layer.name!r} ({layer.class_name}) of {self.file.where} {what}")

    # --- Layers with arrays -------------------------------------------------------------------------------------------

    def _dense(self, layer: Layer) -> None:
        units: Any = layer.config.get("units")
        if not isinstance(units, int) or isinstance(units, bool) or not 0 < units < 2**31:
            raise self.wrong(layer, f"has units {shown(units)}; accepted: a positive integer")
        if layer.config.get("lora_rank") or layer.config.get("quantization_config"):
            raise self.wrong(layer, "is quantized or has LoRA weights; accepted: a plain Dense layer")
        shapes: Shapes = {"kernel": (self.features, units)}
        if self._flag(layer, "use_bias"):
            shapes["bias"] = (units,)
        arrays = self.file.arrays("Dense", layer.name, shapes)
        self.dtypes += [array.dtype for array in arrays.values()]
        self.features = units
        self.parts.append((layer, lambda builder: builder.dense(arrays["kernel"], arrays.get("bias"))))
        self._activate(layer, layer.config.get("activation", "linear"))

    def _batch_normalization(self, layer: Layer) -> None:
        if layer.config.get("axis", -1) not in (-1, 1, [-1], [1]) or layer.config.get("renorm"):
            raise self.wrong(layer, "has renorm, or another axis than the last; accepted: axis=-1 without renorm")
        wide = (self.features,)
        shapes: Shapes = {
            **({"gamma": wide} if self._flag(layer, "scale") else {}),
            **({"beta": wide} if self._flag(layer, "center") else {}),
            "moving_mean": wide,
            "moving_variance": wide,
        }
        arrays = self.file.arrays("BatchNormalization", layer.name, shapes)
        v = {name: array.astype(np.float64) for name, array in arrays.items()}
        epsilon = self._number(layer, "epsilon", 1e-3)
        spread = v["moving_variance"] + epsilon
        if not (spread > 0).all():
            raise self.wrong(
                layer, "has a moving_variance that is not positive with its epsilon; accepted: positive ones"
            )
        factor = v.get("gamma", 1.0) / np.sqrt(spread)
        self._scale(layer, Affine.of(v["moving_mean"], factor, v.get("beta", 0.0)))

    def _normalization(self, layer: Layer) -> None:
        if layer.config.get("axis", [-1]) not in (-1, 1, [-1], [1], [], None):
            raise self.wrong(layer, "has another axis than the last; accepted: axis=-1 or None")
        given = layer.config.get("mean") is not None
        shape = () if layer.config.get("axis", [-1]) in ([], None) else (self.features,)
        if given:
            mean, variance = self._numbers(layer, "mean"), self._numbers(layer, "variance")
        else:
            arrays = self.file.arrays("Normalization", layer.name, {"mean": shape, "variance": shape, "count": None})
            mean, variance = arrays["mean"].astype(np.float64), arrays["variance"].astype(np.float64)
        if (variance < 0).any():
            raise self.wrong(layer, "has a negative variance; accepted: 0 or more")
        deviation = np.maximum(np.sqrt(variance), SMALLEST_DEVIATION)
        invert = layer.config.get("invert", False)
        self._scale(layer, Affine.of(0.0, deviation, mean) if invert else Affine.of(mean, 1 / deviation))

    # --- Layers without -----------------------------------------------------------------------------------------------

    def _rescaling(self, layer: Layer) -> None:
        scale, offset = self._numbers(layer, "scale"), self._numbers(layer, "offset", 0.0)
        center = np.where(scale == 0, 0.0, -offset / np.where(scale == 0, 1.0, scale))
        self._scale(layer, Affine.of(center, scale, np.where(scale == 0, offset, 0.0)))

    def _activation_layer(self, layer: Layer) -> None:
        if layer.class_name == "Activation":
            self._activate(layer, layer.config.get("activation"))
        else:
            self._activate(layer, {"class_name": layer.class_name, "config": layer.config})

    def _scale(self, layer: Layer, affine: Affine) -> None:
        if any(v.shape not in ((), (1,), (self.features,)) for v in (affine.center, affine.factor, affine.offset)):
            raise self.wrong(layer, f"does not fit {self.features} features")
        self.parts.append((layer, lambda builder: builder.scale(f"layer {layer.name!r}", affine)))

    def _activate(self, layer: Layer, activation: object) -> None:
        spec = self._spec(layer, activation)
        self.parts.append((layer, lambda builder: builder.activate(spec)))

    def _spec(self, layer: Layer, activation: object) -> ActivationSpec:
        """Of a function's name, or of the description of an activation layer."""
        if activation is None:
            return "identity"
        if isinstance(activation, dict):
            kind, config = activation.get("class_name"), activation.get("config")
            # Functions are of the module builtins, whoever wrote them, and are refused below.
            if kind != "function" and (mark := foreign(activation)):
                raise self.wrong(
                    layer,
                    f"has the activation {kind}, a class of its author's ({mark}), not Keras' own; accepted: Activation, ELU, "
                    f"LeakyReLU, ReLU, Softmax of keras.layers, and the functions {', '.join(FUNCTIONS)}",
                )
            inner = Layer(layer.name, str(kind), config if isinstance(config, dict) else {})
            if kind == "Activation":
                activation = inner.config.get("activation", "linear")
            elif kind in ("ELU", "LeakyReLU", "ReLU", "Softmax"):
                return self._spec_of_layer(inner)
        if not isinstance(activation, str) or activation not in FUNCTIONS:
            raise self.wrong(layer, f"has the activation {shown(activation)}; accepted: {', '.join(FUNCTIONS)}")
        if activation == "hard_sigmoid" and self.file.legacy:
            raise self.wrong(
                layer,
                "has the activation hard_sigmoid, which in Keras 2 is another function, 0.2 v + 0.5 between 0 and 1; accepted: "
                "that of Keras 3, in files that Keras 3 wrote",
            )
        return FUNCTIONS[activation]

    def _spec_of_layer(self, layer: Layer) -> ActivationSpec:
        if layer.class_name == "Softmax":
            if layer.config.get("axis", -1) not in (-1, 1, [-1], [1]):
                raise self.wrong(layer, "has another axis than the last; accepted: axis=-1")
            return "softmax"
        if layer.class_name == "ELU":
            return "elu", self._number(layer, "alpha", 1.0)
        if layer.class_name == "LeakyReLU":
            return "leaky_relu", self._number(layer, "negative_slope", self._number(layer, "alpha", 0.3))
        slope, threshold = self._number(layer, "negative_slope", 0.0), self._number(layer, "threshold", 0.0)
        most = layer.config.get("max_value")
        if threshold == 0 and slope == 0 and most is None:
            return "relu"
        if threshold == 0 and most is None:
            return "leaky_relu", slope
        if threshold == 0 and slope == 0 and self._number(layer, "max_value", 0.0) == 6:
            return "relu6"
        raise self.wrong(
            layer,
            f"has max_value {shown(most)}, negative_slope {slope} and threshold {threshold}; accepted: threshold 0, and either "
            "max_value 6 or a negative_slope",
        )

    # --- What a description holds ---------------------------------------------------------------------------------------

    def _flag(self, layer: Layer, name: str) -> bool:
        value = layer.config.get(name, True)
        if not isinstance(value, bool):
            raise self.wrong(layer, f"has {name} {shown(value)}; accepted: true or false")
        return value

    def _number(self, layer: Layer, name: str, default: float) -> float:
        value = layer.config.get(name, default)
        if value is None:
            return default
        number = self._numbers(layer, name, default)
        if number.shape != ():
            raise self.wrong(layer, f"has {name} {shown(value)}; accepted: one number")
        return float(number)

    def _numbers(self, layer: Layer, name: str, default: float | None = None) -> Any:
        value: Any = layer.config.get(name, default)
        if isinstance(value, dict):  # Keras 2 and 3 write arrays so
            value = (
                value.get("config", {}).get("value") if isinstance(value.get("config"), dict) else value.get("value")
            )
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            numbers = np.asarray(math.nan)
        if numbers.ndim > 1:
            numbers = numbers.reshape(-1)
        if value is None or isinstance(value, bool) or not np.isfinite(numbers).all():
            raise self.wrong(layer, f"has {name} {shown(value)}; accepted: finite numbers")
        return numbers
