"""Model: what a network is, and its ways in and out: arrays, files, other libraries' models.

`cupymlp.MLP` adds running it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import _npz
from ._checks import ActivationArgument, checked_schedule, make_network, read_layers, to_host
from .activations import ActivationSpec
from .models import Found
from .network import Network, numpy_dtype

__all__ = ["Model"]


class Model:
    """A network's description and its weights, which never change; the arguments are those of `cupymlp.MLP`."""

    def __init__(
        self,
        weights: Sequence[Any],
        biases: Sequence[Any] | None = None,
        activation: ActivationArgument = "relu",
        out_activation: ActivationSpec = "identity",
        weight_layout: str = "in_out",
        precision: str = "ieee",
        *,
        dtype: DTypeLike | None = None,
        schedule: str | None = None,
    ) -> None:
        schedule = checked_schedule(schedule)
        layers = read_layers("MLP", weights, biases, weight_layout)
        host_weights = [to_host(w, name) for w, name in zip(layers.weights, layers.weight_names, strict=True)]
        host_biases = [None if b is None else to_host(b, f"biases[{i}]") for i, b in enumerate(layers.biases)]
        network = make_network(layers, activation, out_activation, precision, dtype)
        self._set(
            network,
            weight_layout,
            [_frozen(w.T if weight_layout == "out_in" else w, network.dtype) for w in host_weights],
            [None if b is None else _frozen(b, network.dtype) for b in host_biases],
            schedule,
        )

    def _set(
        self,
        network: Network,
        weight_layout: str,
        weights: list[NDArray[np.floating]],
        biases: list[NDArray[np.floating] | None],
        schedule: str | None,
    ) -> None:
        self._network = network
        self._weight_layout = weight_layout
        self._weights = weights  # (in, out), whatever the caller's layout
        self._biases = biases
        self._schedule = schedule

    # --- What it is -------------------------------------------------------------------------------------------

    @property
    def network(self) -> Network:
        """The frozen description: sizes, activations, biases, dtype, precision."""
        return self._network

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of weights and results."""
        return numpy_dtype(self._network.dtype)

    @property
    def weight_layout(self) -> str:
        """``in_out`` or ``out_in``, as it was made."""
        return self._weight_layout

    @property
    def schedule(self) -> str | None:
        """The schedule that is forced on the GPU, if one is."""
        return self._schedule

    @property
    def weights(self) -> tuple[NDArray[np.floating], ...]:
        """The weights as read-only NumPy arrays, in the layout asked for."""
        return tuple(w.T if self._weight_layout == "out_in" else w[:] for w in self._weights)

    @property
    def biases(self) -> tuple[NDArray[np.floating] | None, ...]:
        """The biases as read-only NumPy arrays (N,), None where a layer has none."""
        return tuple(None if b is None else b[:] for b in self._biases)

    def __repr__(self) -> str:
        return f"<cupymlp.MLP {self._network.describe()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._rebuilt, (self._network, self._weight_layout, self._weights, self._biases, self._schedule)

    def __dask_tokenize__(self) -> tuple[str, str]:
        """What Dask knows this network by: the same for equal ones in every process, hashed once an object."""
        token: str | None = getattr(self, "_dask_token", None)
        if token is None:
            digest = hashlib.blake2b(digest_size=16)
            digest.update(repr((self._network, self._weight_layout, self._schedule)).encode())
            for array in (*self._weights, *self._biases):
                if array is not None:  # C-contiguous, with its shape in the network: the bytes say the rest
                    digest.update(array.reshape(-1).view(np.uint8).data)
            token = self._dask_token = digest.hexdigest()
        return "cupymlp.MLP", token

    # --- Files and other libraries' models ------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network and its weights to a ``.npz`` file: plain arrays, no pickle. `MLP.load` reads it.

        ``schedule`` is not written: it belongs to a GPU, not to the network. bfloat16 weights are written as their bits.

        The file is written beside its place and then moved there, so that an interrupted save leaves the old one.
        """
        _npz.save(path, self._network, self._weight_layout, self.weights, self.biases)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, schedule: str | None = None) -> Self:
        """Read what `MLP.save` wrote. ``schedule`` is as for `MLP`.

        Raises
        ------
        ValueError
            If the file is truncated, is something else, or was tampered with; the message says what is wrong. For an unknown
            schedule.
        FileNotFoundError
            If there is none.
        """
        schedule = checked_schedule(schedule)
        saved = _npz.load(path)
        in_out = [w.T for w in saved.weights] if saved.weight_layout == "out_in" else saved.weights
        return cls._rebuilt(saved.network, saved.weight_layout, in_out, saved.biases, schedule)

    @classmethod
    def from_sklearn(cls, estimator: Any, *, output: str = "raw", dtype: DTypeLike | None = None) -> Self:
        """The network of a fitted scikit-learn ``MLPClassifier`` or ``MLPRegressor``.

        Parameters
        ----------
        estimator
            The fitted estimator. scikit-learn itself is not imported.
        output
            ``"raw"``: the last layer's sums, up to but without the output function that ``estimator.out_activation_``
            names: ``identity`` for a regressor with squared error, whose prediction these are, else ``softmax``,
            ``logistic`` or ``exp``.
        dtype
            As for `MLP`: None keeps the dtype that the estimator was trained in.

        Raises
        ------
        TypeError
            If it is not such an estimator.
        ValueError
            If it is not fitted, or uses an activation that is not available; the message names it.
        """
        from .models.sklearn import read_estimator

        return cls._found(read_estimator(estimator, output), dtype)

    # --- Making one -----------------------------------------------------------------------------------------------

    @classmethod
    def _rebuilt(
        cls,
        network: Network,
        weight_layout: str,
        weights: list[NDArray[np.floating]],
        biases: list[NDArray[np.floating] | None],
        schedule: str | None = None,
    ) -> Self:
        """Of what is checked already; weights in_out."""
        net = cls.__new__(cls)
        frozen = [_frozen(w, network.dtype) for w in weights]
        frozen_biases = [None if b is None else _frozen(b, network.dtype) for b in biases]
        net._set(network, weight_layout, frozen, frozen_biases, schedule)
        return net

    @classmethod
    def _found(cls, found: Found, dtype: DTypeLike | None) -> Self:
        """Of what an importer found."""
        return cls(found.weights, found.biases, found.activations, found.out_activation, dtype=dtype)


def _frozen(array: NDArray[Any], dtype: str) -> NDArray[np.floating]:
    """A C-contiguous copy that cannot be made writable again: a view of a read-only array."""
    copy = np.array(array, dtype=numpy_dtype(dtype), order="C", copy=True)
    copy.flags.writeable = False
    return copy[:]
