"""scikit-learn's handwritten digits through cupymlp: every class probability beside scikit-learn's own.

Trains an MLPClassifier on the bundled images (1,797 of 8 x 8 pixels), imports it, and compares on the test images. Runs on
the GPU if there is one, else on the CPU. Exits with 1 if any probability is further off than the proven error bound allows.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from cupymlp import MLP
from cupymlp.reference import forward_and_bound


def softmax(logits: NDArray[np.floating]) -> NDArray[np.floating]:
    """Class probabilities of the last layer's sums, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def probability_bound(
    probabilities: NDArray[np.floating], logit_bound: NDArray[np.float64], logits: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How far a probability may be off if every logit of its row may be off by its bound.

    With errors of at most e, a softmax output changes by a factor between exp(-2 e) and exp(2 e). Rounding of the softmax
    itself, in float64, adds a few units in the last place of each term, and of the exponents' arguments.
    """
    e = logit_bound.max(axis=1, keepdims=True)
    u = np.finfo(np.float64).eps
    rounding = u * (2 * np.abs(logits).max(axis=1, keepdims=True) + 2 * probabilities.shape[1] + 10)
    return np.asarray(probabilities * np.expm1(2 * e + rounding) + np.finfo(np.float64).tiny)


def main() -> int:
    """Train, import, compare, print; 0 if every probability is within the bound."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images / 16.0, labels, test_size=0.3, random_state=0)
    start = time.perf_counter()
    classifier = MLPClassifier((64, 40), random_state=0, max_iter=400).fit(train_x, train_y)
    print(f"trained {len(train_x)} images in {time.perf_counter() - start:.1f} s, {classifier.n_iter_} passes")
    expected = classifier.predict_proba(test_x)
    failed = False
    print(f"{'network':<46} {'images':>6} {'same class':>10} {'accuracy':>8} {'max error':>10} {'in bounds':>10}")
    for dtype in ("float64", "float32"):
        net = MLP.from_sklearn(classifier, output="raw", dtype=dtype)
        x = test_x.astype(dtype)
        probabilities = softmax(net(x))
        logits, bound = forward_and_bound(net.network, net.weights, net.biases, x)
        if dtype == "float32":  # rounding weights and pixels to float32 is not the network's error: its effect is added
            logits64, bound64 = forward_and_bound(
                MLP.from_sklearn(classifier).network, classifier.coefs_, classifier.intercepts_, test_x
            )
            bound = bound + bound64 + np.abs(logits - logits64)
        allowed = 2 * probability_bound(expected, bound, logits)  # scikit-learn's own sums may be off as far
        error = np.abs(probabilities - expected)
        in_bounds = float((error / allowed).max())
        classes = classifier.classes_[probabilities.argmax(axis=1)]
        same = int((classes == classifier.predict(test_x)).sum())
        accuracy = float((classes == test_y).mean())
        failed |= not in_bounds <= 1 or same != len(test_x)
        print(
            f"{net.network.describe():<46} {len(x):>6} {same:>10} {accuracy:>8.3f} {error.max():>10.2e} {in_bounds:>10.4f}"
        )
    print(f"computed on {'the CPU' if net.plan(len(test_x)).schedule == 'cpu' else net.plan(len(test_x)).device}")
    print("FAILED: further off than the bound allows" if failed else "every probability and prediction agrees")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
