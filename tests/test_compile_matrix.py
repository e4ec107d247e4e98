"""Every kernel compiles for every architecture, spills nothing where the plan promises it, and flushes no subnormals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support import CANONICAL, H200, NETS, unavailable

from cupymlp._compile import COMPILE_OPTIONS, source_name
from cupymlp._source import kernel_source
from cupymlp.network import Network
from cupymlp.plan import CONTIGUOUS, Access, plan_gpu

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
WIDE = ((128, 128, 128, 128, 128), (784, 256, 10), (512, 512, 512))
ACCESSES = {
    "packed": CONTIGUOUS,
    "the caller's weights": Access(packed=False),
    "strided float16": Access("float16", "strided", "strided", 2),
    "unaligned bfloat16": Access("bfloat16", "unaligned", "unaligned", 1),
    "int8": Access("int8"),
}


@pytest.fixture(scope="module")
def nvrtc():
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        unavailable(f"CuPy with NVRTC is needed to compile: {error}")
    return nvrtc


def network(sizes, dtype):
    depth = len(sizes) - 1
    return Network(tuple(sizes), ("relu",) * (depth - 1) + ("identity",), (True,) * depth, dtype)


def build(nvrtc, plan, architecture, *, ptx=False):
    """Compile as CuPy does, -ftz=true included; returns the code and the log."""
    program = nvrtc.createProgram(kernel_source(source_name(plan)), source_name(plan), [], [])
    target = architecture.replace("sm", "compute") if ptx else architecture
    options = [*COMPILE_OPTIONS, *plan.options, "-ftz=true", f"-arch={target}", "--ptxas-options=-v"]
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    return (nvrtc.getPTX if ptx else nvrtc.getCUBIN)(program), nvrtc.getProgramLog(program)


def spills(log: str) -> int:
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert found, log
    return int(found[1]) + int(found[2])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_net_compiles_and_spills_nothing(nvrtc, architecture, dtype):
    for sizes in (*NETS, *WIDE):
        for batch in (16, 1024):
            plan = plan_gpu(network(sizes, dtype), batch, replace(H200, multiprocessors=100))
            _, log = build(nvrtc, plan, architecture)
            assert spills(log) == 0, (sizes, batch, log)
            assert "warning" not in log, log


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("access", ACCESSES)
def test_every_access_compiles(nvrtc, architecture, access):
    for sizes in (CANONICAL, (7, 0, 4), (0, 5, 3), (130, 10), (3, 600, 2)):
        for dtype in ("float32", "float64"):
            _, log = build(nvrtc, plan_gpu(network(sizes, dtype), 16, H200, ACCESSES[access]), architecture)
            assert "warning" not in log, log


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [CANONICAL, (130, 70, 10)], ids=str)
def test_nothing_on_the_data_path_flushes_subnormals(nvrtc, sizes, dtype, access):
    """-ftz=true, which CuPy adds, leaves its mark on PTX instructions: none may have it."""
    code, _ = build(nvrtc, plan_gpu(network(sizes, dtype), 16, H200, ACCESSES[access]), "sm_90", ptx=True)
    assert re.findall(r"\S*\.ftz\S*", code.decode()) == []


def test_the_canonical_kernel_does_what_its_header_says(nvrtc):
    """All weights by 16-byte loads, no stack; at most 255 registers, and few enough for four blocks a multiprocessor."""
    plan = plan_gpu(network(CANONICAL, "float32"), 16, H200)
    code, log = build(nvrtc, plan, "sm_90", ptx=True)
    assert code.decode().count("ld.global.v4.b32") == 12 + 16 + 10
    _, log = build(nvrtc, plan, "sm_90")
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    assert registers * plan.block[0] * 4 <= 65536
