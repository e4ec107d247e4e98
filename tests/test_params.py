"""MLP.from_params: against Flax, Haiku and Equinox, and broken trees."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings

import numpy as np
import pytest

from cupymlp import MLP
from cupymlp.reference import error_in_bounds, forward_and_bound

SIZES = [(5, 3), (4, 4, 4), (3, 8, 8, 2), (2, 7, 1, 6, 3), (6, 6, 6, 6, 6, 6)]
DTYPES = ["float32", "float64"]
FUNCTIONS = {  # what jax.nn or jax.numpy calls each activation; sums and results in the arrays' dtype
    "identity": lambda jax: lambda v: v,
    "relu": lambda jax: jax.nn.relu,
    ("leaky_relu", 0.01): lambda jax: jax.nn.leaky_relu,
    ("leaky_relu", 0.25): lambda jax: lambda v: jax.nn.leaky_relu(v, 0.25),
    ("elu", 1.0): lambda jax: jax.nn.elu,
    ("elu", 0.5): lambda jax: lambda v: jax.nn.elu(v, 0.5),
    ("celu", 2.0): lambda jax: lambda v: jax.nn.celu(v, 2.0),
    "selu": lambda jax: jax.nn.selu,
    "gelu": lambda jax: lambda v: jax.nn.gelu(v, approximate=False),
    "gelu_tanh": lambda jax: jax.nn.gelu,
    "silu": lambda jax: jax.nn.silu,
    "tanh": lambda jax: jax.nn.tanh,
    "sigmoid": lambda jax: jax.nn.sigmoid,
    "softplus": lambda jax: jax.nn.softplus,
    "softsign": lambda jax: jax.nn.soft_sign,
    ("sin", 3.0): lambda jax: lambda v: jax.numpy.sin(3.0 * v),
    "hard_sigmoid": lambda jax: jax.nn.hard_sigmoid,
    "hard_swish": lambda jax: jax.nn.hard_swish,
    "relu6": lambda jax: jax.nn.relu6,
    "squareplus": lambda jax: jax.nn.squareplus,
}
LAST = {
    "softmax": lambda jax: jax.nn.softmax,
    "log_softmax": lambda jax: jax.nn.log_softmax,
    "exp": lambda jax: jax.numpy.exp,
}


@pytest.fixture(scope="module")
def jax():
    module = pytest.importorskip("jax")
    with module.enable_x64(True) if hasattr(module, "enable_x64") else module.experimental.enable_x64():
        yield module


def library(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def draw(jax, rng, tree):
    """A tree of these shapes with every number drawn: initial biases are zero, and initializers are slow to compile."""
    return jax.tree.map(lambda a: jax.numpy.asarray(rng.standard_normal(a.shape) / 2, a.dtype), tree)


def within(net, x, expected):
    """Both may be off by the bound: jax in its order of summation, the CPU path in BLAS'."""
    _, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert error_in_bounds(net(x, device="cpu"), np.asarray(expected, np.float64), bound).max() <= 2


def biases_of(sizes):
    return [i % 3 != 1 for i in range(len(sizes) - 1)]


# --- Flax, linen --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["compact", "Sequential", "frozen"])
def test_flax_linen(jax, rng, sizes, dtype, style):
    nn = library("flax.linen")
    layers = [nn.Dense(n, use_bias=b, param_dtype=dtype) for n, b in zip(sizes[1:], biases_of(sizes))]
    chain = [part for layer in layers for part in (layer, nn.tanh)][:-1]

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i, (n, b) in enumerate(zip(sizes[1:], biases_of(sizes))):
                x = nn.Dense(n, use_bias=b, param_dtype=dtype)(nn.tanh(x) if i else x)
            return x

    module = nn.Sequential(chain) if style == "Sequential" else Net()
    x = rng.standard_normal((20, sizes[0])).astype(dtype)
    params = draw(jax, rng, jax.eval_shape(module.init, jax.random.key(0), x))
    expected = module.apply(params, x)
    if style == "frozen":
        params = library("flax.core").freeze(params)
    net = MLP.from_params(params, activation="tanh")
    assert net.network.sizes == sizes
    assert net.network.dtype == dtype
    assert net.network.biases == tuple(biases_of(sizes))
    within(net, x, expected)


