"""import cupymlp touches no device and needs no CuPy, no driver and no home."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

NO_CUPY = """
    import sys

    class Block:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy" or name.startswith("cupy."):
                raise ImportError("no CuPy here")

    sys.meta_path.insert(0, Block())
"""
USE = """
    import numpy as np, cupymlp
    net = cupymlp.MLP([np.eye(3)], [np.ones(3)])
    assert net(np.array([[1.0, -3.0, 0.0]]), device="cpu").tolist() == [[2, -2, 1]]
    assert cupymlp.fused_mlp(np.ones(3), np.eye(3), device="cpu").tolist() == [1, 1, 1]
    assert cupymlp.verify(net, device="cpu").ok
"""


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_without_cupy_everything_on_numpy_arrays_works():
    program = (
        NO_CUPY
        + USE
        + """
    assert net(np.ones((2, 3))).shape == (2, 3)  # device=None: the CPU
    assert cupymlp.verify(net).ok
    try:
        net(np.ones(3), device="cuda")
    except RuntimeError as error:
        assert "CuPy cannot be imported (no CuPy here); install CuPy with 'pip install cupy-cuda12x'" in str(error), error
    else:
        sys.exit("no error")
"""
    )
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_with_cupy_and_no_device():
    pytest.importorskip("cupy")
    done = run(
        "import cupy\n" + textwrap.dedent(USE) + "assert net(np.ones((2, 3))).shape == (2, 3)", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr


def test_with_a_home_that_cannot_be_written():
    """CuPy 14 makes its cache folder on import, and cannot: then there is no GPU, and the reason is told."""
    pytest.importorskip("cupy")
    program = textwrap.dedent(USE) + textwrap.dedent("""
    assert net(np.ones((2, 3))).shape == (2, 3)
    try:
        net(np.ones(3), device="cuda")
    except RuntimeError as error:
        assert "set CUPY_CACHE_DIR to a folder that can be written" in str(error), error
    else:
        sys.exit("no error")
    """)
    done = run(program, HOME="/proc/nowhere", XDG_CACHE_HOME="/proc/nowhere", CUPY_CACHE_DIR="/proc/nowhere")
    assert done.returncode == 0, done.stderr


def test_importing_touches_no_device():
    done = run("import sys, cupymlp, cupymlp.cli; sys.exit('cupy' in sys.modules)")
    assert done.returncode == 0


def test_no_assert_guards_the_library():
    """Asserts vanish under -O: the same errors must come with it."""
    program = """
    import numpy as np, cupymlp
    try:
        cupymlp.MLP([np.ones((2, 3)), np.ones((4, 5))])
    except ValueError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-O", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "do not chain" in done.stdout
