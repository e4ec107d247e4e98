"""Model: what a network is, without running it: `cupymlp.MLP` does. `cupymlp.interchange` has its ways in and out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ._checks import ActivationArgument, checked_schedule, make_network, network_dtype, read_layers, to_host
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
            [
                _frozen(w.T if weight_layout == "out_in" else w, network.dtype, name)
                for w, name in zip(host_weights, layers.weight_names, strict=True)
            ],
            [None if b is None else _frozen(b, network.dtype, f"biases[{i}]") for i, b in enumerate(host_biases)],
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

    # --- Other networks made of it ----------------------------------------------------------------------------------

    def scaled(
        self,
        *,
        x_mean: Any = None,
        x_std: Any = None,
        y_mean: Any = None,
        y_std: Any = None,
        scaling: str = "auto",
        dtype: DTypeLike | None = None,
    ) -> Self:
        """The network of data in its own units: ``y_mean + y_std * net((x - x_mean) / x_std)``, in one launch.

        Parameters
        ----------
        x_mean, x_std
            What was subtracted from x, and what that was divided by, before the network saw it in training. One number, or an
            array (K,). None: 0 and 1. Standard deviations are positive; pass 1 for a feature that never changes.
        y_mean, y_std
            The same of the target, one number or (N,).
        scaling
            ``"fold"``: into the weights and biases of the first and the last layer, which costs nothing.

            ``"apart"``: a layer of its own before the first, x - x_mean, and behind the last, each with a diagonal weight.

            ``"auto"``: fold, unless that is less accurate: see the notes.
        dtype
            That of the new network. None: of this one. Weights are folded in float64 and rounded once: a float32 network of
            float64 weights is best made as ``MLP(weights).scaled(..., dtype="float32")``.

        Returns
        -------
        MLP
            A new network, with this one's precision, schedule and weight layout.

        Raises
        ------
        ValueError
            For standard deviations that are not positive, numbers that are not finite, shapes that do not fit, and where the
            dtype cannot hold what comes of them.

        Notes
        -----
        Folded, the first layer computes ``x @ (W / x_std) + (b - (x_mean / x_std) @ W)``. Where means are large beside standard
        deviations, as with temperatures near 300 K, large numbers cancel there, and their rounding errors stay:
        about ``|x_mean| / x_std`` times those of the network itself. Apart, x - x_mean is rounded once. ``"auto"`` computes
        proven bounds on the errors of the first layer's sums either way, for x within three standard deviations of the mean,
        and folds if no sum's is more than 4 times (two bits) what it is apart. That is so for ``|x_mean|`` up to about 4 x_std;
        in tf32 and split3 for all, since they round x itself before anything is subtracted.

        y_mean and y_std are folded where ``out_activation`` is ``identity``: nothing cancels there but in the result itself.
        Behind another activation they are a layer of their own.

        Apart, a row with one infinite x gives NaN in every feature: infinity times the zeros of the diagonal weight.

        Examples
        --------
        >>> import numpy as np
        >>> import cupymlp
        >>> rng = np.random.default_rng(0)
        >>> net = cupymlp.MLP([rng.standard_normal((3, 8)), rng.standard_normal((8, 2))])
        >>> x = rng.normal(300.0, 0.5, (5, 3))
        >>> kelvin = net.scaled(x_mean=300.0, x_std=0.5, y_std=[2.0, 3.0])
        >>> kelvin.network.sizes
        (3, 3, 8, 2)
        >>> np.allclose(kelvin(x), net((x - 300.0) / 0.5) * [2.0, 3.0])
        True
        >>> net.scaled(x_mean=1.0, x_std=2.0).network.sizes
        (3, 8, 2)
        """
        from .models.scaling import scale_network

        network = self._network
        if dtype is not None:
            network = replace(network, dtype=network_dtype([], dtype))
        numbers = {"x_mean": x_mean, "x_std": x_std, "y_mean": y_mean, "y_std": y_std}
        found = scale_network(network, self._weights, self._biases, network.activations, numbers, scaling)
        weights = [np.asarray(w).T for w in found.weights] if self._weight_layout == "out_in" else found.weights
        return self._found(
            replace(found, weights=weights),
            network.dtype,
            weight_layout=self._weight_layout,
            precision=network.precision,
            schedule=self._schedule,
        )

    # --- Source text ----------------------------------------------------------------------------------------------

    def cuda_source(self, name: str = "mlp", *, weights: str = "inline") -> str:
        """The network as CUDA C++: one ``__device__`` function to call in kernels of your own.

        ``void mlp(const float* x, float* y)`` computes one row in the thread that calls it, with the bits of ``net(x)`` on a
        GPU; in float16 and bfloat16, those of the schedules row, tile and layer.

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
        No compiler option changes the bits of sums, nor those of activations of single operations: identity, relu, leaky_relu,
        relu6, softsign, hard_sigmoid, hard_swish, squareplus. The others call CUDA's functions, or leave room for contractions,
        so for the same bits they want CuPy's options and compiler: ``-ftz=true``, which CuPy adds, and no ``-fmad=false``. With
        ``--use_fast_math`` those are further off than the error bound says.

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
    def _found(cls, found: Found, dtype: DTypeLike | None, **options: Any) -> Self:
        """Of what an importer found."""
        dtype = dtype if found.dtype is None else found.dtype
        return cls(found.weights, found.biases, found.activations, found.out_activation, dtype=dtype, **options)


def _frozen(array: NDArray[Any], dtype: str, name: str = "an array") -> NDArray[np.floating]:
    """A C-contiguous copy that cannot be made writable again: a view of a read-only array.

    Raises
    ------
    ValueError
        If a finite number is too large for the dtype: to make it infinite would be more than rounding.
    """
    with np.errstate(over="ignore"):
        copy = np.array(array, dtype=numpy_dtype(dtype), order="C", copy=True)
    if copy.dtype != array.dtype and (beyond := np.isfinite(array) & ~np.isfinite(copy)).any():
        most = np.abs(array[beyond]).max()
        raise ValueError(
            f"{name} has numbers up to {most:.4g}, which {dtype} cannot hold; pass a dtype with a larger range"
        )
    copy.flags.writeable = False
    return copy[:]
