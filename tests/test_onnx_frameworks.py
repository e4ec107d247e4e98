"""MLP.from_onnx on files that PyTorch's exporters and skl2onnx wrote.

PyTorch itself is not needed for the files in data/onnx; data/make_onnx.py made them. The result in float64, which they are
compared with, is PyTorch's own. Where the network is float64, too, both are off by the bound. Folding a scale or a shift rounds
each weight once more: of a layer with n >= 2 roundings in its bound this makes n + 1, so at most 1.5 times the bound.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from support import unavailable

from cupymlp import MLP
from cupymlp.activations import ACTIVATIONS
from cupymlp.reference import error_in_bounds, forward_and_bound

onnx = pytest.importorskip("onnx")

DATA = Path(__file__).parent / "data" / "onnx"
EXPECTED = np.load(DATA / "expected.npz")
FILES = sorted(path.stem for path in DATA.glob("*.onnx"))


def worst(net, x, expected, *, folded=False):
    """The largest error in units of the bound."""
    y = net(x.astype(net.dtype), device="cpu")
    expected = np.asarray(expected, np.float64).reshape(y.shape)
    reference, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    # Bounds are no use where activations make them wide. In float64 the same weights give the same function, all but exactly;
    # the parameters of activations are rounded to the dtype of the arithmetic.
    close = 1e-4 if folded else 1e-10 if net.dtype == np.float64 else 1e-6
    assert np.allclose(reference, expected, 0, close * max(1, np.abs(expected).max()))
    return error_in_bounds(y, expected, bound).max()


@pytest.mark.parametrize("name", FILES)
def test_files_of_pytorch(name):
    net = MLP.from_onnx(DATA / f"{name}.onnx")
    x, expected = EXPECTED[f"{name}.x"], EXPECTED[f"{name}.y"]
    assert net.dtype == next((d for d in ("float64", "bfloat16", "float16") if d in name), "float32")
    folded = "policy" in name
    assert worst(net, x, expected, folded=folded) <= (2 if folded or "float64" in name else 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("exporter", ["script", "dynamo"])
def test_the_files_have_every_activation(exporter, dtype):
    nets = [MLP.from_onnx(DATA / f"{kind}-{exporter}-{dtype}.onnx") for kind in "abcde"]
    specs = {spec if isinstance(spec, str) else spec[0] for net in nets for spec in net.network.activations}
    assert specs == set(ACTIVATIONS)
    assert nets[0].network.activations == ("relu", ("leaky_relu", 0.2), ("elu", 0.7), ("celu", 1.3), "identity")
    assert nets[3].network.activations[-1] == ("sin", 3.25)
    assert [net.network.biases for net in nets] == [(True, False, True, False, True)] * 4 + [(True, False, True)]


def test_a_policy_is_folded_into_four_layers():
    """The scale of the actions comes after their tanh: a layer of its own."""
    net = MLP.from_onnx(DATA / "policy-script-float32.onnx")
    assert net.network.describe() == "6-8-8-2-2 float32, elu:1.0 tanh tanh identity, bias in layer 1, 3, 4"
    assert net.weights[-1].tolist() == [[1.5, 0], [0, 1.5]]
    assert net.biases[-1].tolist() == [-0.25, -0.25]


def test_weights_that_stand_alone_keep_their_bits():
    proto = onnx.load(DATA / "a-script-float32.onnx")
    net = MLP.from_onnx(proto)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert np.array_equal(net.weights[0], arrays["0.weight"].T)
    assert np.array_equal(net.biases[0], arrays["0.bias"])


def test_a_path_bytes_and_a_model_are_read_alike():
    path = DATA / "c-script-float32.onnx"
    nets = [
        MLP.from_onnx(model)
        for model in (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), onnx.load(path))
    ]
    assert len({net.__dask_tokenize__() for net in nets}) == 1


def test_an_inner_tensor_can_be_the_output():
    logits = MLP.from_onnx(DATA / "b-script-float32.onnx", output="/8/Gemm_output_0")
    net = MLP.from_onnx(DATA / "b-script-float32.onnx")
    assert (logits.network.activations[-1], net.network.activations[-1]) == ("identity", "softmax")
    assert logits.weights[-1].shape == net.weights[-1].shape


def test_the_dtype_can_be_chosen():
    net = MLP.from_onnx(DATA / "c-script-float64.onnx", dtype="float32")
    assert net.dtype == np.float32
    assert np.array_equal(net.weights[0], MLP.from_onnx(DATA / "c-script-float64.onnx").weights[0].astype("f4"))
    with pytest.raises(TypeError, match="dtype is nonsense; accepted: float16"):
        MLP.from_onnx(DATA / "c-script-float64.onnx", dtype="nonsense")
    folded = MLP.from_onnx(DATA / "policy-script-float64.onnx", dtype="float32")
    assert worst(folded, EXPECTED["policy-script-float64.x"], EXPECTED["policy-script-float64.y"], folded=True) <= 2


# --- PyTorch itself ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nets():
    """The module with PyTorch's networks."""
    pytest.importorskip("torch")
    import torch_nets

    return torch_nets


