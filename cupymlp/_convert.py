"""Networks in files of any kind, told by the suffix: the one way in and out of the command line.

To add a kind: a row in `KINDS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .activations import ActivationSpec
from .mlp import MLP

__all__ = [
    "KINDS",
    "Kind",
    "checked_target",
    "parsed_activation",
    "parsed_activations",
    "read_network",
    "write_network",
]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes
    ----------
    suffix
        Of its names, in lower case.
    what
        A few words for messages.
    read
        ``read(path, dtype, activation, out_activation)``; None stands for what the file says. Only kinds that fold scalings
        into the weights need the dtype: others are read as they are, with their precision, and changed afterwards.
    write
        ``write(net, path)``; None if this kind is only read.
    lacks_activations
        Whether a file may leave it open what is between its layers.
    """

    suffix: str
    what: str
    read: Callable[[Path, str | None, Any, Any], MLP]
    write: Callable[[MLP, Path], None] | None = None
    lacks_activations: bool = False


def _read_npz(path: Path, *_: Any) -> MLP:
    return MLP.load(path)


def _read_safetensors(path: Path, _: Any, activation: Any, out_activation: Any) -> MLP:
    return MLP.from_safetensors(path, activation=activation, out_activation=out_activation)


KINDS: dict[str, Kind] = {
    kind.suffix: kind
    for kind in (
        Kind(".npz", "MLP.save", _read_npz, MLP.save),
        Kind(".onnx", "ONNX", lambda path, dtype, *_: MLP.from_onnx(path, dtype=dtype), MLP.to_onnx),
        Kind(".safetensors", "torch's names", _read_safetensors, MLP.to_safetensors, lacks_activations=True),
        Kind(".keras", "Keras 3", lambda path, dtype, *_: MLP.from_keras(path, dtype=dtype)),
        Kind(".h5", "Keras", lambda path, dtype, *_: MLP.from_keras(path, dtype=dtype)),
    )
}


def read_network(
    path: str | os.PathLike[str],
    *,
    activation: Any = None,
    out_activation: ActivationSpec | None = None,
    dtype: str | None = None,
    precision: str | None = None,
    schedule: str | None = None,
) -> MLP:
    """The network in a file of any kind of `KINDS`.

    Parameters
    ----------
    path
        The file.
    activation, out_activation
        As for `MLP`, for kinds that leave them open. None: as the file says.
    dtype
        The name of another dtype than the file's, to which the weights are rounded.
    precision
        Another than the file's. Kinds that have none are read as ``ieee``.
    schedule
        As for `MLP`.

    Raises
    ------
    ValueError
        For another suffix; for activations where the file says them itself; and what the importer of the kind raises.
    ImportError
        If the kind needs a package that is not installed.
    FileNotFoundError
        If there is no such file.
    """
    kind = _kind(path)
    given = "activation" if activation is not None else "out_activation" if out_activation is not None else None
    if given is not None and not kind.lacks_activations:
        raise ValueError(f"{given} is given, and {_name(path)} says itself what is between its layers: leave it out")
    return _made_again(kind.read(Path(path), dtype, activation, out_activation), dtype, precision, schedule)


def write_network(net: MLP, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a network to a file of the kind that its suffix says.

    Raises
    ------
    ValueError
        For another suffix, and for a kind that is only read.
    FileExistsError
        If the file is there, unless ``overwrite``.
    """
    checked_target(path, overwrite=overwrite)(net, Path(path))


def _kind(path: str | os.PathLike[str]) -> Kind:
    kind = KINDS.get(Path(path).suffix.lower())
    if kind is None:
        raise ValueError(f"{_name(path)} has no suffix that says its kind; accepted: {_listed(KINDS.values())}")
    return kind


def _name(path: str | os.PathLike[str]) -> str:
    return repr(os.fspath(path))


def _made_again(net: MLP, dtype: str | None, precision: str | None, schedule: str | None) -> MLP:
    network = net.network
    if dtype in (None, network.dtype) and precision in (None, network.precision) and schedule is None:
        return net
    return MLP(
        net.weights,
        net.biases,
        network.activations[:-1],
        network.activations[-1],
        net.weight_layout,
        precision or network.precision,
        dtype=dtype or network.dtype,
        schedule=schedule,
    )


def checked_target(path: str | os.PathLike[str], *, overwrite: bool) -> Callable[[MLP, Path], None]:
    """What writes a file of this name; the errors are those of `write_network`."""
    kind = _kind(path)
    if kind.write is None:
        raise ValueError(
            f"{_name(path)}: files of {kind.what} are read, not written; accepted: "
            f"{_listed(k for k in KINDS.values() if k.write is not None)}"
        )
    if not overwrite and Path(path).exists():
        raise FileExistsError(f"{_name(path)} exists; pass --force to overwrite it, or choose another name")
    return kind.write


def _listed(kinds: Iterable[Kind]) -> str:
    return ", ".join(f"{kind.suffix} ({kind.what})" for kind in kinds)


def parsed_activations(text: str) -> Any:
    """``--activation`` of the command line: one activation for all hidden layers, or one for each, between commas."""
    activations = [parsed_activation(part) for part in text.split(",")]
    return activations[0] if len(activations) == 1 else activations


def parsed_activation(text: str) -> ActivationSpec:
    """``relu``, or ``leaky_relu:0.25`` with a parameter. Whether there is such a one is checked with the network."""
    name, colon, parameter = text.partition(":")
    if not colon:
        return name
    try:
        return name, float(parameter)
    except ValueError:
        raise ValueError(f"{text!r} has no number after its colon, as leaky_relu:0.25 has") from None
