"""A stand-in for CuPy on host memory: what _launch and _chain hand to kernels and to cuBLAS, followed pointer by pointer.

Launches are computed in NumPy from the kernel's options and arguments. The kernels' own reading of them is tested in
test_host_kernels.py and test_gpu.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
from support import H200

from cupymlp import _chain, _direct, _gpu, _launch, fused
from cupymlp._strides import byte_bounds
from cupymlp.activations import ACTIVATIONS, activation_of, parameter_of
from cupymlp.network import Network, numpy_dtype
from cupymlp.plan import _C_TYPES, layer_vectors

DTYPES = {c_type: name for name, c_type in _C_TYPES.items()}
IN_PLACE = ("bias_act", "softmax")
CUBLAS_TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}


class HostArray(np.ndarray):
    """A NumPy array with the attributes of a CuPy one that the launch reads."""

    def __new__(cls, shape, dtype=float, memptr=None):
        return super().__new__(cls, shape, dtype, None if memptr is None else memptr.memory.buffer)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)

    @property
    def _c_contiguous(self):
        return self.flags.c_contiguous

    def set(self, array, stream=None):
        self[...] = array


def host_array(array):
    return np.array(array, order="C", copy=True).view(HostArray)


def at_address(address, shape, strides, dtype):
    """The array whose first element is there; strides in bytes."""
    dtype = numpy_dtype(dtype)
    low, high = byte_bounds(shape, strides, dtype.itemsize)
    if low == high:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * (high - low)).from_address(int(address) + low)
    return np.ndarray(shape, dtype, memory, -low, strides)


def contiguous(address, shape, dtype):
    """The array in C order there."""
    size = numpy_dtype(dtype).itemsize
    return at_address(address, shape, [size * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))], dtype)


# --- Kernels --------------------------------------------------------------------------------------------------------


def network_of(options):
    sizes = tuple(map(int, options["MLP_SIZES"].split(",")))
    names = [name.removeprefix("Act::") for name in options["MLP_ACTIVATIONS"].split(",")]
    parameters = [float.fromhex(text.removesuffix("f")) for text in options["MLP_PARAMETERS"].split(",")]
    activations = tuple(
        name if ACTIVATIONS[name].parameter is None else (name, p) for name, p in zip(names, parameters, strict=True)
    )
    biases = tuple(flag == "1" for flag in options["MLP_BIASES"].split(","))
    return Network(sizes, activations, biases, DTYPES[options["MLP_S"]])


def weights_by_table(network, table):
    """The layers' arrays by struct Weights of common.cuh."""
    size = network.itemsize
    numbers = np.frombuffer(table.tobytes(), np.int64).reshape(5, network.depth).T.tolist()
    weights, biases = [], []
    for layer, (weight, bias, k_step, j_step, bias_step) in enumerate(numbers):
        k, n = network.sizes[layer : layer + 2]
        weights.append(at_address(weight, (k, n), (k_step * size, j_step * size), network.dtype) if weight else None)
        has_bias = network.biases[layer]
        biases.append(at_address(bias, (n,), (bias_step * size,), network.dtype) if has_bias else None)
    return weights, biases


