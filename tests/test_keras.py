"""MLP.from_keras: against Keras itself, against files that it wrote, and broken files of both kinds."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support import unavailable

from cupymlp import MLP
from cupymlp.models.keras import FUNCTIONS
from cupymlp.reference import error_in_bounds, forward_and_bound

DATA = Path(__file__).parent / "data"
SQUARE, SCALED, FUNCTIONAL = (DATA / f"keras_{n}" for n in ("square.keras", "scaled.keras", "functional.h5"))
ROUNDED_BY_KERAS = ("tanh",)  # which its jax backend computes in float32, whatever it is asked for

# Keras' own, of saving its variables under NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

try:
    import h5py
except ImportError:
    h5py = None


@pytest.fixture(autouse=True)
def needs_h5py():
    if h5py is None:
        unavailable("the package h5py is needed")


def within(net, x, expected, dtype=None):
    """The network on the CPU beside what Keras computed, in this dtype or the network's: both may be off by the bound."""
    own, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    if dtype is not None:
        coarse = MLP(net.weights, net.biases, net.network.activations[:-1], net.network.activations[-1], dtype=dtype)
        _, bound = forward_and_bound(coarse.network, coarse.weights, coarse.biases, x)
    assert error_in_bounds(own, expected, bound).max() <= (1 if dtype is None else 3)
    assert error_in_bounds(net(x, device="cpu"), expected, bound).max() <= (2 if dtype is None else 3)


# --- Files that Keras wrote -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [SQUARE, SCALED, FUNCTIONAL], ids=lambda p: p.name)
def test_files_that_keras_wrote(path):
    """11 square layers whose names count backwards; a large mean, BatchNormalization and Softmax; an .h5 file."""
    net = MLP.from_keras(path)
    with np.load(DATA / "keras_answers.npz") as answers:
        x, y = answers[f"{path.name}_x"], answers[f"{path.name}_y"]
    assert net.network.dtype == "float64"
    within(net, x, y, "float32" if path == SCALED else None)  # Keras divides by square roots in float32
    narrow = MLP.from_keras(path, dtype="float32")
    assert narrow.network.dtype == "float32"
    assert narrow.network.sizes == net.network.sizes
    if path == SCALED:
        assert net.network.activations == ("identity", ("leaky_relu", 0.3), "softmax")
        assert net.network.sizes == (4, 4, 6, 3), "the mean of 300 and 10 is kept apart"


# --- Against Keras --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keras():
    jax = pytest.importorskip("jax")
    os.environ.setdefault("KERAS_BACKEND", "jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("keras")
    if module.backend.backend() != "jax":
        pytest.skip(f"Keras runs on {module.backend.backend()}; jax computes in float64, too")
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield module


def saved(keras, rng, model, folder, kind, scale=0.5):
    """Its file, after every weight was drawn."""
    for layer in model.layers:
        drawn = [scale * rng.standard_normal(w.shape) for w in layer.get_weights()]
        if isinstance(layer, keras.layers.BatchNormalization):
            drawn = [rng.uniform(0.5, 2, w.shape) for w in layer.get_weights()]
        if not isinstance(layer, keras.layers.Normalization):
            layer.set_weights(drawn)
    path = folder / f"net.{kind}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(path)
    return path


def answer(keras, model, x):
    return keras.ops.convert_to_numpy(model(x))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("sizes", [(5, 3), (4, 4, 4), (3, 6, 6, 6, 6, 2)], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "keras"), ("float64", "h5")])
def test_functions_depths_and_biases(keras, rng, tmp_path, function, sizes, dtype, kind):
    """A function's name on Dense layers, softmax on the last one; square layers; biases on and off; both kinds of file."""
    last = function if len(sizes) == 2 or "softmax" in function else "linear"
    hidden = "relu" if "softmax" in function else function
    layers = [
        keras.layers.Dense(n, last if i == len(sizes) - 2 else hidden, use_bias=i % 2 == 0, dtype=dtype)
        for i, n in enumerate(sizes[1:])
    ]
    model = keras.Sequential([keras.Input((sizes[0],), dtype=dtype), *layers])
    scale = 0.1 if function == "exponential" else 0.5  # exp of exp of exp grows
    net = MLP.from_keras(saved(keras, rng, model, tmp_path, kind, scale))
    assert net.network.dtype == dtype
    assert net.network.sizes == sizes
    assert net.network.biases == tuple(i % 2 == 0 for i in range(len(layers)))
    assert net.network.activations[-1] == FUNCTIONS[last]
    x = rng.standard_normal((20, sizes[0])).astype(dtype)
    within(net, x, answer(keras, model, x), "float32" if function in ROUNDED_BY_KERAS or dtype == "float32" else None)


