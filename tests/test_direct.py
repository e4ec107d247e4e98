"""The launch by the driver's own call: its arguments in memory, threads, a thread without a context. No GPU."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest
from support import in_threads

from cupymlp import _direct
from cupymlp._direct import NO_CONTEXT, direct_launch


class DriverError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


@pytest.fixture
def driver(monkeypatch):
    """What was launched: the numbers that a kernel with these many of them would read."""
    state = SimpleNamespace(launches=[], devices=[], statuses=[], during=lambda: None)

    def launch_kernel(kernel, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        if state.statuses and (status := state.statuses.pop(0)):
            raise DriverError(status)
        pointers = (ctypes.c_void_p * 4).from_address(arguments)
        first = [ctypes.c_int64.from_address(pointers[i]).value for i in range(3)]
        state.during()
        rows = list((ctypes.c_int64 * 3).from_address(pointers[3]))
        again = [ctypes.c_int64.from_address(pointers[i]).value for i in range(3)]
        state.launches.append(((kernel, gx, gy, gz, bx, by, bz, shared, stream, extra), first, again, rows))

    cuda = SimpleNamespace(
        driver=SimpleNamespace(launchKernel=launch_kernel, CUDADriverError=DriverError),
        runtime=SimpleNamespace(setDevice=state.devices.append),
        get_current_stream=lambda device_id: SimpleNamespace(ptr=1000 + device_id),
    )
    monkeypatch.setattr(_direct, "cupy_or_error", lambda _: SimpleNamespace(cuda=cuda))
    return state


def launch_of(rows=(16, 7, 8)):
    return direct_launch(SimpleNamespace(ptr=77), 5, 64, 1024, 2**40 + 3, rows, 2)


def test_what_the_driver_gets(driver):
    launch = launch_of()
    assert launch(2**46 + 8, 2**46 + 800) == 1002
    assert launch(1, 2) == 1002
    place = (77, 5, 1, 1, 64, 1, 1, 1024, 1002, 0)
    assert [(p, first, rows) for p, first, _, rows in driver.launches] == [
        (place, [2**46 + 8, 2**46 + 800, 2**40 + 3], [16, 7, 8]),
        (place, [1, 2, 2**40 + 3], [16, 7, 8]),
    ]
    assert driver.devices == []


def test_a_launch_during_a_launch_leaves_its_arguments_alone(driver):
    launch, depth = launch_of(), []

    def again():
        if len(depth) < 3:
            depth.append(0)
            launch(100 + len(depth), 200)

    driver.during = again
    launch(1, 2)
    assert len(driver.launches) == 4
    assert all(first == later for _, first, later, _ in driver.launches)


def test_threads(driver):
    launch, barrier = launch_of(), threading.Barrier(8)
    driver.during = lambda: barrier.wait(10)
    in_threads(8, lambda i: launch(i, -i))
    assert sorted(later[0] for _, _, later, _ in driver.launches) == list(range(8))
    assert all(later[1] == -later[0] for _, _, later, _ in driver.launches)


def test_a_thread_without_a_context_gets_one(driver):
    launch = launch_of()
    driver.statuses = [NO_CONTEXT, 0]
    launch(1, 2)
    assert driver.devices == [2]
    assert len(driver.launches) == 1


@pytest.mark.parametrize("statuses", [[700], [NO_CONTEXT, 700]])
def test_other_errors_are_told(driver, statuses):
    launch = launch_of()
    driver.statuses = list(statuses)
    with pytest.raises(DriverError, match="700"):
        launch(1, 2)
    launch(3, 4)
    assert driver.launches[-1][1][:2] == [3, 4]


def test_cupy_has_what_calls_use_beside_its_documented_names():
    cupy = pytest.importorskip("cupy")
    assert hasattr(cupy.ndarray, "_c_contiguous")
    assert callable(cupy.cuda.driver.launchKernel)
    assert issubclass(cupy.cuda.driver.CUDADriverError, Exception)
