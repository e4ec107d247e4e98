"""MLP.cuda_source: its text compiles as users compile it, alone and beside others, and computes the bits of the C loop."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest
from support import (
    CANONICAL,
    HOST,
    SANITIZERS,
    c_loop,
    compiler,
    odd_values,
    random_net,
    run_on_host,
    same_bits,
    unavailable,
)
from support import _has_fma as has_fma
from support import _sanitizer_works as problem_of_sanitizer

import cupymlp
from cupymlp._compile import COMPILE_OPTIONS
from cupymlp.activations import ACTIVATIONS, read_spec
from cupymlp.network import numpy_dtype
from cupymlp.reference import error_in_bounds, forward_and_bound

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
C_TYPES = {"float32": "float", "float64": "double", "float16": "unsigned short", "bfloat16": "unsigned short"}
DTYPES = tuple(C_TYPES)
ROWS = 5

# Sizes, dtype, where the weights are, and whether they have infinities, NaN and subnormal numbers among them.
CASES = (
    *((CANONICAL, dtype, "inline", False) for dtype in DTYPES),
    *(((17, 33, 65, 2), dtype, "pointer", False) for dtype in DTYPES),
    *(((19, 70, 18), dtype, "inline", True) for dtype in DTYPES),
    ((1, 1), "float32", "inline", False),
    ((16, 16, 1), "float32", "inline", False),
    ((130, 10), "float32", "pointer", False),
    ((3, 600, 2), "float64", "inline", False),
    ((7, 0, 4), "float32", "inline", False),
    ((0, 5, 3), "float32", "pointer", False),
    ((9, 0), "float32", "inline", False),
    ((2,) * 9, "float64", "pointer", True),
)


def nets(rng):
    """The networks of CASES, with x of every kind of number."""
    for sizes, dtype, _, odd in CASES:
        net = random_net(rng, sizes, dtype)
        if odd:
            for i, weight in enumerate(net.weights):  # a few in all: one NaN would hide the rest of a row
                some = rng.random(weight.shape) < 0.02
                tiny = (
                    weight * numpy_dtype(dtype).type(float(np.finfo(weight.dtype).tiny))
                    if i == 0 and dtype in {"float32", "float64"}
                    else weight
                )
                net.weights[i] = np.where(some, odd_values(rng, weight.shape, dtype), tiny)
        yield net, odd_values(rng, (ROWS, sizes[0]), dtype)


def kernel(name, net, where, type_=None):
    """A user's kernel: rows in a grid-stride loop."""
    type_ = type_ or C_TYPES[net.network.dtype]
    k, n = net.network.sizes[0], net.network.sizes[-1]
    parameter, argument = (", const void* weights", ", weights") if where == "pointer" else ("", "")
    return (
        f'extern "C" __global__ void run_{name}(const {type_}* x, {type_}* y, long long rows{parameter}) {{\n'
        "    for (long long r = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; r < rows;\n"
        f"         r += gridDim.x * static_cast<long long>(blockDim.x)) {name}(x + r * {k}, y + r * {n}{argument});\n"
        "}\n"
    )


# --- The host ---------------------------------------------------------------------------------------------------------

MAIN = r"""
template <class Element, class Function>
void run(const char* name, int features_in, int features_out, Function function) {
    std::ifstream in(std::string(name) + ".x", std::ios::binary);
    std::ofstream out(std::string(name) + ".y", std::ios::binary);
    for (int row = 0; row < ROWS; ++row) {
        std::vector<Element> x(features_in), y(features_out);  // exactly as large as they are
        in.read(reinterpret_cast<char*>(x.data()), features_in * sizeof(Element));
        if (!in) std::exit(2);
        function(x.data(), y.data());
        std::vector<Element> both(std::max(features_in, features_out));
        std::copy(x.begin(), x.end(), both.begin());
        function(both.data(), both.data());
        if (features_out > 0 && std::memcmp(both.data(), y.data(), features_out * sizeof(Element)) != 0) std::exit(3);
        out.write(reinterpret_cast<const char*>(y.data()), features_out * sizeof(Element));
    }
}
std::vector<char> bytes_of(const char* name) {
    std::ifstream in(std::string(name) + ".weights", std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
"""


