"""fused_mlp: one call on the caller's own weight arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._chain import refuse_in_capture
from ._checks import (
    ActivationArgument,
    Device,
    Layers,
    as_cupy,
    as_numpy,
    check_call,
    check_device,
    check_same_device,
    checked_schedule,
    library_of,
    make_network,
    mixed_message,
    read_layers,
)
from ._gpu import cupy_or_error, is_cupy_array
from ._launch import FusedCall, aligned, find_fused, fused_key, remember_fused
from .activations import ActivationSpec
from .mlp import MLP
from .network import numpy_dtype

__all__ = ["fused_mlp"]


def fused_mlp(
    x: Any,
    *weights: Any,
    biases: Sequence[Any] | None = None,
    activation: ActivationArgument = "relu",
    out_activation: ActivationSpec = "identity",
    weight_layout: str = "in_out",
    precision: str = "ieee",
    out: Any = None,
    device: Device = None,
    schedule: str | None = None,
) -> Any:
    """One shot: the network with these weights, of x. Use `MLP` for calls that repeat: it prepares once.

    ``fused_mlp(x, W1, W2, W3)`` is ``relu(relu(x @ W1) @ W2) @ W3``. On GPU arrays it is one launch that reads the weight
    arrays as they are at the call; nothing of them is copied to the host, converted or kept. (For tensor cores, and past 89
    layers, whose addresses outgrow a kernel's arguments, the weights are packed on the GPU first: some 150 us a layer.)

    Parameters
    ----------
    x
        Array (..., K).
    *weights
        One 2-D array a layer, in x's library. At least one. GPU weights that are not of the result's dtype are converted
        by CuPy first.
    out, device
        As for a call of an `MLP`.
    biases, activation, out_activation, weight_layout, precision, schedule
        As for `MLP`.

    Returns
    -------
    array
        (..., N), of dtype ``numpy.result_type(x, *weights, *biases)``.

    Examples
    --------
    >>> import numpy as np
    >>> import cupymlp
    >>> cupymlp.fused_mlp(np.array([1.0, -2.0]), np.eye(2), np.eye(2))
    array([1., 0.])
    """
    check_device(device)
    key = None
    names = tuple(activation) if isinstance(activation, list) else activation
    options = (names, out_activation, weight_layout, precision, schedule)
    if device != "cpu" and is_cupy_array(x) and (biases is None or isinstance(biases, Sequence)):
        bias_list = (None,) * len(weights) if biases is None else biases
        key = fused_key(options, (x, out, *weights, *bias_list))
        known = find_fused(key)
        if known is not None:  # checked when it was first seen
            return known(weights, bias_list, x, out)
    schedule = checked_schedule(schedule)
    layers = read_layers("fused_mlp", weights, biases, weight_layout)
    on_gpu = library_of("x", x) == "gpu"
    if on_gpu != layers.on_gpu:
        raise TypeError(mixed_message("x", x, layers.weight_names[0], weights[0]))
    if out is not None and (library_of("out", out) == "gpu") != on_gpu:
        raise TypeError(mixed_message("x", x, "out", out))
    if not on_gpu:
        x = as_numpy("x", x)
        network = make_network(layers, activation, out_activation, precision, None, x_dtype=x.dtype)
        net = MLP(
            weights,
            biases,
            activation,
            out_activation,
            weight_layout,
            precision,
            dtype=network.dtype,
            schedule=schedule,
        )
        return net(x, out, device=device)
    if device == "cpu":
        raise TypeError("x is on a GPU and device='cpu': pass NumPy arrays, or leave device out")
    return _fused_on_gpu(key, options, x, layers, activation, out_activation, weight_layout, precision, out, schedule)


def _fused_on_gpu(
    key: tuple[Any, ...] | None,
    options: tuple[Any, ...],
    x: Any,
    layers: Layers,
    activation: ActivationArgument,
    out_activation: ActivationSpec,
    weight_layout: str,
    precision: str,
    out: Any,
    schedule: str | None,
) -> Any:
    cupy = cupy_or_error("a GPU array")
    x = as_cupy("x", x)
    network = make_network(layers, activation, out_activation, precision, None, x_dtype=x.dtype)
    views = [as_cupy(name, w) for name, w in zip(layers.weight_names, layers.weights, strict=True)]
    bias_views = [None if b is None else as_cupy(f"biases[{i}]", b) for i, b in enumerate(layers.biases)]
    named = [("x", x), *zip(layers.weight_names, views, strict=True)]
    named += [(f"biases[{i}]", b) for i, b in enumerate(bias_views) if b is not None]
    y = None if out is None else as_cupy("out", out, writable=True)
    named += [] if y is None else [("out", y)]
    check_same_device(named)
    check_call(network, x.shape, x.dtype, None if y is None else y.shape, None if y is None else y.dtype)
    with cupy.cuda.Device(x.data.device_id):
        if key is None:  # another library's arrays, or a device that was not the current one
            key = fused_key(options, (x, y, *views, *bias_views))
            known = find_fused(key)
            if known is not None:
                result = known(views, bias_views, x, y)
                return result if out is None else out
        refuse_in_capture(
            "the first call of fused_mlp with arrays like these, and every call whose weights have to be converted, allocates "
            "memory, which a stream that captures a CUDA graph does not allow: make the same call once before the capture, "
            "with weights of the result's dtype"
        )
        dtype = numpy_dtype(network.dtype)
        ready = [aligned(w).astype(dtype, copy=False) for w in views]
        ready_biases = [None if b is None else aligned(b).astype(dtype, copy=False) for b in bias_views]
        call = FusedCall(network, weight_layout, ready, ready_biases, x, y, schedule)
        if all(a is b for a, b in zip([*ready, *ready_biases], [*views, *bias_views], strict=True)):
            remember_fused(key, call)
        y = call(ready, ready_biases, x, y)
    return y if out is None else out