@pytest.mark.parametrize("activation", [*FUNCTIONS, *LAST], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_jax(jax, rng, activation, dtype):
    """Twelve layers: Dense_10 and Dense_11 come after Dense_2, and all but the first are square."""
    sizes = (3, *[4] * 12)
    keys = [f"Dense_{i}" for i in range(12)]
    params = {
        key: {
            "kernel": jax.numpy.asarray(rng.standard_normal((k, 4)) / 3, dtype),
            "bias": jax.numpy.full(4, i / 50, dtype),
        }
        for i, (key, k) in enumerate(zip(keys, sizes))
    }
    hidden = "relu" if activation in LAST else activation
    x = rng.standard_normal((20, 3)).astype(dtype)
    h = jax.numpy.asarray(x)
    for key in keys:
        h = h @ params[key]["kernel"] + params[key]["bias"]
        h = {**FUNCTIONS, **LAST}[activation if key == keys[-1] else hidden](jax)(h)
    net = MLP.from_params({"params": params}, activation=hidden, out_activation=activation)
    within(net, x, h)


# --- Flax, nnx ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flax_nnx(jax, rng, sizes, dtype):
    nnx = library("flax.nnx")
    layers = [
        nnx.Linear(k, n, use_bias=b, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(i))
        for i, (k, n, b) in enumerate(zip(sizes, sizes[1:], biases_of(sizes)))
    ]
    module = nnx.Sequential(*[part for layer in layers for part in (layer, nnx.relu)][:-1])
    nnx.update(module, draw(jax, rng, nnx.state(module)))
    x = rng.standard_normal((20, sizes[0])).astype(dtype)
    for params in (nnx.state(module, nnx.Param), nnx.to_pure_dict(nnx.state(module))):
        net = MLP.from_params(params, activation="relu")
        assert net.network.sizes == sizes
        assert net.network.dtype == dtype
        within(net, x, module(x))
    with pytest.raises(TypeError, match=r"params is a flax\..*; accepted: .* Pass nnx\.state\(module, nnx\.Param\)"):
        MLP.from_params(module, activation="relu")


# --- Haiku ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["MLP", "Sequential"])
def test_haiku(jax, rng, sizes, dtype, style):
    """The first of Sequential's layers is named linear, without a number."""
    hk = library("haiku")

    def forward(x):
        if style == "MLP":
            return hk.nets.MLP(sizes[1:], activation=jax.nn.tanh)(x)
        layers = [hk.Linear(n, with_bias=b) for n, b in zip(sizes[1:], biases_of(sizes))]
        return hk.Sequential([part for layer in layers for part in (layer, jax.nn.tanh)][:-1])(x)

    transformed = hk.without_apply_rng(hk.transform(forward))
    x = rng.standard_normal((20, sizes[0])).astype(dtype)
    params = draw(jax, rng, jax.eval_shape(transformed.init, jax.random.key(0), x))
    net = MLP.from_params(params, activation="tanh")
    assert net.network.sizes == sizes
    assert net.network.dtype == dtype
    within(net, x, transformed.apply(params, x))


# --- Equinox --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equinox(jax, rng, sizes, dtype):
    eqx = library("equinox")
    key = jax.random.key(0)
    layers = [
        draw(jax, rng, eqx.filter_eval_shape(eqx.nn.Linear, k, n, use_bias=b, dtype=dtype, key=key))
        for k, n, b in zip(sizes, sizes[1:], biases_of(sizes))
    ]
    chain = [part for layer in layers for part in (layer, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Identity())][:-2]
    module = eqx.nn.Sequential(chain)
    x = rng.standard_normal((20, sizes[0])).astype(dtype)
    net = MLP.from_params(module, activation="relu")
    assert net.network.sizes == sizes
    assert net.network.dtype == dtype
    within(net, x, jax.vmap(module)(x))
    if len(sizes) == 2:
        assert MLP.from_params(layers[0]).network.sizes == sizes


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_equinox_mlps(jax, rng, depth):
    eqx = library("equinox")
    module = eqx.nn.MLP(4, "scalar", 4, depth, activation=jax.nn.gelu, key=jax.random.key(1))
    net = MLP.from_params(module, activation="gelu_tanh")
    x = rng.standard_normal((20, 4)).astype(net.dtype)
    assert net.network.sizes == (4, *[4] * depth, 1)
    within(net, x, jax.vmap(module)(x)[:, None])


def test_bfloat16_arrays_of_jax(jax, rng):
    params = {"Dense_0": {"kernel": jax.numpy.asarray(rng.standard_normal((3, 2)), "bfloat16")}}
    net = MLP.from_params(params)
    assert net.network.dtype == "bfloat16"
    assert (net.weights[0].astype("f8") == np.asarray(params["Dense_0"]["kernel"], "f8")).all()


def test_an_equinox_module_with_a_normalization_is_refused(jax):
    eqx = library("equinox")
    key = jax.random.key(0)
    module = eqx.nn.Sequential([eqx.nn.Linear(3, 3, key=key), eqx.nn.LayerNorm(3), eqx.nn.Linear(3, 3, key=key)])
    with pytest.raises(
        ValueError, match=r"layers\.1\.weight of params has shape \(3,\): it belongs to a normalization"
    ):
        MLP.from_params(module, activation="relu")


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "a pool", "inside", "shared", "of a subclass"])
def test_equinox_modules_that_compute_without_arrays_are_refused(jax, name):
    """They have no array that would tell of them."""
    eqx = library("equinox")
    linears = [eqx.nn.Linear(3, 3, key=jax.random.key(0)) for _ in range(2)]
    norm = eqx.nn.LayerNorm(3, use_weight=False, use_bias=False)
    between, message = {
        "LayerNorm": (norm, r"layers\.1 of params is a LayerNorm of equinox; accepted: .*Linear.*Sequential"),
        "RMSNorm": (eqx.nn.RMSNorm(3, use_weight=False, use_bias=False), r"layers\.1 of params is a RMSNorm"),
        "GroupNorm": (eqx.nn.GroupNorm(3, 3, channelwise_affine=False), r"layers\.1 of params is a GroupNorm"),
        "a pool": (eqx.nn.AvgPool1d(1), r"layers\.1 of params is a AvgPool1d"),
        "inside": (eqx.nn.Sequential([norm]), r"layers\.1\.layers\.0 of params is a LayerNorm"),
        "shared": (eqx.nn.Lambda(norm), r"layers\.1\.fn of params is a LayerNorm"),
        "of a subclass": (type("Mine", (eqx.nn.LayerNorm,), {})(3, use_weight=False, use_bias=False), "is a LayerNorm"),
    }[name]
    with pytest.raises(ValueError, match=message):
        MLP.from_params(eqx.nn.Sequential([linears[0], between, linears[1]]), activation="relu")