LAYERS = {  # an activation layer, and what it is here
    "ReLU": (lambda k: k.ReLU(), "relu"),
    "ReLU6": (lambda k: k.ReLU(max_value=6), "relu6"),
    "leaky ReLU": (lambda k: k.ReLU(negative_slope=0.1), ("leaky_relu", 0.1)),
    "LeakyReLU": (lambda k: k.LeakyReLU(), ("leaky_relu", 0.3)),
    "LeakyReLU of another slope": (lambda k: k.LeakyReLU(negative_slope=0.05), ("leaky_relu", 0.05)),
    "ELU": (lambda k: k.ELU(alpha=0.5), ("elu", 0.5)),
    "Activation": (lambda k: k.Activation("gelu"), "gelu"),
    "Activation of nothing": (lambda k: k.Activation("linear"), "identity"),
    "Softmax": (lambda k: k.Softmax(), "softmax"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ["keras", "h5"])
@pytest.mark.parametrize("inside", [False, True], ids=["behind", "inside"])
def test_activation_layers(keras, rng, tmp_path, name, kind, inside):
    """As a layer of its own, or as the activation of a Dense layer."""
    make, spec = LAYERS[name]
    layers = [keras.layers.Dense(4, "relu"), keras.layers.Dense(3, activation=make(keras.layers) if inside else None)]
    model = keras.Sequential([keras.Input((5,)), *layers, *([] if inside else [make(keras.layers)])])
    net = MLP.from_keras(saved(keras, rng, model, tmp_path, kind))
    assert net.network.activations == ("relu", spec)
    x = rng.standard_normal((20, 5)).astype("f4")
    within(net, x, answer(keras, model, x), "float32")


MEAN, VARIANCE = [300.0, 1.0, 0.0, -5.0], [1.0, 4.0, 0.25, 1.0]
SCALINGS = {
    "Normalization": lambda k: [k.Normalization(mean=MEAN, variance=VARIANCE), k.Dense(4, "relu"), k.Dense(2)],
    "Normalization near zero": lambda k: [k.Normalization(mean=1.0, variance=2.0), k.Dense(4, "relu"), k.Dense(2)],
    "Normalization of a feature that never changes": lambda k: [k.Normalization(mean=0.5, variance=0.0), k.Dense(2)],
    "Normalization, inverted, last": lambda k: [k.Dense(4), k.Normalization(mean=MEAN, variance=VARIANCE, invert=True)],
    "Rescaling": lambda k: [k.Rescaling(1 / 127.5, offset=-1), k.Dense(4, "relu"), k.Dense(2)],
    "Rescaling behind a function": lambda k: [k.Dense(4, "sigmoid"), k.Rescaling(10.0, offset=5.0)],
    "Rescaling by zero": lambda k: [k.Rescaling(0.0, offset=2.0), k.Dense(2)],
    "BatchNormalization behind Dense": lambda k: [
        k.Dense(4, use_bias=False),
        k.BatchNormalization(),
        k.ReLU(),
        k.Dense(2),
    ],
    "BatchNormalization behind a function": lambda k: [k.Dense(4, "relu"), k.BatchNormalization(), k.Dense(2)],
    "BatchNormalization first": lambda k: [k.BatchNormalization(), k.Dense(4, "relu"), k.Dense(2)],
    "BatchNormalization last": lambda k: [k.Dense(4, "relu"), k.BatchNormalization()],
    "BatchNormalization without scale": lambda k: [
        k.Dense(4),
        k.BatchNormalization(scale=False, epsilon=0.1),
        k.Dense(2),
    ],
    "BatchNormalization without center": lambda k: [k.Dense(4), k.BatchNormalization(center=False), k.Dense(2)],
    "two after another": lambda k: [
        k.Rescaling(2.0),
        k.BatchNormalization(),
        k.Dense(4, "relu"),
        k.Rescaling(0.5),
        k.Dense(2),
    ],
    "two functions after another": lambda k: [k.Dense(4, "relu"), k.Activation("sigmoid"), k.Dense(2)],
    "a function first": lambda k: [k.Activation("sigmoid"), k.Dense(2)],
    "a scaling before a function": lambda k: [k.Rescaling(2.0, offset=1.0), k.Activation("sigmoid"), k.Dense(2)],
    "what does nothing": lambda k: [
        k.Dropout(0.1),
        k.Flatten(),
        k.Dense(4),
        k.GaussianNoise(1.0),
        k.Identity(),
        k.Dense(2),
    ],
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("kind", ["keras", "h5"])
def test_scalings_become_part_of_the_network(keras, rng, tmp_path, name, kind):
    model = keras.Sequential([keras.Input((4,)), *SCALINGS[name](keras.layers)])
    path = saved(keras, rng, model, tmp_path, kind)
    net = MLP.from_keras(path)
    x = (rng.standard_normal((30, 4)) + (MEAN if name == "Normalization" else 0)).astype("f4")
    expected = answer(keras, model, x)
    exact = MLP.from_keras(path, dtype="float64")
    _, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    # Each of the three rounds weights or scales that the others do not.
    assert error_in_bounds(exact(x.astype("f8"), device="cpu"), expected, 6 * bound).max() <= 1
    assert error_in_bounds(net(x, device="cpu"), expected, 6 * bound).max() <= 1
    assert net.network.depth == {
        "Normalization": 3,
        "Normalization of a feature that never changes": 2,
        "Rescaling behind a function": 2,
        "BatchNormalization last": 2,
        "two functions after another": 3,
        "a scaling before a function": 2,
        "a function first": 2,
    }.get(name, sum(isinstance(layer, keras.layers.Dense) for layer in model.layers))


def test_an_adapted_normalization(keras, rng, tmp_path):
    normalization = keras.layers.Normalization()
    normalization.adapt(rng.normal([300.0, 1.0], [10.0, 2.0], (500, 2)))
    model = keras.Sequential([keras.Input((2,)), normalization, keras.layers.Dense(3)])
    for kind in ("keras", "h5"):
        net = MLP.from_keras(saved(keras, rng, model, tmp_path, kind))
        x = rng.normal([300.0, 1.0], [10.0, 2.0], (30, 2)).astype("f4")
        np.testing.assert_allclose(net(x, device="cpu"), answer(keras, model, x), rtol=1e-4, atol=1e-5)
        assert net.network.depth == 2


def test_functional_chains(keras, rng, tmp_path):
    k = keras.layers
    x = keras.Input((4,), name="measured")
    h = k.Dense(5, "elu", name="b")(x)
    h = k.Dropout(0.5)(h)
    model = keras.Model(x, k.Dense(5, name="a")(h))
    for kind in ("keras", "h5"):
        net = MLP.from_keras(saved(keras, rng, model, tmp_path, kind))
        assert net.network.activations == (("elu", 1.0), "identity")
        values = rng.standard_normal((20, 4)).astype("f4")
        within(net, values, answer(keras, model, values), "float32")


@pytest.mark.parametrize("kind", ["keras", "h5"])
def test_half_precision_weights(keras, rng, tmp_path, kind):
    dtypes = ["float16", "bfloat16"] if kind == "keras" else ["float16"]
    for dtype in dtypes:
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3, dtype=dtype), keras.layers.Dense(3, dtype=dtype)]
        )
        net = MLP.from_keras(saved(keras, rng, model, tmp_path, kind))
        assert net.network.dtype == dtype
        want = keras.ops.convert_to_numpy(keras.ops.cast(model.layers[1].kernel, "float32"))
        assert (net.weights[1].astype("f4") == want).all()


