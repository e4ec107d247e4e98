"""Calls on fixed buffers, captured as a CUDA graph and replayed: `MLP.bind` and `capture`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ._gpu import cupy_or_error
from ._launch import PackedNet, overlap
from ._recorders import recorders

__all__ = ["Bound", "bind", "capture"]

_LEGACY_STREAM = 1  # this address and 0 stand for the legacy default stream, which cannot be captured


def _not_yet(*_: Any) -> None:
    raise RuntimeError("the calls are still being captured: leave the with block of cupymlp.capture() first")


class Bound:
    """Captured calls: call it to run them again, on whatever its buffers hold by then.

    Made by `MLP.bind` and `capture`. A call queues one CUDA graph on the current stream of the device and returns at once;
    it checks and allocates nothing. The graph's arrays and weights live as long as this object. Within a capture of the
    caller's own the networks' calls are captured again.

    Attributes
    ----------
    out
        The array that the last captured call wrote.
    device_id
        The device that it runs on, whichever is the current one.
    """

    def __init__(self, device_id: int) -> None:
        self.out: Any = None
        self.device_id = device_id
        self._graph: Any = None
        self._launch: Any = _not_yet
        self._graph_address = 0
        self._kept: list[tuple[Any, tuple[Any, ...]]] = []
        cuda = cupy_or_error("capturing calls").cuda
        self._current_stream, self._current_device = cuda.get_current_stream, cuda.runtime.getDevice
        self._is_capturing = cuda.runtime.streamIsCapturing
        self._device = cuda.Device

    def __call__(self) -> Any:
        """Run the captured calls again, on the current stream of the device; returns ``out``."""
        stream = self._current_stream(self.device_id).ptr
        if stream > _LEGACY_STREAM:
            if self._is_capturing(stream) and self._graph is not None:
                # A graph cannot be launched into a capture: to try would end it.
                for call, arguments in self._kept:
                    call(*arguments)
                return self.out
        elif self._current_device() != self.device_id:  # whose default stream has the same address
            with self._device(self.device_id):
                return self()
        self._launch(self._graph_address, stream)
        return self.out

    def __repr__(self) -> str:
        return f"<cupymlp.Bound {len(self._kept)} calls on device {self.device_id}>"

    def _be_empty(self, out: Any) -> None:
        """There is nothing to compute."""
        self.out, self._launch = out, lambda *_: None

    def _take(self, graph: Any, kept: list[tuple[Any, tuple[Any, ...]]]) -> None:
        if not kept:
            raise ValueError(
                "nothing was captured: call networks on CuPy arrays, on the device that was current when "
                "cupymlp.capture() began, inside its with block"
            )
        self._graph, self._kept = graph, kept  # which keep alive what the address stands for
        self._graph_address = graph.graphExec
        self._launch = cupy_or_error("capturing calls").cuda.runtime.graphLaunch
        self.out = kept[-1][1][-1]


class capture:  # noqa: N801, a function to its users
    """Capture the calls of networks inside a with block, to run them again as one CUDA graph.

    Every call must have been made once before with arrays of the same shapes, strides and dtypes: a first call compiles and
    allocates. Nothing is computed inside the block. Work of CuPy's own that can be captured may stand between the calls; arrays
    that only it uses must be kept by the caller.

    Raises
    ------
    RuntimeError
        At the end of the block, or for a first call inside it; the current stream is then what it was before. Within another
        capture. For ``precision="library"``.
    ValueError
        If there was no call.

    Examples
    --------
    ::

        h, v = policy(obs), value(obs)  # once, which compiles
        with cupymlp.capture() as step:
            policy(obs, out=h)
            value(obs, out=v)
        step()  # reads obs, writes h and v
    """

    def __init__(self) -> None:
        self._cupy = cupy_or_error("capturing calls")
        self._stream: Any = None
        self._bound: Any = None

    def __enter__(self) -> Bound:
        cuda = self._cupy.cuda
        outer = cuda.get_current_stream()
        if outer.ptr > _LEGACY_STREAM and outer.is_capturing():
            raise RuntimeError(
                "the current stream captures a CUDA graph already, and captures do not nest: call the networks themselves, "
                "which become part of that graph"
            )
        self._bound = Bound(cuda.runtime.getDevice())
        self._stream = cuda.Stream(non_blocking=True)
        self._stream.__enter__()
        try:
            self._stream.begin_capture()
        except BaseException:
            self._stream.__exit__(None, None, None)
            raise
        recorders[self._stream.ptr] = []
        return self._bound  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        kept = recorders.pop(self._stream.ptr)
        try:
            graph = self._end(failed=error is not None)
        finally:
            self._stream.__exit__(kind, error, traceback)
        if error is None:
            self._bound._take(graph, kept)

    def _end(self, *, failed: bool) -> Any:
        """End the capture; the graph, or None if the block failed, whose own error is then the one to see."""
        try:
            return self._stream.end_capture()
        except self._cupy.cuda.runtime.CUDARuntimeError:
            if not failed:
                raise
            return None


def bind(net: PackedNet, x: Any, out: Any, returned: Any) -> Bound:
    """`MLP.bind`, of CuPy arrays; ``returned`` is what a call returns if it is not None."""
    cupy = cupy_or_error("capturing calls")
    with cupy.cuda.Device(x.data.device_id):
        y = net(x, out)  # checks, compiles, uploads, and allocates the scratch memory that a capture needs
        if out is not None and overlap(x, out):
            raise ValueError("x and out overlap: a bound call reads x again and again, so pass arrays that do not")
        if y.size == 0:
            bound = Bound(x.data.device_id)
            bound._be_empty(y)
        else:
            with capture() as bound:
                net(x, y)
        if returned is not None:
            bound.out = returned
    return bound
