"""Every kernel compiles for every architecture, spills nothing where the plan promises it, and flushes no subnormals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from compiling import build, registers, spills
from support import CANONICAL, H200, NETS

from cupymlp.network import Network
from cupymlp.plan import CONTIGUOUS, Access
from cupymlp.schedules import plan_gpu
from cupymlp.schedules.layer import SHAPES, layer_kernel

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
WIDE = ((128, 128, 128, 128, 128), (784, 256, 10), (512, 512, 512))
DTYPES = ("float16", "bfloat16", "float32", "float64")
MAIN = ("sm_75", "sm_90", "sm_120")  # where the compiler's choices differ most
MATRIX = [
    (dtype, architecture)
    for dtype in DTYPES
    for architecture in (ARCHITECTURES if dtype == "float32" else (*MAIN, "sm_100") if dtype == "float64" else MAIN)
]
FEW = replace(H200, multiprocessors=100)  # 1,024 rows are many rows for it
ACCESSES = {
    "packed": CONTIGUOUS,
    "the caller's weights": Access(packed=False),
    "strided float16": Access("float16", "strided", "strided", 2),
    "unaligned bfloat16": Access("bfloat16", "unaligned", "unaligned", 1),
    "int8": Access("int8"),
}


def network(sizes, dtype, precision="ieee"):
    depth = len(sizes) - 1
    return Network(tuple(sizes), ("relu",) * (depth - 1) + ("identity",), (True,) * depth, dtype, precision)


def only_kernel(sizes, dtype, batch, schedule, access=CONTIGUOUS, device=H200):
    (kernel,) = plan_gpu(network(sizes, dtype), batch, device, access, schedule).kernels
    return kernel


def nets_of(dtype):
    """Nets for row: fewer for half types, of which only how vectors are read is new."""
    if dtype in {"float32", "float64"}:
        return (*NETS, *WIDE)
    return (
        CANONICAL,
        (17, 33, 65, 2),
        (130, 10),
        (64,) * 5,
        (128,) * 5,
        (15, 31, 63, 129, 5),
        (784, 256, 10),
        (512, 512, 512),
    )


@pytest.mark.parametrize(("dtype", "architecture"), MATRIX)
def test_row_compiles_and_spills_nothing(nvrtc, architecture, dtype):
    for sizes in nets_of(dtype):
        kernels = {only_kernel(sizes, dtype, batch, "row", device=FEW) for batch in (16, 1024)}
        for kernel in {kernel.options: kernel for kernel in kernels}.values():
            _, log = build(nvrtc, kernel, architecture)
            assert spills(log) == 0, (sizes, log)
            assert "warning" not in log, log


@pytest.mark.parametrize(("dtype", "architecture"), MATRIX)
def test_tile_compiles_and_spills_nothing(nvrtc, architecture, dtype):
    nets = (CANONICAL, (17, 33, 65, 2), (7, 0, 4)) if dtype == "float32" and architecture in MAIN else (CANONICAL,)
    for sizes in nets:
        for batch in (256, 1 << 20):
            _, log = build(nvrtc, only_kernel(sizes, dtype, batch, "tile"), architecture)
            assert spills(log) == 0, (sizes, batch, log)
            assert "warning" not in log, log


@pytest.mark.parametrize(("dtype", "architecture"), MATRIX)
def test_layer_compiles_and_spills_nothing(nvrtc, architecture, dtype):
    """The shapes, for a layer of whole chunks; the largest, too, for one that ends within a chunk and a tile."""
    shapes = SHAPES[8 if dtype == "float64" else 4]
    for shape in shapes if dtype in {"float32", "float64"} and architecture in MAIN else shapes[::3]:
        for sizes in ((512, 512), (515, 130)) if shape is shapes[0] else ((512, 512),):
            kernel = layer_kernel(network(sizes, dtype), 0, 4096, shape, CONTIGUOUS)
            _, log = build(nvrtc, kernel, architecture)
            assert spills(log) == 0, (sizes, shape, log)
            assert registers(log) * shape.threads * shape.blocks <= 65536
            assert "warning" not in log, log


@pytest.mark.parametrize("architecture", ["sm_75", "sm_120"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_act_compiles(nvrtc, architecture, dtype):
    net = network((64, 30, 7), dtype, "library")
    for access in (CONTIGUOUS, Access("int8", "unaligned", "strided", 2, packed=False)):
        for kernel in plan_gpu(net, 100, H200, access).kernels:
            _, log = build(nvrtc, kernel, architecture)
            assert spills(log) == 0, log
            assert "warning" not in log, log


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("access", ACCESSES)
def test_every_access_compiles(nvrtc, architecture, access):
    for sizes in (CANONICAL, (7, 0, 4), (0, 5, 3), (130, 10), (3, 600, 2)):
        for dtype in ("float32", "float64"):
            _, log = build(nvrtc, only_kernel(sizes, dtype, 16, "row", ACCESSES[access]), architecture)
            assert "warning" not in log, log
    for schedule, sizes in (("tile", (17, 33, 2)), ("layer", (64, 30))) if architecture == "sm_90" else ():
        _, log = build(nvrtc, only_kernel(sizes, "float32", 300, schedule, ACCESSES[access]), architecture)
        assert "warning" not in log, log


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("schedule", "sizes"), [("row", CANONICAL), ("row", (130, 70, 10)), ("tile", (48, 64, 24)), ("layer", (130, 70))]
)
def test_nothing_on_the_data_path_flushes_subnormals(nvrtc, schedule, sizes, dtype, access):
    """-ftz=true, which CuPy adds, leaves its mark on PTX instructions: none may have it."""
    code, _ = build(nvrtc, only_kernel(sizes, dtype, 16, schedule, ACCESSES[access]), "sm_90", ptx=True)
    assert re.findall(r"\S*\.ftz\S*", code.decode()) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_activation_of_matmul_flush_no_subnormals(nvrtc, dtype):
    for kernel in plan_gpu(network((64, 30, 7), dtype, "library"), 100, H200, Access("int8")).kernels:
        code, _ = build(nvrtc, kernel, "sm_90", ptx=True)
        assert re.findall(r"\S*\.ftz\S*", code.decode()) == []


def test_the_canonical_kernel_does_what_its_header_says(nvrtc):
    """All weights by 16-byte loads, no stack; at most 255 registers, and few enough for four blocks a multiprocessor."""
    kernel = only_kernel(CANONICAL, "float32", 16, "row")
    code, log = build(nvrtc, kernel, "sm_90", ptx=True)
    assert code.decode().count("ld.global.v4.b32") == 12 + 16 + 10
    _, log = build(nvrtc, kernel, "sm_90")
    assert registers(log) * kernel.block[0] * 4 <= 65536


def test_layer_moves_16_bytes_at_a_time(nvrtc):
    """x of float32 and the weights of whole chunks; the narrow loads of x are there for addresses that need them."""
    kernel = only_kernel((512, 512), "float32", 1 << 16, "layer")
    code, _ = build(nvrtc, kernel, "sm_90", ptx=True)
    text = code.decode()
    assert text.count("ld.global.nc.v4.") + text.count("ld.global.v4.") >= 2 * (2 + 2)  # the first chunk and the next
    assert not re.findall(r"\bld\.local|\bst\.local", text)
