"""A stand-in for CuPy whose streams put off their work: what is read without having been waited for is not there yet.

A stream is a list of operations. They run when somebody waits for them, or, with ``rng``, some of them at any moment, in any
order that the events allow. Memory is poisoned, and counted. Several threads may use it, each with a current stream of its own.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
from host_cupy import HostArray


class OutOfMemoryError(MemoryError):
    """As CuPy's."""


class CudaError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class LazyCupy:
    """The parts of the module that the pipeline uses."""

    def __init__(self, rng=None, most_device_bytes=None, most_pinned_bytes=None):
        self.rng = rng
        self.streams = {}
        self.graphs = {}
        self.live = {}  # kind and size of every buffer that somebody holds
        self.most = {"device": most_device_bytes, "pinned": most_pinned_bytes}
        self.ndarray = HostArray
        self.lock = threading.RLock()  # one for all: what a thread runs may be another thread's
        self.null = _Stream(self)
        self.thread = threading.local()
        module = self

        class Event:
            def __init__(self, block, disable_timing):
                self.stream, self.marker = None, None

            def record(self, stream):
                with module.lock:
                    module.jiggle()
                    self.stream, self.marker = stream, stream.append(lambda: None)

            def synchronize(self):
                with module.lock:
                    self.stream.run_until(self.marker)
                    module.jiggle()

        runtime = SimpleNamespace(
            CUDARuntimeError=CudaError, getDevice=lambda: 0, memcpyHostToDevice=1, memcpyDeviceToHost=2,
            memcpyAsync=self.memcpy, hostRegister=self.register, hostUnregister=self.unregister,
            graphLaunch=self.launch_graph,
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            Device=lambda device_id: SimpleNamespace(use=lambda: None),
            Event=Event,
            Stream=lambda non_blocking: _Stream(self),
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=CudaError),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            alloc=lambda size: SimpleNamespace(memory=self.take("device", size)),
            get_current_stream=lambda: self.current,
        )

    @property
    def current(self):
        """This thread's stream."""
        return getattr(self.thread, "current", self.null)

    def fits(self, kind, size):
        taken = sum(its_size for its_kind, its_size in self.live.values() if its_kind == kind)
        return self.most[kind] is None or taken + size <= self.most[kind]

    def take(self, kind, size):
        if not self.fits(kind, size):
            raise OutOfMemoryError(f"out of memory: {size} bytes")
        buffer = np.ndarray.__new__(_Buffer, size, np.uint8)
        buffer.fill(0xFF)
        self.live[id(buffer)] = kind, size
        weakref.finalize(buffer, self.live.pop, id(buffer))
        return SimpleNamespace(buffer=buffer)

    def register(self, address, size, flags):
        if not self.fits("pinned", size):
            raise CudaError(2, "cudaErrorMemoryAllocation: out of memory")
        ctypes.memset(address, 0xFF, size)
        self.live[address] = "pinned", size

    def unregister(self, address):
        del self.live[address]

    def is_pinned(self, address, size):
        return any(
            kind == "pinned" and first <= address and address + size <= first + its_size
            for first, (kind, its_size) in self.live.items()
        )

    def memcpy(self, to, start, size, kind, stream):
        assert self.is_pinned(start if kind == 1 else to, size)
        with self.lock:
            self.jiggle()
            self.streams[stream].append(lambda: ctypes.memmove(to, start, size))

    def launch_graph(self, address, stream):
        with self.lock:
            self.jiggle()
            for operation in self.graphs[address]:
                self.streams[stream].append(operation)

    def jiggle(self):
        """Let some streams get on."""
        if self.rng is None:
            return
        for stream in self.rng.permutation(np.array([*self.streams.values()], dtype=object)):
            for _ in range(self.rng.integers(0, 3)):
                stream.step()

    def net(self, compute, launches_once=True):
        """A PackedNet that computes on the current stream."""

        def call(x, y):
            with self.lock:
                self.jiggle()
                # No closure: a frame that an error remembers would hold x and y for ever.
                self.current.append(partial(compute, x.view(np.ndarray), y.view(np.ndarray)))

        call.launches_once = lambda x: launches_once
        return call


class _Buffer(np.ndarray):
    """Unlike NumPy's own, it can be referred to weakly."""


class _Graph:
    """As CuPy's: it has the address of the driver's."""


class _Stream:
    def __init__(self, module):
        self.module = module
        self.ptr = 1000 + len(module.streams)
        self.queue, self.first = [], 0  # first: the number of the queue's first operation
        self.before = []
        self.captured = None
        module.streams[self.ptr] = self

    def append(self, operation):
        if self.captured is not None:
            self.captured.append(operation)
            return None
        self.queue.append(operation)
        return self.first + len(self.queue)  # what `first` is when the operation has run

    def step(self):
        """Run one operation, if there is one and it need not wait."""
        if self.queue and getattr(self.queue[0], "ready", lambda: True)():
            operation = self.queue.pop(0)
            self.first += 1
            operation()

    def run_until(self, marker):
        while self.first < marker:
            operation = self.queue.pop(0)
            getattr(operation, "wait", lambda: None)()
            self.first += 1
            operation()

    def wait_event(self, event):
        stream, marker = event.stream, event.marker  # as recorded now

        def operation():
            pass

        operation.ready = lambda: stream.first >= marker
        operation.wait = lambda: stream.run_until(marker)
        with self.module.lock:
            self.append(operation)

    def synchronize(self):
        assert self.captured is None
        with self.module.lock:
            self.run_until(self.first + len(self.queue))

    def is_capturing(self):
        return self.captured is not None

    def begin_capture(self):
        self.captured = []

    def end_capture(self):
        """What keeps a graph's operations: they are gone with it."""
        graph = _Graph()
        graph.graphExec = id(graph)
        self.module.graphs[graph.graphExec], self.captured = self.captured, None
        weakref.finalize(graph, self.module.graphs.pop, graph.graphExec)
        return graph

    def __enter__(self):
        self.before.append(self.module.current)
        self.module.thread.current = self
        return self

    def __exit__(self, *_):
        self.module.thread.current = self.before.pop()
