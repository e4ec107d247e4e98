"""Plan -> kernel handle. The only file that says RawModule.

A handle is compiled once a process, device and set of options, and kept; CuPy keeps the compiled code on disk.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from ._gpu import cupy_or_error
from ._source import kernel_source
from .plan import KernelPlan, Plan

__all__ = ["COMPILE_OPTIONS", "Kernel", "kernel_for", "with_registers"]

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


def _key(kernel: KernelPlan, device_id: int) -> tuple[int, str, tuple[str, ...]]:
    return device_id, kernel.name, kernel.options


def with_registers(plan: Plan, device_id: int) -> Plan:
    """The plan, with the registers that its kernels take if they are compiled already."""
    compiled = [_kernels.get(_key(kernel, device_id)) for kernel in plan.kernels]
    kernels = zip(plan.kernels, compiled, strict=True)
    return replace(plan, kernels=tuple(k if c is None else replace(k, registers=c.registers) for k, c in kernels))


def kernel_for(plan: KernelPlan, device_id: int) -> Kernel:
    """The kernel of a plan, compiled at the first call. The device must be the current one."""
    key = _key(plan, device_id)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _compile(plan)
    return kernel


def _compile(plan: KernelPlan) -> Kernel:
    cupy = cupy_or_error("compiling a kernel")
    module = cupy.RawModule(code=kernel_source(f"{plan.name}.cu"), options=COMPILE_OPTIONS + plan.options)
    raw = module.get_function(plan.name)
    if plan.shared_bytes > DEFAULT_SHARED_BYTES:
        raw.max_dynamic_shared_size_bytes = plan.shared_bytes
    return Kernel(raw, raw.num_regs, raw.local_size_bytes)