def test_equinox_modules_of_ones_own(jax):
    eqx = library("equinox")

    class Mine(eqx.Module):
        layers: list
        drop: eqx.nn.Dropout

    linears = [eqx.nn.Linear(3, 3, key=key) for key in jax.random.split(jax.random.key(0))]
    net = MLP.from_params(Mine(linears, eqx.nn.Dropout(0.5)), activation="relu")
    assert (net.weights[1] == np.asarray(linears[1].weight).T).all()
    chosen = MLP.from_params({"a": linears, "b": eqx.nn.LayerNorm(3)}, activation="relu", prefix="a")
    assert chosen.network.sizes == (3, 3, 3)


def test_random_state_of_nnx_is_named(jax):
    nnx = library("flax.nnx")
    module = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match=r"it belongs to a random number generator; of flax\.nnx pass nnx\.state\(module, nnx"
    ):
        MLP.from_params(nnx.state(module))
    assert MLP.from_params(nnx.state(module, nnx.Param)).network.sizes == (3, 3)


# --- Trees of plain arrays ------------------------------------------------------------------------------------------------


def dense(i=0, size=3, kernel="kernel", bias="bias"):
    """Layers that can be told apart by their biases."""
    return {kernel: np.eye(size), bias: np.full(size, 10.0**i)}


def firsts(params, **options):
    net = MLP.from_params(params, activation="relu", **options)
    return [round(np.log10(b[0])) for b in net.biases]


