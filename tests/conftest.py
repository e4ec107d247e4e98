"""GPU tests are skipped where there is no GPU. With CUPYMLP_REQUIRE_GPU=1 a GPU test that is skipped has failed.

So has, with CUPYMLP_REQUIRE_FRAMEWORKS=1, a test that is skipped because a package cannot be imported.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support import CANONICAL, random_net, unavailable

from cupymlp._gpu import gpu_problem

settings.register_profile(
    "cupymlp", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cupymlp")

# No tests, and what they import may not be there: --doctest-modules would import them.
collect_ignore = ["onnx_models.py", "torch_nets.py"]
collect_ignore_glob = ["data/make_*.py"]

REQUIRE_GPU = os.environ.get("CUPYMLP_REQUIRE_GPU") == "1"
REQUIRE_FRAMEWORKS = os.environ.get("CUPYMLP_REQUIRE_FRAMEWORKS") == "1"


def pytest_collection_modifyitems(items):
    problem = gpu_problem()
    if problem is not None and not REQUIRE_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {problem}"))


def pytest_runtest_setup(item):
    problem = gpu_problem()
    if REQUIRE_GPU and problem is not None and item.get_closest_marker("gpu"):
        pytest.fail(f"CUPYMLP_REQUIRE_GPU=1, and {problem}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if REQUIRE_GPU and report.skipped and item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"CUPYMLP_REQUIRE_GPU=1, and a GPU test was skipped: {report.longrepr}"
    if REQUIRE_FRAMEWORKS and report.skipped and "could not import" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"CUPYMLP_REQUIRE_FRAMEWORKS=1, and a test was skipped: {report.longrepr}"
    return report


@pytest.fixture
def rng():
    return np.random.default_rng(20260101)


@pytest.fixture
def canonical(rng):
    return random_net(rng, CANONICAL, biases=[True, False, True], activations=["relu", "relu", "identity"])


@pytest.fixture(scope="session")
def activation_errors():
    """benchmarks/activation_errors.py, which knows the exact functions."""
    pytest.importorskip("mpmath")
    path = Path(__file__).parent.parent / "benchmarks" / "activation_errors.py"
    spec = importlib.util.spec_from_file_location("activation_errors", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def nvrtc():
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        unavailable(f"CuPy with NVRTC is needed to compile: {error}")
    return nvrtc
