"""The examples run, on the CPU path here and on the GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_digits():
    pytest.importorskip("sklearn")
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "digits.py")],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip


def test_digits():
    done = run_digits()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 540 ") >= 2
    assert "every probability and prediction agrees" in done.stdout


@pytest.mark.gpu
def test_digits_on_the_gpu():
    done = run_digits()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "computed on NVIDIA" in done.stdout


def test_digits_fails_when_a_prediction_is_off(monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    right = digits.MLP.__call__

    def wrong(self, x, *args, **options):
        y = right(self, x, *args, **options)
        y[3, 1] += 0.5
        return y

    monkeypatch.setattr(digits.MLP, "__call__", wrong)
    assert digits.main() == 1
    assert "FAILED" in capsys.readouterr().out
