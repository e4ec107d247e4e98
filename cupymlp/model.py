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

    # --- Source text ----------------------------------------------------------------------------------------------

    def cuda_source(self, name: str = "mlp", *, weights: str = "inline") -> str:
        """The network as CUDA C++: one ``__device__`` function to call in kernels of your own.

        ``void mlp(const float* x, float* y)`` computes one row in the thread that calls it, with the bits of ``net(x)`` on a
        GPU (in float16 and bfloat16, those of the schedules row, tile and layer), whatever the compiler's options for
        floating-point numbers.

        Parameters
        ----------
        name
            Of the function. Networks of different names can be in one program.
        weights
            ``"inline"``: in the text. ``"pointer"``: the function has a third parameter, ``const void* weights``, for a copy of
            `packed_weights` in the GPU's memory.

        Returns
        -------
        str
            C++17 for nvcc, NVRTC and CuPy's RawKernel and RawModule, which needs no header. x and y are one row each, without
            gaps, of the network's dtype, and may overlap. A float16 or bfloat16 network takes pointers to any type of 2 bytes.

        Raises
        ------
        ValueError
            For a name that is none in C++; for a precision other than ``"ieee"``; if the weights are too large for a text, or
            a row's activations for a thread.

        Notes
        -----
        It is for kernels that do more with a row than the network does: x and y need not go through memory then. For the rows
        of an array there is ``net(x)``, whose threads share a row's work, or its weights.

        Examples
        --------
        >>> import numpy as np
        >>> import cupymlp
        >>> net = cupymlp.MLP([np.eye(2, dtype="f4")])
        >>> source = net.cuda_source("policy")
        >>> "__device__ inline void policy(const float* x, float* y)" in source
        True

        On a GPU::

            kernel = cupy.RawKernel(source + r'''
            extern "C" __global__ void step(float* state, int rows) {
                const int row = blockIdx.x * blockDim.x + threadIdx.x;
                if (row >= rows) return;
                float force[2];
                policy(state + 2 * row, force);
                for (int k = 0; k < 2; ++k) state[2 * row + k] += 0.01f * force[k];
            }''', "step")
            kernel((blocks,), (128,), (state, len(state)))
        """
        from . import __version__
        from ._cuda_source import device_function

        return device_function(self._network, self._weights, self._biases, name, weights, __version__)

    def packed_weights(self) -> NDArray[Any]:
        """Weights and biases as the ``weights`` of `cuda_source` points to them: a new 1-D NumPy array of the network's dtype.

        ``cupy.asarray(net.packed_weights())`` puts them on the GPU, at an address that will do: a multiple of 16 bytes.
        """
        from ._cuda_source import packed

        return packed(self._network, self._weights, self._biases)

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
