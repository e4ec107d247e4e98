"""How far something long is: a bar if rich is installed and a terminal is there, else lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

__all__ = ["LINE_SECONDS", "RowsBar", "terminal_bar"]

LINE_SECONDS = 2.0  # between lines, where there is no bar


class RowsBar:
    """Shows `MLP.map`'s rows on stderr; it is called as a user's own ``progress`` is."""

    def __init__(self) -> None:
        self._bar = terminal_bar(_columns)
        self._task: Any = None
        self._last_line = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """So many rows of so many are complete."""
        if self._bar is not None:
            if self._task is None:
                self._bar.start()
                self._task = self._bar.add_task("rows", total=total)
            self._bar.update(self._task, completed=done)
        elif time.monotonic() - self._last_line >= LINE_SECONDS or done == total:
            self._last_line = time.monotonic()
            print(f"{done:,}/{total:,} rows", file=sys.stderr, flush=True)

    def __enter__(self) -> RowsBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.stop()


def terminal_bar(columns: Callable[[Any], Sequence[Any]]) -> Any:
    """A progress bar of rich's on stderr; None where there is no terminal, or no rich.

    Parameters
    ----------
    columns
        Makes them of the module rich.progress.
    """
    if not sys.stderr.isatty():
        return None
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(*columns(progress), console=Console(stderr=True))


def _columns(progress: Any) -> Sequence[Any]:
    rows = progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows")
    return progress.BarColumn(), progress.TaskProgressColumn(), rows, progress.TimeRemainingColumn()
