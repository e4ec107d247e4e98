"""A stand-in for CuPy whose streams put off their work: what is read without having been waited for is not there yet.

A stream is a list of operations. They run when somebody waits for them, or, with ``rng``, some of them at any moment, in any
order that the events allow. Memory is poisoned, and counted.
"""

from __future__ import annotations

import ctypes
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
        self.live = {}  # kind and size of every buffer that somebody holds
        self.most = {"device": most_device_bytes, "pinned": most_pinned_bytes}
        self.ndarray = HostArray
        self.null = _Stream(self)
        self.current = self.null
        module = self

        class Event:
            def __init__(self, block, disable_timing):
                self.stream, self.marker = None, None

            def record(self, stream):
                module.jiggle()
                self.stream, self.marker = stream, stream.append(lambda: None)

            def synchronize(self):
                self.stream.run_until(self.marker)
                module.jiggle()

        runtime = SimpleNamespace(
            CUDARuntimeError=CudaError, getDevice=lambda: 0, memcpyHostToDevice=1, memcpyDeviceToHost=2,
            memcpyAsync=self.memcpy,
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=lambda non_blocking: _Stream(self),
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=CudaError),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            alloc=lambda size: SimpleNamespace(memory=self.take("device", size)),
            PinnedMemory=lambda size: self.take("pinned", size),
            PinnedMemoryPointer=lambda memory, _: memory.buffer,
            get_current_stream=lambda: self.current,
        )

    def take(self, kind, size):
        taken = sum(its_size for its_kind, its_size in self.live.values() if its_kind == kind)
        if self.most[kind] is not None and taken + size > self.most[kind]:
            if kind == "device":
                raise OutOfMemoryError(f"out of memory: {size} bytes")
            raise CudaError(2, "cudaErrorMemoryAllocation: out of memory")
        buffer = np.ndarray.__new__(_Buffer, size, np.uint8)
        buffer.fill(0xFF)
        self.live[id(buffer)] = kind, size
        weakref.finalize(buffer, self.live.pop, id(buffer))
        return SimpleNamespace(buffer=buffer)

    def memcpy(self, to, start, size, kind, stream):
        self.jiggle()
        self.streams[stream].append(lambda: ctypes.memmove(to, start, size))

    def jiggle(self):
        """Let some streams get on."""
        if self.rng is None:
            return
        for stream in self.rng.permutation(np.array([*self.streams.values()], dtype=object)):
            for _ in range(self.rng.integers(0, 3)):
                stream.step()

    def net(self, compute):
        """A PackedNet that computes on the current stream."""

        def call(x, y):
            self.jiggle()
            # No closure: a frame that an error remembers would hold x and y for ever.
            self.current.append(partial(compute, x.view(np.ndarray), y.view(np.ndarray)))

        return call


class _Buffer(np.ndarray):
    """Unlike NumPy's own, it can be referred to weakly."""


class _Stream:
    def __init__(self, module):
        self.module = module
        self.ptr = 1000 + len(module.streams)
        self.queue, self.first = [], 0  # first: the number of the queue's first operation
        self.before = None
        module.streams[self.ptr] = self

    def append(self, operation):
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
        stream, marker = event.stream, event.marker

        def operation():
            pass

        operation.ready = lambda: stream.first >= marker
        operation.wait = lambda: stream.run_until(marker)
        self.append(operation)

    def synchronize(self):
        self.run_until(self.first + len(self.queue))

    def is_capturing(self):
        return False

    def __enter__(self):
        self.before, self.module.current = self.module.current, self
        return self

    def __exit__(self, *_):
        self.module.current = self.before
