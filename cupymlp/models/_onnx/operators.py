"""One function an operator: what it makes of inputs of which one, at least, depends on the model's input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import unchanged
from .algebra import Terms, value
from .graph import Node
from .layers import Data, Layer, folded
from .reader import Above, Operator, Reader, Value

__all__ = ["OPERATORS"]

_SELU = {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}
_THRESHOLD = 20.0  # where a softplus may be cut off: v is e^-20 off there at most


# --- Layers -----------------------------------------------------------------------------------------------------------


def _gemm(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    """The sum of alpha A B and beta C; A, or B, may be transposed first."""
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    trans_a, trans_b = node.flag("transA"), node.flag("transB")
    node.finish(2, 3)
    if not isinstance(inputs[0], Data):
        raise node.refuse(
            "its input A is a constant: what comes out has samples in columns. Accepted: data as A, a weight as B"
        )
    data = inputs[0]
    if trans_a:
        raise node.refuse("transA is 1: samples are in columns. Accepted: 0, samples in rows")
    if len(data.lead) != 1:
        raise node.refuse(f"its input A has the axes {list(data.shape)}; accepted: (rows, features)")
    weight = reader.weight(node, inputs[1], node.inputs[1])
    if trans_b:
        weight = weight.T
    if alpha != 1:
        weight = weight.astype(np.float64) * alpha
    bias = None
    if len(inputs) > 2 and inputs[2] is not None and beta != 0:
        c = reader.numbers(node, inputs[2], "input C")
        reader.saw(node, c, "input C")
        n = weight.shape[1]
        if c.ndim > 2 or any(d != 1 for d in c.shape[:-1]) or (c.ndim and c.shape[-1] not in (1, n)):
            raise node.refuse(
                f"its input C, {node.inputs[2]!r}, has the shape {list(c.shape)}; accepted: one number, or one for each of "
                f"the {n} outputs, the same in all rows"
            )
        reader.budget.spend(node, (n,), 8)
        bias = np.broadcast_to(c.reshape(-1).astype(np.float64) * beta, (n,))
    return reader.layer(node, 0, data, weight, bias)


def _matmul(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.finish(2, 2)
    left, right = inputs
    if isinstance(left, Data) and isinstance(right, Data):
        raise node.refuse("both its inputs depend on the model's input; accepted: data times a constant weight")
    if isinstance(left, Data):
        return reader.layer(node, 0, left, reader.weight(node, right, node.inputs[1]))
    data = reader.data(node, right)
    if data.lead:
        raise node.refuse(
            "its weight is on the left of data with several axes, whose samples are in columns. Accepted: data times weight, "
            "or weight times a vector"
        )
    return reader.layer(node, 1, data, reader.weight(node, left, node.inputs[0]).T)


def _batch_normalization(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    epsilon = node.number("epsilon", 1e-5)
    training = node.flag("training_mode")
    for ignored in ("momentum", "spatial"):
        node.attribute(ignored, "f" if ignored == "momentum" else "i", None)
    node.finish(5, 5)
    data = reader.data(node, inputs[0])
    if training:
        raise node.refuse("training_mode is 1: export the model in evaluation mode")
    if len(data.lead) != 1:
        raise node.refuse(f"its input has the axes {list(data.shape)}; accepted: (rows, features)")
    named = zip(("scale", "B", "mean", "var"), inputs[1:], strict=True)
    scale, shift, mean, variance = (np.asarray(reader.feature_numbers(node, v, data, f"input {n}")) for n, v in named)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + epsilon)
    if not np.isfinite(factor).all():
        raise node.refuse("its variance and epsilon make a scale that is not finite")
    data = data.of_width(factor.size)
    factor, shift = np.atleast_1d(factor), np.atleast_1d(shift - mean * factor)
    return reader.affine(data, data.terms * factor + shift, factor)


def _scaler(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    """(x - offset) * scale, of ai.onnx.ml."""
    offset, scale = (
        np.array(node.attribute(name, "floats", None) or [missing], np.float64)
        for name, missing in (("offset", 0), ("scale", 1))
    )
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    for numbers in (offset, scale):
        if not np.isfinite(numbers).all() or (data.width is not None and numbers.size not in (1, data.width)):
            raise node.refuse(f"its offset or scale has {numbers.size} numbers, or some that are not finite")
    data = data.of_width(max(offset.size, scale.size))
    return reader.affine(data, (data.terms + -offset) * scale, scale)


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def _two(reader: Reader, node: Node, inputs: list[Value], what: Callable[[Any, Any], Terms]) -> Data:
    """A function of two inputs, one of which may be constant."""
    node.finish(2, 2)
    left, right = inputs
    if isinstance(left, Data) and isinstance(right, Data):
        if left.base is not right.base or left.lead != right.lead:
            raise node.refuse(
                f"it joins two branches, {node.inputs[0]!r} and {node.inputs[1]!r}; accepted: layers one after the other"
            )
        return replace(left, terms=what(left.terms, right.terms))
    data = reader.data(node, left if isinstance(left, Data) else right)
    name, given = (node.inputs[1], right) if data is left else (node.inputs[0], left)
    number = reader.feature_numbers(node, given, data, f"constant {name!r}")
    with np.errstate(all="ignore"):
        terms = what(data.terms, number) if data is left else what(number, data.terms)
    if not all(np.isfinite(n).all() for n in terms.numbers.values()):
        raise node.refuse(f"with its constant {name!r} it makes numbers that are not finite")
    return reader.affine(data, terms, number)


def _inverse(divisor: Any) -> Any:
    return divisor.of("reciprocal") if isinstance(divisor, Terms) else 1 / np.float64(divisor)


def _sum(left: Any, right: Any) -> Terms:
    terms, other = (left, right) if isinstance(left, Terms) else (right, left)
    total: Terms = terms + other
    return total


def _difference(left: Any, right: Any) -> Terms:
    return _sum(left, right * -1.0)


def _product(left: Any, right: Any) -> Terms:
    terms, other = (left, right) if isinstance(left, Terms) else (right, left)
    total: Terms = terms * other
    return total


def _quotient(left: Any, right: Any) -> Terms:
    return _product(left, _inverse(right))


def _binary(what: Callable[[Any, Any], Terms]) -> Operator:
    return lambda reader, node, inputs: _two(reader, node, inputs, what)


def _negative(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    return replace(data, terms=data.terms * -1.0)


def _power(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.finish(2, 2)
    data = reader.data(node, inputs[0])
    exponent = reader.numbers(node, inputs[1], "exponent")
    terms = data.terms
    known = {
        1.0: lambda: terms,
        2.0: lambda: terms * terms,
        3.0: lambda: terms * terms * terms,
        0.5: lambda: terms.of("sqrt"),
    }
    number = float(exponent.reshape(())) if exponent.size == 1 else None
    if number not in known:
        raise node.refuse(f"its exponent is {exponent.ravel()[:4].tolist()}; accepted: 1, 2, 3 or 0.5")
    return replace(data, terms=known[number]())


# --- Functions --------------------------------------------------------------------------------------------------------


def _function(name: str) -> Operator:
    def operator(reader: Reader, node: Node, inputs: list[Value]) -> Data:
        node.finish(1, 1)
        data = reader.data(node, inputs[0])
        return replace(data, terms=data.terms.of(name))

    return operator


def _with_alpha(name: str, default: float) -> Operator:
    def operator(reader: Reader, node: Node, inputs: list[Value]) -> Data:
        alpha = node.number("alpha", default)
        node.finish(1, 1)
        data = reader.data(node, inputs[0])
        return replace(data, terms=data.terms.of(name, alpha))

    return operator


def _selu(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    given = {name: node.number(name, value) for name, value in _SELU.items()}
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    if any(not math.isclose(given[name], value, rel_tol=1e-6) for name, value in _SELU.items()):
        raise node.refuse(f"its constants are {given}; accepted: those of selu, {_SELU}")
    return replace(data, terms=data.terms.of("selu"))


def _gelu(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    approximate = node.attribute("approximate", "s", "none")
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    if approximate not in ("none", "tanh"):
        raise node.refuse(f"approximate is {approximate!r}; accepted: 'none', 'tanh'")
    return replace(data, terms=data.terms.of("gelu" if approximate == "none" else "gelu_tanh"))


def _swish(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    alpha = node.number("alpha", 1.0)
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    return replace(data, terms=data.terms * (data.terms * alpha).of("sigmoid"))


def _hard_sigmoid(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    """Between 0 and 1: alpha v + beta, which is w / 6 + 1 / 2 of a w that is scaled and shifted."""
    alpha, beta = node.number("alpha", 0.2), node.number("beta", 0.5)
    node.finish(1, 1)
    data = reader.data(node, inputs[0])
    terms = data.terms
    if not (math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5):
        terms = terms * (6 * alpha) + 6 * (beta - 0.5)
    return replace(data, terms=terms.of("hard_sigmoid"))


def _clip(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    bounds: list[float | None] = [node.attribute(name, "f", None) for name in ("min", "max")]
    node.finish(1, 3)
    data = reader.data(node, inputs[0])
    for i, given in enumerate(inputs[1:]):
        if given is not None:
            if not isinstance(given, np.ndarray) or given.size != 1:
                raise node.refuse("its bounds are no constant numbers")
            bounds[i] = float(given.reshape(()))
    least, most = bounds
    if least == 0 and (most is None or most >= 3e38):
        return replace(data, terms=data.terms.of("relu"))
    if least == 0 and most == 6:
        return replace(data, terms=data.terms.of("relu6"))
    raise node.refuse(f"it clips to {least} and {most}; accepted: 0 and 6 (relu6), or 0 alone (relu)")


def _maximum(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.finish(2, 2)
    left, right = inputs
    data = reader.data(node, left if isinstance(left, Data) else right)
    other = reader.numbers(node, right if data is left else left, "other input")
    if other.size != 1 or float(other.reshape(())) != 0:
        raise node.refuse("it is the maximum with something else than 0; accepted: 0 (relu)")
    return replace(data, terms=data.terms.of("relu"))


def _prelu(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    node.finish(2, 2)
    data = reader.data(node, inputs[0])
    slope = np.unique(np.asarray(reader.feature_numbers(node, inputs[1], data, "slope")))
    if slope.size != 1:
        raise node.refuse("its slopes differ between features; accepted: one slope (leaky_relu)")
    return replace(data, terms=data.terms.of("leaky_relu", reader.shortest(float(slope[0]))))


def _row_wise(name: str) -> Operator:
    def operator(reader: Reader, node: Node, inputs: list[Value]) -> Data:
        axis = node.attribute("axis", "i", -1 if reader.graph.opset >= 13 else 1)
        node.finish(1, 1)
        data = reader.data(node, inputs[0])
        if axis not in (-1, len(data.lead)):
            raise node.refuse(f"its axis is {axis}; accepted: the last one, -1 or {len(data.lead)}")
        return replace(data, terms=data.terms.of(name))

    return operator


def _greater(reader: Reader, node: Node, inputs: list[Value]) -> Above:
    node.finish(2, 2)
    data = reader.data(node, inputs[0])
    threshold = reader.numbers(node, inputs[1], "threshold")
    if threshold.size != 1:
        raise node.refuse("it compares with more than one number")
    return Above(data, float(threshold.reshape(())))


def _where(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    """softplus, cut off: v itself where it is large."""
    node.finish(3, 3)
    above, linear, soft = inputs
    if isinstance(above, Above) and isinstance(linear, Data) and isinstance(soft, Data):
        v = above.data.terms
        (factor,) = soft.terms.numbers.values() if len(soft.terms.numbers) == 1 else (0.0,)
        same = above.data.base is linear.base is soft.base
        if (
            same
            and np.ndim(factor) == 0
            and above.threshold >= _THRESHOLD
            and soft.terms.is_close(v.of("softplus") * factor)
            and linear.terms.is_close(v * factor, reader.tolerance)
        ):
            return soft
    raise node.refuse(
        f"it chooses between values; accepted: softplus(v), or v where v is greater than {_THRESHOLD:g} or more"
    )


def _negated_and_itself(reader: Reader, node: Node, inputs: list[Value]) -> Data:
    """The probabilities of two classes, 1 - sigmoid(v) and sigmoid(v): the sigmoids of -v and v, a layer of two outputs."""
    axis = node.attribute("axis", "i", 0)
    node.finish(1, 16)
    if len(inputs) == 2 and all(isinstance(v, Data) for v in inputs):
        no, yes = (reader.data(node, v) for v in inputs)
        found = reader.resolved(node, yes, node.inputs[1])
        opposite = (yes.terms * -1.0 + 1.0).is_close(no.terms)
        if no.base is yes.base and opposite and axis in (-1, len(yes.lead)) and found.activation == "sigmoid":
            base = folded(yes.base, found.before)
            if found.after.is_trivial and isinstance(base, Layer):
                return replace(yes, base=_doubled(base), terms=value().of("sigmoid"))
    raise node.refuse("it joins several tensors; accepted: 1 - p and p, where p is a sigmoid")


def _doubled(layer: Layer) -> Layer:
    """The layer's outputs, negated, and then as they are."""
    signs = np.repeat([-1.0, 1.0], layer.width)
    scale, shift = (np.broadcast_to(np.asarray(n, np.float64), (layer.width,)) for n in (layer.scale, layer.shift))
    return replace(
        layer,
        weight=np.concatenate([layer.weight, layer.weight], 1),
        bias=None if layer.bias is None else np.concatenate([layer.bias, layer.bias]),
        scale=np.tile(scale, 2) * signs,
        shift=np.tile(shift, 2) * signs if np.any(shift) else 0.0,
    )


