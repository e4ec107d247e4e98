"""The network over Dask arrays: many GPUs, many machines, arrays on disk.

`apply` makes a Dask array of the network of another; `store` computes one zarr array from another, and goes on where a killed
run stopped. Dask and zarr are imported when they are needed: ``pip install 'cupymlp[dask]'``.

The graph holds the network once, as a key that the tasks depend on: Dask sends it once to each worker. Workers keep the
networks that they have seen, by their token, so that weights are uploaded once a process and device, whatever number of copies
is unpickled there.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ._checks import Device, check_call, check_device, dtype_name, to_host, type_name
from ._gpu import is_cupy_array
from .mlp import MLP

if TYPE_CHECKING:
    import dask.array as da
    import zarr

__all__ = ["Stored", "apply", "store"]

KEPT_NETS = 32  # networks that a process keeps for later tasks; past that the one that was not used for longest goes
DONE = "cupymlp-done"  # beside the target's chunks: <DONE>/<job>/<region> exists if that job has written that region

Where = tuple[int, ...]  # a region: its place in the grid of regions along the leading axes


def apply(net: MLP, x: da.Array, *, device: Device = None) -> da.Array:
    """The network of a Dask array of NumPy or CuPy chunks, computed by whatever scheduler computes the result.

    Nothing is computed yet, and no worker is asked: shape and dtype are checked here.

    Parameters
    ----------
    net
        The network.
    x
        Dask array (..., K): NumPy or CuPy chunks, the feature axis in one chunk. The leading axes may be chunked anyhow, with
        known lengths or not; 1-D is one row. Its dtype must widen to the network's, as for ``net(x)``.
    device
        As for ``net(x)``, where a chunk is computed: None takes CuPy chunks where they lie, and NumPy chunks to the worker's
        GPU if it has one, else to its CPU. ``"cuda"``: a worker without a GPU is an error there. ``"cpu"``: NumPy chunks only.

    Returns
    -------
    dask.array.Array
        Shape (..., N), of the network's dtype; NumPy chunks for NumPy, CuPy for CuPy. The chunks along the leading axes are
        x's.

    Raises
    ------
    ValueError
        For a wrong shape, or if the feature axis is in several chunks.
    TypeError
        For a dtype that the network would have to narrow, and for what is no Dask array or has other chunks.
    ImportError
        If there is no Dask.

    Examples
    --------
    ::

        import dask.array as da
        import numpy as np
        import cupymlp.dask

        rng = np.random.default_rng(0)
        net = cupymlp.MLP([rng.standard_normal((48, 24)).astype("f4")])
        x = da.from_array(rng.standard_normal((1000, 48)).astype("f4"), chunks=(250, 48))
        y = cupymlp.dask.apply(net, x)
        assert y.shape == (1000, 24) and y.chunks == ((250, 250, 250, 250), (24,))
        assert np.allclose(y.compute(), net(x.compute()), atol=1e-4)
    """
    from_dask = _needs("dask.array", "cupymlp.dask.apply")
    _check_net(net, device)
    if not isinstance(x, from_dask.Array):
        raise TypeError(
            f"x is a {type_name(x)}; accepted: a Dask array. Make one with dask.array.from_array(x, chunks=...) or "
            "dask.array.from_zarr, or call net(x) for an array in memory"
        )
    meta = x._meta
    on_gpu = is_cupy_array(meta)
    if isinstance(meta, np.ma.MaskedArray):
        raise TypeError("x has chunks of masked arrays, whose mask would be lost; pass dask.array.ma.filled(x, value)")
    if not on_gpu and not isinstance(meta, np.ndarray):
        raise TypeError(
            f"x has chunks of type {type_name(meta)}; accepted: NumPy or CuPy. Convert them with x.map_blocks(numpy.asarray) "
            "or x.map_blocks(cupy.asarray)"
        )
    if on_gpu and device == "cpu":
        raise TypeError(
            "x has CuPy chunks and device='cpu': pass NumPy chunks (x.map_blocks(cupy.asnumpy)), or leave device out"
        )
    _check_features(net, x)
    tokenize = import_module("dask.base").tokenize
    axes = tuple(range(x.ndim))
    return from_dask.blockwise(
        partial(_run, token=_token(net), device=device),
        axes,
        x,
        axes,
        _shared(net, f"cupymlp-net-{_token(net)}"),
        None,
        name=f"cupymlp-{tokenize(x.name, _token(net), device)}",
        adjust_chunks={x.ndim - 1: (net.network.sizes[-1],)},
        dtype=net.dtype,
        meta=import_module("dask.array.utils").meta_from_array(meta, ndim=x.ndim, dtype=net.dtype),
    )


# --- Checks -------------------------------------------------------------------------------------------------------------


def _needs(module: str, caller: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{caller} needs {module}, which cannot be imported ({error}): pip install 'cupymlp[dask]'"
        ) from error


def _check_net(net: object, device: object) -> None:
    if not isinstance(net, MLP):
        raise TypeError(f"net is a {type_name(net)}; accepted: a cupymlp.MLP")
    check_device(device)


def _check_features(net: MLP, x: da.Array) -> None:
    """Raise unless x's shape and dtype suit the network and its feature axis is in one chunk."""
    if x.ndim and math.isnan(x.shape[-1]):
        raise ValueError(
            f"x has shape {x.shape}, whose last axis has an unknown length; the network takes {net.network.sizes[0]} features. "
            "Call x.compute_chunk_sizes() first"
        )
    check_call(net.network, x.shape, x.dtype, None, None)
    chunks = x.chunks[-1]
    if len(chunks) != 1:
        shown = ", ".join(map(str, chunks[:4])) + (", ..." if len(chunks) > 4 else "")
        raise ValueError(
            f"x has its feature axis, the last one, in {len(chunks)} chunks ({shown}); accepted: one chunk of {x.shape[-1]}, "
            "since every output needs all features. Pass x.rechunk({-1: -1})"
        )