def refused(keras):
    k = keras.layers
    x, other = keras.Input((4,)), keras.Input((4,))
    dense, shared = k.Dense(4), k.Dense(4)
    h = dense(x)
    return {
        "a convolution": (
            keras.Sequential([keras.Input((4, 1)), k.Conv1D(2, 2)]),
            r"takes an input of shape \[None, 4, 1\]",
        ),
        "a Lambda": (
            keras.Sequential([keras.Input((4,)), k.Lambda(lambda v: v), k.Dense(2)]),
            r"layer 'lambda.*' \(Lambda\) .* cannot be part",
        ),
        "an Embedding": (
            keras.Sequential([keras.Input((4,)), k.Embedding(3, 2)]),
            r"\(Embedding\) .* cannot be part of a network; accepted",
        ),
        "LayerNormalization": (
            keras.Sequential([keras.Input((4,)), k.Dense(4), k.LayerNormalization()]),
            r"\(LayerNormalization\)",
        ),
        "PReLU": (keras.Sequential([keras.Input((4,)), k.Dense(4), k.PReLU()]), r"\(PReLU\)"),
        "a model in a model": (
            keras.Sequential([keras.Input((4,)), keras.Sequential([keras.Input((4,)), k.Dense(4)])]),
            r"\(Sequential\)",
        ),
        "a function that is not there": (
            keras.Sequential([keras.Input((4,)), k.Dense(4, "mish")]),
            "has the activation 'mish'; accepted: linear",
        ),
        "a function of one's own": (
            keras.Sequential([keras.Input((4,)), k.Dense(4, activation=lambda v: v)]),
            "has the activation .*; accepted: linear",
        ),
        "another most": (
            keras.Sequential([keras.Input((4,)), k.Dense(4), k.ReLU(max_value=5)]),
            r"has max_value 5(\.0)?, negative_slope 0.0 and",
        ),
        "a threshold": (
            keras.Sequential([keras.Input((4,)), k.Dense(4), k.ReLU(threshold=1)]),
            "and threshold 1.0; accepted: threshold 0",
        ),
        "softmax in the middle": (
            keras.Sequential([keras.Input((4,)), k.Dense(4, "softmax", name="s"), k.Dense(2)]),
            "follows 'softmax', which is accepted at the end",
        ),
        "no Dense layer": (
            keras.Sequential([keras.Input((4,)), k.ReLU()]),
            "has no Dense layer; accepted: at least one",
        ),
        "two inputs": (keras.Model([x, other], k.Add()([x, other])), "has 2 inputs"),
        "two outputs": (keras.Model(x, [h, shared(h)]), "has 2 outputs"),
        "a residual": (keras.Model(x, k.Add()([x, h])), "the layers are no chain"),
        "a layer that is called twice": (keras.Model(x, shared(shared(x))), "are no chain|a later call of"),
        "an operation": (keras.Model(x, h * 2.0), "cannot be part of a network|is called with"),
    }


REFUSED = [
    "a convolution", "a Lambda", "an Embedding", "LayerNormalization", "PReLU", "a model in a model",
    "a function that is not there", "a function of one's own", "another most", "a threshold", "softmax in the middle",
    "no Dense layer", "two inputs", "two outputs", "a residual", "a layer that is called twice", "an operation",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["keras", "h5"])
def test_models_that_are_no_chain_are_refused(keras, tmp_path, name, kind):
    model, message = refused(keras)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(tmp_path / f"net.{kind}")
    with pytest.raises(ValueError, match=message):
        MLP.from_keras(tmp_path / f"net.{kind}")


def test_all_refused_models_are_tested(keras):
    assert list(refused(keras)) == REFUSED


def of_ones_own(keras):
    """Classes with the names of Keras' own, which compute something else."""
    k = keras.layers
    register = keras.saving.register_keras_serializable("mypkg")
    x = keras.Input((3,))

    def identity(base):
        return type("Identity", (base,), {"call": lambda self, v: v + 1})

    def dense():
        return type("Dense", (k.Dense,), {"call": lambda self, v: v})

    def leaky():
        return type("LeakyReLU", (k.LeakyReLU,), {"call": lambda self, v: -v})

    def model(base):
        return type(base.__name__, (base,), {"call": lambda self, v, **_: v})

    functional = type(keras.Model(x, k.Dense(3)(x)))
    return {
        "a registered Identity": (
            keras.Sequential([x, k.Dense(3), register(identity(k.Layer))(name="mine")]),
            r"layer 'mine' \(Identity\) of .* registered as 'mypkg>Identity'\), not Keras' own; accepted",
        ),
        "an Identity": (
            keras.Sequential([x, k.Dense(3), identity(k.Layer)(name="mine")]),
            r"layer 'mine' \(Identity\)",
        ),
        "a registered Dense": (keras.Sequential([x, register(dense())(3, name="mine")]), r"layer 'mine' \(Dense\)"),
        "a Dense": (
            keras.Sequential([x, dense()(3, name="mine")]),
            r"layer 'mine' \(Dense\) of .* is a class of its author's \(module .*, registered as 'Dense'\)",
        ),
        "a Dense in a Functional": (keras.Model(x, dense()(3, name="mine")(x)), r"layer 'mine' \(Dense\)"),
        "a registered LeakyReLU in Dense": (
            keras.Sequential([x, k.Dense(3, activation=register(leaky())(), name="mine")]),
            r"layer 'mine' \(Dense\) of .* has the activation LeakyReLU, a class of its author's",
        ),
        "a LeakyReLU in Activation": (
            keras.Sequential([x, k.Dense(3), k.Activation(leaky()(), name="mine")]),
            r"layer 'mine' \(Activation\) of .* has the activation LeakyReLU, a class of its author's",
        ),
        "a Sequential": (
            model(keras.Sequential)([x, k.Dense(3)]),
            r"is a model of class 'Sequential' that is its author's \(module ",
        ),
        "a Functional": (
            model(functional)(x, k.Dense(3)(x)),
            r"is a model of class 'Functional' that is its author's \(module ",
        ),
    }


