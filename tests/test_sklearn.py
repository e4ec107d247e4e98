"""MLP.from_sklearn against scikit-learn itself: whole networks, with the scalers and output functions around them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

from cupymlp import MLP
from cupymlp.models.sklearn import ACTIVATION_OF
from cupymlp.reference import forward_and_bound

HIDDEN = [(7,), (8, 8), (6, 6, 6), (3, 9, 1, 4), ()]
DTYPES = ["float32", "float64"]


def fit(estimator, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(x, y)


def within(net, found, expected, x, factor=2):
    """Both may be off by the bound, so twice the bound is between them."""
    assert found.dtype == net.dtype
    _, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    return (np.abs(found.reshape(bound.shape) - expected.reshape(bound.shape)) <= factor * bound).all()


def targets(rng, kind, rows):
    return {
        "binary": lambda: rng.integers(0, 2, rows),
        "classes": lambda: rng.integers(0, 4, rows),
        "multilabel": lambda: rng.integers(0, 2, (rows, 3)),
        "one label": lambda: rng.integers(0, 2, (rows, 1)),
    }[kind]()


@pytest.mark.parametrize("activation", ACTIVATION_OF)
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_regressors_predict_the_same(rng, hidden, activation, dtype, outputs):
    """Square layers among them: 8 features, hidden layers of 8. scikit-learn computes in float64, whatever it trained in."""
    x = rng.standard_normal((40, 8)).astype(dtype)
    y = rng.standard_normal((40, outputs)).astype(dtype)
    estimator = fit(
        MLPRegressor(hidden_layer_sizes=hidden, activation=activation, max_iter=3, random_state=1),
        x,
        y if outputs > 1 else y[:, 0],
    )
    expected = estimator.predict(x.astype(np.float64))
    for output in ("raw", "predict"):
        net = MLP.from_sklearn(estimator, output=output)
        assert net.dtype == dtype
        assert net.network.sizes == (8, *hidden, outputs)
        assert within(net, net(x, device="cpu"), expected, x)


@pytest.mark.parametrize("activation", ACTIVATION_OF)
@pytest.mark.parametrize("hidden", HIDDEN[:4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["binary", "classes", "multilabel"])
def test_classifiers_have_the_same_probabilities(rng, hidden, activation, dtype, kind):
    x = (3 * rng.standard_normal((40, 6))).astype(dtype)
    estimator = fit(
        MLPClassifier(hidden, activation=activation, max_iter=3, random_state=1), x, targets(rng, kind, len(x))
    )
    net = MLP.from_sklearn(estimator, output="predict_proba")
    expected = estimator.predict_proba(x.astype(np.float64))
    assert net.network.sizes == (6, *hidden, expected.shape[1])
    found = net(x, device="cpu")
    assert within(net, found, expected, x)
    if kind != "multilabel":
        assert np.abs(found.sum(axis=1, dtype=np.float64) - 1).max() <= 8 * np.finfo(dtype).eps


def test_small_probabilities_of_two_classes_keep_their_digits(rng):
    """scikit-learn's first column is 1 - p, which has none of them left at 1e-17."""
    x = rng.standard_normal((60, 3))
    estimator = fit(MLPClassifier((4,), max_iter=2, random_state=1), x, (x[:, 0] > 0).astype(int))
    estimator.coefs_[-1] *= 1000
    raw = MLP.from_sklearn(estimator)(x, device="cpu")[:, 0]
    found = MLP.from_sklearn(estimator, output="predict_proba")(x, device="cpu")
    sure = (raw > 40) & (raw < 600)
    assert sure.sum() > 3
    assert (estimator.predict_proba(x)[sure, 0] == 0).all()
    np.testing.assert_allclose(found[sure, 0], np.exp(-raw[sure]), rtol=1e-12)


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


def test_poisson_regressors(rng):
    """Their output function is exp, and so y must be scaled behind it, in a layer of its own."""
    if tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 7):
        pytest.skip("scikit-learn 1.7 brings the loss")
    x = rng.standard_normal((50, 4))
    y = rng.poisson(np.exp(x[:, 0]))
    plain = fit(MLPRegressor("poisson", hidden_layer_sizes=(6, 6), max_iter=5, random_state=1), x, y)
    assert plain.out_activation_ == "exp"
    net = MLP.from_sklearn(plain, output="predict")
    assert within(net, net(x, device="cpu"), plain.predict(x), x)
    np.testing.assert_allclose(np.exp(MLP.from_sklearn(plain)(x, device="cpu")[:, 0]), plain.predict(x), rtol=1e-12)
    scaled = fit(TransformedTargetRegressor(plain, transformer=MaxAbsScaler()), x, y)
    net = MLP.from_sklearn(scaled, output="predict")
    assert net.network.depth == 4
    assert within(net, net(x, device="cpu"), scaled.predict(x), x)
    with pytest.raises(ValueError, match=r"output is 'raw', and the .*MaxAbsScaler of the target comes after .* 'exp'"):
        MLP.from_sklearn(scaled)