def drawn(rng, nets):
    """Sizes, activations and biases of a network of one to five layers, square ones among them."""
    depth = int(rng.integers(1, 6))
    sizes = rng.choice([1, 3, 5, 8, 17], depth + 1).tolist()
    if rng.random() < 0.5:
        sizes[:-1] = [sizes[0]] * depth
    hidden = [list(nets.MODULES)[i] for i in rng.integers(0, len(nets.MODULES), depth - 1)]
    last = list(nets.LAST)[rng.integers(0, len(nets.LAST))]
    return sizes, [*hidden, last], rng.integers(0, 2, depth).astype(bool).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(40))
def test_what_pytorch_exports(nets, seed, dtype):
    """By the exporter of TorchScript, which takes hundredths of a second."""
    import torch

    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sizes, activations, biases = drawn(rng, nets)
    net = nets.sequential(sizes, activations, biases).to(getattr(torch, dtype))
    x = torch.randn(9, sizes[0]).to(getattr(torch, dtype))
    read = MLP.from_onnx(nets.export(net, x, dynamo=False, opset=int(rng.choice([13, 17, 20]))))
    assert read.network.sizes == tuple(sizes)
    assert read.network.activations == tuple(activations)
    assert read.network.biases == tuple(biases)
    assert read.dtype == dtype
    assert worst(read, x.numpy(), nets.exact(net, x)) <= (2 if dtype == "float64" else 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("opset", [18, 20])
def test_what_pytorch_exports_by_dynamo(nets, opset, dtype):
    """Which takes a second: all activations in two networks."""
    pytest.importorskip("onnxscript")
    import torch

    torch.manual_seed(1)
    specs = [spec for spec in nets.MODULES if spec != "exp"]  # exp of exp leaves all dtypes
    for activations in ([*specs[:9], "softmax"], [*specs[9:], "log_softmax"]):
        biases = [i % 3 > 0 for i in range(len(activations))]
        net = nets.sequential([5] * (len(activations) + 1), activations, biases).to(getattr(torch, dtype))
        x = torch.randn(6, 5).to(getattr(torch, dtype))
        read = MLP.from_onnx(nets.export(net, x, dynamo=True, opset=opset))
        assert read.network.activations == tuple(activations)
        assert read.network.biases == tuple(biases)
        assert worst(read, x.numpy(), nets.exact(net, x)) <= (2 if dtype == "float64" else 1)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kind", ["Policy", "View"])
def test_modules_with_more_than_layers(nets, kind, dynamo):
    if dynamo:
        pytest.importorskip("onnxscript")
    import torch

    torch.manual_seed(2)
    net = getattr(nets, kind)().eval()
    x = torch.randn(6, 6)
    read = MLP.from_onnx(nets.export(net, x, dynamo=dynamo))
    assert worst(read, x.numpy(), nets.exact(net, x), folded=kind == "Policy") <= 2


def test_a_module_in_training_is_told_to_be_exported_otherwise(nets):
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    import io

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.randn(5, 3),), file, dynamo=False, training=torch.onnx.TrainingMode.TRAINING)
    with pytest.raises(
        ValueError, match=r"\(BatchNormalization\), .*training_mode is 1: export the model in evaluation mode"
    ):
        MLP.from_onnx(file.getvalue())


