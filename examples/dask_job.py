"""A job from zarr to zarr that may be killed at any time: started again, it computes what is missing.

    python dask_job.py [FOLDER]

Makes FOLDER/x.zarr, if it is not there, and computes FOLDER/y.zarr from it. For the sake of the example the first attempt is
stopped on its way. With a Dask cluster (docs/clusters.md) the same lines use all its GPUs. Exits with 1 if the second attempt
computes what was there, or if a result is further off than the proven error bound allows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from dask.callbacks import Callback

import cupymlp.dask
from cupymlp import MLP
from cupymlp.reference import forward_and_bound

ROWS, CHUNK, FEATURES = 40_000, 2_000, 48


class Stop(Callback):  # type: ignore[misc]
    """Stops Dask's local scheduler, as Ctrl-C would, after so many tasks."""

    def __init__(self, tasks: int) -> None:
        super().__init__(posttask=self._count)
        self._left = tasks

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def network() -> MLP:
    """The same at every start; a real job has ``MLP.load("policy.npz")`` here."""
    rng = np.random.default_rng(0)
    return MLP([rng.standard_normal(shape).astype("f4") for shape in [(FEATURES, 64), (64, 40), (40, 24)]])


def main(folder: Path) -> int:
    """Stop one attempt, complete it, check every row."""
    source, target, net = folder / "x.zarr", folder / "y.zarr", network()
    if not source.exists():
        x = zarr.create_array(source, shape=(ROWS, FEATURES), chunks=(CHUNK, FEATURES), dtype="f4")
        x[:] = np.random.default_rng(1).standard_normal(x.shape, dtype="f4")
    try:
        with Stop(tasks=8):
            cupymlp.dask.store(net, source, target)
    except KeyboardInterrupt:
        print("stopped; starting again")
    done = cupymlp.dask.store(net, source, target)
    print(f"{done.computed} of {done.regions} regions were missing, and are computed now")
    x, y = zarr.open_array(source, mode="r")[:], done.target[:]
    exact, bound = forward_and_bound(net.network, net.weights, net.biases, x)
    off = float((np.abs(y - exact) / bound).max())
    print(f"{len(y):,} rows, off by {off:.3f} of what the error bound allows at most")
    again = cupymlp.dask.store(net, source, target)
    return int(not (off <= 1 and done.computed < done.regions and again.computed == 0))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))
