"""A sweep as a picture: rows a second against batch size, one panel a network, the floor drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .cases import ITEMSIZES
from .sweep_report import grouped, microseconds

__all__ = ["plot", "plot_problem"]

WIDTH_INCHES, PANEL_INCHES, DPI = 12.0, 4.0, 100  # 1200 pixels wide
COLUMNS = 2
# Okabe and Ito's colours, which are told apart by colour-blind readers, too.
NET_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PEER_COLOUR = "#777777"
MARKERS = ("s", "^", "v", "D", "P", "X")
FLOOR_STYLES = {2: (0, (1, 1.5)), 4: (0, (4, 2)), 8: (0, (6, 2, 1, 2))}


def plot(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str], title: str = "") -> None:
    """Draw the rows of a sweep.

    One line for each dtype and precision of this library's planned calls, one for each peer (of the first dtype and precision
    that is there), and the floor, which is the larger of the copy and the empty kernel, for each size of a number.

    Parameters
    ----------
    rows
        Of a sweep.
    path
        The picture, a ``.png`` or what else matplotlib writes.
    title
        A line above the panels.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    if (problem := plot_problem()) is not None:
        raise ImportError(problem)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(grouped(rows, ("net",)))
    styles = _styles(rows)
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH_INCHES, PANEL_INCHES * lines + 1.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axis, ((net,), of_net) in zip(axes, panels, strict=False):
        for label, points in _lines(of_net).items():
            batches, rates = zip(*sorted(points), strict=True)
            (handles[label],) = axis.plot(batches, rates, label=label, **styles[label])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(net, fontsize=13)
        axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.8)
        axis.tick_params(labelsize=11)
        axis.set_xlabel("batch (rows)", fontsize=12)
        axis.set_ylabel("rows a second", fontsize=12)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if title:
        figure.suptitle(title, fontsize=14)
    ordered = [label for label in styles if label in handles]
    figure.legend(
        [handles[label] for label in ordered], ordered, loc="outside lower center", ncols=4, fontsize=11, frameon=False
    )
    figure.savefig(path)


def plot_problem() -> str | None:
    """Why nothing can be drawn; None if it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"--plot needs matplotlib ({error}): pip install 'cupymlp[bench]', or leave --plot out"
    return None


def _lines(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The points of each line: batch and rows a second."""
    first = (rows[0]["dtype"], rows[0]["precision"])
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        time, label = microseconds(row), _label(row)
        wanted = row["kind"] == "net" or (row["dtype"], row["precision"]) == first
        if time and label is not None and wanted:
            found.setdefault(label, []).append((row["batch"], row["batch"] / (time * 1e-6)))
    drawn: set[tuple[str, int]] = set()
    for (_, dtype, _, batch), case in grouped(rows, ("net", "dtype", "precision", "batch")):
        times = {row["subject"]: time for row in case if row["kind"] == "floor" and (time := microseconds(row))}
        copies = [times[name] for name in ("copy kernel", "memcpy") if name in times]
        label = _floor_label(dtype)
        if copies and (label, batch) not in drawn:
            drawn.add((label, batch))
            floor = max(min(copies), times.get("empty kernel", 0.0))
            found.setdefault(label, []).append((batch, batch / (floor * 1e-6)))
    return found


def _label(row: dict[str, Any]) -> str | None:
    if row["kind"] == "net":
        return None if row["forced"] else f"cupymlp {row['dtype']} {row['precision']}"
    return row["subject"] if row["kind"] == "peer" else None


def _floor_label(dtype: str) -> str:
    return f"floor, {ITEMSIZES[dtype]}-byte numbers"


def _styles(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How each line looks, in the order of the legend."""
    labels = [(row["kind"], label) for row in rows if (label := _label(row)) is not None]
    nets = list(dict.fromkeys(label for kind, label in labels if kind == "net"))
    peers = list(dict.fromkeys(label for kind, label in labels if kind == "peer"))
    styles: dict[str, dict[str, Any]] = {}
    for i, label in enumerate(nets):
        styles[label] = {"color": NET_COLOURS[i % len(NET_COLOURS)], "linewidth": 2.2, "marker": "o", "markersize": 4}
    for i, label in enumerate(peers):
        look = {"marker": MARKERS[i % len(MARKERS)], "markersize": 6, "markerfacecolor": "white"}
        styles[label] = {"color": PEER_COLOUR, "linewidth": 1.2, "linestyle": "--", **look}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        styles[_floor_label(dtype)] = {
            "color": "#000000",
            "linewidth": 1.4,
            "linestyle": FLOOR_STYLES[ITEMSIZES[dtype]],
        }
    return styles