def weights_by_packing(network, address):
    """The layers' arrays out of the packed buffer, index by index."""
    v = 16 // network.itemsize
    weights, biases = [], []
    for layer in range(network.depth):
        k, n = network.sizes[layer : layer + 2]
        groups = -(-k // v)
        vectors = contiguous(address, (groups, n, v), network.dtype)
        weights.append(vectors.transpose(0, 2, 1).reshape(groups * v, n)[:k])
        at = address + groups * n * 16
        biases.append(contiguous(at, (n,), network.dtype) if network.biases[layer] else None)
        address += 16 * layer_vectors(network, layer)
    return weights, biases


def address_of(argument):
    return argument.data.ptr if isinstance(argument, HostArray) else argument


def rows_of(address, features, dtype, strides, first, count):
    """Rows of x or y: strides are None, or the feature step, the shape and the steps of Rows."""
    if strides is None:
        size = numpy_dtype(dtype).itemsize
        return contiguous(address + first * features * size, (count, features), dtype)
    feature_step, shape, steps = strides
    return [
        at_address(
            address + sum(i * s for i, s in zip(np.unravel_index(row, shape), steps)),
            (features,),
            (feature_step,),
            dtype,
        )
        for row in range(first, first + count)
    ]


def launch(kernel, grid, block, arguments, shared_bytes):
    """What the kernel computes, in the dtype of its sums."""
    assert shared_bytes == kernel.shared_bytes
    assert block == (*kernel.block, 1, 1)
    options = dict(option[2:].split("=", 1) for option in kernel.options if option.startswith("-DMLP_"))
    network = network_of(options)
    x, y, weights, rows, *its_round = arguments
    dims = int(options["MLP_BATCH_DIMS"])
    x_strides = y_strides = None
    if dims:
        numbers = np.frombuffer(rows.tobytes(), np.int64).tolist()
        batch, x_feature, y_feature = numbers[:3]
        shape, x_steps, y_steps = np.array(numbers[3:]).reshape(3, dims).tolist()
        if options["MLP_X_ACCESS"] != "Access::contiguous":
            x_strides = x_feature, shape, x_steps
        if options["MLP_Y_ACCESS"] != "Access::contiguous":
            y_strides = y_feature, shape, y_steps
    else:
        batch = rows
    x_first, y_first, count = its_round or (0, 0, batch)
    if options["MLP_PACKED"] == "1":
        matrices, biases = weights_by_packing(network, address_of(weights))
    else:
        matrices, biases = weights_by_table(network, weights)
    x_rows = rows_of(address_of(x), network.sizes[0], DTYPES[options["MLP_X_T"]], x_strides, x_first, count)
    out = rows_of(address_of(y), network.sizes[-1], DTYPES[options["MLP_Y_T"]], y_strides, y_first, count)
    h = np.stack([row.astype(network.sum_dtype) for row in x_rows])
    for matrix, bias, spec in zip(matrices, biases, network.activations, strict=True):
        if kernel.name not in IN_PLACE:
            # A kernel may write a row of out before another row reads its inputs: they must not share memory.
            assert not any(np.shares_memory(matrix, row) for row in out)
            h = h @ matrix.astype(network.sum_dtype)
        if bias is not None:
            h = h + bias.astype(network.sum_dtype)
        with np.errstate(all="ignore"):
            activation_of(spec).apply(h, h, parameter_of(spec, network.sum_dtype))
            h = h.astype(out[0].dtype).astype(network.sum_dtype)
    if kernel.name not in IN_PLACE:
        assert not any(np.shares_memory(a, b) for a in x_rows for b in out)
    for to, row in zip(out, h, strict=True):
        to[...] = row


def gemm_ex(
    handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algorithm
):
    """cublasGemmEx: C (m, n) = op(A) (m, k) @ op(B) (k, n), all column-major."""

    def matrix(address, rows, columns, leading, type_code):
        size = numpy_dtype(CUBLAS_TYPES[type_code]).itemsize
        assert leading >= max(1, rows)
        return at_address(address, (rows, columns), (size, leading * size), CUBLAS_TYPES[type_code])

    sums = CUBLAS_TYPES[c_type]
    assert (contiguous(alpha, (1,), sums)[0], contiguous(beta, (1,), sums)[0]) == (1, 0)
    left = matrix(a, *((k, m) if op_a else (m, k)), lda, a_type)
    right = matrix(b, *((n, k) if op_b else (k, n)), ldb, b_type)
    left, right = left.T if op_a else left, right.T if op_b else right
    matrix(c, m, n, ldc, c_type)[...] = left.astype(sums) @ right.astype(sums)


def launch_directly(kernel, gx, gy, gz, bx, by, bz, shared_bytes, _stream, address, extra):
    """The driver's launch of a kernel of x, y, packed weights and rows."""
    assert (gy, gz, by, bz, extra) == (1, 1, 1, 1, 0)
    x, y, weights, rows = (ctypes.c_void_p * 4).from_address(address)
    options = dict(option[2:].split("=", 1) for option in kernel.options if option.startswith("-DMLP_"))
    dims = int(options["MLP_BATCH_DIMS"])
    numbers = np.array((ctypes.c_int64 * (3 + 3 * dims if dims else 1)).from_address(rows))
    pointers = [ctypes.c_int64.from_address(value).value for value in (x, y, weights)]
    launch(kernel, (gx, 1, 1), (bx, 1, 1), (*pointers, numbers if dims else int(numbers[0])), shared_bytes)


# --- CuPy -----------------------------------------------------------------------------------------------------------


def install(monkeypatch, device=H200):
    """Put the stand-in in CuPy's place; what it returns tells what was launched, and has the current stream."""
    state = SimpleNamespace(
        launches=[], products=[], allocations=[], copies=[], stream=SimpleNamespace(ptr=0, capturing=False)
    )

    functions = []

    class Function:
        """CuPy's Function; its address is its place in a list."""

        def __init__(self, kernel):
            self._kernel, self.ptr = kernel, len(functions)
            functions.append(self)

        def __call__(self, *arguments):
            state.launches.append(self._kernel)
            launch(self._kernel, *arguments)

        def direct(self, *arguments):
            state.launches.append(self._kernel)
            launch_directly(self._kernel, *arguments)

    def kernel_for(kernel, _):
        function = Function(kernel)
        return SimpleNamespace(launcher=lambda: function)

    def launch_kernel(ptr, *arguments):
        functions[ptr].direct(*arguments)

    def gemm(*arguments):
        state.products.append(arguments)
        gemm_ex(*arguments)

    class Memory:
        def __init__(self, size):
            state.allocations.append(size)
            self.buffer = np.full(size, 0xFF, np.uint8)  # NaN
            self.ptr = self.buffer.__array_interface__["data"][0]

    def get_current_stream(_=0):
        stream = state.stream
        return SimpleNamespace(ptr=stream.ptr, is_capturing=lambda: stream.capturing, synchronize=lambda: None)

    cupy = ModuleType("cupy")
    cupy.ndarray = HostArray
    cupy.zeros = lambda shape, dtype: np.zeros(shape, dtype).view(HostArray)
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDevice=lambda: 0, setDevice=lambda _: None, memsetAsync=lambda at, v, size, _: ctypes.memset(at, v, size)
        ),
        Device=lambda _: contextlib.nullcontext(),
        Memory=Memory,
        MemoryPointer=lambda memory, _: SimpleNamespace(memory=memory),
        get_current_stream=get_current_stream,
        cublas=SimpleNamespace(gemmEx=gemm),
        device=SimpleNamespace(get_cublas_handle=lambda: 1),
        driver=SimpleNamespace(launchKernel=launch_kernel, CUDADriverError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for module in (_gpu, _launch, _chain, _direct, fused):
        if hasattr(module, "cupy_or_error"):
            monkeypatch.setattr(module, "cupy_or_error", lambda _: cupy)
    for module in (_launch, _chain):
        monkeypatch.setattr(module, "device_numbers", lambda _: device)
        monkeypatch.setattr(module, "kernel_for", kernel_for)

    def copy(array):
        state.copies.append(host_array(array))
        return state.copies[-1]

    monkeypatch.setattr(_launch, "_copy", copy)
    monkeypatch.setattr(_launch, "_fused_calls", {})
    for name, empty in (("_memories", {}), ("_spares", {}), ("_kept", [])):
        monkeypatch.setattr(_chain, name, empty)
    return state
