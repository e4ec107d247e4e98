"""cupymlp: a small multilayer perceptron as one GPU kernel, on CuPy and NumPy arrays.

To read the source, in this order: ``mlp`` (running a network; what it is: ``model``; its ways in and out: ``interchange``)
and ``fused``, which users call (``_checks`` has the checks), ``network`` (the description), ``activations``, ``plan`` (what a
plan is) and ``schedules`` (network + batch + device numbers -> plan, one file a schedule), ``_source``, ``_compile`` and
``_launch`` (from a .cu file to a launch; ``_chain``: to several), ``_pack`` (weights in the kernels' order), ``_direct`` and
``_graph`` (launches that cost little), ``_host`` (NumPy arrays on the GPU), ``_map``, ``_pipeline`` and ``_lanes`` (arrays
larger than the GPU), ``cpu``, ``reference`` (the formula in float64, and its error bounds), ``verify``, then ``models``,
``_cuda_source`` (a network as source text), ``dask``, ``bench``, ``_convert`` (files of any kind) and ``cli``. The kernels
are in ``cuda_src``: ``common.cuh`` and ``mlp_row.cu``; ``tile.cuh``, ``mlp_tile.cu`` and ``mlp_layer.cu`` for many rows;
``tensor.cuh``, ``mlp_mma.cu`` and ``mlp_wgmma.cu`` for tensor cores; ``activations.cuh`` and ``softmax.cuh``;
``thread_row.cuh`` for kernels that users write.
"""

from ._graph import Bound, capture
from ._map import MapError, MapInterrupted
from .fused import fused_mlp
from .mlp import MLP
from .network import Network
from .plan import Plan, PlanError
from .verify import Report, verify

__all__ = [
    "MLP",
    "Bound",
    "MapError",
    "MapInterrupted",
    "Network",
    "Plan",
    "PlanError",
    "Report",
    "capture",
    "fused_mlp",
    "verify",
]
__version__ = "0.1.0"
