"""The temporary place of a result that is a path: ``y.npy.part``, and the record in it of how many rows are complete.

A run that is killed leaves this place, and nothing else. The record says what it was computed from, so that no other network
or x is mixed into it, and since when the machine has been up: rows that were written before a restart may never have reached
the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .network import Network

__all__ = ["RECORD_BYTES", "Record", "boot", "fingerprint", "lock", "part_of", "resumed_rows"]

RECORD_BYTES = 512


def part_of(path: Path) -> Path:
    """The temporary place, beside it: a rename within one file system is at once."""
    return path.with_name(f"{path.name}.part")


@dataclass(frozen=True)
class Record:
    """How far a run has come."""

    rows: int
    computed_from: str  # of `fingerprint`
    boot: str

    def packed(self) -> bytes:
        """Always RECORD_BYTES, with a checksum."""
        text = json.dumps({"rows": self.rows, "of": self.computed_from, "boot": self.boot}).encode()
        return (b"cupymlp map %08x " % zlib.crc32(text) + text).ljust(RECORD_BYTES - 1) + b"\n"

    @classmethod
    def unpacked(cls, packed: bytes) -> Record | None:
        """None if these bytes are no record."""
        head, text = packed[:21], packed[21:].strip()
        if len(packed) != RECORD_BYTES or head != b"cupymlp map %08x " % zlib.crc32(text):
            return None
        fields = json.loads(text)
        return cls(fields["rows"], fields["of"], fields["boot"])


def boot() -> str:
    """What tells this run of the operating system from others; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def fingerprint(network: Network, arrays: Sequence[NDArray[Any] | None], x: Any, shape: Any, dtype: Any) -> str:
    """Of the network, its weights, and x's shape, dtype and, if it is a file, its size and the time of its last change."""
    file = None
    if isinstance(x, str | os.PathLike) and Path(x).is_file():
        status = os.stat(x)
        file = status.st_size, status.st_mtime_ns
    digest = hashlib.sha256(repr((network, tuple(shape), str(dtype), file)).encode())
    for array in arrays:
        if array is not None:
            digest.update(array.tobytes())
    return digest.hexdigest()


def lock(descriptor: int, part: Path) -> None:
    """Keep it for this process until the descriptor is closed, which also the end of a killed process does.

    Raises
    ------
    FileExistsError
        If another run holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise FileExistsError(
                errno.EEXIST, "another run is writing it: wait for that one, or write to another path", os.fspath(part)
            ) from error
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):  # file systems without locks
            raise


def resumed_rows(found: Record | None, wanted: Record, resume: int, part: Path) -> int:
    """The rows to go on from: what the record says if resume is True, else resume, if the record allows it.

    Raises
    ------
    ValueError
        If it cannot be gone on from; the message says why.
    """
    afresh = "Begin afresh with overwrite=True (on the command line, --force)"
    place = os.fspath(part)
    if found is None:
        raise ValueError(f"{place!r} has no record of how many of its rows are complete. {afresh}")
    if found.computed_from != wanted.computed_from:
        raise ValueError(
            f"{place!r} was computed from another network or another x than those that came now; accepted: the same. {afresh}"
        )
    if resume is True:
        if found.boot != wanted.boot or not found.boot:
            raise ValueError(
                f"{place!r} was written on another machine, or before a restart of this one, so its {found.rows} rows may not "
                f"all have reached the disk. If it was another machine that has not crashed, pass resume={found.rows}. {afresh}"
            )
        return found.rows
    if resume > found.rows:
        raise ValueError(
            f"resume is {resume}, and {place!r} has {found.rows} complete rows; accepted: at most that, or True"
        )
    return resume
