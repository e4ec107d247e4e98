"""Ways to do without this library, as their users would write them: NumPy, CuPy, and the frameworks that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..activations import ActivationSpec
from .buffers import Buffers
from .cases import Case, Settings
from .samplers import Call, Engine, HostEngine

__all__ = ["Entry", "Peers", "numpy_peer"]

NUMPY_CHAIN = "NumPy chain"
CUPY_CHAIN = "CuPy chain"

# What NumPy does in a few tenths of a second; it has no BLAS for float16, and makes float32 of bfloat16.
NUMPY_MOST_FMAS = {"float64": 5e9, "float32": 1e10, "float16": 1e8}


@dataclass(frozen=True)
class Entry:
    """Something to measure in a case.

    Attributes
    ----------
    name
        What the table calls it.
    kind
        ``net``, ``floor`` or ``peer``.
    call
        One call on a set of buffers; None if there can be none, and the note says why.
    engine
        How it is waited for and timed.
    schedule
        The schedule of a net.
    forced
        Whether the schedule was asked for, not the planner's choice.
    note
        What to know.
    """

    name: str
    kind: str
    call: Call | None
    engine: Engine
    schedule: str | None = None
    forced: bool = False
    note: str = ""


def numpy_chain(x: Any, weights: Sequence[Any], activations: Sequence[ActivationSpec]) -> Any:
    """One call a matmul, one an activation (relu or identity), in NumPy or in CuPy."""
    for weight, name in zip(weights, activations, strict=True):
        x = x @ weight
        if name == "relu":
            np.maximum(x, 0, out=x)
    return x


def numpy_peer(case: Case, net: Any, host_x: Callable[[], Any]) -> Iterator[Entry]:
    """NumPy's chain on a host array, if that ends soon."""
    if case.fmas <= NUMPY_MOST_FMAS.get(case.group.dtype, 0):
        call = partial(numpy_chain, host_x(), net.weights, net.network.activations)
        yield Entry(NUMPY_CHAIN, "peer", lambda _: call(), HostEngine())


@contextmanager
def _cupy_tf32(on: bool) -> Iterator[None]:
    """What CUPY_TF32=1 does, for one call: CuPy asks the environment only once."""
    from cupy import _core
    from cupy._core import _routines_linalg as linalg

    before = linalg.get_compute_type(np.float32)
    _core.set_compute_type(np.float32, linalg.COMPUTE_TYPE_TF32 if on else linalg.COMPUTE_TYPE_DEFAULT)
    try:
        yield
    finally:
        _core.set_compute_type(np.float32, before)


class Peers:
    """The peers of a sweep on a GPU.

    Parameters
    ----------
    cupy, engine
        The module, and how CuPy's calls are timed.
    settings
        Of the sweep.
    """

    def __init__(self, cupy: Any, engine: Engine, settings: Settings) -> None:
        self._cupy, self._engine, self._settings = cupy, engine, settings
        self._frameworks: list[Any] = []
        self.notes: dict[str, str] = {}
        if settings.peers:
            self._find()

    def _find(self) -> None:
        from .jax_peer import JaxPeer
        from .torch_peer import TorchPeer

        for make in (TorchPeer, JaxPeer):
            try:
                self._frameworks.append(make(self._settings.compile_seconds))
            except (ImportError, OSError, RuntimeError) as error:  # not there, or there without its libraries or a GPU
                self.notes[make.name] = f"not measured: {_first_line(error)}"

    def entries(self, case: Case, net: Any, buffers: Buffers) -> Iterator[Entry]:
        """The peers of one case, ready to be called; one that fails is an entry without a call."""
        if not self._settings.peers or case.batch not in self._settings.peer_batches:
            return
        ways = {
            NUMPY_CHAIN: numpy_peer(case, net, lambda: self._host_x(case, net, buffers)),
            CUPY_CHAIN: self._cupy_chain(case, net, buffers),
            **{framework.name: framework.entries(case, net, buffers) for framework in self._frameworks},
        }
        for name, entries in ways.items():
            try:
                yield from entries
            except Exception as error:  # whatever it is, the sweep goes on without this peer
                yield Entry(name, "peer", None, HostEngine(), note=failed(error))

    def _host_x(self, case: Case, net: Any, buffers: Buffers) -> Any:
        return self._cupy.asnumpy(buffers.x_bytes(0)).view(net.dtype).reshape(case.batch, case.group.sizes[0])

    def _cupy_chain(self, case: Case, net: Any, buffers: Buffers) -> Iterator[Entry]:
        weights = [self._cupy.asarray(np.ascontiguousarray(w)) for w in net.weights]
        activations, tf32 = net.network.activations, case.group.precision == "tf32"

        def call(index: int) -> Any:
            with _cupy_tf32(tf32):
                return numpy_chain(buffers.x[index], weights, activations)

        yield Entry(CUPY_CHAIN, "peer", call, self._engine)

    def free(self) -> None:
        """Give memory that the frameworks keep back to the device."""
        for framework in self._frameworks:
            framework.free()


def failed(error: BaseException) -> str:
    """Why a peer has no figures, in one line."""
    return f"failed: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
