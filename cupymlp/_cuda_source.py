"""A network as CUDA C++ text: one ``__device__`` function for kernels that users write themselves.

The text is ``cuda_src/thread_row.cuh`` with what it includes, in a namespace of its own, so that a translation unit can have
several networks, and with the packed weights as bits. It computes what the kernels compute, by the same lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._pack import pack
from ._source import kernel_source, without_line_directives
from .activations import activation_of
from .network import Network
from .plan import CONTIGUOUS, VECTOR_BYTES, compute_itemsize, held_widths, network_options, packed_bytes, vectors

__all__ = ["device_function", "packed"]

WEIGHTS = ("inline", "pointer")
INLINE_BYTES = 1024 * 1024  # of weights in the text, which is about four times as long
LOCAL_BYTES = (
    32 * 1024
)  # of activations a thread: the driver reserves them for every thread that a GPU can hold at once
WORDS_A_LINE = 10

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def packed(network: Network, weights: Sequence[Any], biases: Sequence[Any]) -> NDArray[Any]:
    """What the function's ``weights`` points to."""
    return np.asarray(pack(np, "vectors", network, weights, biases))


def device_function(
    network: Network, weights: Sequence[Any], biases: Sequence[Any], name: str, where: str, version: str
) -> str:
    """The text; `cupymlp.MLP.cuda_source` documents it and its errors."""
    _check(network, name, where)
    space = f"cupymlp_{name}"
    options = dict(option.removeprefix("-D").split("=", 1) for option in network_options(network, CONTIGUOUS))
    body = without_line_directives(kernel_source("thread_row.cuh"))
    parts = [
        _header(network, name, where, version),
        "\n".join(f"#define {macro} {value}" for macro, value in options.items()),
        f"namespace {space} {{",
        body.strip(),
    ]
    if where == "inline":
        parts.append(_array(packed(network, weights, biases)))
    parts += [
        f"}}  // namespace {space}",
        "\n".join(f"#undef {macro}" for macro in options),
        _function(network, name, space, where),
    ]
    return "\n\n".join(parts) + "\n"


def _check(network: Network, name: str, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or "__" in name:
        raise ValueError(
            f"name is {name!r}; accepted: letters, digits and single underscores that begin with a letter, as 'mlp': a C++ name"
        )
    if where not in WEIGHTS:
        raise ValueError(
            f"weights is {where!r}; accepted: 'inline' for weights in the text, 'pointer' for an argument that points to them"
        )
    if network.precision != "ieee":
        raise ValueError(
            f"the network has precision={network.precision!r}, whose sums need more threads than one; accepted: 'ieee'. Make "
            "the MLP without precision"
        )
    activations = _local_bytes(network)
    if activations > LOCAL_BYTES:
        raise ValueError(
            f"a row's activations take {activations:,} bytes of a thread's local memory; accepted: up to {LOCAL_BYTES:,}. Call "
            "the MLP on all rows between two kernels instead"
        )
    size = packed_bytes(network)
    if where == "inline" and size > INLINE_BYTES:
        raise ValueError(
            f"the weights are {size:,} bytes; accepted in the text: up to {INLINE_BYTES:,}. Use weights='pointer', and pass "
            "cupy.asarray(net.packed_weights()) to the kernel"
        )


def _local_bytes(network: Network) -> int:
    """Of the two arrays in thread_row."""
    groups = sum(max([1, *(vectors(network, n) for n in held_widths(network)[parity::2])]) for parity in (0, 1))
    return groups * VECTOR_BYTES // network.itemsize * compute_itemsize(network)


def _header(network: Network, name: str, where: str, version: str) -> str:
    features_in, features_out = network.sizes[0], network.sizes[-1]
    element = _element(network)
    lines = [
        f"{name}: {network.describe()}",
        f"Written by MLP.cuda_source of cupymlp {version}. MIT license, copyright 2026 the cupymlp authors.",
        "",
        f"    __device__ void {name}({_parameters(element, where)})",
        "",
        f"Computes one row in the calling thread. x: its {features_in} features; y: its {features_out} results; each without "
        "gaps, in any memory;",
        "they may overlap.",
    ]
    if network.itemsize == 2:
        lines += [f"{element} is any type of the 2 bytes of a {network.dtype} number: CUDA's own, or unsigned short."]
    if where == "pointer":
        lines += [
            f"weights: the {packed_bytes(network):,} bytes of MLP.packed_weights(), at a multiple of {VECTOR_BYTES} bytes, in "
            "any memory."
        ]
    lines += [
        *_bits(network),
        "",
        "C++17, for nvcc, NVRTC and CuPy's RawKernel and RawModule. Needs no header; put it before macros of your own.",
    ]
    return "\n".join(f"// {line}".rstrip() for line in lines)


def _bits(network: Network) -> list[str]:
    of = "the MLP on a GPU" + (", schedules row, tile and layer" if network.itemsize == 2 else "")
    if all(activation_of(activation).exact for activation in network.activations):
        return [f"The bits are those of {of}, whatever the compiler's options for floating-point numbers."]
    return [
        f"The bits are those of {of}, if the compiler and its options are CuPy's: -ftz=true, and no",
        "-fmad=false. Others may change the last bits of CUDA's exp, tanh and the like, and --use_fast_math more than these.",
    ]


def _element(network: Network) -> str:
    return {2: "Half", 4: "float", 8: "double"}[network.itemsize]


def _parameters(element: str, where: str) -> str:
    return f"const {element}* x, {element}* y" + (", const void* weights" if where == "pointer" else "")


def _array(buffer: NDArray[Any]) -> str:
    """The bits of the packed weights as 32-bit words; at least one vector, as C++ has no empty array."""
    words = buffer.view(np.uint32) if buffer.size else np.zeros(VECTOR_BYTES // 4, np.uint32)
    texts = [f"0x{word:x}u" for word in words.tolist()]
    lines = [", ".join(texts[i : i + WORDS_A_LINE]) for i in range(0, len(texts), WORDS_A_LINE)]
    return (
        f'// "Packed weights", above, as bits. Not __constant__: of that a program has 64 KB in all.\n'
        f"alignas({VECTOR_BYTES}) __device__ const unsigned int packed_weights[{len(texts)}] = {{\n"
        + ",\n".join(lines)
        + "};"
    )


def _function(network: Network, name: str, space: str, where: str) -> str:
    element = _element(network)
    source = f"{space}::packed_weights" if where == "inline" else "weights"
    x, y = "x", "y"
    template = check = ""
    if network.itemsize == 2:
        template = f"template <class {element}>\n"
        check = f'    static_assert(sizeof({element}) == 2, "x and y hold {network.dtype} numbers");\n'
        x, y = f"reinterpret_cast<const {space}::X*>(x)", f"reinterpret_cast<{space}::S*>(y)"
    return (
        f"{template}__device__ inline void {name}({_parameters(element, where)}) {{\n"
        f"{check}"
        f"    {space}::thread_row({x}, {y}, reinterpret_cast<const {space}::Vector*>({source}));\n"
        "}"
    )
