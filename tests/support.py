"""What several test modules share: random networks, the C loop, and the kernels compiled for the host."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cupymlp import MLP
from cupymlp._pack import pack
from cupymlp._source import find_cuda_src
from cupymlp.activations import ACTIVATIONS, activation_of, parameter_of
from cupymlp.network import Network, numpy_dtype
from cupymlp.plan import CONTIGUOUS, Access, Device, KernelPlan, network_options
from cupymlp.schedules import plan_gpu

HOST = Path(__file__).parent / "host"
CANONICAL = (48, 64, 40, 24)
H200 = Device("NVIDIA H200", 90, 132, 232448)

# Networks that between them reach every branch of the kernels: depths, widths around 16, 32, 64 and the block, held and
# streamed layers, more than one output a thread, biases on and off, both activations everywhere, empty layers.
NETS = (
    (48, 64, 40, 24),
    (1, 1),
    (5, 3),
    (16, 16, 1),
    (17, 33, 65, 2),
    (64, 64, 64, 64, 64),
    (15, 31, 63, 129, 5),
    (100, 70, 7),
    (130, 10),
    (3, 600, 2),
    (7, 0, 4),
    (0, 5, 3),
    (2, 2, 2, 2, 2, 2, 2, 2, 2),
)


@dataclass(frozen=True)
class Net:
    """A network with its arrays, weights in_out."""

    network: Network
    weights: list[np.ndarray]
    biases: list[np.ndarray | None]

    def mlp(self, **options) -> MLP:
        weights = [w.T for w in self.weights] if options.get("weight_layout") == "out_in" else self.weights
        hidden, last = self.network.activations[:-1], self.network.activations[-1]
        options.setdefault("precision", self.network.precision)
        return MLP(weights, self.biases, hidden, last, **options)


def random_net(
    rng, sizes: Sequence[int], dtype="float32", *, biases=None, activations=None, scale=None, precision="ieee"
) -> Net:
    """A random network; biases and activations are drawn unless they are given."""
    depth = len(sizes) - 1
    if biases is None:
        biases = rng.integers(0, 2, depth).astype(bool).tolist()
    if activations is None:
        activations = rng.choice(["relu", "identity"], depth).tolist()
    network = Network(tuple(map(int, sizes)), tuple(activations), tuple(biases), dtype, precision)
    pairs = list(zip(sizes, sizes[1:], strict=False))
    dtype = numpy_dtype(dtype)
    weights = [(rng.standard_normal((k, n)) * (scale or np.sqrt(2 / max(k, 1)))).astype(dtype) for k, n in pairs]
    return Net(
        network, weights, [rng.standard_normal(n).astype(dtype) if b else None for (_, n), b in zip(pairs, biases)]
    )


def odd_values(rng, shape, dtype) -> np.ndarray:
    """Numbers of every kind: ordinary, huge, subnormal, zeros of both signs, infinities, NaN."""
    dtype = numpy_dtype(dtype)
    info = pytest.importorskip("ml_dtypes").finfo(dtype) if dtype.kind == "V" else np.finfo(dtype)
    x = rng.standard_normal(shape).astype(dtype)
    special = np.array(
        [
            0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            info.smallest_subnormal,
            -info.smallest_subnormal,
            info.tiny,
            float(info.max) / 4,
        ],
        dtype,
    )
    tiny = (rng.standard_normal(shape) * float(info.tiny)).astype(dtype)
    kind = rng.random(shape)
    x = np.where(kind < 0.05, rng.choice(special, shape), x)
    return np.where(kind > 0.8, tiny, x)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, any NaN equal to any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = f"u{a.dtype.itemsize}"
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return bool(np.all((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))))


# --- The C loop ---------------------------------------------------------------------------------------------------


def compiler(names: Sequence[str], variable: str) -> str:
    """A host compiler; without one the test is skipped, or fails where CI wants it."""
    found = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        unavailable(f"no host compiler ({', '.join(names)}) is installed")
    return found


def unavailable(reason: str) -> None:
    """Skip with a reason; fail instead where CUPYMLP_REQUIRE_TOOLS is set, as CI does."""
    if os.environ.get("CUPYMLP_REQUIRE_TOOLS") == "1":
        pytest.fail(f"CUPYMLP_REQUIRE_TOOLS=1, and {reason}")
    pytest.skip(reason)


@functools.cache
def _build_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cupymlp-tests-"))


@functools.cache
def _c_loop() -> ctypes.CDLL:
    library = _build_folder() / "fmaf_loop.so"
    command = [
        compiler(("cc", "gcc", "clang"), "CC"),
        "-O2",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Werror",
    ]
    with_fma = [*command, "-mfma"] if _has_fma() else command
    subprocess.run([*with_fma, str(HOST / "fmaf_loop.c"), "-o", str(library), "-lm"], check=True, timeout=120)
    return ctypes.CDLL(str(library))


def _has_fma() -> bool:
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def c_loop(net: Net, x: np.ndarray) -> np.ndarray:
    """The network of x by the plain C loop of section 3: x (rows, K) of the network's dtype."""
    network = net.network
    dtype = np.dtype(network.sum_dtype)  # float32 stands for float16 and bfloat16, which C rounds to
    x = np.ascontiguousarray(x, dtype)
    y = np.empty((len(x), network.sizes[-1]), dtype)
    weights = np.concatenate([np.ascontiguousarray(w, dtype).ravel() for w in net.weights])
    biases = np.concatenate([np.zeros(0, dtype), *(b.astype(dtype) for b in net.biases if b is not None)])
    widest = max(network.sizes)
    scratch = np.empty(2 * widest + 1, dtype)
    ints = [np.array(v, np.int32) for v in (network.sizes, [a == "relu" for a in network.activations], network.biases)]

    def pointer(array):
        return ctypes.c_void_p(array.ctypes.data)

    getattr(_c_loop(), f"forward_{network.dtype}")(
        network.depth, *map(pointer, ints), pointer(weights), pointer(biases), pointer(x), pointer(y),
        ctypes.c_longlong(len(x)), pointer(scratch), widest,
    )  # fmt: skip
    return y.astype(numpy_dtype(network.dtype), copy=False)  # exact