ORDERS = {
    "Flax": {"params": {f"Dense_{i}": dense(i) for i in (10, 2, 0, 1)}},
    "Haiku": {f"linear_{i}" if i else "linear": dense(i, kernel="w", bias="b") for i in (10, 2, 0, 1)},
    "Haiku's MLP": {f"mlp/~/linear_{i}": dense(i, kernel="w", bias="b") for i in (10, 2, 0, 1)},
    "numbers for names": {"layers": {i: dense(i) for i in (10, 2, 0, 1)}},
}


@pytest.mark.parametrize("name", ORDERS)
def test_layers_are_in_the_order_of_their_numbers(name):
    assert firsts(ORDERS[name]) == [0, 1, 2, 10]


def test_prefixes_choose_and_order():
    params = {
        "params": {
            "actor": {"Dense_0": dense(0), "Dense_1": dense(1)},
            "mean": dense(2),
            "critic": {"Dense_0": dense(3)},
        }
    }
    assert firsts(params, prefix="params.actor") == [0, 1]
    assert firsts(params, prefix=["params.actor", "params/mean"]) == [0, 1, 2]
    haiku = {"policy/linear": dense(0, kernel="w", bias="b"), "value/linear": dense(1, kernel="w", bias="b")}
    assert firsts(haiku, prefix="value/linear") == [1]


def test_layouts_follow_the_names():
    @dataclasses.dataclass
    class Linear:
        weight: np.ndarray
        bias: np.ndarray | None = None
        out_features: int = 2

    W = np.arange(6.0).reshape(3, 2)
    for params in ({"kernel": W}, {"w": W}, Linear(W.T), [Linear(W.T)][0], {"a": Linear(W.T)}):
        assert (MLP.from_params(params).weights[0] == W).all()
    assert MLP.from_params({"kernel": W, "bias": None}).network.biases == (False,)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_lists_of_layers(sequence):
    a, b = np.arange(9.0).reshape(3, 3), np.eye(3)
    net = MLP.from_params(sequence([{"w": a, "b": np.ones(3)}, {"w": b, "b": np.zeros(3)}]), activation="tanh")
    assert (net.weights[0] == a).all()
    assert (net.weights[1] == b).all()
    layers = [{"kernel": np.eye(3) * i} for i in range(12)]
    net = MLP.from_params(sequence(layers), activation="relu")
    assert [w[0, 0] for w in net.weights] == list(range(12))
    assert MLP.from_params(sequence(layers), prefix="11").network.sizes == (3, 3)


def cyclic():
    tree = {"Dense_0": dense()}
    tree["again"] = tree
    return tree


def branching():
    tree = {"a": np.eye(3)}
    for _ in range(40):
        tree = {"a": tree, "b": tree}
    return tree


def nested(levels):
    tree = dense()
    for _ in range(levels):
        tree = {"a": tree}
    return tree


