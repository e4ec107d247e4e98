"""mlp_mma.cu compiles for every architecture with tensor cores, spills nothing up to 128 wide, and flushes no subnormals."""

from __future__ import annotations

import re

import pytest
from compiling import DEVICES as ALL_DEVICES
from compiling import build, spills
from support import CANONICAL, H200

from cupymlp.network import Network
from cupymlp.plan import CONTIGUOUS, Access
from cupymlp.schedules import plan_gpu

KINDS = {
    "tf32": ("float32", "tf32"),
    "split3": ("float32", "split3"),
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
}
DEVICES = {**ALL_DEVICES, "sm_90a": H200}
ACCESSES = {
    "contiguous": CONTIGUOUS,
    "strided float16": Access("float16", "strided", "strided", 2),
    "unaligned": Access(None, "unaligned", "unaligned", 1),
    "int8": Access("int8"),
}


def kernel(kind, sizes, device, batch=1 << 20, access=CONTIGUOUS):
    dtype, precision = KINDS[kind]
    depth = len(sizes) - 1
    network = Network(tuple(sizes), ("relu",) * (depth - 1) + ("identity",), (True,) * depth, dtype, precision)
    return plan_gpu(network, batch, device, access, "mma").kernels[0]


def check(nvrtc, kernel, architecture):
    _, log = build(nvrtc, kernel, architecture)
    assert spills(log) == 0, log
    assert "warning" not in log, log


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", DEVICES)
def test_nothing_is_spilled(nvrtc, architecture, kind):
    for sizes in (CANONICAL, (128, 128, 128)):
        check(nvrtc, kernel(kind, sizes, DEVICES[architecture]), architecture)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(15, 31, 63, 127, 5), (96, 96, 10), (512, 512, 5)], ids=str)
def test_nothing_is_spilled_at_other_widths(nvrtc, sizes, kind):
    check(nvrtc, kernel(kind, sizes, H200), "sm_90")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("access", ACCESSES)
def test_every_access_compiles_and_flushes_nothing(nvrtc, access, kind):
    """-ftz=true, which CuPy adds, leaves its mark on PTX instructions: none may have it."""
    a = ACCESSES[access]
    for sizes in ((20, 17, 3), (300, 40, 2)) if access == "contiguous" else ((20, 17, 3),):
        code, log = build(nvrtc, kernel(kind, sizes, H200, 100, a), "sm_80", ptx=True)
        assert re.findall(r"\S*\.ftz\S*", code.decode()) == []
        assert "warning" not in log, log