# --- skl2onnx -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def to_onnx():
    """skl2onnx's converter."""
    try:
        import skl2onnx
    except ImportError as error:
        unavailable(f"skl2onnx is not installed: {error}")
    return skl2onnx.to_onnx


def fit(estimator, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(x, y)


def targets(rng, kind, rows):
    if kind == "binary":
        return rng.integers(0, 2, rows)
    if kind == "classes":
        return np.array(["cat", "dog", "owl"])[rng.integers(0, 3, rows)]
    return rng.integers(0, 2, (rows, 3))


def pipeline_exact(scaler, estimator, x):
    """In float64, from the parameters that the converter writes: those of scikit-learn, rounded to float32."""
    single = np.float32 if x.dtype == np.float32 else np.float64
    scale, mean = (1 / scaler.scale_).astype(single), scaler.mean_.astype(single)
    h = (x.astype(np.float64) - mean) * scale.astype(np.float64)
    for i, (w, b) in enumerate(zip(estimator.coefs_, estimator.intercepts_)):
        h = h @ w.astype(single).astype(np.float64) + b.astype(single)
        if i < len(estimator.coefs_) - 1:
            h = {
                "relu": lambda v: np.maximum(v, 0),
                "tanh": np.tanh,
                "logistic": lambda v: 1 / (1 + np.exp(-v)),
                "identity": lambda v: v,
            }[estimator.activation](h)
    if estimator.out_activation_ == "softmax":
        powers = np.exp(h - h.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)
    if estimator.out_activation_ == "logistic":
        p = 1 / (1 + np.exp(-h))
        return np.concatenate([1 / (1 + np.exp(h)), p], 1) if p.shape[1] == 1 else p
    return h


@pytest.mark.parametrize("zipmap", [True, False])
@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic", "identity"])
@pytest.mark.parametrize("kind", ["binary", "classes", "multilabel"])
def test_classifiers_after_a_scaler(rng, to_onnx, kind, activation, zipmap):
    """The probabilities are read, not the labels. Two classes are a layer of two outputs."""
    x = (rng.standard_normal((60, 5)) * 3 + 1).astype("f4")
    estimator = MLPClassifier((6, 6), activation=activation, max_iter=10, random_state=1)
    pipeline = fit(make_pipeline(StandardScaler(), estimator), x, targets(rng, kind, len(x)))
    model = to_onnx(pipeline, x[:1], options={id(estimator): {"zipmap": zipmap}})
    net = MLP.from_onnx(model)
    assert net.dtype == np.float32
    assert net.network.activations[-1] == ("softmax" if kind == "classes" else "sigmoid")
    assert worst(net, x, pipeline_exact(pipeline[0], estimator, x), folded=True) <= 2
    np.testing.assert_allclose(net(x, device="cpu"), pipeline.predict_proba(x), atol=1e-5)
    label = "output_label" if zipmap else "label"
    with pytest.raises(ValueError, match="cannot be read as an MLP: node"):
        MLP.from_onnx(model, output=label)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("scaled", [True, False])
def test_regressors(rng, to_onnx, scaled, outputs, dtype):
    x = (rng.standard_normal((60, 5)) * 3 + 1).astype(dtype)
    y = x[:, :outputs] if outputs > 1 else x[:, 0]
    estimator = MLPRegressor(hidden_layer_sizes=(7, 7), activation="tanh", max_iter=10, random_state=1)
    scaler = StandardScaler(with_mean=scaled, with_std=scaled).fit(x)
    pipeline = fit(make_pipeline(scaler, estimator) if scaled else make_pipeline(estimator), x, y)
    model = to_onnx(pipeline, x[:1])
    if outputs > 1:  # skl2onnx makes one column of them
        with pytest.raises(
            ValueError, match=r"\(Reshape\), which makes tensor 'variable': it makes \[-1, 1\] of \['.*', 3\]"
        ):
            MLP.from_onnx(model)
    net = MLP.from_onnx(model, output="add_result2" if outputs > 1 else None)
    if not scaled:
        scaler.mean_, scaler.scale_ = np.zeros(5), np.ones(5)
    assert net.dtype == dtype
    assert worst(net, x, pipeline_exact(scaler, estimator, x), folded=scaled) <= 2