# --- The kernels on the host ----------------------------------------------------------------------------------------

SANITIZERS = {
    "plain": ["-O1"],
    "address+undefined": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
}


@functools.cache
def _sanitizer_works(sanitizer: str) -> str | None:
    """Why this sanitizer cannot be used here; None if it can."""
    source = _build_folder() / "probe.cpp"
    source.write_text("#include <barrier>\nint main() { std::barrier<> b(1); b.arrive_and_wait(); return 0; }\n")
    program = source.with_name("probe-" + sanitizer.replace("+", "-"))
    command = [
        compiler(("g++", "clang++"), "CXX"),
        "-std=c++20",
        *SANITIZERS[sanitizer],
        str(source),
        "-o",
        str(program),
    ]
    built = subprocess.run([*command, "-pthread"], capture_output=True, text=True, timeout=120, check=False)
    if built.returncode:
        return f"the host compiler cannot build for {sanitizer}: {built.stderr.strip().splitlines()[-1]}"
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    return None if ran.returncode == 0 else f"the runtime of {sanitizer} cannot start: {ran.stderr.strip()[:200]}"


class HostError(Exception):
    """The kernel did not run through: what a sanitizer or the compiler said."""


@functools.cache
def _build(kernel: KernelPlan, sanitizer: str, edit: tuple[str, str] | None) -> Path:
    if (problem := _sanitizer_works(sanitizer)) is not None:
        unavailable(problem)
    folder = Path(tempfile.mkdtemp(dir=_build_folder()))
    sources = find_cuda_src()
    if edit is not None:
        shutil.copytree(sources, folder / "cuda_src")
        sources = folder / "cuda_src"
        changed = 0
        for file in (sources / f"{kernel.name}.cu", *sources.glob("*.cuh")):
            text = file.read_text()
            changed += text.count(edit[0])
            file.write_text(text.replace(*edit))
        if changed != 1:
            raise ValueError(f"the edit {edit[0]!r} fits {changed} places, not one")
    options = (
        *SANITIZERS[sanitizer], *kernel.options, f'-DKERNEL_FILE="{kernel.name}.cu"', f"-DKERNEL={kernel.name}",
        f"-DTHREADS={kernel.block[0]}", f"-DSHARED_BYTES={kernel.shared_bytes}",
    )  # fmt: skip
    return _compile_for_host("run_kernel.cpp", options, sources, folder / "run_kernel")


