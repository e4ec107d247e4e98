"""Every check on what a user passes, and the Network that comes of it.

A message names the argument, what came, what is accepted, and what to do instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ._gpu import cupy_or_error, declares_read_only, is_cupy_array, is_foreign_gpu_array, view_foreign
from ._launch import aligned
from .activations import ActivationSpec, read_spec
from .network import DTYPES, PRECISIONS, Network, numpy_dtype, precision_takes
from .plan import readable_dtypes
from .schedules import SCHEDULES

__all__ = [
    "ActivationArgument",
    "Device",
    "Layers",
    "as_cupy",
    "as_numpy",
    "check_call",
    "check_device",
    "check_same_device",
    "checked_schedule",
    "library_of",
    "make_network",
    "mixed_message",
    "read_layers",
    "to_host",
    "type_name",
]

LAYOUTS = ("in_out", "out_in")
DEVICES = (None, "cuda", "cpu")
ACCEPTED_DTYPES = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"

Device = Literal["cuda", "cpu"] | None
ActivationArgument = ActivationSpec | Sequence[ActivationSpec]


# --- Checks: the network ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """Weights and biases that chain; in the caller's layout and library, not yet converted."""

    weights: list[Any]
    weight_names: list[str]
    biases: list[Any]
    sizes: list[int]
    on_gpu: bool


def read_layers(caller: str, weights: Any, biases: Any, weight_layout: str) -> Layers:
    if weight_layout not in LAYOUTS:
        raise ValueError(
            f"weight_layout is {weight_layout!r}; accepted: 'in_out' for weights (in, out) used as x @ W, 'out_in' for "
            "weights (out, in) used as x @ W.T"
        )
    one_array = hasattr(weights, "ndim") or hasattr(weights, "shape")
    if isinstance(weights, str) or one_array or not isinstance(weights, Sequence):
        raise TypeError(f"weights is a {type_name(weights)}; accepted: a sequence with one 2-D array a layer")
    if len(weights) == 0:
        raise ValueError(f"{caller} got no weights; accepted: one 2-D array a layer, at least one")
    names = [f"weights[{i}]" for i in range(len(weights))]
    libraries = {name: library_of(name, w) for name, w in zip(names, weights, strict=True)}
    on_gpu = libraries[names[0]] == "gpu"
    ready = []
    for name, weight in zip(names, weights, strict=True):
        if (libraries[name] == "gpu") != on_gpu:
            raise TypeError(mixed_message(names[0], weights[0], name, weight))
        ready.append(as_cupy(name, weight) if on_gpu else as_numpy(name, weight))
        _check_float(name, ready[-1])
        if len(ready[-1].shape) != 2:
            raise ValueError(f"{name} has shape {tuple(ready[-1].shape)}; accepted: a 2-D array")
    sizes = _chain(names, [tuple(w.shape) for w in ready], weight_layout)
    if biases is None:
        biases = [None] * len(ready)
    if isinstance(biases, str) or hasattr(biases, "ndim") or not isinstance(biases, Sequence):
        raise TypeError(
            f"biases is a {type_name(biases)}; accepted: None, or a sequence of one 1-D array or None a layer"
        )
    if len(biases) != len(ready):
        raise ValueError(
            f"biases has {len(biases)} entries for {len(ready)} layers; accepted: one a layer, None for no bias"
        )
    ready_biases = []
    for i, bias in enumerate(biases):
        if bias is not None:
            name = f"biases[{i}]"
            if (library_of(name, bias) == "gpu") != on_gpu:
                raise TypeError(mixed_message(names[0], weights[0], name, bias))
            array = as_cupy(name, bias) if on_gpu else as_numpy(name, bias)
            _check_float(name, array)
            if tuple(array.shape) != (sizes[i + 1],):
                raise ValueError(f"{name} has shape {tuple(array.shape)}; layer {i + 1} needs ({sizes[i + 1]},)")
            ready_biases.append(array)
        else:
            ready_biases.append(None)
    return Layers(ready, names, ready_biases, sizes, on_gpu)


def _chain(names: list[str], shapes: list[tuple[int, ...]], weight_layout: str) -> list[int]:
    """The sizes K, hidden ..., N of weights that chain; raises ValueError if they do not."""

    def first_break(pairs: list[tuple[int, ...]]) -> int | None:
        return next((i for i in range(1, len(pairs)) if pairs[i - 1][1] != pairs[i][0]), None)

    here = shapes if weight_layout == "in_out" else [s[::-1] for s in shapes]
    at = first_break(here)
    if at is None:
        return [here[0][0], *(s[1] for s in here)]
    other = "out_in" if weight_layout == "in_out" else "in_out"
    advice = ""
    if first_break([s[::-1] for s in here]) is None:
        advice = f". They do chain as weight_layout={other!r}"
    elif here[at][1] == here[at - 1][1]:
        advice = f". {names[at]}.T would fit: is that weight stored the other way round?"
    raise ValueError(
        f"{names[at - 1]} {shapes[at - 1]} and {names[at]} {shapes[at]} do not chain with weight_layout="
        f"{weight_layout!r}: the one gives {here[at - 1][1]} features, the other takes {here[at][0]}{advice}"
    )


