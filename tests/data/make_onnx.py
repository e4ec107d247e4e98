"""Write tests/data/onnx: files of PyTorch's two exporters, and what PyTorch computes of them in float64.

Run by hand, from the repository's root, where torch, onnx and onnxscript are installed: the files are committed, so that the
tests need neither. They were made with the versions that each file names as its producer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from torch_nets import Policy, View, exact, export, sequential

FOLDER = Path(__file__).parent / "onnx"
NETS = {
    "a": ["relu", ("leaky_relu", 0.2), ("elu", 0.7), ("celu", 1.3), "identity"],
    "b": ["selu", "gelu", "gelu_tanh", "silu", "softmax"],
    "c": ["tanh", "sigmoid", "softplus", "softsign", "log_softmax"],
    "d": ["hard_sigmoid", "hard_swish", "relu6", "squareplus", ("sin", 3.25)],
    "e": ["exp", "tanh", "sigmoid"],
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
EXPECTED = {}


def write(name, net, x, **options):
    data = export(net, x, **options)
    if "external" not in options:
        (FOLDER / f"{name}.onnx").write_bytes(data)
    EXPECTED[f"{name}.x"] = x.double().numpy()
    EXPECTED[f"{name}.y"] = exact(net, x)


def main():
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    for dtype, torch_dtype in DTYPES.items():
        for exporter, dynamo in (("script", False), ("dynamo", True)):
            # The oldest opset writes most activations in pieces; PyTorch's exporters have 18 and 13 at least.
            opset = None if dtype == "float64" else 18 if dynamo else 13
            for kind, activations in NETS.items():
                sizes = [6, 6, 9, 9, 5, 5][: len(activations) + 1]
                net = sequential(sizes, activations, [i % 2 == 0 for i in range(len(activations))])
                x = torch.randn(7, 6)
                write(f"{kind}-{exporter}-{dtype}", net.to(torch_dtype), x.to(torch_dtype), dynamo=dynamo, opset=opset)
            for kind, net in (("policy", Policy()), ("view", View())):
                x = torch.randn(7, 6).to(torch_dtype)
                write(f"{kind}-{exporter}-{dtype}", net.eval().to(torch_dtype), x, dynamo=dynamo, opset=opset)
    net = sequential([6, 40, 3], ["relu", "identity"], [True, True])
    write("external", net, torch.randn(7, 6), dynamo=True, external=str(FOLDER / "external.onnx"))
    write("three-axes", sequential([6, 8, 3], ["gelu", "identity"], [True, True]), torch.randn(2, 7, 6), dynamo=False)
    write("fixed-batch", nn.Sequential(nn.Flatten(), net.float()), torch.randn(7, 6), dynamo=False, dynamic=False)
    for dtype in (torch.float16, torch.bfloat16):
        net = sequential([6, 8, 8, 3], ["gelu", "silu", "identity"], [True, True, False]).to(dtype)
        write(str(dtype).removeprefix("torch."), net, torch.randn(7, 6).to(dtype), dynamo=True, opset=18)
    np.savez_compressed(FOLDER / "expected.npz", **EXPECTED)


if __name__ == "__main__":
    main()
