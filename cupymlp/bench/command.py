"""``python -m cupymlp bench``: its arguments, and what it prints and writes. Light to import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._gpu import gpu_problem
from ..schedules import SCHEDULES

if TYPE_CHECKING:
    from .cases import Settings

__all__ = ["add_arguments", "run", "settings_of"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``bench``."""
    what = (
        "sweep: many nets, dtypes, precisions and batches, beside floors and peers; latency: one small net's table; map: rows "
        "from host memory and back; activations: one net with each, as a ratio to relu"
    )
    parser.add_argument(
        "what", nargs="?", choices=("sweep", "latency", "map", "activations"), default="sweep", help=what
    )
    parser.add_argument("--sizes", type=_net, help="widths of one network (48,64,40,24), instead of --nets")
    parser.add_argument("--nets", type=_nets, help="networks of the sweep: 48-64-40-24,16-16-1")
    parser.add_argument("--dtypes", type=_words, help="float32,float16,bfloat16; float64 only if it is named")
    parser.add_argument("--precisions", type=_words, help="ieee,tf32,split3,library; float32 has them all")
    parser.add_argument(
        "--batches",
        type=_batches,
        help="batch sizes; with a + in front (+100,1000) beside the powers of four up to 2^22",
    )
    parser.add_argument("--quick", action="store_true", help="a small sweep: two nets, four batch sizes")
    parser.add_argument(
        "--schedules", type=_words, default=(), help="schedules to force beside the planner's choice, or all"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave NumPy, CuPy, PyTorch and JAX out")
    parser.add_argument("--peer-batches", type=_numbers, help="batch sizes at which peers are measured")
    parser.add_argument("--compile-seconds", type=float, help="for torch.compile, and for jax.jit, in all (120)")
    parser.add_argument(
        "--rounds", type=int, help="how often everything is measured (sweep and activations 7, latency 15, map 5)"
    )
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of x, for map (4)")
    parser.add_argument("--budget-seconds", type=float, help="start no case of the sweep after this time")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--plot", metavar="FILE", help="draw the sweep: rows a second against batch size")
    parser.add_argument(
        "--commit", help="the commit to name in the JSON (default: what git says of the current folder)"
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,16,1024")
    return numbers


def _net(text: str) -> tuple[int, ...]:
    sizes = _numbers(text.replace("-", ","))
    if len(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} has one width; accepted: two or more, as 48-64-40-24")
    return sizes


def _nets(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_net(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _batches(text: str) -> tuple[bool, tuple[int, ...]]:
    """Whether the sizes are added to the default ones, and the sizes."""
    return text.startswith("+"), _numbers(text.removeprefix("+"))


def settings_of(options: argparse.Namespace) -> Settings:
    """The sweep that was asked for."""
    from .cases import defaults

    device = options.device or ("cpu" if gpu_problem() is not None else "cuda")
    settings = defaults(device, options.quick)
    changes: dict[str, Any] = {
        "nets": (options.sizes,) if options.sizes else options.nets,
        "dtypes": options.dtypes,
        "precisions": options.precisions,
        "peer_batches": options.peer_batches,
        "rounds": options.rounds,
        "budget_seconds": options.budget_seconds,
        "compile_seconds": options.compile_seconds,
    }
    if options.batches is not None:
        added, batches = options.batches
        changes["batches"] = tuple(sorted({*settings.batches, *batches})) if added else batches
        if options.peer_batches is None:  # what was asked for is wanted beside the peers
            changes["peer_batches"] = tuple(sorted({*settings.peer_batches, *batches}))
    schedules = tuple(SCHEDULES) if options.schedules == ("all",) else options.schedules
    unknown = [name for name in schedules if name not in SCHEDULES]
    if unknown:
        raise ValueError(f"--schedules names {', '.join(unknown)}; accepted: all, {', '.join(SCHEDULES)}")
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(settings, schedules=schedules, peers=not options.no_peers, seed=options.seed, **given)


def run(options: argparse.Namespace, commit: Callable[[], str | None]) -> int:
    """Verify, measure, print and write; returns the exit status.

    Parameters
    ----------
    options
        Of `add_arguments`.
    commit
        Asked for the commit to name, if the options name none.
    """
    ways = {"sweep": _sweep, "latency": _latency, "map": _map, "activations": _activations}
    return ways[options.what](options, options.commit or commit())


def _map(options: argparse.Namespace, commit: str | None) -> int:
    from ..verify import CANONICAL_SIZES
    from .map_rate import map_rows, map_table
    from .report import write_json

    rows = list(map_rows(options.sizes or CANONICAL_SIZES, options.gigabytes, options.rounds or 5, options.seed))
    print(map_table(rows))
    if options.json:
        write_json(
            options.json, rows, "rows at the beginning, in the middle and at the end have the bits of a call", commit
        )
    return 0


def _activations(options: argparse.Namespace, commit: str | None) -> int:
    from ..verify import CANONICAL_SIZES
    from .activation_times import DTYPES, PRECISIONS, activation_rows, activation_table
    from .report import write_json

    rows = list(
        activation_rows(
            options.sizes or CANONICAL_SIZES,
            None if options.batches is None else options.batches[1],
            options.dtypes or DTYPES,
            options.precisions or PRECISIONS,
            options.rounds or 7,
            options.seed,
            options.device,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    )
    print(activation_table(rows))
    if options.json:
        write_json(options.json, rows, "every network within its error bound", commit)
    return 0


def _latency(options: argparse.Namespace, commit: str | None) -> int:
    from ..verify import CANONICAL_SIZES
    from .latency import BATCHES, latency_rows, verified
    from .report import table, write_json

    sizes = options.sizes or CANONICAL_SIZES
    report = verified(sizes, seed=options.seed)
    print(report, flush=True)
    batches: Sequence[int] = BATCHES
    if options.batches is not None:
        added, asked = options.batches
        batches = sorted({*BATCHES, *asked}) if added else asked
    rows = list(latency_rows(sizes, batches, options.rounds or 15, options.seed))
    print(table(rows))
    if options.json:
        write_json(options.json, rows, str(report), commit)
    return 0


def _sweep(options: argparse.Namespace, commit: str | None) -> int:
    from .progress import Progress
    from .report import machine, write_json
    from .sweep import Result, VerificationError, sweep
    from .sweep_report import crossings, crossings_table, json_parts, sweep_table

    settings = settings_of(options)
    if options.plot:
        from .plot import plot, plot_problem

        if (problem := plot_problem()) is not None:
            raise ImportError(problem)  # before the measuring, not after it

    def save(result: Result) -> None:
        if options.json:
            lines = [*result.verified, "verified"]
            write_json(options.json, result.rows, "\n".join(lines), commit, json_parts(settings, result))

    cases = sum(1 for _ in settings.groups()) * len(settings.batches)
    try:
        with Progress(cases) as progress:
            result = sweep(settings, progress.step, save)
    except VerificationError as error:
        print(f"cupymlp: {error}", file=sys.stderr)
        return 1
    print("\n".join([*result.verified, "verified", sweep_table(result.rows)]))
    if found := crossings(result.rows):
        print(crossings_table(found))
    for case, reason in result.skipped:
        print(f"not measured: {case}: {reason}")
    for name, note in result.peer_notes.items():
        print(f"{name}: {note}")
    if options.plot:
        known = machine()
        plot(result.rows, options.plot, f"cupymlp {known['cupymlp']} on {known['gpu'] or known['cpu']}")
    return 0
