"""The scaling of a network's inputs and outputs, by means and standard deviations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._checks import as_numpy, library_of, to_host
from ..network import Network
from . import Found
from ._builder import SCALINGS, Affine, Builder

__all__ = ["scale_network"]


def scale_network(
    network: Network,
    weights: Sequence[NDArray[np.floating]],
    biases: Sequence[NDArray[np.floating] | None],
    activations: Sequence[Any],
    means_and_stds: dict[str, Any],
    scaling: str,
) -> Found:
    """The network between the scalings of x and y; `cupymlp.MLP.scaled` documents the arguments and errors.

    Parameters
    ----------
    network, weights, biases, activations
        What is scaled; weights in_out, activations one a layer as `cupymlp.MLP` takes them.
    means_and_stds
        x_mean, x_std, y_mean and y_std, each None, a number or one a feature.
    """
    if scaling not in SCALINGS:
        raise ValueError(
            f"scaling is {scaling!r}; accepted: 'fold' into the weights beside it, 'apart' as a layer of its own, 'auto' to "
            "fold where that is nearly as accurate"
        )
    wide = {"x": network.sizes[0], "y": network.sizes[-1]}
    v = {name: _numbers(name, value, wide[name[0]]) for name, value in means_and_stds.items()}
    builder = Builder(network.dtype, network.precision, scaling)
    if means_and_stds["x_mean"] is not None or means_and_stds["x_std"] is not None:
        with np.errstate(over="ignore"):  # an infinite factor is found where it is used
            factor = 1 / v["x_std"]
        builder.scale("x_mean, x_std", Affine.of(center=v["x_mean"], factor=factor))
    for weight, bias, activation in zip(weights, biases, activations, strict=True):
        builder.dense(weight, bias)
        builder.activate(activation)
    if means_and_stds["y_mean"] is not None or means_and_stds["y_std"] is not None:
        builder.scale("y_mean, y_std", Affine.of(factor=v["y_std"], offset=v["y_mean"]))
    return builder.found()


def _numbers(name: str, value: Any, features: int) -> NDArray[np.float64]:
    is_std = name.endswith("std")
    if value is None:
        return np.asarray(float(is_std))
    array = to_host(value, name) if library_of(name, value) == "gpu" else as_numpy(name, value)
    with np.errstate(over="ignore"):  # a longdouble beyond float64 is infinite, and refused below
        numbers = array.astype(np.float64)
    if numbers.shape not in ((), (features,)):
        raise ValueError(
            f"{name} has shape {numbers.shape}; accepted: one number, or one for each of the {features} features of {name[0]}"
        )
    wrong = ~np.isfinite(numbers) | (is_std & (numbers <= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        where = f"{name}[{at}]" if numbers.ndim else name
        advice = "; for a feature that never changes, pass 1" if is_std else ""
        raise ValueError(
            f"{where} is {numbers.reshape(-1)[at]}; accepted: {'positive, finite' if is_std else 'finite'} numbers{advice}"
        )
    return numbers