def make_network(
    layers: Layers,
    activation: ActivationArgument,
    out_activation: ActivationSpec,
    precision: str,
    dtype: DTypeLike | None,
    x_dtype: np.dtype[Any] | None = None,
) -> Network:
    dtypes = [w.dtype for w in layers.weights] + [b.dtype for b in layers.biases if b is not None]
    if x_dtype is not None:
        dtypes.append(x_dtype)
    name = _network_dtype(dtypes, dtype)
    return _network_of(
        tuple(layers.sizes),
        _activations(activation, out_activation, len(layers.weights), "float64" if name == "float64" else "float32"),
        tuple(b is not None for b in layers.biases),
        name,
        _checked_precision(precision, name),
    )


@lru_cache(maxsize=256)
def _network_of(*fields: Any) -> Network:
    """One Network object for equal fields, so that what is remembered by network is found again at once."""
    return Network(*fields)


def _network_dtype(dtypes: Sequence[Any], asked: DTypeLike | None) -> str:
    if asked is not None:
        name = dtype_name(asked) if isinstance(asked, Hashable) else repr(asked)
        if name not in DTYPES:
            raise TypeError(f"dtype is {name}; accepted: {ACCEPTED_DTYPES}")
        return name
    names = sorted({dtype_name(d) for d in dtypes})
    name = _common_dtype(*names) or "no common dtype"
    if name not in DTYPES:
        raise TypeError(
            f"the arrays have dtype {', '.join(names)}, which makes {name}; accepted: {ACCEPTED_DTYPES}. Convert them first, "
            "as with array.astype('float32')"
        )
    return name


@cache
def _common_dtype(*names: str) -> str | None:
    """The name of ``numpy.result_type`` of these dtypes; None if there is none, as of bfloat16 and float16."""
    try:
        return str(np.result_type(*map(numpy_dtype, names)).name)
    except TypeError:
        return None


def _activations(
    activation: ActivationArgument, out_activation: ActivationSpec, depth: int, dtype: str
) -> tuple[ActivationSpec, ...]:
    """One a layer. ``dtype``: of the arithmetic."""
    if isinstance(activation, str) or _is_pair(activation):
        hidden = [read_spec("activation", activation, last=False, dtype=dtype)] * (depth - 1)
    elif isinstance(activation, Sequence):
        if len(activation) != depth - 1:
            advice = ""
            if (
                len(activation) == 2
                and isinstance(activation[0], str)
                and not isinstance(activation[1], str | Sequence)
            ):
                advice = ". A name with its parameter is a tuple, as ('leaky_relu', 0.25)"
            raise ValueError(
                f"activation has {len(activation)} entries for {depth - 1} hidden layers; accepted: one for all of them, or "
                f"one a hidden layer (out_activation is the output layer's){advice}"
            )
        hidden = [read_spec(f"activation[{i}]", a, last=False, dtype=dtype) for i, a in enumerate(activation)]
    else:
        raise TypeError(
            f"activation is a {type_name(activation)}; accepted: a name, a name with its parameter, as ('leaky_relu', 0.25), "
            "or a sequence of these"
        )
    return (*hidden, read_spec("out_activation", out_activation, last=True, dtype=dtype))


def _is_pair(activation: ActivationArgument) -> bool:
    """Whether it is one name with its parameter, not a sequence of two names."""
    return (
        isinstance(activation, tuple)
        and len(activation) == 2
        and isinstance(activation[0], str)
        and not isinstance(activation[1], str | tuple | list)
    )


def _checked_precision(precision: object, dtype: str) -> str:
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; accepted: {', '.join(map(repr, PRECISIONS))}")
    if not precision_takes(str(precision), dtype):
        raise ValueError(
            f"precision is {precision!r} and the network is {dtype}; accepted: {precision!r} for float32 networks only. Use "
            "precision='ieee', or convert the weights (and x) to float32"
        )
    return str(precision)


def checked_schedule(schedule: object) -> str | None:
    if schedule is None:
        return None
    if schedule not in tuple(SCHEDULES):
        raise ValueError(
            f"schedule is {schedule!r}; accepted: {', '.join(map(repr, SCHEDULES))}, or None for the one that is expected to "
            "be the fastest"
        )
    return str(schedule)


# --- Checks: a call ---------------------------------------------------------------------------------------------------


