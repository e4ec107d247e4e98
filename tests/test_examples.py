"""The examples run, on the CPU path here and on the GPU where there is one, and notice a network that is wrong."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# What an example needs beside numpy, and what it prints when all is well.
SAYS = {
    "control_loop": ((), r"upright to 0.01 rad after 10 s: 1024 with the policy; off by 0.5 rad without: 1024"),
    "dask_job": (("dask", "zarr"), "of 20 regions were missing, and are computed now"),
    "digits": (("sklearn",), "every probability and prediction agrees"),
    "potential": ((), "turned, moved and with like atoms exchanged"),
    "surrogate": ((), "400 steps of 96 x 96 cells"),
}


def run(name):
    for library in SAYS[name][0]:
        pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[name][1] in done.stdout
    return done.stdout


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name):
    run(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAYS)
def test_example_on_the_gpu(name):
    said = run(name)
    if name == "digits":
        assert "computed on NVIDIA" in said
    elif name != "dask_job":
        assert "with cupy" in said


@pytest.fixture
def wrong(monkeypatch):
    """``wrong(name)``: the example's module, in which networks give numbers that are off, on the CPU."""

    def load(name, by):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        module = importlib.import_module(name)
        right = module.MLP.__call__

        def call(self, x, out=None, **options):
            y = right(self, x, out, device="cpu")
            by(y)
            return y

        monkeypatch.setattr(module.MLP, "__call__", call)
        monkeypatch.setattr(module, "array_library", lambda: np, raising=False)
        return module

    return load


def add(*where, amount):
    def change(y):
        y[where] += amount

    return change


def test_digits_fails_when_a_prediction_is_off(wrong, capsys):
    pytest.importorskip("sklearn")
    assert wrong("digits", add(3, 1, amount=0.5)).main() == 1
    assert "FAILED" in capsys.readouterr().out


def test_control_loop_fails_when_the_policy_pushes_the_other_way(wrong, monkeypatch):
    def turned(y):
        if y.ndim == 2:  # the check of one state, before, is to pass
            y *= -1

    module = wrong("control_loop", turned)
    monkeypatch.setattr(module, "STEPS", 100)
    assert module.main() == 1


def test_control_loop_fails_when_the_policy_is_not_the_feedback(wrong):
    with pytest.raises(RuntimeError, match="the network gives"):
        wrong("control_loop", add(..., amount=0.1)).main()


@pytest.mark.parametrize("amount", [0.0, 0.05])
def test_surrogate_fails_when_the_reaction_is_off(wrong, monkeypatch, amount):
    module = wrong("surrogate", add(..., 0, amount=amount))
    monkeypatch.setattr(module, "STEPS", 60)
    assert module.main() == (amount > 0)


def test_potential_fails_when_atoms_are_told_apart(wrong):
    assert wrong("potential", add(0, 0, amount=1e-3)).main() == 1


def test_dask_job_goes_on_in_the_same_folder_and_fails_when_a_row_is_off(tmp_path, capsys, wrong):
    pytest.importorskip("dask")
    pytest.importorskip("zarr")
    module = wrong("dask_job", add(5, amount=0.0))
    assert module.main(tmp_path) == 0
    assert "stopped; starting again" in capsys.readouterr().out
    assert module.main(tmp_path) == 0  # all was there
    assert "0 of 20 regions were missing" in capsys.readouterr().out
    import zarr

    zarr.open_array(tmp_path / "y.zarr", mode="r+")[17_000, 3] += 1
    assert module.main(tmp_path) == 1
