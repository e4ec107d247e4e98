"""How far a long measurement is: a bar if rich is installed and a terminal is there, else lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .._progress import LINE_SECONDS, terminal_bar

__all__ = ["Progress"]


class Progress:
    """Counts steps on stderr.

    Parameters
    ----------
    total
        The steps there will be.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._last_line = 0.0
        self._bar = terminal_bar(_columns)
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def step(self, text: str) -> None:
        """One more step is done; ``text`` says what came out."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
        elif time.monotonic() - self._last_line >= LINE_SECONDS or self._done == self._total:
            self._last_line = time.monotonic()
            print(f"{self._done}/{self._total} {text}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _columns(progress: Any) -> Sequence[Any]:
    text = progress.TextColumn("{task.description}")
    return progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn(), text