def check_call(
    network: Network, shape: tuple[int, ...], dtype: Any, out_shape: tuple[int, ...] | None, out_dtype: Any
) -> None:
    """Raise unless x and out, if there is one, suit the network."""
    if len(shape) == 0:
        raise ValueError(f"x is 0-dimensional; accepted: an array (..., {network.sizes[0]})")
    if shape[-1] != network.sizes[0]:
        advice = ""
        if len(shape) == 2 and shape[0] == network.sizes[0]:
            advice = ". x.T would fit: features are the last axis"
        elif shape[-1] == network.sizes[-1]:
            advice = ". It fits the output: are the weights in the other layout (weight_layout)?"
        raise ValueError(
            f"x has shape {tuple(shape)}, whose last axis is {shape[-1]}; the network takes {network.sizes[0]} features{advice}"
        )
    name = dtype_name(dtype)
    if name not in readable_dtypes():
        raise TypeError(f"x has dtype {name}; accepted: real numbers that {network.dtype} can hold")
    common = _common_dtype(name, network.dtype)
    if common != network.dtype:
        advice = "" if common is None else f", or make the network with dtype={common!r}"
        raise TypeError(
            f"x has dtype {name} and the network is {network.dtype}, which "
            f"{'have no common dtype' if common is None else 'would narrow it'}: convert x with "
            f"x.astype({network.dtype!r}){advice}"
        )
    if out_shape is None:
        return
    wanted = (*shape[:-1], network.sizes[-1])
    if tuple(out_shape) != wanted:
        raise ValueError(f"out has shape {tuple(out_shape)}; the result has shape {wanted}")
    if dtype_name(out_dtype) != network.dtype:
        raise TypeError(f"out has dtype {dtype_name(out_dtype)}; the result is {network.dtype}")


def check_device(device: object) -> None:
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; accepted: None, 'cuda' or 'cpu'")


def check_same_device(named: Sequence[tuple[str, Any]]) -> None:
    if len({array.data.device_id for _, array in named}) > 1:
        where = ", ".join(f"{name} on device {array.data.device_id}" for name, array in named)
        raise ValueError(f"the arrays are on different devices: {where}. Move them to one")


# --- Checks: arrays -----------------------------------------------------------------------------------------------------


def library_of(name: str, array: Any) -> str:
    """``gpu`` or ``numpy``: where an argument belongs."""
    if array is None:
        raise TypeError(f"{name} is None; accepted: an array")
    if is_cupy_array(array):
        return "gpu"
    try:
        return "gpu" if is_foreign_gpu_array(array) else "numpy"
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is a {type_name(array)} that does not tell its device ({error}); accepted: an array that lies on one CUDA "
            "device, or on the host. Move it to one first"
        ) from error


def mixed_message(a_name: str, a: Any, b_name: str, b: Any) -> str:
    return (
        f"{a_name} is a {type_name(a)} and {b_name} a {type_name(b)}: NumPy and GPU arrays are not mixed in one call. "
        "Convert with cupy.asarray or cupy.asnumpy"
    )


def as_numpy(name: str, array: Any) -> NDArray[Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled(value)")
    try:
        result = np.asarray(array)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: torch's, for a tensor that records gradients
        raise TypeError(f"{name} is a {type_name(array)} that NumPy makes no array of ({error})") from error
    if result.dtype.kind in "OSUVMmTc" and dtype_name(result.dtype) not in readable_dtypes():
        raise TypeError(f"{name} is a {type_name(array)} of dtype {result.dtype}; accepted: an array of real numbers")
    return result


def as_cupy(name: str, array: Any, *, writable: bool = False) -> Any:
    """A CuPy array on the same memory, which the current stream of its device may use; see `view_foreign`."""
    if is_cupy_array(array):
        return array
    view, read_only = view_foreign(f"{name} is a {type_name(array)}", array)
    if writable and (read_only or declares_read_only(array)):
        raise ValueError(f"{name} is read-only: it is a {type_name(array)}. Pass an array that can be written")
    return view


def _check_float(name: str, array: Any) -> None:
    dtype = dtype_name(array.dtype)
    if dtype not in readable_dtypes():
        raise TypeError(f"{name} has dtype {dtype}; accepted: real numbers, as {ACCEPTED_DTYPES}")


def to_host(array: Any, name: str) -> NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array
    view = as_cupy(name, array)
    with cupy_or_error("an array on a GPU").cuda.Device(view.data.device_id):  # its current stream is in order
        return cast("NDArray[Any]", aligned(view).get())


@cache
def dtype_name(dtype: Any) -> str:
    """float32 whatever the library's own way to say it (``torch.float32`` prints ``torch.float32``)."""
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return str(dtype).rpartition(".")[2]


def type_name(array: object) -> str:
    kind = type(array)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
