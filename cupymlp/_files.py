"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["replacing"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file to write to, beside its place under a temporary name; moved there at the end, or removed after an error."""
    place = Path(path)
    temporary = place.with_name(f"{place.name}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
