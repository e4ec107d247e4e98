"""The command line: ``python -m cupymlp verify | bench | plan | run | convert | info``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ._convert import KINDS, checked_target, parsed_activation, parsed_activations, read_network, write_network
from ._map import MapError, MapInterrupted
from .activations import spec_text
from .bench import command as bench_command
from .mlp import MLP
from .network import DTYPES, PRECISIONS
from .schedules import SCHEDULES
from .verify import CANONICAL_SIZES, random_mlp, verify

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 if a verification failed, 2 for what the user got wrong.

    A run that stops on its way returns 3; one that Ctrl-C stops, 130.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (MapError, MapInterrupted) as error:
        print(f"cupymlp: {error}", file=sys.stderr)
        return 3 if isinstance(error, MapError) else 130
    except KeyboardInterrupt:
        print("cupymlp: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MemoryError, OverflowError) as error:
        print(f"cupymlp: {error or type(error).__name__}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cupymlp", description="A small multilayer perceptron as one GPU kernel.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    suffixes = f"that ends in {', '.join(KINDS)}"

    def of_file(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--activation",
            metavar="A",
            help="of the hidden layers, as relu, or leaky_relu:0.2,tanh; default: the file's, a random one's is relu",
        )
        sub.add_argument("--out-activation", metavar="A", help="of the output layer; default: the file's, or identity")
        sub.add_argument(
            "--dtype", choices=DTYPES, help="of the network; default: the file's, a random one's is float32"
        )
        sub.add_argument("--precision", choices=PRECISIONS, help="default: the file's if it has one, else ieee")

    def network(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("file", nargs="?", help=f"a network, in a file {suffixes}; without one, a random network")
        sub.add_argument(
            "--sizes", type=_sizes, default=CANONICAL_SIZES, help="widths of the random network (48,64,40,24)"
        )
        sub.add_argument("--bias", action="store_true", help="give the random network biases")
        of_file(sub)
        sub.add_argument("--schedule", choices=tuple(SCHEDULES), help="force this one on the GPU")
        sub.add_argument("--seed", type=int, default=0, help="of the random numbers")
        sub.add_argument("--batch", type=int, default=16, help="rows")
        sub.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")

    network(
        command("verify", _verify, "Compare with cupy.matmul and with a float64 reference, in units of a proven bound.")
    )
    network(command("plan", _plan, "Tell how a call would run, and why not otherwise."))
    bench_command.add_arguments(
        command("bench", _bench, "Verify, then measure many networks and batch sizes, or the latency table of one.")
    )
    run = command("run", _run, "Compute a file with a saved network, chunk by chunk: files larger than memory will do.")
    run.add_argument("file", metavar="model.npz", help=f"a network, in a file {suffixes}")
    run.add_argument("x", help="a .npy file, or the folder of a zarr array: (..., K)")
    run.add_argument(
        "-o",
        "--out",
        required=True,
        help="the .npy file, or .zarr folder, to write; as <out>.part until it is complete",
    )
    run.add_argument("--force", action="store_true", help="overwrite <out>, and what a run that stopped has left")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on from where a run that stopped has come; from the beginning if there is none",
    )
    run.add_argument("--rows", type=int, help="of a chunk, at most; default: about 9 MB on the GPU, 4 MB on the CPU")
    run.add_argument("--quiet", action="store_true", help="show no progress")
    of_file(run)
    run.add_argument("--schedule", choices=tuple(SCHEDULES), help="force this one on the GPU")
    run.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    convert = command("convert", _convert, "Write a network to a file of another kind.")
    convert.add_argument("file", metavar="model.onnx", help=f"a network, in a file {suffixes}")
    written = ", ".join(kind.suffix for kind in KINDS.values() if kind.write is not None)
    convert.add_argument("out", metavar="model.npz", help=f"the file to write: {written}")
    convert.add_argument("--force", action="store_true", help="overwrite it")
    of_file(convert)
    info = command("info", _info, "Print what a network's file holds; without one, what a bug report needs.")
    info.add_argument("file", nargs="?", help=f"a network, in a file {suffixes}")
    of_file(info)
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 48,64,40,24")
    return sizes


def _network(options: argparse.Namespace) -> MLP:
    if options.file is not None:
        return _network_of_file(options, options.schedule)
    if len(options.sizes) < 2:
        raise ValueError(f"--sizes has {len(options.sizes)} number; accepted: at least two, the features in and out")
    return random_mlp(
        options.sizes,
        options.seed,
        bias=options.bias,
        dtype=options.dtype or "float32",
        precision=options.precision or "ieee",
        activation=parsed_activations("relu" if options.activation is None else options.activation),
        out_activation=parsed_activation(options.out_activation or "identity"),
        schedule=options.schedule,
    )


def _network_of_file(options: argparse.Namespace, schedule: str | None = None) -> MLP:
    hidden, last = options.activation, options.out_activation
    return read_network(
        options.file,
        activation=None if hidden is None else parsed_activations(hidden),
        out_activation=None if last is None else parsed_activation(last),
        dtype=options.dtype,
        precision=options.precision,
        schedule=schedule,
    )


def _verify(options: argparse.Namespace) -> int:
    report = verify(_network(options), batch=options.batch, seed=options.seed, device=options.device)
    print(report)
    return 0 if report.ok else 1


def _plan(options: argparse.Namespace) -> int:
    print(_network(options).plan(options.batch, options.device))
    return 0


def _run(options: argparse.Namespace) -> int:
    net = _network_of_file(options, options.schedule)
    path = net.map(
        Path(options.x),
        Path(options.out),
        options.rows,
        not options.quiet,
        resume=options.resume,
        overwrite=options.force,
        device=options.device,
    )
    print(path)
    return 0


def _bench(options: argparse.Namespace) -> int:
    return bench_command.run(options, _git_commit)


def _git_commit() -> str | None:
    """The commit of the checkout that this runs from, with ``-dirty`` if files have changed since; None elsewhere."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--match=", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _convert(options: argparse.Namespace) -> int:
    checked_target(options.out, overwrite=options.force)  # before the time that reading may take
    net = _network_of_file(options)
    write_network(net, options.out, overwrite=options.force)
    print(f"{options.out}: {net.network.describe()}")
    return 0


def _info(options: argparse.Namespace) -> int:
    if options.file is not None:
        return _info_of_file(options)
    from ._source import find_cuda_src
    from .bench.report import machine

    print(json.dumps({**machine(), "cuda_src": str(find_cuda_src())}, indent=1))
    return 0


def _info_of_file(options: argparse.Namespace) -> int:
    net = _network_of_file(options)
    network = net.network
    print(f"network    {network.describe()}")
    print(f"precision  {network.precision}")
    numbers = sum(a.size for a in (*net.weights, *net.biases) if a is not None)
    print(f"numbers    {numbers:,} weights and biases, {numbers * network.itemsize:,} bytes")
    layers = zip(net.weights, net.biases, network.sizes, network.sizes[1:], network.activations, strict=False)
    for layer, (weight, bias, k, n, activation) in enumerate(layers, 1):
        span = f"weights {weight.min():.3g} .. {weight.max():.3g}" if weight.size else "no weights"
        print(f"layer {layer:<4} {k} -> {n}, {spec_text(activation)}, {span}, {'no ' if bias is None else ''}bias")
    return 0
