"""_strides, _pack, _source and activations."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NETS, random_net

from cupymlp import _source
from cupymlp._pack import pack
from cupymlp._strides import byte_bounds, merge_axes
from cupymlp.plan import layer_vectors
from cupymlp.schedules import SCHEDULES


@given(data=st.data())
def test_merged_axes_visit_the_same_elements_in_the_same_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    strides = [tuple(data.draw(st.integers(-30, 30)) for _ in shape) for _ in range(2)]
    if data.draw(st.booleans()):  # something to merge
        strides = [tuple(np.cumprod((1, *shape[:0:-1]))[::-1][: len(shape)]) for _ in range(2)]

    def offsets(shape, strides):
        return [sum(i * s for i, s in zip(index, strides)) for index in np.ndindex(*shape)]

    merged, steps = merge_axes(shape, *strides)
    for old, new in zip(strides, steps, strict=True):
        assert offsets(shape, old) == offsets(merged, new)
    assert 1 not in merged


def test_contiguous_axes_merge_to_one():
    assert merge_axes((4, 3, 2), (24, 8, 4), (48, 16, 8)) == ((24,), [(4,), (8,)])
    assert merge_axes((4, 3), (12, 4), (4, 16)) == ((4, 3), [(12, 4), (4, 16)])
    assert merge_axes((1, 1), (7, 9)) == ((), [()])
    assert merge_axes((5, 3), (0, 0)) == ((15,), [(0,)])


@given(data=st.data())
def test_byte_bounds_are_what_numpy_says(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    array = np.zeros([s * 2 for s in shape], "f4")[tuple(slice(0, 2 * s, 2) for s in shape)]
    array = array[tuple(slice(None, None, data.draw(st.sampled_from([1, -1]))) for _ in shape)]
    low, high = np.lib.array_utils.byte_bounds(array)
    start = array.__array_interface__["data"][0]
    assert byte_bounds(array.shape, array.strides, 4) == (low - start, high - start)
    assert byte_bounds((3, 0), (4, 4), 4) == (0, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", NETS, ids=str)
def test_packed_weights_lie_where_the_kernels_look(rng, sizes, dtype):
    """Index by index, from the description in common.cuh."""
    net = random_net(rng, sizes, dtype)
    v = 16 // np.dtype(dtype).itemsize
    packed = pack(np, "vectors", net.network, net.weights, net.biases)
    start, seen = 0, np.zeros(packed.size, bool)
    for layer, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
        k_size, n_size = weight.shape
        for k in range(k_size):
            for j in range(0, n_size, 5):
                at = start + ((k // v) * n_size + j) * v + k % v
                assert packed[at] == weight[k, j]
                seen[at] = True
        if bias is not None:
            at = start + -(-k_size // v) * n_size * v
            assert (packed[at : at + n_size] == bias).all()
        start += layer_vectors(net.network, layer) * v
    assert start == packed.size
    assert packed.dtype == dtype


def test_every_schedule_has_its_file_and_headers_are_inlined_once():
    for name in set(SCHEDULES) - {"matmul"}:  # cuBLAS's
        source = _source.kernel_source(f"mlp_{name}.cu")
        assert "#include" not in source
        assert source.count("enum class Act") == 1
        assert f"mlp_{name}(" in source


def test_line_numbers_survive_inlining():
    """After an inlined header, #line says where the rest of the file is."""
    lines = _source.kernel_source("mlp_row.cu").splitlines()
    original = (_source.find_cuda_src() / "mlp_row.cu").read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if line.startswith("#line"))
    number = int(lines[at].split()[1])
    assert lines[at + 1 :] == original[number - 1 :]


def test_the_sources_are_plain_ascii():
    for file in _source.find_cuda_src().iterdir():
        file.read_bytes().decode("ascii")


def test_missing_sources_are_an_error_that_names_both_places(tmp_path, monkeypatch):
    package = tmp_path / "cupymlp"
    package.mkdir()
    monkeypatch.setattr(_source, "__file__", str(package / "_source.py"))
    find = _source.find_cuda_src.__wrapped__
    with pytest.raises(FileNotFoundError) as caught:
        find()
    assert str(package / "cuda_src") in str(caught.value)
    assert str(tmp_path / "cuda_src") in str(caught.value)
    shutil.copytree(_source.find_cuda_src(), tmp_path / "cuda_src")
    assert find() == tmp_path / "cuda_src"
    shutil.copytree(_source.find_cuda_src(), package / "cuda_src")
    assert find() == package / "cuda_src"
