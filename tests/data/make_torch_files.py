"""Makes the files that torch wrote: nets of safetensors, with what torch computes in float64, for tests where torch is not.

``python tests/data/make_torch_files.py`` writes them beside this script. torch.manual_seed keeps them the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file, save_model
from torch import nn

HERE = Path(__file__).parent


def nets() -> dict[str, tuple[nn.Module, torch.dtype]]:
    """By the name of the file."""
    deep = nn.Sequential(*[layer for _ in range(11) for layer in (nn.Linear(3, 3), nn.ReLU())][:-1])
    nested = nn.Sequential(
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU()),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)),
    )
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    return {
        "torch_deep_float32": (deep, torch.float32),
        "torch_nested_float64": (nested, torch.float64),
        "torch_bfloat16": (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.bfloat16),
        "torch_tied_float32": (tied, torch.float32),
    }


def main() -> None:
    """Write them."""
    torch.manual_seed(0)
    answers = {}
    for name, (module, dtype) in nets().items():
        module.to(dtype)
        path = str(HERE / f"{name}.safetensors")
        if "tied" in name:
            save_model(module, path)
        else:
            save_file(module.state_dict(), path)
        x = torch.randn(5, 3 if "deep" in name else 4).to(dtype).double()
        answers[f"{name}_x"] = x.numpy()
        with torch.no_grad():
            answers[f"{name}_y"] = module.double()(x).numpy()
    np.savez(HERE / "torch_answers.npz", **answers)


if __name__ == "__main__":
    main()
