"""The artefact: the wheel, built, installed elsewhere and used from there."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (file,) = out.glob("*.whl")
    return file


def test_the_wheel_carries_every_source_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    package = {str(f.relative_to(ROOT)) for f in (ROOT / "cupymlp").rglob("*") if f.suffix in (".py", ".typed")}
    kernels = {f"cupymlp/cuda_src/{f.name}" for f in (ROOT / "cuda_src").iterdir()}
    assert names == package | kernels


def test_the_installed_wheel_works_and_has_the_same_kernels(wheel, tmp_path):
    """A fresh environment with numpy alone, started in an empty folder; numpy is lent from here, to save a download."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    import numpy

    for part in ("numpy", "numpy.libs"):
        source = Path(numpy.__file__).parent.parent / part
        if source.exists():
            os.symlink(source, Path(site, part))
    empty = tmp_path / "empty"
    empty.mkdir()
    program = """
import cupymlp, numpy as np
from cupymlp._source import find_cuda_src, kernel_source
assert cupymlp.__file__.startswith(SITE), cupymlp.__file__
print(*sorted(f.name for f in find_cuda_src().iterdir()))
assert "mlp_row(" in kernel_source("mlp_row.cu")
assert cupymlp.verify(cupymlp.MLP([np.eye(3)]), device="cpu").ok
"""
    done = subprocess.run(
        [str(python), "-c", f"SITE = {site!r}\n{program}"],
        cwd=empty,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(f.name for f in (ROOT / "cuda_src").iterdir())
    version = subprocess.run(
        [str(python), "-m", "cupymlp", "verify"], cwd=empty, capture_output=True, text=True, timeout=60, check=False
    )
    assert version.returncode == 0, version.stderr
    assert "CuPy cannot be imported" in version.stdout
