"""What the sweep measures: networks, dtypes, precisions and batch sizes, and how much data and arithmetic each case is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..verify import CANONICAL_SIZES

__all__ = ["BATCHES", "NETS", "PEER_BATCHES", "PRECISIONS", "Case", "Group", "Settings", "defaults"]

NETS: tuple[tuple[int, ...], ...] = (
    CANONICAL_SIZES,
    (64, 64, 64, 64),
    (16, 16, 1),
    (128, 128, 128, 128, 128),
    (784, 256, 10),
    (512, 512, 512, 512),  # where cuBLAS should win
)
BATCHES = tuple(4**power for power in range(12))  # 1 .. 2^22
PEER_BATCHES = (1, 16, 1024, 2**14, 2**20)

# The precisions of each dtype that are measured.
PRECISIONS: dict[str, tuple[str, ...]] = {
    "float32": ("ieee", "tf32", "split3", "library"),
    "float16": ("ieee",),
    "bfloat16": ("ieee",),
    "float64": ("ieee",),
}
DTYPES = ("float32", "float16", "bfloat16")  # float64 only if it is asked for
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

QUICK_NETS = (CANONICAL_SIZES, (512, 512, 512, 512))
QUICK_BATCHES = (1, 256, 2**14, 2**20)
MOST_CPU_BATCH = 1024

# From this batch on, calls go around several sets of buffers, so that memory is measured and not the L2 cache. Smaller
# batches are about latency: there the caller's last arrays are in the cache.
ROTATE_FROM = 2**14
CACHES = 2  # the sets together are this many times the cache
MOST_SETS = 128


@dataclass(frozen=True)
class Group:
    """One network in one dtype and precision; measured at every batch size."""

    sizes: tuple[int, ...]
    dtype: str
    precision: str

    def __str__(self) -> str:
        return f"{self.net} {self.dtype} {self.precision}"

    @property
    def net(self) -> str:
        """``48-64-40-24``."""
        return "-".join(map(str, self.sizes))

    @property
    def row_fmas(self) -> int:
        """Fused multiply-adds that one row takes."""
        return sum(k * n for k, n in zip(self.sizes, self.sizes[1:], strict=False))


@dataclass(frozen=True)
class Case:
    """One group at one batch size."""

    group: Group
    batch: int

    @property
    def in_bytes(self) -> int:
        """Bytes of x."""
        return self.batch * self.group.sizes[0] * ITEMSIZES[self.group.dtype]

    @property
    def out_bytes(self) -> int:
        """Bytes of the result."""
        return self.batch * self.group.sizes[-1] * ITEMSIZES[self.group.dtype]

    @property
    def fmas(self) -> int:
        """Fused multiply-adds of one call."""
        return self.batch * self.group.row_fmas

    def sets(self, cache_bytes: int) -> int:
        """How many sets of buffers the calls go around, on a GPU with an L2 cache of this size."""
        both = self.in_bytes + self.out_bytes
        if self.batch < ROTATE_FROM or both == 0:
            return 1
        return max(1, min(MOST_SETS, -(-CACHES * cache_bytes // both)))


@dataclass(frozen=True)
class Settings:
    """What a sweep measures, and how long it may take.

    Attributes
    ----------
    nets, dtypes, precisions, batches
        The cases: their product, less the precisions that a dtype does not have.
    schedules
        Names of schedules to force beside the planner's choice.
    peers, peer_batches
        Whether the peers are measured, and at which batch sizes.
    rounds
        How often everything is measured.
    budget_seconds
        No case is started after this time; None: no limit.
    compile_seconds
        What torch.compile, and what jax.jit, may spend on compiling in all; then it is left out.
    device
        ``cuda`` or ``cpu``.
    seed
        Of the networks and the data.
    """

    nets: tuple[tuple[int, ...], ...] = NETS
    dtypes: tuple[str, ...] = DTYPES
    precisions: tuple[str, ...] = PRECISIONS["float32"]
    batches: tuple[int, ...] = BATCHES
    schedules: tuple[str, ...] = ()
    peers: bool = True
    peer_batches: tuple[int, ...] = PEER_BATCHES
    rounds: int = 7
    budget_seconds: float | None = None
    compile_seconds: float = 120.0
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; accepted: 1 or more")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches is {self.batches}; accepted: numbers of rows, 1 or more")
        for sizes in self.nets:
            if len(sizes) < 2 or min(sizes) < 1:
                raise ValueError(f"the net {sizes} cannot be measured; accepted: two or more widths, each 1 or more")
        _check_names("dtype", self.dtypes, tuple(PRECISIONS))
        _check_names("precision", self.precisions, PRECISIONS["float32"])
        if not any(True for _ in self.groups()):
            raise ValueError(
                f"no dtype of {', '.join(self.dtypes)} has a precision of {', '.join(self.precisions)}; accepted: "
                + "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in PRECISIONS.items())
            )

    def groups(self) -> Iterator[Group]:
        """The networks in their dtypes and precisions, in the order of measuring."""
        for sizes in self.nets:
            for dtype in self.dtypes:
                for precision in PRECISIONS[dtype]:
                    if precision in self.precisions:
                        yield Group(sizes, dtype, precision)


def _check_names(what: str, names: Sequence[str], accepted: Sequence[str]) -> None:
    for name in names:
        if name not in accepted:
            raise ValueError(f"{what} {name!r} is not measured; accepted: {', '.join(accepted)}")


def defaults(device: str, quick: bool = False) -> Settings:
    """What is measured if nothing else is asked for.

    Without a GPU: NumPy's path beside NumPy's chain, at batches that end soon. Quick: two nets and few batch sizes, and no
    peers that compile.
    """
    settings = Settings(device=device)
    if quick:
        settings = replace(settings, nets=QUICK_NETS, batches=QUICK_BATCHES, rounds=5, compile_seconds=0.0)
    if device == "cpu":
        few = tuple(batch for batch in settings.batches if batch <= MOST_CPU_BATCH)
        settings = replace(settings, dtypes=("float32",), precisions=("ieee",), batches=few, peer_batches=few)
    return settings