OF_ONES_OWN = [
    "a registered Identity", "an Identity", "a registered Dense", "a Dense", "a Dense in a Functional",
    "a registered LeakyReLU in Dense", "a LeakyReLU in Activation", "a Sequential", "a Functional",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_ONES_OWN)
def test_classes_with_the_names_of_keras_are_refused(keras, tmp_path, name):
    made = of_ones_own(keras)
    assert list(made) == OF_ONES_OWN
    model, message = made[name]
    kinds = ["keras", "h5"] if "registered" in name else ["keras"]  # .h5 files have a mark of registered ones alone
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save(tmp_path / f"net.{kind}")
        message = message if kind == "keras" else r"layer 'mine' .*(cannot be part of a network|author's)"
        with pytest.raises(ValueError, match=message):
            MLP.from_keras(tmp_path / f"net.{kind}")


# --- Descriptions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewritten(tmp_path):
    """Writes the archive of SQUARE or SCALED again with other members: bytes, or a function of the description."""

    def write(source=SQUARE, compression=zipfile.ZIP_STORED, **changes):
        path = tmp_path / "bad.keras"
        names = {"config": "config.json", "metadata": "metadata.json", "weights": "model.weights.h5"}
        with zipfile.ZipFile(source) as good, zipfile.ZipFile(path, "w", compression) as bad:
            for name, member in names.items():
                content = good.read(member)
                change = changes.get(name)
                if callable(change):
                    config = json.loads(content)
                    config = change(config) or config
                    content = config if isinstance(config, bytes) else json.dumps(config)
                elif name in changes:
                    content = change
                if content is not None:
                    bad.writestr(member, content)
            for member, content in changes.get("members", []):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a name that is there twice
                    bad.writestr(member, content)
        return path

    return write


def layer(index, **config):
    """Changes the configuration of a layer."""

    def change(description):
        description["config"]["layers"][index]["config"].update(config)

    return change


def set_in(*path, value):
    def change(description):
        for part in path[:-1]:
            description = description[part]
        description[path[-1]] = value

    return change


def deep(count):
    return lambda description: (
        b'{"class_name": "Sequential", "config": ' + b'{"a":' * count + b"1" + b"}" * count + b"}"
    )


BAD_DESCRIPTIONS = {
    "no JSON": (lambda d: b"{", "config.json cannot be read"),
    "brackets": (lambda d: b"[" * 200_000, "config.json cannot be read"),
    "objects in objects": (deep(100_000), "config.json cannot be read"),
    "no UTF-8": (lambda d: b'{"\xff": 1}', "config.json cannot be read"),
    "a list": (lambda d: b"[1, 2]", r"config.json is \[1, 2\]; accepted: an object"),
    "another class": (
        set_in("class_name", value="Transformer"),
        "is a model of class 'Transformer'; accepted: Sequential",
    ),
    "no configuration": (set_in("config", value=None), "is a model of class 'Sequential'; accepted"),
    "no layers": (set_in("config", "layers", value=[]), "its description has no list of layers"),
    "layers that are none": (set_in("config", "layers", value=[1]), "its description has no list of layers"),
    "layers that are an object": (set_in("config", "layers", value={"a": 1}), "its description has no list of layers"),
    "a layer without configuration": (set_in("config", "layers", 1, "config", value=3), "a layer is described by"),
    "a layer without a class": (set_in("config", "layers", 1, "class_name", value=None), "a layer is described by"),
    "a layer without a name": (layer(1, name=7), "a layer is named 7"),
    "two layers of one name": (layer(2, name="z11"), "two layers are named 'z11'"),
    "an unknown layer": (
        set_in("config", "layers", 2, "class_name", value="Dense2"),
        r"layer 'z10' \(Dense2\) of .* cannot be part of a network; accepted: Activation",
    ),
    "a name that is elsewhere": (
        layer(2, name="other"),
        "layers/dense_1 holds the arrays of 'z10'; the description has 'other'",
    ),
    "no input": (layer(0, batch_shape=None), "does not say what its input is"),
    "an input of two axes": (
        layer(0, batch_shape=[None, 3, 3]),
        r"takes an input of shape \[None, 3, 3\]; accepted: \[null, features\]",
    ),
    "an input of unknown size": (layer(0, batch_shape=[None, None]), r"takes an input of shape \[None, None\]"),
    "an absurd input": (layer(0, batch_shape=[None, 2**60]), "takes an input of shape"),
    "an input that does not fit": (
        layer(0, batch_shape=[None, 5]),
        r"kernel of layer 'z11' has shape \(3, 3\); the description says \(5, 3\)",
    ),
    "units that do not fit": (
        layer(1, units=4),
        r"kernel of layer 'z11' has shape \(3, 3\); the description says \(3, 4\)",
    ),
    "absurd units": (layer(1, units=2**60), "has units 1152921504606846976; accepted: a positive integer"),
    "large units": (
        layer(1, units=2**31 - 1),
        r"kernel of layer 'z11' has shape \(3, 3\); the description says \(3, 2147483647\)",
    ),
    "no units": (layer(1, units=0), "has units 0; accepted: a positive integer"),
    "units that are none": (layer(1, units=True), "has units True; accepted: a positive integer"),
    "a bias that is not there": (layer(1, use_bias=False), "layer 'z11' has 2 arrays; a Dense like this has kernel"),
    "a flag that is none": (layer(1, use_bias="yes"), "has use_bias 'yes'; accepted: true or false"),
    "an unknown function": (layer(1, activation="wobble"), "has the activation 'wobble'; accepted: linear, relu"),
    "a function as a list": (layer(1, activation=["relu"]), r"has the activation \['relu'\]; accepted"),
    "code": (
        layer(1, activation={"class_name": "function", "config": "os.system", "registered_name": "function"}),
        "has the activation {.*; accepted",
    ),
    "a quantized layer": (layer(1, quantization_config={"a": 1}), "is quantized or has LoRA weights"),
    "a class of a package whose name begins like Keras'": (
        set_in("config", "layers", 1, "module", value="keras_extras.layers"),
        r"layer 'z11' \(Dense\) of .* is a class of its author's \(module 'keras_extras.layers'\), not Keras' own",
    ),
    "a registered name that is none": (
        set_in("config", "layers", 1, "registered_name", value=3),
        "registered as 3",
    ),
    "LoRA": (layer(1, lora_rank=4), "is quantized or has LoRA weights"),
}