SCALERS = {
    "standard": StandardScaler(),
    "standard, no mean": StandardScaler(with_mean=False),
    "standard, no std": StandardScaler(with_std=False),
    "standard, nothing": StandardScaler(with_mean=False, with_std=False),
    "min max": MinMaxScaler(),
    "min max of another range": MinMaxScaler((-3, 7)),
    "max abs": MaxAbsScaler(),
    "robust": RobustScaler(),
    "robust, no centering": RobustScaler(with_centering=False),
    "robust, no scaling": RobustScaler(with_scaling=False, unit_variance=False),
}


@pytest.mark.parametrize("name", SCALERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [1.0, 300.0])
@pytest.mark.parametrize("hidden", [(7,), (5, 5, 5)], ids=str)
def test_pipelines_with_scalers(rng, name, dtype, mean, hidden):
    """Means near zero are folded, large ones get a layer of their own; one feature never changes."""
    x = rng.normal(mean, [1.0, 0.5, 2.0, 1.0, 0.0], (60, 5))
    model = fit(
        make_pipeline(
            SCALERS[name], "passthrough", MLPRegressor(hidden_layer_sizes=hidden, max_iter=3, random_state=1)
        ),
        x,
        rng.standard_normal((60, 2)),
    )
    net = MLP.from_sklearn(model, dtype=dtype)
    x = x.astype(dtype)
    expected = model.predict(x.astype(np.float64))
    plain = MLP.from_sklearn(model[-1], dtype=dtype)
    _, bound = forward_and_bound(plain.network, plain.weights, plain.biases, model[:-1].transform(x.astype(np.float64)))
    own, own_bound = forward_and_bound(net.network, net.weights, net.biases, x)
    assert (np.abs(own - expected) <= 4 * (bound + own_bound)).all(), "weights that were rounded once more"
    assert (np.abs(net(x, device="cpu") - own) <= own_bound).all()
    if name == "standard":
        assert net.network.depth == len(hidden) + 1 + (mean == 300)


def test_several_scalers_and_pipelines_in_pipelines(rng):
    x, y = rng.normal(5, 2, (60, 4)), rng.normal(1e4, 10, 60)
    inner = make_pipeline(MinMaxScaler(), MLPRegressor(hidden_layer_sizes=(6,), max_iter=3, random_state=1))
    model = fit(
        TransformedTargetRegressor(
            make_pipeline(StandardScaler(), MaxAbsScaler(), inner), transformer=StandardScaler()
        ),
        x,
        y,
    )
    net = MLP.from_sklearn(model, output="predict")
    assert net.network.sizes == (4, 6, 1)
    np.testing.assert_allclose(net(x, device="cpu")[:, 0], model.predict(x), rtol=1e-13)
    outside = fit(make_pipeline(RobustScaler(), model), x, y)
    np.testing.assert_allclose(MLP.from_sklearn(outside)(x, device="cpu")[:, 0], outside.predict(x), rtol=1e-13)


def test_a_scaled_classifier(rng):
    x = rng.normal(300, 10, (60, 4))
    model = fit(make_pipeline(StandardScaler(), MLPClassifier((6,), max_iter=5, random_state=1)), x, x[:, 0] > 300)
    net = MLP.from_sklearn(model, output="predict_proba")
    np.testing.assert_allclose(net(x, device="cpu"), model.predict_proba(x), rtol=1e-11)


def test_an_unknown_activation_is_named():
    estimator = SimpleNamespace(
        hidden_layer_sizes=(2,), activation="sine", coefs_=[np.eye(2)], intercepts_=[np.ones(2)]
    )
    with pytest.raises(ValueError, match="activation is 'sine'; accepted: 'identity', 'logistic', 'tanh', 'relu'"):
        MLP.from_sklearn(estimator)


def fitted_regressor(rng):
    x = rng.standard_normal((20, 3))
    return fit(MLPRegressor(hidden_layer_sizes=(2,), max_iter=2, random_state=1), x, x[:, 0])


