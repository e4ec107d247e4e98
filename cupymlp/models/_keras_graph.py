"""The layers of a Keras model's description in the order in which data passes them, if that is one chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._keras_files import KerasFile, shown

__all__ = ["Layer", "foreign", "layers_of"]


@dataclass(frozen=True)
class Layer:
    """A layer of the description."""

    name: str
    class_name: str
    config: dict[str, Any]


def layers_of(file: KerasFile) -> tuple[int, list[Layer]]:
    """How many features the model takes, and its layers.

    Raises
    ------
    ValueError
        If the model is of another kind, or its layers are no chain from one input to one output; the message names the layer.
    """
    kind, config = file.config.get("class_name"), file.config.get("config")
    if kind not in ("Sequential", "Functional", "Model") or not isinstance(config, dict):
        raise ValueError(
            f"{file.where} is a model of class {shown(kind)}; accepted: Sequential, and Functional without branches"
        )
    if mark := foreign(file.config):
        raise ValueError(
            f"{file.where} is a model of class {kind!r} that is its author's ({mark}), not Keras' own; "
            "accepted: Sequential, and Functional without branches. Save keras.Model(model.inputs, model.outputs) if it "
            "computes no more than its layers do"
        )
    entries = config.get("layers")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise file.wrong("its description has no list of layers")
    layers = [_layer(file, entry) for entry in entries]
    names = [layer.name for layer in layers]
    if len({*names}) < len(names):
        raise file.wrong(f"two layers are named {next(n for n in names if names.count(n) > 1)!r}")
    if kind != "Sequential":
        _check_chain(file, config, entries, names)
    return _features(file, layers), layers


def _layer(file: KerasFile, entry: dict[str, Any]) -> Layer:
    config = entry.get("config")
    if not isinstance(config, dict) or not isinstance(entry.get("class_name"), str):
        raise file.wrong(f"a layer is described by {shown(entry)}")
    name = config.get("name", entry.get("name"))
    if not isinstance(name, str):
        raise file.wrong(f"a layer is named {shown(name)}")
    if mark := foreign(entry):
        raise ValueError(
            f"layer {name!r} ({entry['class_name']}) of {file.where} is a class of its author's ({mark}), not Keras' own; "
            "accepted: layers of keras.layers, of which the model is to be built instead"
        )
    return Layer(name, entry["class_name"], config)


def foreign(description: dict[str, Any]) -> str:
    """What says that a class is not Keras' own, though its name may be; ``""`` if nothing does.

    In the format of Keras 3 the module is ``keras.layers`` for Keras' own layers; for others it is null or another package,
    and ``registered_name`` is ``package>name`` if they are registered. The format before, of .h5 files, has neither key: there
    an unregistered class cannot be told from Keras'.
    """
    module, registered = description.get("module", "keras"), description.get("registered_name")
    ours = isinstance(module, str) and module.partition(".")[0] in ("keras", "tf_keras")
    if ours and (registered is None or (isinstance(registered, str) and ">" not in registered)):
        return ""
    return f"module {shown(module)}" + ("" if registered is None else f", registered as {shown(registered)}")


def _features(file: KerasFile, layers: list[Layer]) -> int:
    config = layers[0].config
    shape = config.get("batch_shape", config.get("batch_input_shape"))
    if shape is None:
        raise ValueError(
            f"{file.where} does not say what its input is: build the model, or give it an Input, before it is saved"
        )
    features = shape[-1] if isinstance(shape, list) and shape else None
    if len(shape) != 2 or not isinstance(features, int) or isinstance(features, bool) or not 0 <= features < 2**31:
        raise ValueError(
            f"{file.where} takes an input of shape {shown(shape)}; accepted: [null, features], one axis of a known number of "
            "features beside the batch"
        )
    return features


# --- Functional models ------------------------------------------------------------------------------------------------


def _check_chain(file: KerasFile, config: dict[str, Any], entries: list[dict[str, Any]], names: list[str]) -> None:
    """Raise unless every layer takes what the one before it gives. The description lists layers in an order that works."""
    inputs, outputs = (_ends(config.get(end)) for end in ("input_layers", "output_layers"))
    for what, ends in (("inputs", inputs), ("outputs", outputs)):
        if len(ends) != 1:
            raise ValueError(f"{file.where} has {len(ends)} {what}: {shown(ends)}; accepted: a model with one")
    for i, (entry, name) in enumerate(zip(entries, names, strict=True)):
        sources = _sources(file, name, entry.get("inbound_nodes"))
        wanted = [] if i == 0 else [names[i - 1]]
        if sources != wanted:
            takes, before = (", ".join(map(repr, those)) or "nothing" for those in (sources, wanted))
            raise ValueError(
                f"layer {name!r} of {file.where} takes what comes of {takes}, and follows {before}: the layers are no chain; "
                "accepted: each takes what the one before it gives, once"
            )
    if inputs != names[:1] or outputs != names[-1:]:
        raise ValueError(
            f"{file.where} goes from {inputs[0]!r} to {outputs[0]!r}, and its layers from {names[0]!r} to {names[-1]!r}: the "
            "layers are no chain; accepted: one that uses all of them"
        )


def _ends(value: object) -> list[str]:
    """``["dense", 0, 0]``, or a list of such."""
    if not isinstance(value, list) or not value:
        return []
    each = [value] if isinstance(value[0], str) else value
    return [str(end[0]) if isinstance(end, list) and end and end[1:] == [0, 0] else shown(end) for end in each]


def _sources(file: KerasFile, name: str, nodes: object) -> list[str]:
    """The names of the layers whose outputs a layer takes, over all of its calls."""
    found: list[str] = []
    for node in nodes if isinstance(nodes, list) else [nodes]:
        if isinstance(node, dict):  # Keras 3: the arguments of a call
            args = node.get("args")
            if not isinstance(args, list) or len(args) != 1:
                raise ValueError(f"layer {name!r} of {file.where} is called with {shown(args)}; accepted: one tensor")
            found += _tensor(file, name, args[0])
        elif isinstance(node, list):  # Keras 2: [name, node, tensor, arguments] for each tensor
            for tensor in [node] if node and isinstance(node[0], str) else node:
                history = tensor[:3] if isinstance(tensor, list) else tensor
                found.append(_history(file, name, history))
        else:
            raise file.wrong(f"layer {name!r} has inbound_nodes {shown(nodes)}")
    return found


def _tensor(file: KerasFile, name: str, argument: object) -> list[str]:
    if isinstance(argument, list):
        return [source for each in argument for source in _tensor(file, name, each)]
    config = argument.get("config") if isinstance(argument, dict) else None
    if not isinstance(config, dict):
        raise ValueError(f"layer {name!r} of {file.where} is called with {shown(argument)}; accepted: one tensor")
    return [_history(file, name, config.get("keras_history"))]


def _history(file: KerasFile, name: str, history: object) -> str:
    if not isinstance(history, list) or len(history) != 3 or not isinstance(history[0], str):
        raise file.wrong(f"layer {name!r} takes {shown(history)}")
    if history[1:] != [0, 0]:
        raise ValueError(
            f"layer {name!r} of {file.where} takes {shown(history)}, a later call of {history[0]!r}; accepted: layers that are "
            "called once"
        )
    return history[0]