@pytest.mark.parametrize("name", BAD_DESCRIPTIONS)
def test_broken_descriptions_are_clear_errors(rewritten, name):
    change, message = BAD_DESCRIPTIONS[name]
    refuses(rewritten(config=change), message)


BAD_SCALINGS = {  # layers of SCALED: 0 Input, 1 Normalization, 2 Dense, 3 BatchNormalization, 4 LeakyReLU, ..., 7 Softmax
    "another axis": (layer(1, axis=[2]), "has another axis than the last; accepted: axis=-1 or None"),
    "another axis of BatchNormalization": (layer(3, axis=0), "has renorm, or another axis than the last"),
    "renorm": (layer(3, renorm=True), "has renorm, or another axis than the last"),
    "an epsilon that is none": (layer(3, epsilon="small"), "has epsilon 'small'; accepted: finite numbers"),
    "an epsilon of many numbers": (layer(3, epsilon=[1.0, 2.0]), r"has epsilon \[1.0, 2.0\]; accepted: one number"),
    "a negative epsilon": (layer(3, epsilon=-100.0), "has a moving_variance that is not positive with its epsilon"),
    "an infinite slope": (layer(4, negative_slope=1e999), "has negative_slope inf; accepted: finite numbers"),
    "a mean that does not fit": (layer(1, mean=[1.0, 2.0], variance=[1.0, 2.0]), "does not fit 4 features"),
    "a negative variance": (layer(1, mean=1.0, variance=-1.0), "has a negative variance; accepted: 0 or more"),
    "a mean that is none": (layer(1, mean="a", variance=1.0), "has mean 'a'; accepted: finite numbers"),
    "a variance that is missing": (layer(1, mean=1.0, variance=None), "has variance None; accepted: finite numbers"),
    "a softmax over another axis": (layer(7, axis=0), "has another axis than the last; accepted: axis=-1"),
}


@pytest.mark.parametrize("name", BAD_SCALINGS)
def test_broken_scalings_are_clear_errors(rewritten, name):
    change, message = BAD_SCALINGS[name]
    refuses(rewritten(SCALED, config=change), message)


