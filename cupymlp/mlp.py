"""MLP: a network that is made once and called often."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ._checks import (
    Device,
    as_cupy,
    as_numpy,
    check_call,
    check_device,
    library_of,
    mixed_message,
    type_name,
)
from ._compile import with_registers
from ._gpu import cupy_or_error, device_numbers, gpu_problem
from ._graph import Bound, bind
from ._host import Host
from ._launch import PackedNet
from .cpu import run_cpu
from .interchange import Interchange
from .network import Network
from .plan import Plan
from .schedules import plan_cpu, plan_gpu

__all__ = ["MLP"]

SEEN_CALLS = 256  # combinations of shapes and dtypes that an MLP remembers as checked; past that it starts afresh


class MLP(Interchange):
    """A multilayer perceptron with fixed weights, run as one GPU kernel, or on the CPU.

    ``h = act(h @ W + b)`` through all layers. The object never changes: it copies its weights when it is made, keeps
    them on the host, and uploads them once a device at the first call there. It can be shared between threads, pickled
    and copied.

    Parameters
    ----------
    weights
        One 2-D array a layer, all NumPy (or what ``numpy.asarray`` takes) or all on the GPU. At least one.
    biases
        One 1-D array (N,) or None a layer; None: no layer has a bias.
    activation
        The hidden layers' activation: one for all of them, or a sequence with one a hidden layer. A name, or a name with its
        parameter, as ``("leaky_relu", 0.25)``: ``identity``, ``relu``, ``leaky_relu`` (slope, 0.01), ``elu`` and ``celu``
        (alpha, 1), ``selu``, ``gelu`` (of erf), ``gelu_tanh``, ``silu``, ``tanh``, ``sigmoid``, ``softplus``, ``softsign``,
        ``sin`` (omega, 1), ``exp``, ``hard_sigmoid``, ``hard_swish``, ``relu6``, ``squareplus``; `cupymlp.activations` has
        the formulas.
    out_activation
        The output layer's: one of these, ``softmax`` or ``log_softmax`` over the features.
    weight_layout
        ``"in_out"``: weights are (in, out), used as ``x @ W`` (NumPy, Keras, scikit-learn, JAX). ``"out_in"``: weights
        are (out, in), used as ``x @ W.T`` (``torch.nn.Linear``). Never guessed from shapes.
    precision
        The arithmetic on the GPU. Sums, biases and activations are float32 (float64 in float64 networks) in all of them, and
        float16 and bfloat16 networks round to their dtype once a layer.

        - ``"ieee"``: float32 and float64 networks have one order of summation, the same bits for a row whatever the batch
          size, schedule or GPU; activations with exponentials and their like have those of the GPU. float16 and bfloat16
          networks take tensor cores where the planner finds them faster, whose order is their own: last bits may then depend
          on the batch size; ``schedule`` pins them.
        - ``"tf32"`` (float32 networks): tensor cores, the operands of every product rounded to 11 significant bits.
        - ``"split3"`` (float32 networks): each float32 operand is split into a float16 high and low part, after scaling each
          row of activations, and each weight matrix, by a power of two; three tensor-core products make one of float32-grade.
          Its bound is normwise: in units of the row's and the matrix' largest element.
        - ``"library"``: cuBLAS, in its own order; bits may depend on the batch size.

        On the CPU all four are computed as ``"ieee"`` is, more exactly than asked.
    dtype
        Convert the weights to this dtype, rounding if need be. None: ``numpy.result_type`` of weights and biases.
        ``float16``, ``bfloat16`` (needs the package ml_dtypes), ``float32`` or ``float64``.
    schedule
        Force this schedule on the GPU, a name of ``cupymlp.schedules.SCHEDULES``, for tests and measurements, or to pin the
        last bits of float16 and bfloat16 networks. None: the one that is expected to be the fastest. `plan` tells which.
        A `PlanError` at the call if it cannot run the network. On the CPU it makes no difference.

    Raises
    ------
    ValueError
        For shapes that do not chain, unknown names, wrong lengths.
    TypeError
        For dtypes that cannot be used, and for NumPy and GPU arrays mixed.

    Examples
    --------
    >>> import numpy as np
    >>> import cupymlp
    >>> rng = np.random.default_rng(0)
    >>> W1, W2 = rng.standard_normal((3, 8)), rng.standard_normal((8, 2))
    >>> net = cupymlp.MLP([W1, W2], biases=[np.ones(8), None])
    >>> x = rng.standard_normal((5, 3))
    >>> np.allclose(net(x), np.maximum(x @ W1 + 1, 0) @ W2)
    True
    """

    def _set(
        self,
        network: Network,
        weight_layout: str,
        weights: list[NDArray[np.floating]],
        biases: list[NDArray[np.floating] | None],
        schedule: str | None,
    ) -> None:
        super()._set(network, weight_layout, weights, biases, schedule)
        self._for_cpu: Any = None  # the weights and biases that the CPU path takes, made at the first call there
        self._seen: set[Any] = set()  # shapes and dtypes of NumPy arrays that were checked
        self._lock = threading.Lock()
        self._gpu: Any = None  # a PackedNet, made at the first call on a GPU
        self._host: Host | None = None  # its calls on NumPy arrays, made at the first
        self._cupy_ndarray: Any = None

    # --- Running it ---------------------------------------------------------------------------------------------

    def __call__(self, x: Any, out: Any = None, *, device: Device = None) -> Any:
        """The network of x.

        Parameters
        ----------
        x
            Array (..., K): NumPy (or what ``numpy.asarray`` takes), CuPy, or another library's array on a CUDA device. Any
            strides, byte order and alignment. Its dtype must widen to the network's: nothing is narrowed silently.
        out
            Where to put the result: an array (..., N) of x's library and the network's dtype. If it overlaps x, x is copied
            first.
        device
            None: a GPU array is computed where it lies, a NumPy array on the GPU if there is one, else on the CPU.
            ``"cuda"``: on the GPU, or an error. ``"cpu"``: NumPy arrays on the CPU.

        Returns
        -------
        array
            ``out``, or a new array (..., N) of the network's dtype: NumPy for NumPy, CuPy for any GPU array. On the GPU
            the work is on the current stream of x's device; with ``out`` nothing is allocated and nothing waits.

        Raises
        ------
        ValueError
            For a wrong shape of x or out, or arrays on different devices.
        TypeError
            For a dtype that the network would have to narrow, and for NumPy and GPU arrays mixed.
        RuntimeError
            If ``device="cuda"`` and there is no GPU, or for a first call while a stream captures.
        """
        if type(x) is self._cupy_ndarray and device is None and (out is None or type(out) is self._cupy_ndarray):
            return self._gpu.run(x, out)  # the hot path: the PackedNet checks what it has not seen before
        if self._host is not None and type(x) is np.ndarray and device in (None, "cuda"):
            y = self._host.replay(x, out)  # and that of NumPy arrays
            if y is not None:
                return y
        return self._dispatch(x, out, device)

    def bind(self, x: Any, out: Any = None) -> Bound:
        """The call ``net(x, out=out)`` as a CUDA graph, for the same arrays again and again.

        Parameters
        ----------
        x, out
            GPU arrays, as for a call, that do not overlap. None: ``out`` is a new CuPy array.

        Returns
        -------
        Bound
            Call it to compute again, on the current stream, from whatever x holds by then. It keeps x, its ``out`` and the
            weights. Several networks in one graph: `cupymlp.capture`.

        Raises
        ------
        TypeError, ValueError
            Those of a call. For NumPy arrays, whose calls are graphs already.
        RuntimeError
            If there is no GPU; within a capture; for ``precision="library"``.

        Notes
        -----
        It computes once, on the current stream, before it captures.

        Examples
        --------
        ::

            step = policy.bind(observation)
            while True:
                observation[...] = ...
                act(step())
        """
        if library_of("x", x) != "gpu" or (out is not None and library_of("out", out) != "gpu"):
            arrays = f"x is a {type_name(x)}" + ("" if out is None else f" and out a {type_name(out)}")
            raise TypeError(f"{arrays}; accepted: arrays on a GPU. Calls on NumPy arrays keep a graph by themselves")
        return bind(self._on_gpu(), as_cupy("x", x), None if out is None else as_cupy("out", out, writable=True), out)

    def _dispatch(self, x: Any, out: Any, device: Device) -> Any:
        check_device(device)
        on_gpu = library_of("x", x) == "gpu"
        if out is not None and (library_of("out", out) == "gpu") != on_gpu:
            raise TypeError(mixed_message("x", x, "out", out))
        if on_gpu:
            if device == "cpu":
                raise TypeError(
                    "x is on a GPU and device='cpu': pass a NumPy array (cupy.asnumpy(x)), or leave device out"
                )
            y = self._on_gpu()(as_cupy("x", x), None if out is None else as_cupy("out", out, writable=True))
            return y if out is None else out
        return self._run_numpy(x, out, device)

    def _run_numpy(self, x: Any, out: Any, device: Device) -> NDArray[np.floating]:
        x = as_numpy("x", x)
        if out is not None and not isinstance(out, np.ndarray):
            raise TypeError(f"out is a {type_name(out)}; accepted: a NumPy array of dtype {self._network.dtype}")
        seen = (x.shape, x.dtype, None, None) if out is None else (x.shape, x.dtype, out.shape, out.dtype)
        if seen not in self._seen:
            check_call(self._network, *seen)
            if len(self._seen) >= SEEN_CALLS:
                self._seen.clear()
            self._seen.add(seen)
        if out is None:
            out = np.empty((*x.shape[:-1], self._network.sizes[-1]), self.dtype)
        elif not out.flags.writeable:
            raise ValueError("out is read-only: pass an array that can be written")
        use_gpu = device == "cuda" or (device is None and gpu_problem() is None)
        if use_gpu:
            net = self._on_gpu()  # before the shortcut below: device='cuda' without a GPU is an error for any x
        if out.size == 0:
            return cast("NDArray[np.floating]", out)
        if use_gpu:
            if self._host is None:
                self._host = Host(net)
            self._host.run(x, out)
        else:
            if np.may_share_memory(x, out):
                x = x.copy()
            run_cpu(self._network, *self._on_cpu(), x, out)
        return cast("NDArray[np.floating]", out)

    def _on_cpu(self) -> tuple[list[NDArray[np.floating]], list[NDArray[np.floating] | None]]:
        """Weights and biases in the dtype of the sums: copies for float16 and bfloat16, which BLAS does not know."""
        if self._for_cpu is None:
            dtype = self._network.sum_dtype
            self._for_cpu = (
                [w.astype(dtype, copy=False) for w in self._weights],
                [None if b is None else b.astype(dtype, copy=False) for b in self._biases],
            )
        return cast("tuple[list[NDArray[np.floating]], list[NDArray[np.floating] | None]]", self._for_cpu)

    def _on_gpu(self) -> Any:
        if self._gpu is None:
            cupy = cupy_or_error("device='cuda' or a GPU array")
            with self._lock:  # one for all threads: each would upload the weights
                if self._gpu is None:
                    check = partial(check_call, self._network)
                    self._gpu = PackedNet(self._network, self._weights, self._biases, check, self._schedule)
            self._cupy_ndarray = cupy.ndarray
        return self._gpu

    def plan(self, batch: int, device: Device = None) -> Plan:
        """How a call with this many rows would run: print it.

        Parameters
        ----------
        batch
            Rows: the product of x's leading axes.
        device
            As for a call on NumPy arrays: None is the current GPU if there is one, else the CPU.
        """
        check_device(device)
        rows = int(batch)
        if rows != batch or rows < 0:
            raise ValueError(f"batch is {batch!r}; accepted: a whole number of rows, 0 or more")
        problem = gpu_problem()
        if device == "cpu" or (device is None and problem is not None):
            return plan_cpu(self._network, rows, "device='cpu' was asked for" if device == "cpu" else str(problem))
        cupy = cupy_or_error("device='cuda'")
        device_id = cupy.cuda.runtime.getDevice()
        plan = plan_gpu(self._network, rows, device_numbers(device_id), schedule=self._schedule)
        return with_registers(plan, device_id)

    def map(
        self,
        x: Any,
        out: Any = None,
        rows: int | None = None,
        progress: Any = None,
        *,
        resume: int = 0,
        overwrite: bool = False,
        device: Device = None,
    ) -> Any:
        """The network of an x that is larger than the GPU, or than memory: chunk by chunk, from and to arrays and files.

        Chunks of rows go through page-locked memory to the GPU and back, while others are read and written. It takes less than
        2 GB of host memory, and of GPU memory, beside x and out, whatever their size. A row is one vector of features: an x
        (A, B, K) has A * B of them.

        Parameters
        ----------
        x
            A NumPy array (..., K) of any strides and byte order, memory maps included; the path of a ``.npy`` file or of the
            folder of a zarr array; or an object with shape, dtype and slices of its first axis, as zarr's and h5py's arrays.
            Its dtype must widen to the network's, as for a call.
        out
            Where to put the result (..., N). None: a new NumPy array. An array or such an object, of the network's dtype,
            which shares no memory with x. A path that ends in ``.npy`` or ``.zarr``: written as ``<path>.part`` beside it,
            and renamed when all of it is there.
        rows
            How many rows a chunk has, at most. None: about 9 MB of x and out on the GPU, 4 MB on the CPU. Where zarr's chunks
            are not too large, a whole number of them, so that none is written twice. Never more than 256 MB.
        progress
            Called as ``progress(done, total)``, in rows, at the beginning and after every chunk. True: a bar on stderr, if rich
            is installed and a terminal is there, else lines.
        resume
            How many leading rows of out are complete already: go on from there. True, for a path: as many as ``<path>.part``
            records; from the beginning if there is none. Out of another network or file it is an error; of an
            array or a zarr folder as x, shape and dtype alone are compared.
        overwrite
            Whether the path may exist (it stays as it is until the new one is complete) and, without ``resume``, whether what
            an earlier run left at ``<path>.part`` may be thrown away.
        device
            ``"cuda"``: the current GPU, ``"cpu"``, or None: the GPU if there is one, else the CPU.

        Returns
        -------
        array or path
            ``out``, or the new array; for a path, a ``pathlib.Path``. Everything is done when it returns.

        Raises
        ------
        ValueError, TypeError, FileExistsError
            For what cannot be computed or written, before anything is: those of a call, a truncated or damaged file, a path
            that exists.
        MapError
            A RuntimeError, for what fails on the way; its cause is the error, its message names the rows. Its ``rows`` leading
            rows of ``out`` are complete, and the message says how to go on. If GPU memory is short, chunks are halved first.
        MapInterrupted
            A KeyboardInterrupt, for Ctrl-C, with the same ``rows`` and ``out``.

        Notes
        -----
        Results are those of ``net(x)``: to the bit on the GPU with ``precision="ieee"`` in float32 and float64. In float16 and
        bfloat16 the schedule, and on the CPU and with ``precision="library"`` BLAS, may depend on the rows of a chunk: there
        last bits may differ, within the error bound.

        A memory map as out can be a torn one if the machine stops; and if its file is cut while it is used, the system ends the
        process (SIGBUS). Files by path are read and written by calls, which raise.

        Examples
        --------
        >>> import tempfile, pathlib
        >>> import numpy as np
        >>> import cupymlp
        >>> rng = np.random.default_rng(0)
        >>> net = cupymlp.MLP([rng.standard_normal((3, 8)), rng.standard_normal((8, 2))])
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> np.save(folder / "x.npy", rng.standard_normal((1000, 3)))
        >>> done = []
        >>> path = net.map(folder / "x.npy", out=folder / "y.npy", rows=400, progress=lambda rows, total: done.append(rows))
        >>> y = np.load(path, mmap_mode="r")
        >>> y.shape, done
        ((1000, 2), [0, 400, 800, 1000])
        >>> np.allclose(y, net(np.load(folder / "x.npy")))
        True
        """
        from ._map import run_map
        from ._map_engine import CpuEngine, Engine

        check_device(device)
        engine: Engine
        if device == "cuda" or (device is None and gpu_problem() is None):
            from ._pipeline import GpuEngine

            engine = GpuEngine(self._on_gpu(), self._network)
        else:
            engine = CpuEngine(self._network, *self._on_cpu())
        arrays = [*self._weights, *self._biases]
        return run_map(engine, self._network, arrays, x, out, rows, progress, resume, overwrite)