# --- In the workers -----------------------------------------------------------------------------------------------------

_nets: OrderedDict[str, MLP] = OrderedDict()  # by token, the one that was used last at the end
_lock = threading.Lock()


def _run(block: Any, net: MLP, *, token: str, device: Device) -> Any:
    """One task: the network of a chunk."""
    return _kept(net, token)(block, device=device)


def _kept(net: MLP, token: str) -> MLP:
    """The MLP with this token that this process keeps, which is net if there was none."""
    with _lock:
        kept = _nets.setdefault(token, net)
        _nets.move_to_end(token)
        while len(_nets) > KEPT_NETS:
            _nets.popitem(last=False)
        return kept


def _token(net: MLP) -> str:
    return str(net.__dask_tokenize__()[1])


def _shared(value: object, name: str) -> Any:
    """A value as a key of its own, so that a graph holds it once and not once a task."""
    return import_module("dask").delayed(value, name=name, traverse=False)


# --- From zarr to zarr ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """What `store` did.

    Attributes
    ----------
    target
        The zarr array, complete.
    regions
        Regions that the target consists of.
    computed
        How many of them this call computed; the others had been written by earlier ones.
    """

    target: zarr.Array
    regions: int
    computed: int


def store(
    net: MLP,
    x: da.Array | zarr.Array | str | os.PathLike[str],
    target: zarr.Array | str | os.PathLike[str],
    *,
    device: Device = None,
) -> Stored:
    """Compute the network of an array into a zarr array, region by region; after a killed run, only what is missing.

    A region is one chunk of the target along the leading axes (one shard, if it is sharded), with all features: no two tasks
    write the same chunk, and one region at a time a thread is in memory. When a region's data is written, a mark is written
    to the target's store, beside the chunks. A later call with the same network computes the regions that have no mark. Marks
    of another network, or for another shape, dtype or chunks, do not count: then all is computed afresh.

    That the source's numbers are the same as before is yours to promise, and so is that nobody else wrote to the target:
    else delete the target first. Marks outlast killed processes; after a power failure, delete the target too.

    Returns when all is written. It is computed by Dask's current scheduler: that of a ``distributed.Client`` if there is one.

    Parameters
    ----------
    net
        The network.
    x
        A zarr array (..., K), or where one is: a path or URL; or a Dask array as for `apply`, with known chunk lengths. A zarr
        array is read in the target's regions; a Dask array is rechunked to them.
    target
        A zarr array (..., N) of the network's dtype, or where it is or shall be. One that is not there is made, with x's
        chunks along the leading axes. All workers must see the same files.
    device
        As for `apply`.

    Returns
    -------
    Stored

    Raises
    ------
    ValueError, TypeError
        As `apply`, and for a target that does not suit.
    RuntimeError
        If the workers' writes do not show in the target, as with a store in memory, or a disk that is not shared.
    ImportError
        If there is no Dask or no zarr 3.

    Examples
    --------
    ::

        import tempfile
        import numpy as np
        import zarr
        import cupymlp.dask

        folder = tempfile.mkdtemp()
        x = zarr.create_array(f"{folder}/x.zarr", shape=(1000, 48), chunks=(100, 48), dtype="f4")
        x[:] = np.random.default_rng(0).standard_normal(x.shape)
        net = cupymlp.MLP([np.ones((48, 24), "f4")])
        done = cupymlp.dask.store(net, f"{folder}/x.zarr", f"{folder}/y.zarr")
        assert (done.regions, done.computed) == (10, 10) and done.target.shape == (1000, 24)
        assert cupymlp.dask.store(net, f"{folder}/x.zarr", f"{folder}/y.zarr").computed == 0
    """
    caller = "cupymlp.dask.store"
    from_dask, from_zarr = _needs("dask.array", caller), _needs("zarr", caller)
    _check_net(net, device)
    source = from_zarr.open_array(_place(x), mode="r") if isinstance(x, str | os.PathLike) else x
    is_dask = isinstance(source, from_dask.Array)
    if is_dask:
        apply(net, source, device=device)  # for its checks
        if any(map(math.isnan, source.shape)):
            raise ValueError(
                f"x has shape {source.shape} with unknown lengths, which gives its rows no place in target: call "
                "x.compute_chunk_sizes() first"
            )
        wanted = tuple(max(1, *chunks) for chunks in source.chunks[:-1])
    elif isinstance(source, from_zarr.Array):
        check_call(net.network, source.shape, source.dtype, None, None)
        wanted = (source.shards or source.chunks)[:-1]
    else:
        raise TypeError(
            f"x is a {type_name(x)}; accepted: a zarr array, its path or URL, or a Dask array. For an array in memory, "
            "target[...] = net(x)"
        )
    out = _opened(net, source, target, wanted, from_zarr)
    lengths = (out.shards or out.chunks)[:-1]
    chunks = (*lengths, max(1, source.shape[-1]))
    rows = source.rechunk(chunks) if is_dask else from_dask.from_array(source, chunks=chunks)
    grid = list(product(*map(range, rows.numblocks[:-1])))
    job = _job(net, source, out, lengths)
    _forget_others(out, job)
    missing = sorted({*grid} - _done(out, job))
    if missing:
        y = apply(net, rows, device=device)
        writes = y.map_blocks(
            partial(_write, lengths=lengths, job=job),
            _shared(out, f"cupymlp-target-{uuid.uuid4().hex}"),
            block_id=True,  # not in the graph for each task: Dask counts them out
            name=f"cupymlp-store-{uuid.uuid4().hex}",  # writing is never the same task as before
            chunks=tuple((1,) * blocks for blocks in y.numblocks),
            dtype=bool,
            meta=np.empty((0,) * y.ndim, bool),
        ).to_delayed()
        import_module("dask").compute(*(writes[(*where, 0)] for where in missing))
    lost = {*grid} - _done(out, job)
    if lost:
        raise RuntimeError(
            f"{len(lost)} of the {len(grid)} regions that workers wrote are not in target ({out.store_path}): pass a target "
            "in a store that all workers and this process share, as a path on a shared file system or a URL"
        )
    return Stored(out, len(grid), len(missing))


def _place(path: str | os.PathLike[str]) -> str:
    """A path that means the same in every worker's folder; URLs as they are."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def _opened(net: MLP, x: Any, target: Any, lengths: tuple[int, ...], from_zarr: Any) -> Any:
    """The target, checked; made if it is a place where nothing is. ``lengths``: its chunks, should it be made."""
    shape, dtype = (*x.shape[:-1], net.network.sizes[-1]), net.network.dtype
    if isinstance(target, str | os.PathLike):
        place = _place(target)
        try:
            target = from_zarr.open_array(place, mode="r+")
        except FileNotFoundError:
            if dtype == "bfloat16":
                raise TypeError(
                    "target cannot be made: zarr has no bfloat16. Make the network with dtype='float32', which takes such x"
                ) from None
            chunks = (*lengths, max(1, shape[-1]))
            target = from_zarr.create_array(place, shape=shape, chunks=chunks, dtype=dtype)
    if not isinstance(target, from_zarr.Array):
        raise TypeError(f"target is a {type_name(target)}; accepted: a zarr array, or a path or URL for one")
    if target.shape != shape:
        raise ValueError(f"target has shape {target.shape}; the result has shape {shape}: pass a zarr array of that")
    if dtype_name(target.dtype) != dtype:
        raise TypeError(
            f"target has dtype {target.dtype}; the result is {dtype}: pass a zarr array of that, or make the network with "
            f"dtype={dtype_name(target.dtype)!r}"
        )
    if target.read_only:
        raise ValueError("target is read-only: open it with zarr.open_array(path, mode='r+')")
    if isinstance(x, from_zarr.Array) and str(x.store_path) == str(target.store_path):
        raise ValueError(f"target is x itself ({target.store_path}): pass another place for the result")
    return target


