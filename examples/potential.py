"""An interatomic potential of two networks: the energy of clusters of two kinds of atoms, and molecular dynamics with it.

Each atom's surroundings are described by smooth counts of its neighbours at several distances, one set for either kind, as
Behler and Parrinello do (Physical Review Letters 98, 146401, 2007). A network for each kind, of widths of its own, makes the
atom's energy of them; a cluster's energy is the sum. The hidden layers pass the counts on, which relu leaves as they are, with
random combinations of them; the output layers are fitted by least squares to energies of Morse's pair potential. Forces are
central differences: all displaced clusters go through the networks as one batch.

Exits with 1 if energies of new clusters are off by more than 5 % of their spread, if a rotation or an exchange of like atoms
changes an energy, or if the dynamics does not conserve it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupymlp import MLP

ATOMS = (slice(0, 7), slice(7, 12))  # of a cluster, by kind
KINDS = np.repeat([0, 1], [7, 5])
CENTRES = np.linspace(0.5, 3.0, 26)  # distances at which neighbours are counted, in units of the bond length
CUTOFF, WIDTH, HIDDEN = 3.2, 0.2, (96, 64)
DEPTHS = np.array([[1.0, 0.7], [0.7, 0.4]])  # of the true potential's wells, by kinds
STEP, TIME, STEPS = 1e-4, 0.004, 100


def array_library() -> ModuleType:
    """CuPy if there is a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.is_available() else np


def distances(xp: Any, positions: Any) -> Any:
    """(clusters, atoms, 3) -> (clusters, atoms, atoms); an atom is far from itself."""
    between = positions[:, :, None] - positions[:, None]
    return xp.sqrt((between**2).sum(axis=-1) + 1e6 * xp.eye(positions.shape[1]))


def descriptors(xp: Any, positions: Any) -> Any:
    """(clusters, atoms, 3) -> (clusters, atoms, 2 * centres): neighbours of either kind at each distance."""
    r = distances(xp, positions)
    fade = xp.where(r < CUTOFF, 0.5 + 0.5 * xp.cos(np.pi * r / CUTOFF), 0.0)
    counts = xp.exp(-(((r[..., None] - xp.asarray(CENTRES)) / WIDTH) ** 2)) * fade[..., None]
    return xp.concatenate([counts[:, :, atoms].sum(axis=2) for atoms in ATOMS], axis=-1)


def true_energy(positions: NDArray[Any]) -> NDArray[Any]:
    """Morse's potential, summed over pairs."""
    stretch = np.exp(-2.0 * (distances(np, positions) - 1.0))
    return np.asarray(0.5 * (DEPTHS[KINDS][:, KINDS] * (stretch**2 - 2 * stretch)).sum(axis=(1, 2)))


def clusters(rng: np.random.Generator, count: int) -> NDArray[Any]:
    """Atoms near the places of a cubic lattice, shaken by various amounts."""
    lattice = 1.1 * np.stack(np.meshgrid(*[np.arange(n) for n in (3, 2, 2)]), axis=-1).reshape(-1, 3)
    return lattice + rng.uniform(0.02, 0.12, (count, 1, 1)) * rng.standard_normal((count, len(KINDS), 3))


def fitted(rng: np.random.Generator) -> list[MLP]:
    """The two networks."""
    positions = clusters(rng, 3000)
    features, made = [], []
    described = descriptors(np, positions)
    for atoms, width in zip(ATOMS, HIDDEN, strict=True):
        of_kind = described[:, atoms]
        counts = of_kind.shape[-1]
        directions = np.hstack([np.eye(counts), rng.standard_normal((counts, width - counts))])
        offsets = -(directions.T * of_kind.reshape(-1, counts)[:width]).sum(axis=1)  # each bends at a sample
        offsets[:counts] = 0
        hidden = np.maximum(of_kind @ directions + offsets, 0)
        features.append(np.concatenate([hidden, np.ones((*hidden.shape[:2], 1))], axis=-1).sum(axis=1))
        made.append((directions, offsets))
    solution = np.linalg.lstsq(np.hstack(features), true_energy(positions), rcond=1e-10)[0]
    outputs = np.split(solution, [HIDDEN[0] + 1])
    return [
        MLP([directions, output[:-1, None]], [offsets, output[-1:]])
        for (directions, offsets), output in zip(made, outputs, strict=True)
    ]


def energy(xp: Any, nets: list[MLP], positions: Any) -> Any:
    """(clusters, atoms, 3) -> (clusters,)."""
    described = descriptors(xp, positions)
    return sum(net(described[:, atoms]).sum(axis=(1, 2)) for atoms, net in zip(ATOMS, nets, strict=True))


def forces(xp: Any, nets: list[MLP], positions: Any) -> Any:
    """(atoms, 3) -> (atoms, 3)."""
    moves = STEP * xp.eye(positions.size).reshape(-1, *positions.shape)
    plus, minus = xp.split(energy(xp, nets, xp.concatenate([positions + moves, positions - moves])), 2)
    return -((plus - minus) / (2 * STEP)).reshape(positions.shape)


def drift(xp: Any, nets: list[MLP], positions: Any) -> tuple[float, float]:
    """How far the total energy strays in a run by Verlet's method, and how far the kinetic energy goes."""
    speeds, force, total, kinetic = xp.zeros_like(positions), forces(xp, nets, positions), [], []
    for _ in range(STEPS):
        speeds += 0.5 * TIME * force
        positions = positions + TIME * speeds
        force = forces(xp, nets, positions)
        speeds += 0.5 * TIME * force
        kinetic.append(float(0.5 * (speeds**2).sum()))
        total.append(kinetic[-1] + float(energy(xp, nets, positions[None])[0]))
    return max(total) - min(total), max(kinetic)


def main() -> int:
    """Fit, compare, move; 0 if all three checks hold."""
    xp, rng = array_library(), np.random.default_rng(0)
    nets = fitted(rng)
    new = clusters(rng, 500)
    true, found = true_energy(new), energy(xp, nets, xp.asarray(new))
    error = float(np.sqrt(((np.asarray(found.tolist()) - true) ** 2).mean()) / true.std())
    turned = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    order = np.concatenate([rng.permutation(np.arange(12)[atoms]) for atoms in ATOMS])
    change = float(abs(energy(xp, nets, xp.asarray(new[:, order] @ turned + 5.0)) - found).max())
    strayed, kinetic = drift(xp, nets, xp.asarray(new[0]))
    print(f"energies with {xp.__name__}: off by {100 * error:.2f} % of their spread, {true.std():.2f}")
    print(f"turned, moved and with like atoms exchanged: another energy by {change:.1e}")
    print(f"dynamics of {STEPS} steps: kinetic energy up to {kinetic:.3f}, total energy within {strayed:.1e}")
    return int(not (error < 0.05 and change < 1e-9 and strayed < 0.01 * kinetic))


if __name__ == "__main__":
    sys.exit(main())