def refuses(path, message):
    """A ValueError with this message, and little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            MLP.from_keras(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6


def test_hard_sigmoid_is_another_function_in_keras_2(rewritten):
    change = layer(1, activation="hard_sigmoid")
    assert MLP.from_keras(rewritten(config=change)).network.activations[0] == "hard_sigmoid"
    for metadata in (b'{"keras_version": "2.15.0"}', b"{}", None):
        refuses(rewritten(config=change, metadata=metadata), "hard_sigmoid, which in Keras 2 is another function")


def test_an_archive_of_an_older_keras_has_no_names(rewritten):
    """Nor need it have metadata."""
    with zipfile.ZipFile(SQUARE) as archive:
        content = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(content, "r+") as file:
        for name in file["layers"]:
            del file[f"layers/{name}/vars"].attrs["name"]
    net, want = MLP.from_keras(rewritten(weights=content.getvalue(), metadata=None)), MLP.from_keras(SQUARE)
    assert all((a == b).all() for a, b in zip(net.weights, want.weights))


# --- Archives -------------------------------------------------------------------------------------------------------------

ARCHIVES = {
    "no description": ({"config": None}, "it has no config.json"),
    "no weights": ({"weights": None}, "it has no model.weights.h5"),
    "empty weights": ({"weights": b""}, "is not a model that Keras saved, or it is damaged"),
    "weights that are text": ({"weights": b"hello" * 1000}, "is not a model that Keras saved, or it is damaged"),
    "metadata that is no JSON": ({"metadata": b"?"}, "metadata.json cannot be read"),
    "metadata that is a list": ({"metadata": b"[]"}, r"metadata.json is \[\]; accepted: an object"),
    "a path out of the folder": (
        {"members": [("../../evil", b"x")]},
        "it has a member '../../evil'; accepted: config.json",
    ),
    "a path out of the assets": ({"members": [("assets/../../evil", b"x")]}, "it has a member 'assets/../../evil'"),
    "an absolute path": ({"members": [("/etc/passwd", b"x")]}, "it has a member '/etc/passwd'"),
    "code": ({"members": [("model.py", b"x")]}, "it has a member 'model.py'"),
    "two descriptions": ({"members": [("config.json", b"{}")]}, "a member is there twice"),
    "two weights": ({"members": [("model.weights.h5", b"")]}, "a member is there twice"),
    "a bomb of weights": (
        {"weights": bytes(50 << 20), "compression": zipfile.ZIP_DEFLATED},
        "model.weights.h5 has 52,428,800 bytes; at most",
    ),
    "a bomb of a description": (
        {"config": b" " * (50 << 20), "compression": zipfile.ZIP_DEFLATED},
        "config.json has 52,428,800 bytes; at most",
    ),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_broken_archives_are_clear_errors(rewritten, name):
    changes, message = ARCHIVES[name]
    refuses(rewritten(**changes), message)


def test_assets_are_no_matter(rewritten):
    assert MLP.from_keras(rewritten(members=[("assets/vocabulary.txt", b"x")])).network.depth == 11


def test_a_member_that_claims_to_be_smaller(rewritten):
    """What the archive says is read, not what is there; the rest is a wrong checksum."""
    path = rewritten(compression=zipfile.ZIP_DEFLATED, config=lambda d: b" " * 10_000_000 + b"{}")
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")
    while content[at + 46 : at + 57] != b"config.json":
        at = content.find(b"PK\x01\x02", at + 1)
    content[at + 24 : at + 28] = struct.pack("<I", 100)
    path.write_bytes(content)
    refuses(path, "is not a model that Keras saved, or it is damaged: ")


def test_an_encrypted_archive(rewritten):
    path = rewritten()
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")
    while at >= 0:
        content[at + 8] |= 1
        at = content.find(b"PK\x01\x02", at + 1)
    path.write_bytes(content)
    refuses(path, "is not a model that Keras saved, or it is damaged: .*encrypted")


# --- HDF5 -----------------------------------------------------------------------------------------------------------------

KERNEL = "model_weights/second/second/kernel"


def replaced(name, **options):
    """Makes the dataset anew with these arguments of create_dataset."""

    def change(file):
        old = file[name][()]
        del file[name]
        file.create_dataset(name, **{"data": old, **options})

    return change


def linked(name, link):
    def change(file):
        del file[name]
        file[name] = link(file) if callable(link) else link

    return change


def looping(file):
    del file[KERNEL]
    file[KERNEL] = h5py.SoftLink("/model_weights/second/second/kernel")


def external(file):
    del file[KERNEL]
    file.create_dataset(KERNEL, (5, 5), "f8", external=[("/dev/zero", 0, 200)])


def virtual(file):
    layout = h5py.VirtualLayout((5, 5), "f8")
    layout[:] = h5py.VirtualSource("other.h5", "a", (5, 5))
    del file[KERNEL]
    file.create_virtual_dataset(KERNEL, layout)


def nowhere(shape):
    """An array that claims a shape and has no bytes: HDF5 makes them up when it is read."""

    def change(file):
        del file[KERNEL]
        space = h5py.h5s.create_simple(shape)
        h5py.h5d.create(file.id, KERNEL.encode(), h5py.h5t.IEEE_F64LE, space)

    return change


def described(edit):
    def change(file):
        config = json.loads(file.attrs["model_config"])
        edit(config)
        file.attrs["model_config"] = json.dumps(config)

    return change


def attribute(name, value, group="/"):
    def change(file):
        if value is None:
            del file[group].attrs[name]
        else:
            file[group].attrs[name] = value

    return change


def with_number(value):
    def change(file):
        file[KERNEL][2, 3] = value

    return change


def cyclic(config):
    """input -> first -> flatten -> second -> third, where first takes what third gives."""
    node = config["config"]["layers"][1]["inbound_nodes"][0]
    node["args"][0]["config"]["keras_history"] = ["third", 0, 0]


def itself(config):
    config["config"]["layers"][1]["inbound_nodes"][0]["args"][0]["config"]["keras_history"] = ["first", 0, 0]


def twice(config):
    nodes = config["config"]["layers"][3]["inbound_nodes"]
    nodes.append(nodes[0])


def history(value):
    def edit(config):
        config["config"]["layers"][1]["inbound_nodes"][0]["args"][0]["config"]["keras_history"] = value

    return edit


SECOND = "model_weights/second"
BAD_HDF5 = {
    "no description": (
        attribute("model_config", None),
        r"it has no description \(model_config\), weights at most; save all of it",
    ),
    "a description that is no JSON": (attribute("model_config", "{"), "model_config cannot be read"),
    "a description of brackets": (attribute("model_config", "[" * 50_000), "model_config cannot be read"),
    "a description that is a number": (attribute("model_config", 3), "model_config is 3; accepted: an object"),
    "no weights": (lambda file: file.__delitem__("model_weights"), "'model_weights' is missing"),
    "a layer missing": (lambda file: file.__delitem__(SECOND), "'model_weights/second' is missing"),
    "an array missing": (lambda file: file.__delitem__(KERNEL), "'second/kernel' is missing"),
    "names missing": (
        attribute("weight_names", None, SECOND),
        "layer 'second' has no arrays; a Dense like this has kernel, bias",
    ),
    "a name too few": (
        attribute("weight_names", ["second/kernel"], SECOND),
        "layer 'second' has kernel; a Dense like this has kernel, bias",
    ),
    "a name twice": (
        attribute("weight_names", ["second/kernel", "second/kernel", "second/bias"], SECOND),
        "layer 'second' has bias, kernel; a Dense",
    ),
    "names that are numbers": (
        attribute("weight_names", [1.0, 2.0], SECOND),
        "layer 'second' has 1.0, 2.0; a Dense like this",
    ),
    "a name that begins at the root": (
        attribute("weight_names", ["/model_weights/first/first/kernel", "second/bias"], SECOND),
        "'' is missing",
    ),
    "a name that goes up": (
        attribute("weight_names", ["../first/first/kernel", "second/bias"], SECOND),
        "'..' is missing",
    ),
    "a soft link": (
        linked(KERNEL, lambda f: h5py.SoftLink("/model_weights/first/first/kernel")),
        "'second/kernel' is a link to another place",
    ),
    "a soft link to itself": (looping, "second/kernel'? is"),
    "a soft link to nothing": (linked(KERNEL, lambda f: h5py.SoftLink("/nothing")), "second/kernel'? is"),
    "a link to another file": (
        linked(KERNEL, lambda f: h5py.ExternalLink("/etc/passwd", "/a")),
        "second/kernel'? is|damaged",
    ),
    "a layer in another file": (
        linked(SECOND, lambda f: h5py.ExternalLink("other.h5", "/a")),
        "model_weights/second'? is|damaged",
    ),
    "a group that holds itself": (linked(SECOND, lambda f: f["model_weights"]), "layer 'second' has no arrays"),
    "a group for an array": (linked(KERNEL, lambda f: f["model_weights"]), "kernel of layer 'second' is not an array"),
    "an array for a group": (
        linked(SECOND, lambda f: f["model_weights/first/first/bias"]),
        "layer 'second' has no arrays|is missing",
    ),
    "an array in another file": (external, "is compressed, in chunks, or elsewhere; accepted: arrays in one piece"),
    "a virtual array": (virtual, "is compressed, in chunks, or elsewhere"),
    "a compressed array": (replaced(KERNEL, compression="gzip"), "is compressed, in chunks, or elsewhere"),
    "an array in chunks": (replaced(KERNEL, chunks=(1, 5)), "is compressed, in chunks, or elsewhere"),
    "another shape": (
        replaced(KERNEL, data=np.ones((5, 4))),
        r"kernel of layer 'second' has shape \(5, 4\); the description says \(5, 5\)",
    ),
    "another rank": (
        replaced(KERNEL, data=np.ones((5, 5, 1))),
        r"has shape \(5, 5, 1\); the description says \(5, 5\)",
    ),
    "an array without a shape": (
        replaced(KERNEL, data=h5py.Empty("f8") if h5py else None),
        "has shape None; the description says",
    ),
    "integers": (replaced(KERNEL, data=np.ones((5, 5), int)), "has dtype int64; accepted: floating-point numbers"),
    "texts": (replaced(KERNEL, data=np.full((5, 5), b"x")), r"has dtype \|S1; accepted: floating-point numbers"),
    "structures": (replaced(KERNEL, data=np.zeros((5, 5), "f4,f4")), "accepted: floating-point numbers"),
    "an absurd array": (
        nowhere((2**30, 2**30)),
        r"has shape \(1073741824, 1073741824\); the description says \(5, 5\)",
    ),
    "an array that is nowhere": (nowhere((5, 5)), "kernel of layer 'second' takes 0 bytes; its shape needs 200"),
    "NaN": (with_number(np.nan), "kernel of layer 'second' of .* has NaN or infinite numbers, 1 of 25"),
    "infinity": (with_number(-np.inf), "kernel of layer 'second' of .* has NaN or infinite numbers, 1 of 25"),
    "a cycle": (
        described(cyclic),
        "layer 'first' of .* takes what comes of 'third', and follows 'input_layer.*': the layers are no chain",
    ),
    "a layer that takes itself": (described(itself), "layer 'first' of .* takes what comes of 'first'"),
    "a layer called twice": (
        described(twice),
        "layer 'second' of .* takes what comes of 'flatten.*', 'flatten.*', and follows",
    ),
    "a later call": (
        described(history(["input_layer", 1, 0])),
        r"takes \['input_layer', 1, 0\], a later call of 'input_layer'",
    ),
    "a history that is none": (described(history("input")), "layer 'first' takes 'input'"),
    "a history of another kind": (described(history([1, 2, 3])), r"layer 'first' takes \[1, 2, 3\]"),
    "nodes that are none": (
        described(set_in("config", "layers", 1, "inbound_nodes", value=5)),
        "layer 'first' has inbound_nodes 5",
    ),
    "nodes without arguments": (
        described(set_in("config", "layers", 1, "inbound_nodes", value=[{}])),
        "layer 'first' of .* is called with None",
    ),
    "two arguments": (
        described(set_in("config", "layers", 1, "inbound_nodes", value=[{"args": [1, 2]}])),
        r"is called with \[1, 2\]; accepted: one tensor",
    ),
    "an argument that is no tensor": (
        described(set_in("config", "layers", 1, "inbound_nodes", value=[{"args": [1]}])),
        "is called with 1; accepted: one tensor",
    ),
    "no nodes": (
        described(set_in("config", "layers", 1, "inbound_nodes", value=[])),
        "layer 'first' of .* takes what comes of nothing",
    ),
    "two inputs": (
        described(set_in("config", "input_layers", value=[["a", 0, 0], ["b", 0, 0]])),
        r"has 2 inputs: \['a', 'b'\]",
    ),
    "no output": (described(set_in("config", "output_layers", value=[])), "has 0 outputs"),
    "another output": (
        described(set_in("config", "output_layers", value=["second", 0, 0])),
        "goes from 'input_layer.*' to 'second', and its layers",
    ),
    "a name of paths": (described(layer(4, name="x/../third")), "'x/../third'|is missing|follows"),
}


@pytest.fixture
def edited(tmp_path):
    def edit(change):
        path = tmp_path / "bad.h5"
        shutil.copy(FUNCTIONAL, path)
        with h5py.File(path, "r+") as file:
            change(file)
        return path

    return edit


@pytest.mark.parametrize("name", BAD_HDF5)
def test_broken_hdf5_files_are_clear_errors(edited, name):
    change, message = BAD_HDF5[name]
    refuses(edited(change), message)


@pytest.mark.parametrize("size", [0, 1, 15, 2**64 - 1, 2**64 - 16, 2**63, 4096])
@pytest.mark.parametrize("which", ["heap", "first", "free"])
def test_heaps_without_an_end(tmp_path, which, size):
    """The HDF5 library walks around for ever in some of these."""
    content = bytearray(FUNCTIONAL.read_bytes())
    heap = content.find(b"GCOL\x01")
    at = {"heap": heap + 8, "first": heap + 16 + 8}.get(which)
    if at is None:
        at = heap + 16
        while content[at : at + 2] != b"\0\0":
            at += 16 + -(-struct.unpack_from("<Q", content, at + 8)[0] // 8) * 8
        at += 8
    if struct.unpack_from("<Q", content, at) != (size,):
        struct.pack_into("<Q", content, at, size)
        (tmp_path / "bad.h5").write_bytes(content)
        refuses(tmp_path / "bad.h5", "or it is damaged: .*global heap")


def test_files_of_many_heaps_end(tmp_path):
    """Heap upon heap, each with as many objects as the file has room for: no more than a million steps."""
    content = FUNCTIONAL.read_bytes() + b"GCOL\x01\0\0\0" + struct.pack("<Q", 1 << 20) + bytes(1 << 10)
    steps = b"GCOL\x01\0\0\0" + bytes(8)  # an object of index 0x4347 and no size, and a heap, at once
    (tmp_path / "bad.h5").write_bytes(content + steps * 100_000)
    refuses(tmp_path / "bad.h5", "a global heap of its HDF5 is damaged")


def test_addresses_of_other_widths_are_refused(tmp_path):
    content = bytearray(FUNCTIONAL.read_bytes())
    content[13 if content[8] < 2 else 9] = 4
    (tmp_path / "bad.h5").write_bytes(content)
    refuses(tmp_path / "bad.h5", "its HDF5 has no superblock at its beginning with addresses of 8 bytes")


def test_a_file_as_keras_2_wrote_it(edited):
    """Names end with :0, nodes are lists, the input's shape has another name, slopes and texts are of other kinds."""

    def change(file):
        config = json.loads(file.attrs["model_config"])
        config["class_name"] = "Model"
        for entry in config["config"]["layers"]:
            entry["inbound_nodes"] = [
                [[*argument["config"]["keras_history"], {}] for argument in node["args"]]
                for node in entry["inbound_nodes"]
            ]
        first = config["config"]["layers"][0]["config"]
        first["batch_input_shape"] = first.pop("batch_shape")
        config["config"]["input_layers"], config["config"]["output_layers"] = (
            [[name, 0, 0]] for name in (first["name"], "third")
        )
        config["config"]["layers"][1]["config"]["activation"] = {"class_name": "LeakyReLU", "config": {"alpha": 0.25}}
        file.attrs["model_config"] = json.dumps(config).encode()
        file.attrs["keras_version"] = b"2.15.0"
        for name in ("first", "second", "third"):
            group = file["model_weights"][name]
            group.attrs["weight_names"] = [f"{name}/kernel:0".encode(), f"{name}/bias:0".encode()]
            for array in ("kernel", "bias"):
                group.move(f"{name}/{array}", f"{name}/{array}:0")

    net, want = MLP.from_keras(edited(change)), MLP.from_keras(FUNCTIONAL)
    assert net.network.activations == (("leaky_relu", 0.25), *want.network.activations[1:])
    assert all((a == b).all() for a, b in zip((*net.weights, *net.biases), (*want.weights, *want.biases)))


