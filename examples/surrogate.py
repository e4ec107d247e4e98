"""A network inside a time-stepper: a reaction-diffusion system whose reaction is learned from samples of it.

FitzHugh and Nagumo's excitable medium on a square of cells. The reaction of a cell's two
substances is replaced by a network of one hidden layer, whose output weights are fitted by least squares. Cells are rows:
every step evaluates all of them in one call. Exits with 1 if the fields end further than 1 % from those of the true reaction.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from cupymlp import MLP

CELLS, STEPS, DT, DIFFUSION = 96, 400, 0.1, 1.0  # cells a side; time and length in the model's units
HIDDEN, SAMPLES = 256, 20_000
Fields = Any  # (cells, cells, 2): NumPy or CuPy


def array_library() -> ModuleType:
    """CuPy if there is a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.is_available() else np


def reaction(fields: Fields, out: Fields) -> Fields:
    """What the network learns: the rates of both substances, from their amounts."""
    u, v = fields[..., 0], fields[..., 1]
    out[..., 0] = u - u**3 / 3 - v
    out[..., 1] = 0.08 * (u + 0.7 - 0.8 * v)
    return out


def fitted() -> MLP:
    """A network of the reaction: random hidden layer, output layer by least squares."""
    rng = np.random.default_rng(0)
    samples = rng.uniform([-2.5, -1.5], [2.5, 2.0], (SAMPLES, 2))
    directions = rng.standard_normal((2, HIDDEN))
    offsets = -(rng.uniform([-2.5, -1.5], [2.5, 2.0], (HIDDEN, 2)) * directions.T).sum(axis=1)  # each bends at a sample
    hidden = np.maximum(samples @ directions + offsets, 0)
    design = np.hstack([hidden, np.ones((SAMPLES, 1))])
    solution = np.linalg.lstsq(design, reaction(samples, np.empty_like(samples)), rcond=None)[0]
    return MLP([directions, solution[:-1]], [offsets, solution[-1]], dtype="float32")


def simulate(xp: Any, react: Callable[[Fields, Fields], Fields]) -> Fields:
    """The fields after all steps; the square is closed to a torus."""
    fields = xp.zeros((CELLS, CELLS, 2), "f4")
    fields[...] = xp.asarray([-1.2, -0.62], dtype="f4")  # at rest
    fields[: CELLS // 2, : CELLS // 8, 0] = 1.5  # excited, with an open end: it rolls up
    fields[: CELLS // 2, CELLS // 8 : CELLS // 4, 1] = 1.0
    rates = xp.empty_like(fields)
    for _ in range(STEPS):
        u = fields[..., 0]
        neighbours = sum(xp.roll(u, shift, axis) for axis in (0, 1) for shift in (-1, 1))
        react(fields, rates)
        rates[..., 0] += DIFFUSION * (neighbours - 4 * u)
        fields += DT * rates
    return fields


def main() -> int:
    """Fit, simulate with both, compare; 0 if they agree to 1 %."""
    xp, net = array_library(), fitted()
    start = time.perf_counter()
    learned = simulate(xp, lambda fields, out: net(fields, out=out))
    seconds = time.perf_counter() - start
    true = simulate(xp, reaction)
    spread = float(true[..., 0].max() - true[..., 0].min())
    error = float(abs(learned - true).mean()) / spread
    print(f"{STEPS} steps of {CELLS} x {CELLS} cells with {xp.__name__}: {1e3 * seconds / STEPS:.2f} ms a step")
    print(f"u spans {spread:.2f}; the learned reaction's fields are off by {100 * error:.3f} % of it on average")
    return int(not (error < 0.01 and spread > 2))


if __name__ == "__main__":
    sys.exit(main())
