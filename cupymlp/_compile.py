"""Plan -> kernel handle. The only file that says RawModule.

A handle is compiled once a process, device and set of options, and kept; CuPy keeps the compiled code on disk.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from ._gpu import cupy_or_error
from ._source import kernel_source
from .plan import Plan

__all__ = ["COMPILE_OPTIONS", "Kernel", "kernel_for", "source_name", "with_registers"]

COMPILE_OPTIONS: tuple[str, ...] = ("-std=c++17",)
DEFAULT_SHARED_BYTES = 48 * 1024  # what a kernel may be launched with before it is asked for more


@dataclass(frozen=True)
class Kernel:
    """A kernel, loaded on one device: CuPy's RawKernel and what the compiler made of it."""

    raw: Any
    registers: int
    local_bytes: int

    def launcher(self) -> Any:
        """CuPy's Function for the current device, which must be the one that the kernel was loaded on.

        It saves RawKernel's own look-up of the device at every call.
        """
        return self.raw.kernel


_kernels: dict[tuple[int, str, tuple[str, ...]], Kernel] = {}
_lock = threading.Lock()


def source_name(plan: Plan) -> str:
    """The file of cuda_src that a plan's kernel comes from; the kernel has the file's name."""
    return f"mlp_{plan.schedule}.cu"


def _key(plan: Plan, device_id: int) -> tuple[int, str, tuple[str, ...]]:
    return device_id, plan.schedule, plan.options


def with_registers(plan: Plan, device_id: int) -> Plan:
    """The plan, with the registers that its kernel takes if it is compiled already."""
    kernel = _kernels.get(_key(plan, device_id))
    return plan if kernel is None else replace(plan, registers=kernel.registers)


def kernel_for(plan: Plan, device_id: int) -> Kernel:
    """The kernel of a plan, compiled at the first call. The device must be the current one."""
    key = _key(plan, device_id)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _compile(plan)
    return kernel


def _compile(plan: Plan) -> Kernel:
    cupy = cupy_or_error("compiling a kernel")
    name = source_name(plan)
    module = cupy.RawModule(code=kernel_source(name), options=COMPILE_OPTIONS + plan.options)
    raw = module.get_function(name.removesuffix(".cu"))
    if plan.shared_bytes > DEFAULT_SHARED_BYTES:
        raw.max_dynamic_shared_size_bytes = plan.shared_bytes
    return Kernel(raw, raw.num_regs, raw.local_size_bytes)
