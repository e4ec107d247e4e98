"""Kernels through NVRTC as CuPy compiles them, without a GPU, and what the compiler says of them. The fixture is conftest's."""

from __future__ import annotations

import re

import pytest
from support import H200

from cupymlp._compile import COMPILE_OPTIONS
from cupymlp._source import kernel_source
from cupymlp.plan import Device

DEVICES = {
    "sm_80": Device("A100", 80, 108, 166_912),
    "sm_86": Device("RTX A6000", 86, 84, 101_376),
    "sm_89": Device("L40", 89, 142, 101_376),
    "sm_90": H200,
    "sm_100": Device("B200", 100, 148, 232_448),
    "sm_120": Device("RTX 5090", 120, 170, 101_376),
}


def build(nvrtc, kernel, architecture, *, ptx=False):
    """Compile for this architecture, -ftz=true included; returns the code and the log."""
    name = f"{kernel.name}.cu"
    program = nvrtc.createProgram(kernel_source(name), name, [], [])
    target = architecture.replace("sm", "compute") if ptx else architecture
    own = [option for option in kernel.options if not option.startswith("-arch")]
    options = [*COMPILE_OPTIONS, *own, "-ftz=true", f"-arch={target}", "--ptxas-options=-v"]
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    return (nvrtc.getPTX if ptx else nvrtc.getCUBIN)(program), nvrtc.getProgramLog(program)


def spills(log: str) -> int:
    """Of the kernel, and of the function that some call."""
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert found, log
    return sum(int(number) for pair in found for number in pair)


def registers(log: str) -> int:
    return max(map(int, re.findall(r"Used (\d+) registers", log)))