def _job(net: MLP, x: Any, target: Any, lengths: tuple[int, ...]) -> str:
    """What marks are filed under: all that decides what is written in a region but the source's numbers."""
    what = (_token(net), tuple(map(int, x.shape)), dtype_name(x.dtype), target.shape, target.dtype.str, lengths)
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def _write(block: Any, target: Any, *, block_id: Where, lengths: Where, job: str) -> Any:
    """One task: a region's data, then its mark."""
    where = block_id[:-1]
    starts = [i * length for i, length in zip(where, lengths, strict=True)]
    target[(*map(slice, starts, map(sum, zip(starts, block.shape, strict=False))), slice(None))] = to_host(block, "y")
    _mark(target, job, where)
    return np.ones((1,) * len(block_id), bool)


# --- Marks: keys in the target's own store, so that they go when it is deleted ---------------------------------------------
# zarr offers its store to others only by async methods, which must run in its own event loop: zarr.core.sync does that.


def _mark(target: Any, job: str, where: Where) -> None:
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    mark = default_buffer_prototype().buffer.from_bytes(b"done")
    sync((target.store_path / DONE / job / ("c" + ".".join(map(str, where)))).set(mark))


def _marks(target: Any) -> Iterator[tuple[str, str]]:
    """The job and the region of each mark that is there."""
    from zarr.core.sync import sync

    top = target.store_path / DONE

    async def keys() -> list[str]:
        return [key async for key in top.store.list_prefix(top.path + "/")]

    for key in sync(keys()):
        job, _, region = key.removeprefix(top.path + "/").partition("/")
        yield job, region


def _done(target: Any, job: str) -> set[Where]:
    return {tuple(map(int, filter(None, region[1:].split(".")))) for its, region in _marks(target) if its == job}


def _forget_others(target: Any, job: str) -> None:
    """Remove other jobs' marks before their regions are overwritten: else they would count if that job came again."""
    from zarr.core.sync import sync

    for other in {its for its, _ in _marks(target)} - {job}:
        sync(target.store.delete_dir((target.store_path / DONE / other).path))
