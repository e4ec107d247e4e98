"""Writing a file so that an interrupted save leaves the old one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A name beside the path to write to; what is there afterwards is moved to the path, or removed after an error."""
    place = Path(path)
    temporary = place.with_name(f"{place.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
