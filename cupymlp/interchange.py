"""Interchange: a model's ways in and out of files and of other libraries' objects.

Each format's reader and writer is a file of `cupymlp.models`, imported when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

from numpy.typing import DTypeLike

from . import _npz
from ._checks import ActivationArgument, checked_schedule
from .activations import ActivationSpec
from .model import Model

__all__ = ["Interchange"]


class Interchange(Model):
    """What `cupymlp.MLP` is read from and written to."""

    # --- Files of its own -------------------------------------------------------------------------------------------

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

    def to_npz(self, path: str | os.PathLike[str]) -> None:
        """The same as `save`, beside `to_onnx` and `to_safetensors`."""
        self.save(path)

    # --- ONNX -------------------------------------------------------------------------------------------------------

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

    # --- Tensors by name: PyTorch, safetensors, JAX's libraries ---------------------------------------------------

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Any,
        *,
        activation: ActivationArgument | None = None,
        out_activation: ActivationSpec = "identity",
        prefix: str | Sequence[str] = "",
        dtype: DTypeLike | None = None,
    ) -> Self:
        """The network of a torch state dict: the ``nn.Linear`` layers of a module that chains them.

        Parameters
        ----------
        state_dict
            Names to tensors, as ``module.state_dict()`` gives them: ``0.weight`` (out, in), ``0.bias`` (out,), ``2.weight`` and
            so on. Tensors of torch, bfloat16 included (needs the package ml_dtypes), or arrays. torch is not imported.
        activation, out_activation
            As for `MLP`. A state dict does not name them, so that ``activation`` must be given where there are hidden layers.
        prefix
            Only names below this one count, as ``"policy"`` or ``"policy.net"``; ``""``: all, and then all must belong to one
            chain of layers. A sequence of several: their layers follow one another, in this order.
        dtype
            As for `MLP`: None keeps that of the tensors.

        Raises
        ------
        TypeError
            If it is no such mapping.
        ValueError
            For tensors that are no linear layer's (BatchNorm, LayerNorm, Conv, ...), weights that are missing, shapes that do
            not chain, numbers that are not finite, and names that do not say in which order layers come: those that differ by
            more than their numbers. The message names them.

        Notes
        -----
        Layers are ordered by the numbers in their names: ``net.2`` before ``net.10``, ``fc1`` before ``fc2``. Of names that
        differ in words nothing is guessed: ``prefix=["hidden", "out"]`` says it.

        Examples
        --------
        >>> import numpy as np
        >>> import cupymlp
        >>> state = {  # what nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).state_dict() holds
        ...     "0.weight": np.ones((8, 3), "f4"),
        ...     "0.bias": np.zeros(8, "f4"),
        ...     "2.weight": np.ones((2, 8), "f4"),
        ...     "2.bias": np.ones(2, "f4"),
        ... }
        >>> net = cupymlp.MLP.from_state_dict(state, activation="relu")
        >>> net(np.ones(3, "f4"))
        array([25., 25.], dtype=float32)

        A policy of stable-baselines3, whose last layer is in another module than the others::

            parts = ["mlp_extractor.policy_net", "action_net"]
            net = cupymlp.MLP.from_state_dict(model.policy.state_dict(), activation="tanh", prefix=parts)
        """
        from .models.state_dict import read_state_dict

        return cls._found(read_state_dict(state_dict, prefix, activation, out_activation), dtype)

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str],
        *,
        activation: ActivationArgument | None = None,
        out_activation: ActivationSpec | None = None,
        prefix: str | Sequence[str] = "",
        dtype: DTypeLike | None = None,
    ) -> Self:
        """The network of a safetensors file with the names of a torch state dict. Needs the package safetensors.

        Parameters
        ----------
        path
            The file. One of `to_safetensors` says all about its network; others hold arrays alone.
        activation, out_activation
            As for `MLP`. None: as the file says, if `to_safetensors` wrote it; else ``out_activation`` is ``identity``, and
            ``activation`` must be given where there are hidden layers.
        prefix
            As for `from_state_dict`.
        dtype
            As for `MLP`: None keeps that of the file.

        Raises
        ------
        ValueError
            As for `from_state_dict`; if the file is damaged, or none of this kind. Files of ``torch.save`` are pickles, which
            can run code, and are refused; the message says how to convert one.
        FileNotFoundError
            If there is none.
        ImportError
            If safetensors is not installed.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> import cupymlp
        >>> net = cupymlp.MLP([np.ones((3, 8), "f4"), np.ones((8, 2), "f4")])
        >>> path = pathlib.Path(tempfile.mkdtemp(), "net.safetensors")
        >>> net.to_safetensors(path)
        >>> cupymlp.MLP.from_safetensors(path)
        <cupymlp.MLP 3-8-2 float32, relu identity, no bias>
        """
        from .models.safetensors import read_safetensors

        found, precision = read_safetensors(path, prefix, activation, out_activation)
        return cls._found(found, dtype, precision=precision)

    def to_safetensors(self, path: str | os.PathLike[str], *, prefix: str = "") -> None:
        """Write a safetensors file with the names of a torch ``nn.Sequential``. Needs the package safetensors.

        Layer i is ``<2 i>.weight`` (out, in) and ``<2 i>.bias``: an activation has a number of its own, the identity
        (``nn.Identity``), too. The file's metadata has the activations and the precision under the key ``cupymlp``, from which
        `from_safetensors` makes the same network again, to the bit.

        Parameters
        ----------
        path
            Where to. Written beside its place and then moved there, so that an interrupted save leaves the old file.
        prefix
            What names begin with, as ``"policy"`` for ``policy.0.weight``.

        Examples
        --------
        What to load it into, in torch::

            net.to_safetensors("net.safetensors")
            module = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 24))
            module.load_state_dict(safetensors.torch.load_file("net.safetensors"))
        """
        from .models.safetensors import write_safetensors

        write_safetensors(path, prefix, self._network, self._weights, self._biases)

    @classmethod
    def from_params(
        cls,
        params: Any,
        *,
        activation: ActivationArgument | None = None,
        out_activation: ActivationSpec = "identity",
        prefix: str | Sequence[str] = "",
        dtype: DTypeLike | None = None,
    ) -> Self:
        """The network of a parameter tree of Flax, Haiku or Equinox. JAX is not imported.

        Parameters
        ----------
        params
            What ``module.init`` of Flax (linen) or Haiku returns, ``nnx.state(module, nnx.Param)`` of Flax (nnx), or an Equinox
            module: nested mappings, lists and dataclasses of arrays. Names say the layout of weights: ``kernel`` and ``w`` are
            (in, out), with ``bias`` and ``b``; ``weight`` of a module is (out, in).
        activation, out_activation
            As for `MLP`. A tree does not name them, so that ``activation`` must be given where there are hidden layers.
        prefix
            As for `from_state_dict`: which part, or which parts in which order, with dots between names.
            Without it, layers whose names differ in a number are in the order of the numbers. Flax (linen) and Haiku number
            layers as they are constructed, which need not be the order in which data passes them: in
            ``Dense(a)(relu(Dense(b)(x)))`` the last one is ``Dense_0``. Names do not show this, and square layers chain in
            any order: there give the order, as ``prefix=["params.Dense_1", "params.Dense_0"]``.
        dtype
            As for `MLP`: None keeps that of the arrays.

        Raises
        ------
        TypeError
            If it is no such tree.
        ValueError
            As for `from_state_dict`: for arrays that are no dense layer's, shapes that do not chain, numbers that are not
            finite, and names that do not say in which order layers come; for layers of Equinox other than Linear, MLP,
            Sequential, Lambda, Dropout and Identity. The message names them.

        Examples
        --------
        >>> import numpy as np
        >>> import cupymlp
        >>> params = {  # as of a Flax module with two nn.Dense
        ...     "params": {
        ...         "Dense_0": {"kernel": np.ones((3, 8), "f4"), "bias": np.zeros(8, "f4")},
        ...         "Dense_1": {"kernel": np.ones((8, 2), "f4"), "bias": np.ones(2, "f4")},
        ...     }
        ... }
        >>> cupymlp.MLP.from_params(params, activation="gelu_tanh")  # jax.nn.gelu is this one
        <cupymlp.MLP 3-8-2 float32, gelu_tanh identity, bias>
        """
        from .models.params import read_params

        return cls._found(read_params(params, prefix, activation, out_activation), dtype)

    # --- Keras and scikit-learn ---------------------------------------------------------------------------------------

    @classmethod
    def from_keras(cls, path: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> Self:
        """The network of a Keras model: a ``.keras`` file, or an older ``.h5`` one. Needs the package h5py, not Keras.

        Parameters
        ----------
        path
            What ``model.save`` wrote of a Sequential model, or of a Functional one whose layers make one chain: Dense with any
            of the activations below, Activation, ReLU, LeakyReLU, ELU, Softmax; BatchNormalization, Normalization and
            Rescaling, which become part of the layers beside them as in `scaled`; and Flatten (of one axis), Identity and those
            that do nothing after training, as Dropout. The input is one axis of features.
        dtype
            As for `MLP`: None keeps that of the Dense layers' arrays.

        Raises
        ------
        ValueError
            If the model has another layer, several inputs or outputs, or branches; the message names the layer. If the file is
            damaged, or none of this kind.
        FileNotFoundError
            If there is none.
        ImportError
            If h5py is not installed.

        Notes
        -----
        Nothing in a file is run: layers are known by the names and modules of their classes, and Lambda and custom layers are
        refused. Some that have the names of Keras' own nothing in the file tells apart: layers and models of an ``.h5`` file
        whose class is not registered, and unregistered functions for an activation, as ``def gelu(x)``.
        Files are checked before arrays are read, but HDF5's own library is no match for every file that was made to break it:
        it can crash, or not return. Read files of strangers in a process of their own, and `save` what comes of them.

        Activations have the parameters that the file says, or Keras' own: 0.2 for the function leaky_relu, 0.3 for the layer
        LeakyReLU, alpha 1 for elu and celu. gelu is the one with erf. hard_sigmoid is that of Keras 3; Keras 2 had another,
        which is refused. Functions: linear, relu, leaky_relu, elu, celu, selu, gelu, silu (swish), tanh, sigmoid, softplus,
        softsign, exponential, hard_sigmoid, hard_silu (hard_swish), relu6, squareplus, softmax, log_softmax.

        Examples
        --------
        ::

            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "gelu"), keras.layers.Dense(2)])
            model.save("net.keras")
            net = cupymlp.MLP.from_keras("net.keras")  # anywhere, without Keras
        """
        from .models.keras import read_keras

        return cls._found(read_keras(path, dtype), dtype)

    @classmethod
    def from_sklearn(cls, estimator: Any, *, output: str = "raw", dtype: DTypeLike | None = None) -> Self:
        """The network of a fitted scikit-learn ``MLPClassifier`` or ``MLPRegressor``, with the scalers around it.

        Parameters
        ----------
        estimator
            The fitted estimator; or a ``Pipeline`` that ends with one, after any of ``StandardScaler``, ``MinMaxScaler``,
            ``MaxAbsScaler`` and ``RobustScaler``; or a ``TransformedTargetRegressor`` of one, whose transformer is such a
            scaler. Scalers become part of the network as in `scaled`, with ``scaling="auto"``. scikit-learn is not imported.
        output
            ``"raw"``: the last layer's sums, up to but without the output function that ``estimator.out_activation_``
            names: ``identity`` for a regressor with squared error, whose prediction these are, else ``softmax``,
            ``logistic`` or ``exp``.

            ``"predict"``: what a regressor's ``predict`` gives, as (..., outputs).

            ``"predict_proba"``: what a classifier's ``predict_proba`` gives, a column a class in the order of
            ``estimator.classes_``. Of two classes the network computes sigmoid(-z) and sigmoid(z) of the one sum z, where
            scikit-learn subtracts from 1: small probabilities keep their digits, and a row's sum is 1 but for rounding.
        dtype
            As for `MLP`: None keeps the dtype that the estimator was trained in.

        Raises
        ------
        TypeError
            If it is not such an estimator.
        ValueError
            If it is not fitted, if ``output`` does not suit it, or if it has a step that cannot be part of the network; the
            message names it.

        Examples
        --------
        >>> import numpy as np
        >>> import cupymlp
        >>> from sklearn.neural_network import MLPRegressor
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import StandardScaler
        >>> x = np.random.default_rng(0).normal(300.0, 20.0, (200, 4))
        >>> model = make_pipeline(StandardScaler(), MLPRegressor(hidden_layer_sizes=(8, 8), tol=0.01))
        >>> model = model.fit(x, x[:, 0] > x[:, 1])
        >>> net = cupymlp.MLP.from_sklearn(model, output="predict")
        >>> np.allclose(net(x)[:, 0], model.predict(x))
        True
        """
        from .models.sklearn import read_estimator

        return cls._found(read_estimator(estimator, output, dtype), dtype)