OPERATORS: dict[str, Operator] = {
    "Gemm": _gemm,
    "MatMul": _matmul,
    "BatchNormalization": _batch_normalization,
    "ai.onnx.ml.Scaler": _scaler,
    "Add": _binary(_sum),
    "Sub": _binary(_difference),
    "Mul": _binary(_product),
    "Div": _binary(_quotient),
    "Neg": _negative,
    "Pow": _power,
    "Relu": _function("relu"),
    "Tanh": _function("tanh"),
    "Sigmoid": _function("sigmoid"),
    "Softplus": _function("softplus"),
    "Softsign": _function("softsign"),
    "Exp": _function("exp"),
    "Sin": _function("sin"),
    "HardSwish": _function("hard_swish"),
    "Erf": _function("erf"),
    "Sqrt": _function("sqrt"),
    "Abs": _function("abs"),
    "Reciprocal": _function("reciprocal"),
    "Log": _function("log"),
    "LeakyRelu": _with_alpha("leaky_relu", 0.01),
    "Elu": _with_alpha("elu", 1.0),
    "Celu": _with_alpha("celu", 1.0),
    "PRelu": _prelu,
    "Selu": _selu,
    "Gelu": _gelu,
    "Swish": _swish,
    "HardSigmoid": _hard_sigmoid,
    "Clip": _clip,
    "Max": _maximum,
    "Softmax": _row_wise("softmax"),
    "LogSoftmax": _row_wise("log_softmax"),
    "Greater": _greater,
    "Where": _where,
    "Concat": _negated_and_itself,
    "Identity": unchanged.identity,
    "Dropout": unchanged.dropout,
    "ai.onnx.ml.ZipMap": unchanged.zip_map,
    "Cast": unchanged.cast,
    "CastLike": unchanged.cast_like,
    "Transpose": unchanged.transpose,
    "Flatten": unchanged.flatten,
    "Reshape": unchanged.reshape,
    "Squeeze": unchanged.squeeze,
    "Unsqueeze": unchanged.unsqueeze,
}
