"""MLP.from_sklearn against scikit-learn itself."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor

from cupymlp import MLP
from cupymlp.reference import forward_and_bound

HIDDEN = [(7,), (8, 8), (6, 6, 6), (3, 9, 1, 4), (5, 5, 5, 5)]


def fit(estimator, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(x, y)


def within(net, found, expected, x, factor=2):
    """Both may be off by the bound, so twice the bound is between them."""
    _, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    return (np.abs(found.reshape(bound.shape) - expected.reshape(bound.shape)) <= factor * bound).all()


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_regressors_predict_the_same(rng, hidden, activation, dtype, outputs):
    """Square layers among them: 8 features, hidden layers of 8."""
    x = rng.standard_normal((60, 8)).astype(dtype)
    y = rng.standard_normal((60, outputs)).astype(dtype)
    estimator = fit(
        MLPRegressor(hidden_layer_sizes=hidden, activation=activation, max_iter=15, random_state=1),
        x,
        y if outputs > 1 else y[:, 0],
    )
    net = MLP.from_sklearn(estimator)
    assert net.dtype == dtype
    assert net.network.sizes == (8, *hidden, outputs)
    assert within(net, net(x), estimator.predict(x), x)


@pytest.mark.parametrize("kind", ["binary", "classes", "multilabel"])
def test_classifiers_have_the_same_sums_before_the_output_function(rng, kind):
    x = rng.standard_normal((80, 5))
    y = {
        "binary": rng.integers(0, 2, 80),
        "classes": rng.integers(0, 4, 80),
        "multilabel": rng.integers(0, 2, (80, 3)),
    }[kind]
    estimator = fit(MLPClassifier((6, 6), max_iter=15, random_state=1), x, y)
    net = MLP.from_sklearn(estimator, output="raw")
    raw = net(x)
    p = estimator.predict_proba(x)
    assert estimator.out_activation_ == ("softmax" if kind == "classes" else "logistic")
    if kind == "classes":
        powers = np.exp(raw - raw.max(axis=1, keepdims=True))
        np.testing.assert_allclose(powers / powers.sum(axis=1, keepdims=True), p, rtol=1e-12)
    else:
        np.testing.assert_allclose(1 / (1 + np.exp(-raw)), p[:, 1:] if kind == "binary" else p, rtol=1e-12)


def test_the_dtype_can_be_chosen(rng):
    x = rng.standard_normal((30, 4))
    estimator = fit(MLPRegressor(hidden_layer_sizes=(5,), max_iter=5), x, x[:, 0])
    assert MLP.from_sklearn(estimator).dtype == np.float64
    assert MLP.from_sklearn(estimator, dtype="float32").dtype == np.float32
    net = MLP.from_sklearn(estimator, dtype="float16")
    assert net.dtype == np.float16
    np.testing.assert_allclose(net(x.astype("f2"), device="cpu")[:, 0], estimator.predict(x), atol=0.02)


@pytest.mark.parametrize("activation", ["logistic"])
def test_an_activation_that_is_not_there_is_named(rng, activation):
    x = rng.standard_normal((30, 4))
    estimator = fit(MLPRegressor(hidden_layer_sizes=(5,), activation=activation, max_iter=5), x, x[:, 0])
    with pytest.raises(ValueError, match=f"activation is '{activation}'; accepted: 'identity', 'relu'"):
        MLP.from_sklearn(estimator)


def test_what_is_no_fitted_network_is_refused():
    with pytest.raises(ValueError, match=r"MLPRegressor is not fitted: call its fit first"):
        MLP.from_sklearn(MLPRegressor())
    with pytest.raises(TypeError, match=r"estimator is a types\.SimpleNamespace; accepted: a fitted MLPClassifier"):
        MLP.from_sklearn(SimpleNamespace(coefs_=[np.eye(2)]))
    with pytest.raises(ValueError, match="output is 'proba'; accepted: 'raw'"):
        MLP.from_sklearn(MLPRegressor(), output="proba")


def test_reading_an_estimator_imports_no_scikit_learn():
    program = """
import sys, numpy as np, types, cupymlp
estimator = types.SimpleNamespace(hidden_layer_sizes=(2,), activation="relu", coefs_=[np.eye(2), np.eye(2)],
                                  intercepts_=[np.ones(2), np.zeros(2)])
assert cupymlp.MLP.from_sklearn(estimator)(np.array([1.0, -3.0]), device="cpu").tolist() == [2, 0]
assert "sklearn" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