# --- Any bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SQUARE, SCALED, FUNCTIONAL], ids=lambda p: p.name)
def test_files_cut_short_are_clear_errors(tmp_path, source):
    content = source.read_bytes()
    path = tmp_path / "cut"
    for length in [*range(12), *range(12, len(content), len(content) // 60)]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is not a model that Keras saved, or it is damaged"):
            MLP.from_keras(path)


@pytest.mark.parametrize("source", [SQUARE, FUNCTIONAL], ids=lambda p: p.name)
def test_flipped_bytes_never_do_more_than_raise(tmp_path, source):
    """In a process of its own, which has to end by itself. The archive has checksums; HDF5 has none for numbers."""
    program = f"""
import pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
import numpy as np
from cupymlp import MLP
content = pathlib.Path({str(source)!r}).read_bytes()
path = pathlib.Path({str(tmp_path / "flip")!r})
want = MLP.from_keras({str(source)!r})
rng = np.random.default_rng(0)
raised = 0
for at in rng.choice(len(content), 400, replace=False):
    flipped = bytearray(content)
    flipped[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(flipped)
    try:
        found = MLP.from_keras(path)
    except ValueError:
        raised += 1
        continue
    assert found.network.sizes == want.network.sizes, at
    if {source.suffix == ".keras"}:
        assert all((a == b).all() for a, b in zip(found.weights, want.weights)), at
assert raised > 60
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("hello, this is no network")
    (tmp_path / "empty").write_bytes(b"")
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    refuses(tmp_path / "text", r"it is neither a zip archive \(.keras\) nor an HDF5 file \(.h5\)")
    refuses(tmp_path / "empty", "it is neither a zip archive")
    refuses(tmp_path / "arrays.npz", "it has a member 'a.npy'")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["a"] = np.zeros(3)
    refuses(tmp_path / "other.h5", "it has no description")
    with pytest.raises(FileNotFoundError):
        MLP.from_keras(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        MLP.from_keras(tmp_path)


def test_keras_is_not_imported_and_without_h5py_it_is_said():
    program = f"""
import sys, cupymlp
assert cupymlp.MLP.from_keras({str(SQUARE)!r}).network.depth == 11
assert not {{"keras", "tensorflow", "jax", "torch"}} & set(sys.modules)
sys.modules["h5py"] = None
try:
    cupymlp.MLP.from_keras({str(SQUARE)!r})
except ImportError as error:
    assert "pip install h5py" in str(error), error
else:
    sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
