"""JAX as a peer, if it is installed: jax.jit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from .buffers import Buffers
from .cases import Case
from .peers import Entry
from .samplers import Call, Sampler, WallSampler

__all__ = ["JaxPeer"]


class JaxPeer:
    """JAX on the current GPU. Its streams are its own, so that many calls are timed by the host's clock.

    Parameters
    ----------
    compile_seconds
        What jax.jit may take for compiling in all; 0 leaves JAX out.

    Raises
    ------
    ImportError
        If JAX is not installed.
    RuntimeError
        If it finds no GPU, or no time is given to it.
    """

    name = "jax.jit"

    def __init__(self, compile_seconds: float) -> None:
        if compile_seconds <= 0:
            raise RuntimeError("it was given no time to compile")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes three quarters of the memory
        import jax

        if jax.default_backend() != "gpu":
            raise RuntimeError("JAX finds no GPU")
        jax.config.update("jax_enable_x64", True)
        self._jax = jax
        self._engine = _JaxEngine(jax)
        self._left = compile_seconds

    def entries(self, case: Case, net: Any, buffers: Buffers) -> Iterator[Entry]:
        """The jitted chain, while there is time for compiling."""
        if self._left <= 0:
            return
        jax, jnp = self._jax, self._jax.numpy
        precision = "tensorfloat32" if case.group.precision == "tf32" else "highest"
        x = [self._array(net, buffers, i) for i in range(buffers.sets)]
        weights = [jnp.asarray(np.ascontiguousarray(w)) for w in net.weights]
        activations = net.network.activations

        def chain(h: Any, layers: list[Any]) -> Any:
            for weight, name in zip(layers, activations, strict=True):
                h = jnp.matmul(h, weight, precision=precision)
                if name == "relu":
                    h = jnp.maximum(h, 0)
            return h

        jitted = jax.jit(chain)
        start = time.perf_counter()
        self._engine.wait(jitted(x[0], weights))
        seconds = time.perf_counter() - start
        self._left -= seconds
        note = f"compiled in {seconds:.1f} s"
        yield Entry(self.name, "peer", lambda index: jitted(x[index], weights), self._engine, note=note)

    def _array(self, net: Any, buffers: Buffers, index: int) -> Any:
        """One set's x, without a copy; bfloat16, which not every DLPack knows, by its bits."""
        if net.dtype.name != "bfloat16":
            return self._jax.numpy.from_dlpack(buffers.x[index])
        bits = self._jax.numpy.from_dlpack(buffers.x[index].view(np.uint16))
        return self._jax.lax.bitcast_convert_type(bits, self._jax.numpy.bfloat16)

    def free(self) -> None:
        """Forget what was compiled."""
        self._jax.clear_caches()


class _JaxEngine:
    def __init__(self, jax: Any) -> None:
        self._jax = jax

    def wait(self, result: Any) -> None:
        self._jax.block_until_ready(result)

    def sampler(self, call: Call, calls: int, sets: int) -> Sampler:
        return WallSampler("wall", call, self.wait, calls, sets)
