"""Networks as people write them in PyTorch, for what its exporters make of them. Imported where PyTorch is installed only."""

from __future__ import annotations

import io
import warnings

import torch
from torch import nn


class Sin(nn.Module):
    """omega should be a float32 number: the exporters write it as one, in float64 networks, too."""

    def __init__(self, omega):
        super().__init__()
        self.omega = omega

    def forward(self, x):
        return torch.sin(self.omega * x)


class Exp(nn.Module):
    def forward(self, x):
        return torch.exp(x)


class Squareplus(nn.Module):
    def forward(self, x):
        return (x + torch.sqrt(x * x + 4)) / 2


# What cupymlp calls it: a module of it.
MODULES = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    ("leaky_relu", 0.2): lambda: nn.LeakyReLU(0.2),
    ("elu", 0.7): lambda: nn.ELU(0.7),
    ("celu", 1.3): lambda: nn.CELU(1.3),
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    ("sin", 3.25): lambda: Sin(3.25),
    ("sin", 1.0): lambda: Sin(1.0),
    "exp": Exp,
    "hard_sigmoid": nn.Hardsigmoid,
    "hard_swish": nn.Hardswish,
    "relu6": nn.ReLU6,
    "squareplus": Squareplus,
}
LAST = {**MODULES, "softmax": lambda: nn.Softmax(-1), "log_softmax": lambda: nn.LogSoftmax(1)}


def sequential(sizes, activations, biases):
    """nn.Sequential; one activation and one truth value a layer."""
    parts = []
    for k, n, spec, bias in zip(sizes, sizes[1:], activations, biases):
        parts.append(nn.Linear(k, n, bias=bias))
        if spec != "identity":
            parts.append(LAST[spec]())
    return nn.Sequential(*parts).eval()


class Policy(nn.Module):
    """A network as reinforcement learning has them: normalised observations, BatchNorm, Dropout, scaled actions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("std", torch.rand(6) + 0.5)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8, bias=False)
        self.after = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(8, 2)
        for norm in (self.norm, self.after):
            with torch.no_grad():
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
                norm.weight.uniform_(0.5, 2)
                norm.bias.normal_()

    def forward(self, x):
        x = ((x - self.mean) / self.std).flatten(1)
        x = nn.functional.elu(self.norm(self.first(x)))
        x = self.dropout(self.after(torch.tanh(self.second(x))))
        return 1.5 * torch.tanh(self.last(x)) - 0.25


class View(nn.Module):
    """What ``x.view(x.size(0), -1)`` makes: lengths of axes, computed in the graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 5))

    def forward(self, x):
        return self.layers(x.view(x.size(0), -1))


def export(net, x, *, dynamo, opset=None, external=None, dynamic=True):
    """The bytes that torch.onnx.export writes; with ``external``, a path, to that file and one beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
            program = torch.onnx.export(
                net, (x,), dynamo=True, verbose=False, opset_version=opset, dynamic_shapes=shapes, input_names=["x"]
            )
            for node in program.model.graph:
                node.metadata_props.clear()  # the lines of this program that made it
            if external is not None:
                program.save(external, external_data=True)
            return program.model_proto.SerializeToString()
        file = io.BytesIO()
        axes = {"x": {0: "batch"}} if dynamic else None
        torch.onnx.export(net, (x,), file, dynamo=False, opset_version=opset, dynamic_axes=axes, input_names=["x"])
        return file.getvalue()


def exact(net, x):
    """The network in float64, of the weights as they are, as an array."""
    with torch.no_grad():
        return net.double()(x.double()).numpy()
