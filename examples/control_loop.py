"""A policy inside a simulation's loop: 1,024 poles on carts, kept upright by a network that is called at every step.

The policy is a saturated linear feedback, written as a network of two layers: clip(u, -F, F) = relu(u + F) - relu(u - F) - F.
A trained policy takes its place as it is (`MLP.from_state_dict`, `MLP.from_onnx`, ...). State and action stay in the same
arrays, so on a GPU the call is bound once, as a CUDA graph. Exits with 1 if a pole falls.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from cupymlp import MLP

CARTS, STEPS, DT = 1024, 500, 0.02  # seconds
GRAVITY, CART, POLE, LENGTH = 9.8, 1.0, 0.1, 0.5  # m/s^2, kg, kg, m: half the pole's length
FORCE = 10.0  # the most that the motor gives, in newtons
GAINS = np.array([[1.0], [2.2], [36.0], [8.4]])  # N of each of x (m), its speed, the angle (rad), and its speed


def array_library() -> ModuleType:
    """CuPy if there is a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.is_available() else np


def policy() -> MLP:
    """Force of a state (x, speed, angle, angular speed), in newtons."""
    return MLP(
        [np.hstack([GAINS, GAINS]), np.array([[1.0], [-1.0]])],
        biases=[np.array([FORCE, -FORCE]), np.array([-FORCE])],
        dtype="float32",
    )


def move(xp: Any, state: Any, force: Any) -> None:
    """One step of Euler's method, in place: a pole on a cart without friction."""
    _, speed, angle, turn = state.T
    sin, cos, mass = xp.sin(angle), xp.cos(angle), CART + POLE
    push = (force + POLE * LENGTH * turn**2 * sin) / mass
    angular = (GRAVITY * sin - cos * push) / (LENGTH * (4 / 3 - POLE * cos**2 / mass))
    linear = push - POLE * LENGTH * angular * cos / mass
    state += DT * xp.stack([speed, linear, turn, angular], axis=1)


def simulate(xp: Any, net: MLP, *, controlled: bool = True) -> Any:
    """The states after all steps."""
    state = xp.asarray(np.random.default_rng(0).uniform(-0.2, 0.2, (CARTS, 4)).astype("f4"))
    force = xp.zeros((CARTS, 1), "f4")
    step = partial(net, state, out=force) if xp is np else net.bind(state, out=force)
    for _ in range(STEPS):
        if controlled:
            step()
        move(xp, state, force[:, 0])
    return state


def main() -> int:
    """Simulate with the policy and without; 0 if it makes the difference."""
    xp, net = array_library(), policy()
    state = np.array([0.3, -0.4, 0.25, 0.1], "f4")
    clipped = np.clip(state @ GAINS, -FORCE, FORCE)
    if not np.allclose(net(state), clipped, atol=1e-5):
        raise RuntimeError(f"the network gives {net(state)} N for clip(state @ gains) = {clipped} N")
    start = time.perf_counter()
    with_policy = abs(simulate(xp, net)[:, 2])
    seconds = time.perf_counter() - start
    without = abs(simulate(xp, net, controlled=False)[:, 2])
    upright, fallen = int((with_policy < 0.01).sum()), int((without > 0.5).sum())
    print(f"{STEPS} steps of {CARTS} carts with {xp.__name__}: {1e6 * seconds / STEPS:.0f} us a step")
    print(f"upright to 0.01 rad after {STEPS * DT:.0f} s: {upright} with the policy; off by 0.5 rad without: {fallen}")
    return int(upright != CARTS or fallen < 0.9 * CARTS)


if __name__ == "__main__":
    sys.exit(main())
