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

    @classmethod
    def from_onnx(
        cls,
        model: str | os.PathLike[str] | bytes | Any,
        *,
        output: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> Self:
        """The network in an ONNX model: a chain of layers, as PyTorch, scikit-learn (skl2onnx) and others export it.

        Needs the package onnx (``pip install 'cupymlp[onnx]'``). Nothing in the file is executed. docs/onnx.md lists the
        operators that are read.

        Parameters
        ----------
        model
            The path of an ``.onnx`` file, its bytes, or an ``onnx.ModelProto``. Weights in files of their own (external data)
            are read if they lie below the model's folder.
        output
            Which tensor is the result, by its name: an output of the graph, or any tensor in it. None: the output, or the
            one output of real numbers, as the probabilities of a classifier.
        dtype
            None keeps the dtype of the model's weights.

        Returns
        -------
        MLP
            With ``weight_layout="in_out"``. Weights that stand alone have the bits that they have in the file. Scales and
            shifts beside a layer (a multiplication, a BatchNormalization, a scaler before the first layer) are folded into its
            weight and bias: in float64, with one rounding to the dtype. So results differ from the model's by what rounding
            the weights makes, which is much where a shift is large beside what remains of the data.

        Raises
        ------
        ValueError
            If the file is damaged or cannot be trusted, or is not such a network; the message names the node, its operator and
            its tensor. For weights that are not finite.
        ImportError
            Without the package onnx.
        FileNotFoundError
            If there is no such file.

        Examples
        --------
        >>> import os, tempfile, cupymlp, numpy as np
        >>> net = cupymlp.MLP([np.ones((3, 2)), np.ones((2, 1))])
        >>> path = os.path.join(tempfile.mkdtemp(), "net.onnx")
        >>> net.to_onnx(path)
        >>> cupymlp.MLP.from_onnx(path)
        <cupymlp.MLP 3-2-1 float64, relu identity, no bias>
        """
        from .models.onnx import read_onnx

        return cls._found(read_onnx(model, output, dtype), dtype)

    def to_onnx(self, path: str | os.PathLike[str], *, opset: int = 20) -> None:
        """Write the network as an ONNX model, for other runtimes; `MLP.from_onnx` reads it back, bit for bit.

        Needs the package onnx (``pip install 'cupymlp[onnx]'``), whose checker the model passes before it is written. The file
        is written beside its place and then moved there.

        Parameters
        ----------
        path
            The file, by custom ``.onnx``.
        opset
            The version of ONNX's operators, 13 or later. Activations that it does not have are written as several nodes.

        Notes
        -----
        A layer is a Gemm with x of the shape (rows, K), any number of rows, and an activation; input ``x``, output ``y``. ONNX
        keeps the parameters of LeakyRelu, Elu and Celu as float32, also in float64 models, so other runtimes round them; the
        exact ones are written as metadata, where from_onnx finds them. ``precision`` and ``schedule`` are not written.

        Raises
        ------
        ValueError
            For an opset that the installed onnx does not know, or that has an operator, but not for the network's dtype; for a
            network of more than 2 GiB, which is more than a file holds.
        ImportError
            Without the package onnx.

        Examples
        --------
        >>> import os, tempfile, cupymlp, numpy as np
        >>> path = os.path.join(tempfile.mkdtemp(), "net.onnx")
        >>> cupymlp.MLP([np.ones((3, 2)), np.ones((2, 1))]).to_onnx(path)
        """
        from .models.onnx import write_onnx

        write_onnx(path, self._network, self._weights, self._biases, opset)

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
