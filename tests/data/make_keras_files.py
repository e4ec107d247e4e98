"""Makes the files that Keras wrote, with what Keras computes in float64, for tests where Keras is not.

``KERAS_BACKEND=jax JAX_ENABLE_X64=1 python tests/data/make_keras_files.py`` writes them beside this script.
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
from keras import layers

HERE = Path(__file__).parent


def models() -> dict[str, keras.Model]:
    """By the name of the file."""
    normalization = layers.Normalization()
    normalization.adapt(np.random.default_rng(1).normal([300.0, 1.0, -2.0, 0.0], [10.0, 1.0, 0.5, 1.0], (200, 4)))
    square = keras.Sequential([keras.Input((3,)), *[layers.Dense(3, "silu", name=f"z{11 - i}") for i in range(11)]])
    scaled = keras.Sequential(
        [keras.Input((4,)), normalization, layers.Dense(6, use_bias=False), layers.BatchNormalization(), layers.LeakyReLU(),
         layers.Dropout(0.5), layers.Dense(3), layers.Softmax()]
    )  # fmt: skip
    x = keras.Input((4,))
    h = layers.Dense(5, "leaky_relu", name="first")(x)
    h = layers.Dense(5, "gelu", name="second")(layers.Flatten()(h))
    functional = keras.Model(x, layers.Dense(2, activation=layers.ReLU(6.0), name="third")(h))
    return {"keras_square.keras": square, "keras_scaled.keras": scaled, "keras_functional.h5": functional}


def main() -> None:
    """Write them; biases and the numbers of BatchNormalization are drawn, too."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    answers = {}
    for name, model in models().items():
        for layer in model.layers:
            if not isinstance(layer, layers.Normalization):
                layer.set_weights(
                    [np.abs(rng.normal(0.5, 0.5, w.shape)) + 0.1 - w.ndim / 2 for w in layer.get_weights()]
                    if isinstance(layer, layers.Dense)
                    else [rng.uniform(0.5, 2, w.shape) for w in layer.get_weights()]
                )
        model.save(HERE / name)
        center = [300.0, 1.0, -2.0, 0.0] if "scaled" in name else 0.0
        x = center + rng.standard_normal((5, model.input_shape[1]))
        answers[f"{name}_x"], answers[f"{name}_y"] = x, keras.ops.convert_to_numpy(model(x))
    np.savez(HERE / "keras_answers.npz", **answers)


if __name__ == "__main__":
    main()