REFUSED = {
    "PCA": (PCA(2), r"the step sklearn.decomposition._pca.PCA cannot be part of a network; accepted: StandardScaler"),
    "a function": (FunctionTransformer(np.log1p), r"the step .*FunctionTransformer cannot be part of a network"),
    "clipping": (MinMaxScaler(clip=True), "the MinMaxScaler has clip=True, which is no part of a network"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_are_no_scalers_are_refused(rng, name):
    step, message = REFUSED[name]
    x = np.abs(rng.standard_normal((20, 3)))
    model = fit(make_pipeline(step, MLPRegressor(hidden_layer_sizes=(2,), max_iter=2)), x, x[:, 0])
    with pytest.raises(ValueError, match=message):
        MLP.from_sklearn(model)


def test_targets_that_are_no_scaling_are_refused(rng):
    x, y = rng.standard_normal((20, 3)), np.abs(rng.standard_normal(20))
    network = MLPRegressor(hidden_layer_sizes=(2,), max_iter=2)
    model = fit(TransformedTargetRegressor(network, func=np.log1p, inverse_func=np.expm1), x, y)
    with pytest.raises(ValueError, match=r"the TransformedTargetRegressor has a func; accepted: a transformer, one of"):
        MLP.from_sklearn(model)
    nested = fit(TransformedTargetRegressor(TransformedTargetRegressor(network, transformer=StandardScaler())), x, y)
    with pytest.raises(TypeError, match="two TransformedTargetRegressors, one inside the other, have transformers"):
        MLP.from_sklearn(fit(TransformedTargetRegressor(nested, transformer=StandardScaler()), x, y))
    np.testing.assert_allclose(MLP.from_sklearn(nested)(x, device="cpu")[:, 0], nested.predict(x), rtol=1e-12)


def test_outputs_that_do_not_suit_are_refused(rng):
    regressor = fitted_regressor(rng)
    with pytest.raises(
        ValueError, match=r"output is 'predict_proba' and the estimator a .*MLPRegressor: use output='predict'"
    ):
        MLP.from_sklearn(regressor, output="predict_proba")
    x = rng.standard_normal((20, 3))
    classifier = fit(MLPClassifier((2,), max_iter=2), x, x[:, 0] > 0)
    with pytest.raises(
        ValueError, match="use output='predict_proba', whose largest column is the class that its classes_"
    ):
        MLP.from_sklearn(classifier, output="predict")
    regressor.out_activation_ = "cloglog"
    with pytest.raises(ValueError, match="out_activation_ is 'cloglog'; accepted: 'identity'"):
        MLP.from_sklearn(regressor, output="predict")


def test_weights_that_are_not_finite_are_refused(rng):
    estimator = fitted_regressor(rng)
    estimator.coefs_[1][0, 0] = np.nan
    with pytest.raises(ValueError, match=r"coefs_\[1\] has NaN or infinite numbers"):
        MLP.from_sklearn(estimator)
    estimator.coefs_[1][0, 0] = 0
    estimator.intercepts_[0][1] = -np.inf
    with pytest.raises(ValueError, match=r"intercepts_\[0\] has NaN or infinite numbers"):
        MLP.from_sklearn(estimator)


def test_what_is_no_fitted_network_is_refused(rng):
    with pytest.raises(ValueError, match=r"MLPRegressor is not fitted: call its fit first"):
        MLP.from_sklearn(MLPRegressor())
    with pytest.raises(ValueError, match=r"StandardScaler is not fitted: call its fit first"):
        MLP.from_sklearn(make_pipeline(StandardScaler(), fitted_regressor(rng)))
    with pytest.raises(ValueError, match=r"TransformedTargetRegressor is not fitted: call its fit first"):
        MLP.from_sklearn(TransformedTargetRegressor(fitted_regressor(rng)))
    with pytest.raises(TypeError, match=r"estimator is a types\.SimpleNamespace; accepted: a fitted MLPClassifier"):
        MLP.from_sklearn(SimpleNamespace(coefs_=[np.eye(2)]))
    with pytest.raises(TypeError, match=r"the Pipeline's last step 'passthrough' is 'passthrough'; accepted"):
        MLP.from_sklearn(make_pipeline(StandardScaler(), "passthrough"))
    search = GridSearchCV(fitted_regressor(rng), {})
    search.best_estimator_ = None
    with pytest.raises(TypeError, match=r"GridSearchCV; accepted: .*\. Pass its best_estimator_"):
        MLP.from_sklearn(search)
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