def _compile_for_host(file: str, options: Sequence[str], sources: Path, program: Path) -> Path:
    command = [
        compiler(("g++", "clang++"), "CXX"), "-std=c++20", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing",
        "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-parentheses", "-Wno-maybe-uninitialized",
        *(["-mfma"] if _has_fma() else []), *options,
        "-include", str(HOST / "cuda_on_host.h"), "-I", str(sources), str(HOST / file), "-x", "c++", "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if built.returncode:
        raise HostError(built.stderr)
    return program


@functools.cache
def _activations_program(dtype: str) -> Path:
    network = Network((1, 1), ("identity",), (False,), dtype)
    options = ("-O1", *network_options(network, CONTIGUOUS))
    folder = Path(tempfile.mkdtemp(dir=_build_folder()))
    return _compile_for_host("run_activations.cpp", options, find_cuda_src(), folder / "run_activations")


def activations_on_host(dtype: str, calls: Sequence[tuple[str | tuple[str, float], np.ndarray]]) -> list[np.ndarray]:
    """The kernels' activations of float32 or float64 numbers, by the host's own elementary functions."""
    names, numbers = list(ACTIVATIONS), np.dtype(dtype)
    with tempfile.TemporaryDirectory(dir=_build_folder()) as folder:
        source, result = Path(folder, "in"), Path(folder, "out")
        with open(source, "wb") as file:
            for spec, v in calls:
                file.write(np.array([names.index(activation_of(spec).name), v.size], np.int64).tobytes())
                file.write(numbers.type(parameter_of(spec, dtype)).tobytes() + v.astype(dtype).tobytes())
        subprocess.run([str(_activations_program(dtype)), str(source), str(result)], check=True, timeout=300)
        found = np.frombuffer(result.read_bytes(), dtype)
    return np.split(found, np.cumsum([v.size for _, v in calls])[:-1])


def build_host_kernel(kernel: KernelPlan, sanitizer: str, edit: tuple[str, str] | None = None) -> Path:
    """Compile a kernel's .cu file for the host. ``edit`` replaces a piece of a copy of cuda_src, for mutation tests."""
    return _build(replace(kernel, grid=()), sanitizer, edit)


def launch_on_host(
    kernel: KernelPlan,
    x: bytes,
    y: bytes,
    weights: bytes,
    rows: bytes,
    *,
    sanitizer: str = "plain",
    edit: tuple[str, str] | None = None,
    grid: int | None = None,
    past: tuple[int, int] = (0, 0),
    starts: tuple[int, int] = (0, 0),
    round_: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    """One launch, on copies of these arrays; returns y's bytes after it. run_kernel.cpp says what the numbers mean."""
    program = build_host_kernel(kernel, sanitizer, edit)
    data = (x, y, weights, rows)
    head = np.array([grid or kernel.grid[0], *map(len, data), *past, *starts, *round_], np.int64)
    with tempfile.TemporaryDirectory(dir=_build_folder()) as folder:
        source, result = Path(folder, "in"), Path(folder, "out")
        source.write_bytes(head.tobytes() + b"".join(data))
        ran = subprocess.run(
            [str(program), str(source), str(result)], capture_output=True, text=True, timeout=300, check=False
        )
        if ran.returncode:
            raise HostError(ran.stderr[-4000:] or f"exit status {ran.returncode}")
        return result.read_bytes()


def run_on_host(
    net: Net,
    x: np.ndarray,
    *,
    schedule: str = "row",
    device: Device = H200,
    sanitizer: str = "plain",
    grid: int | None = None,
    access: Access = CONTIGUOUS,
    rows: bytes | None = None,
    weights: bytes | None = None,
    x_bytes: bytes | None = None,
    y_bytes: int | None = None,
    past: tuple[int, int] = (0, 0),
    starts: tuple[int, int] = (0, 0),
    edit: tuple[str, str] | None = None,
    plan_edit: dict | None = None,
) -> np.ndarray | bytes:
    """Run a schedule of one kernel on the host: x (rows, K) contiguous, or, with the other arguments, what they describe."""
    plan = plan_gpu(net.network, len(x), device, access, schedule)
    (kernel,) = plan.kernels
    if plan_edit:
        kernel = replace(kernel, options=tuple(plan_edit.get(o, o) for o in kernel.options))
    n = net.network.sizes[-1]
    dtype = numpy_dtype(net.network.dtype)
    out = launch_on_host(
        kernel,
        x_bytes if x_bytes is not None else np.ascontiguousarray(x).tobytes(),
        b"\xff" * (y_bytes if y_bytes is not None else len(x) * n * dtype.itemsize),
        weights if weights is not None else pack(np, plan.layout, net.network, net.weights, net.biases).tobytes(),
        rows if rows is not None else np.int64(len(x)).tobytes(),
        sanitizer=sanitizer,
        edit=edit,
        grid=grid,
        past=past,
        starts=starts,
        round_=(0, 0, len(x)),
    )
    return np.frombuffer(out, dtype).reshape(len(x), n) if y_bytes is None else out


def in_threads(count: int, work) -> None:
    """``work(i)`` in as many threads, side by side; returns when all are done."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