BAD_TREES = {
    "nothing": ({}, "params, a dict, has no arrays; accepted: a tree of parameters, in Flax what module.init returns"),
    "an empty list": ([], "params, a list, has no arrays"),
    "arrays in a list": ([np.eye(3)], r"0 of params is no kernel .* MLP\(weights, biases\)"),
    "pairs in a list": ([(np.eye(3), np.ones(3))], r"0\.0 of params is no kernel .* MLP\(weights, biases\)"),
    "no arrays": ({"a": {"b": None}}, "params, a dict, has no arrays"),
    "itself inside": (cyclic(), r"params contains itself, or has more than 64 levels, at 'again'\.\.\."),
    "many levels": (nested(100), "params contains itself, or has more than 64 levels, at 'a.a.a.a'"),
    "very many levels": (nested(5000), "params contains itself, or has more than 64 levels"),
    "very many arrays": (branching(), "params has more than 10,000 arrays"),
    "torch's names": (
        {"Dense_0": {"weight": np.eye(3)}},
        r"params has the name 'Dense_0.weight', .* MLP.from_state_dict",
    ),
    "BatchNorm's statistics": (
        {"batch_stats": {"BatchNorm_0": {"mean": np.ones(3)}}},
        "batch_stats.BatchNorm_0.mean .* belongs to a normalization",
    ),
    "LayerNorm": (
        {"Dense_0": dense(), "LayerNorm_0": {"scale": np.ones(3)}},
        "LayerNorm_0.scale of params .* belongs to a normalization",
    ),
    "an embedding": ({"Embed_0": {"embedding": np.eye(3)}}, "Embed_0.embedding .* belongs to an embedding"),
    "a convolution": (
        {"Conv_0": {"kernel": np.ones((3, 3, 1, 1))}},
        r"Conv_0.kernel of params has shape \(3, 3, 1, 1\): it belongs to a conv",
    ),
    "DenseGeneral": ({"D": {"kernel": np.ones((3, 3, 3))}}, r"D.kernel of params has shape \(3, 3, 3\)"),
    "a scale for a kernel": (
        {"D": {"kernel": np.ones(3)}},
        r"D.kernel of params has shape \(3,\): it belongs to a normalization",
    ),
    "another name": (
        {"D": {"matrix": np.eye(3)}},
        "D.matrix of params is no kernel or w or weight or bias or b of a dense layer",
    ),
    "pairs in lists": (
        {"layers": [[np.eye(3), np.ones(3)]]},
        r"layers.0.0 of params is no kernel .* MLP\(weights, biases\)",
    ),
    "a bias alone": (
        {"Dense_0": dense(), "Dense_1": {"bias": np.ones(3)}},
        "'Dense_1.bias' of params has no weight beside it",
    ),
    "two weights": (
        {"D": {"kernel": np.eye(3), "w": np.eye(3)}},
        "D.kernel and D.w of params are weights of one layer",
    ),
    "two of one name": (
        {"a/b": {"kernel": np.eye(3)}, "a": {"b": {"kernel": np.eye(3)}}},
        "params has two arrays of the name 'a.b.kernel'",
    ),
    "shapes that do not chain": (
        {"D_0": dense(), "D_1": dense(size=4)},
        r"D_0.kernel \(3, 3\) and D_1.kernel \(4, 4\) do not chain as \(in, out\)",
    ),
    "a bias of another length": (
        {"D": {"kernel": np.eye(3), "bias": np.ones(2)}},
        r"D.bias has shape \(2,\); beside D.kernel \(3, 3\) it needs",
    ),
    "words": (
        {"actor": dense(), "critic": dense()},
        "params has layers under 'actor', 'critic', and their names do not say",
    ),
    "two kinds of layers": ({"Dense_0": dense(), "Linear_0": dense()}, "params has layers under 'Dense_0', 'Linear_0'"),
    "NaN": ({"D": {"kernel": np.full((3, 3), np.nan)}}, "D.kernel has NaN or infinite numbers, 9 of 9"),
    "infinity": (
        {"D": {"kernel": np.eye(3), "bias": np.array([0, 0, np.inf])}},
        "D.bias has NaN or infinite numbers, 1 of 3",
    ),
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_trees_that_are_no_chain_are_refused(name):
    params, message = BAD_TREES[name]
    with pytest.raises(ValueError, match=message):
        MLP.from_params(params, activation="relu")


def test_arguments_that_do_not_suit_are_refused():
    with pytest.raises(
        ValueError, match="activation is None, and nothing but the caller knows what is between the 4 layers"
    ):
        MLP.from_params(ORDERS["Flax"])
    with pytest.raises(
        ValueError, match="no array of params has a name that begins with prefix 'Dense_0'; they begin with 'params'"
    ):
        MLP.from_params(ORDERS["Flax"], prefix="Dense_0")
    for bad in (None, 3, "net.msgpack", np.eye(3)):
        with pytest.raises(TypeError, match=r"params is a .*; accepted: nested mappings or lists of arrays"):
            MLP.from_params(bad)
    with pytest.raises(TypeError, match=r"D\.kernel has dtype int64; accepted: floating-point numbers"):
        MLP.from_params({"D": {"kernel": np.eye(3, dtype=int)}})
    with pytest.raises(TypeError, match=r"D\.kernel of params is a set; accepted: arrays"):
        MLP.from_params({"D": {"kernel": {1, 2}}})


def test_jax_is_not_imported():
    program = """
import sys, numpy as np, cupymlp
assert cupymlp.MLP.from_params({"Dense_0": {"kernel": np.eye(2)}}).network.sizes == (2, 2)
assert not {"jax", "flax", "torch"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