# On the host what ptx.cuh has is outside the namespace, where the double functions of these names would hide it.
STAND_INS = "".join(f"using ::{name};\n" for name in ("divide", "product", "reciprocal", "relu", "square_root"))


def on_host(folder, cases):
    """What every network makes of its x, by one program that has all of them."""
    if (problem := problem_of_sanitizer("address+undefined")) is not None:
        unavailable(problem)
    texts, calls = [], []
    for i, (net, x, where) in enumerate(cases):
        name, mlp, type_ = f"net{i}", net.mlp(), C_TYPES[net.network.dtype]
        text = mlp.cuda_source(name, weights=where)
        texts.append(text.replace(f"namespace cupymlp_{name} {{\n", f"namespace cupymlp_{name} {{\n{STAND_INS}"))
        (folder / f"{name}.x").write_bytes(x.tobytes())
        argument = ""
        if where == "pointer":
            (folder / f"{name}.weights").write_bytes(mlp.packed_weights().tobytes())
            argument = f', bytes_of("{name}").data()'
        sizes = net.network.sizes
        calls.append(
            f'    run<{type_}>("{name}", {sizes[0]}, {sizes[-1]}, '
            f"[](const {type_}* x, {type_}* y) {{ {name}(x, y{argument}); }});\n"
        )
    includes = "".join(f"#include <{h}>\n" for h in ("cstdlib", "cstring", "fstream", "iterator", "string", "vector"))
    source, program = folder / "nets.cpp", folder / "nets"
    main = f"constexpr int ROWS = {ROWS};\n{MAIN}\nint main() {{\n{''.join(calls)}}}\n"
    source.write_text(includes + "\n".join(texts) + main)
    command = [
        compiler(("g++", "clang++"), "CXX"), "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing",
        "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-parentheses", "-Wno-maybe-uninitialized", "-Wno-unused",
        *(["-mfma"] if has_fma() else []), *SANITIZERS["address+undefined"], "-O0", "-g0",
        "-include", str(HOST / "cuda_on_host.h"), str(source), "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr[:4000]
    ran = subprocess.run([str(program)], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, (ran.returncode, ran.stderr[:4000])
    for i, (net, x, _) in enumerate(cases):
        y = np.frombuffer((folder / f"net{i}.y").read_bytes(), numpy_dtype(net.network.dtype))
        yield y.reshape(len(x), net.network.sizes[-1])


def test_bits_equal_the_c_loop_alone_and_in_place(rng, tmp_path):
    """All networks in one translation unit, under AddressSanitizer and UBSan; y is x's own memory the second time."""
    pytest.importorskip("ml_dtypes")
    cases = [(net, x, where) for (net, x), (_, _, where, _) in zip(nets(rng), CASES)]
    for (net, x, where), y in zip(cases, on_host(tmp_path, cases)):
        assert same_bits(y, c_loop(net, x)), (net.network.describe(), where)


HIDDEN = [read_spec("", name, last=False) for name, row in ACTIVATIONS.items() if not row.over_row]
OVER_ROW = [name for name, row in ACTIVATIONS.items() if row.over_row]


def with_every_activation(rng):
    """A network of a layer for each hidden activation, and networks that end with those of a row: of few features, of many."""
    weights = {"biases": [True] * len(HIDDEN) + [False], "scale": 1.2}
    yield random_net(rng, (7,) * (len(HIDDEN) + 2), activations=[*HIDDEN, OVER_ROW[0]], **weights)
    for dtype, width in (("float64", 1), ("float16", 33), ("float32", 70), ("bfloat16", 32)):
        for out in OVER_ROW:
            yield random_net(rng, (9, 12, width), dtype, activations=["silu", out])


def test_every_activation(rng, tmp_path):
    """Within the bound; and of some networks the bits of the row schedule, both by the host's own exp, tanh and the like."""
    pytest.importorskip("ml_dtypes")
    cases = []
    for i, net in enumerate(with_every_activation(rng)):
        x = rng.standard_normal((ROWS, net.network.sizes[0])).astype(numpy_dtype(net.network.dtype))
        x[1, 2] = np.inf
        x[2, 2] = np.nan
        cases.append((net, x, ("inline", "pointer")[i % 2]))
    compared = {(cases[0][0].network.sizes, OVER_ROW[0]), ((9, 12, 33), "softmax"), ((9, 12, 70), "log_softmax")}
    for (net, x, _), y in zip(cases, on_host(tmp_path, cases)):
        network = net.network
        assert error_in_bounds(y, *forward_and_bound(network, net.weights, net.biases, x, order="blocks")).max() <= 1
        if (network.sizes, network.activations[-1]) in compared:
            compared.remove((network.sizes, network.activations[-1]))
            assert same_bits(y, run_on_host(net, x)), network.describe()
            assert not same_bits(y[0], y[3])
    assert not compared


# --- Compilers --------------------------------------------------------------------------------------------------------


def user_text(rng, where="inline", dtypes=DTYPES):
    """A user's file: the canonical network in each dtype, and a kernel for each."""
    made = [(f"net_{dtype}", random_net(rng, CANONICAL, dtype)) for dtype in dtypes]
    texts = [net.mlp().cuda_source(name, weights=where) for name, net in made]
    return "\n".join(texts + [kernel(name, net, where) for name, net in made])


def build(nvrtc, text, *options):
    program = nvrtc.createProgram(text, "user.cu", [], [])
    try:
        nvrtc.compileProgram(program, [*options, "--ptxas-options=-v"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    return program


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_networks_of_one_source_compile_for_every_architecture(nvrtc, rng, architecture):
    """All dtypes where compilers differ most."""
    pytest.importorskip("ml_dtypes")
    dtypes = DTYPES if architecture in {"sm_75", "sm_120"} else ("float32", "bfloat16")
    text = user_text(rng, "pointer" if architecture == "sm_120" else "inline", dtypes)
    log = nvrtc.getProgramLog(build(nvrtc, text, *COMPILE_OPTIONS, "-ftz=true", f"-arch={architecture}"))
    assert "warning" not in log, log
    assert len(re.findall(r"(\d+) bytes spill stores", log)) == len(dtypes)
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log


def test_no_option_for_floating_point_numbers_changes_the_code(nvrtc, rng):
    pytest.importorskip("ml_dtypes")
    text = user_text(rng)
    plain, fast = (
        nvrtc.getPTX(build(nvrtc, text, *COMPILE_OPTIONS, "-arch=compute_90", *more)).decode()
        for more in ((), ("--use_fast_math",))
    )
    assert plain.count("fma.rn.f32") > 100
    assert ".ftz" not in fast
    assert fast == plain


def test_macros_do_not_leak(nvrtc, rng):
    text = random_net(rng, (3, 2)).mlp().cuda_source()
    defined = re.findall(r"^#define (\w+)", text, re.MULTILINE)
    assert "MLP_SIZES" in defined
    checks = "".join(f"#ifdef {macro}\n#error {macro}\n#endif\n" for macro in defined)
    build(nvrtc, text + checks, *COMPILE_OPTIONS, "-arch=sm_90")
    assert "#include" not in text
    assert "#line" not in text


@pytest.mark.parametrize("architecture", ["sm_75", "sm_120"])
def test_every_activation_compiles(nvrtc, rng, architecture):
    pytest.importorskip("ml_dtypes")
    made = [(f"net{i}", net) for i, net in enumerate(with_every_activation(rng)) if i in {0, 1, 4, 5}]
    text = "\n".join(net.mlp().cuda_source(name) + kernel(name, net, "inline") for name, net in made)
    log = nvrtc.getProgramLog(build(nvrtc, text, *COMPILE_OPTIONS, "-ftz=true", f"-arch={architecture}"))
    assert "warning" not in log, log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log


def test_activations_of_single_operations_are_told_from_the_others():
    weights = [np.eye(2, dtype="f4")] * 2
    for name, row in ACTIVATIONS.items():
        spec = {"out_activation": name} if row.over_row else {"activation": name}
        text = cupymlp.MLP(weights, **spec).cuda_source()
        assert ("whatever the compiler's options" in text) is row.exact
        assert ("-ftz=true" in text.split("#define")[0]) is not row.exact


def test_nvcc_compiles_it_with_no_header_for_two_files_of_one_program(rng, tmp_path):
    pytest.importorskip("ml_dtypes")
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc is installed")
    half = random_net(rng, (5, 3), "float16", activations=["sin"])
    texts = ["#include <cuda_fp16.h>\n", user_text(rng), half.mlp().cuda_source("own_type")]
    texts.append(kernel("own_type", half, "inline", "__half"))
    texts.append("int main() {}\n")
    (tmp_path / "one.cu").write_text("\n".join(texts))
    (tmp_path / "two.cu").write_text(
        half.mlp().cuda_source("own_type") + kernel("in_two", half, "inline").replace(" in_two(", " own_type(")
    )
    command = ["nvcc", "-arch=sm_90", "-rdc=true", "-Werror", "all-warnings", "one.cu", "two.cu", "-o", "program"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[:4000]


# --- What it says and what it refuses ------------------------------------------------------------------------------------


def test_the_text_says_what_it_is():
    net = cupymlp.MLP([np.ones((3, 2), "f2")])
    text = net.cuda_source("force", weights="pointer")
    assert text.startswith("// force: 3-2 float16, identity, no bias\n")
    assert f"cupymlp {cupymlp.__version__}" in text
    assert "//     __device__ void force(const Half* x, Half* y, const void* weights)" in text
    assert "weights: the 32 bytes of MLP.packed_weights()" in text
    assert net.cuda_source() == net.cuda_source("mlp", weights="inline")
    assert text.isascii()


def test_packed_weights_are_what_common_cuh_describes():
    weight = np.arange(10, dtype="f4").reshape(5, 2)
    packed = cupymlp.MLP([weight.T], [np.array([20, 21], "f4")], weight_layout="out_in").packed_weights()
    vectors = [(0, 2, 4, 6), (1, 3, 5, 7), (8, 0, 0, 0), (9, 0, 0, 0), (20, 21, 0, 0)]
    assert packed.dtype == np.float32
    assert packed.reshape(-1, 4).tolist() == [list(v) for v in vectors]


@pytest.mark.parametrize("name", ["", "2nd", "a b", "a__b", "_a", "é", "a-b", None])
def test_names_that_are_none_in_cpp(name):
    with pytest.raises(ValueError, match=r"name is .*accepted: letters, digits and single underscores"):
        cupymlp.MLP([np.eye(2)]).cuda_source(name)


@pytest.mark.parametrize("precision", ["tf32", "split3", "library"])
def test_precisions_that_one_thread_has_not(precision):
    net = cupymlp.MLP([np.eye(2, dtype="f4")], precision=precision)
    with pytest.raises(ValueError, match=f"precision='{precision}'.*accepted: 'ieee'"):
        net.cuda_source()


def test_what_is_too_large_or_unknown():
    with pytest.raises(ValueError, match="weights is 'file'; accepted: 'inline'"):
        cupymlp.MLP([np.eye(2)]).cuda_source(weights="file")
    large = cupymlp.MLP([np.zeros((513, 512), "f4")])
    with pytest.raises(
        ValueError, match=r"1,056,768 bytes; accepted in the text: up to 1,048,576\. Use weights='pointer'"
    ):
        large.cuda_source()
    assert "const void* weights" in large.cuda_source(weights="pointer")
    with pytest.raises(ValueError, match="take 32,784 bytes of a thread's local memory; accepted: up to 32,768"):
        cupymlp.MLP([np.zeros((8192, 1), "f4")]).cuda_source(weights="pointer")
    cupymlp.MLP([np.zeros((8188, 1), "f4")]).cuda_source()
    with pytest.raises(ValueError, match="take 32,800 bytes"):  # in arithmetic they are float32
        cupymlp.MLP([np.zeros((8192, 1), "f2")]).cuda_source(weights="pointer")


# --- A GPU ----------------------------------------------------------------------------------------------------------------


def launch(cupy, net, name, where, x, grid, block):
    """A user's RawKernel on x; rows that it does not compute stay NaN."""
    mlp = net.mlp()
    raw = cupy.RawKernel(mlp.cuda_source(name, weights=where) + kernel(name, net, where), f"run_{name}")
    y = cupy.full((len(x), net.network.sizes[-1]), np.nan, mlp.dtype)
    weights = (cupy.asarray(mlp.packed_weights()),) if where == "pointer" else ()
    raw((grid,), (block,), (x, y, np.int64(len(x)), *weights))
    return y.get()


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(len(CASES)))
def test_bits_of_a_users_kernel_equal_those_of_the_net(rng, case):
    pytest.importorskip("ml_dtypes")
    cupy = pytest.importorskip("cupy")
    net, _ = list(nets(rng))[case]
    dtype, sizes = net.network.dtype, net.network.sizes
    x = odd_values(rng, (1000, sizes[0]), dtype)
    want = net.mlp(schedule="row")(cupy.asarray(x)).get()
    assert same_bits(want, c_loop(net, x))
    for where, grid, block in (("inline", 8, 64), ("pointer", 3, 96)):
        assert same_bits(launch(cupy, net, "mlp", where, cupy.asarray(x), grid, block), want), where


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(9))
def test_bits_of_every_activation_in_a_users_kernel(rng, case):
    pytest.importorskip("ml_dtypes")
    cupy = pytest.importorskip("cupy")
    net = list(with_every_activation(rng))[case]
    x = cupy.asarray(odd_values(rng, (300, net.network.sizes[0]), net.network.dtype))
    assert same_bits(launch(cupy, net, "mlp", "inline", x, 2, 64), net.mlp(schedule="row")(x).get())


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_bits_of_random_nets_in_a_users_kernel(seed):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(seed)
    for _ in range(5):
        net = random_net(rng, rng.integers(1, 130, rng.integers(2, 7)), ("float32", "float64")[rng.integers(2)])
        x = odd_values(rng, (100, net.network.sizes[0]), net.network.dtype)
        y = launch(cupy, net, "random_net", "pointer", cupy.asarray(x), 1, 128)
        assert same_bits(y, net.mlp()(cupy.asarray(x)).get()), net.network.describe()


PROGRAM = r"""
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

int main() {
    std::ifstream in("x", std::ios::binary);
    const std::vector<char> x(std::istreambuf_iterator<char>(in), {});
    const long long rows = x.size() / (K * sizeof(float));
    std::vector<char> y(rows * N * sizeof(float));
    float *from, *to;
    cudaMalloc(&from, x.size());
    cudaMalloc(&to, y.size());
    cudaMemcpy(from, x.data(), x.size(), cudaMemcpyHostToDevice);
    run_mlp<<<5, 64>>>(from, to, rows);
    cudaMemcpy(y.data(), to, y.size(), cudaMemcpyDeviceToHost);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return std::puts(cudaGetErrorString(error)), 1;
    std::ofstream("y", std::ios::binary).write(y.data(), y.size());
}
"""


@pytest.mark.gpu
def test_a_program_of_nvcc_computes_the_bits(rng, tmp_path):
    cupy = pytest.importorskip("cupy")
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc is installed")
    net = random_net(rng, CANONICAL)
    x = odd_values(rng, (777, CANONICAL[0]), "float32")
    constants = f"constexpr int K = {CANONICAL[0]}, N = {CANONICAL[-1]};\n"
    text = net.mlp().cuda_source() + kernel("mlp", net, "inline") + constants + PROGRAM
    (tmp_path / "program.cu").write_text(text)
    (tmp_path / "x").write_bytes(x.tobytes())
    architecture = f"-arch=sm_{cupy.cuda.Device().compute_capability}"
    for command in (["nvcc", architecture, "--use_fast_math", "-o", "program", "program.cu"], ["./program"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    y = np.frombuffer((tmp_path / "y").read_bytes(), np.float32).reshape(len(x), -1)
    assert same_bits(y, net.mlp()(cupy.asarray(x)).get())
