"""cuda_src -> one self-contained source string.

CuPy's kernel cache is keyed by the source text and the options, not by the files that an ``#include`` reads: so the
headers are put into the text, and a changed header is a changed key.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__all__ = ["find_cuda_src", "kernel_source", "without_line_directives"]

_LINE_DIRECTIVE = re.compile(r"^#line .*\n", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[ \t]*$', re.MULTILINE)


@cache
def find_cuda_src() -> Path:
    """The folder of the .cu files: inside the installed package, or beside it in a checkout.

    Raises
    ------
    FileNotFoundError
        If it is in neither place; the message names both.
    """
    package = Path(__file__).resolve().parent
    places = (package / "cuda_src", package.parent / "cuda_src")
    for place in places:
        if (place / "common.cuh").is_file():
            return place
    raise FileNotFoundError(
        f"cupymlp's CUDA sources are in neither {places[0]} nor {places[1]}: the installation is incomplete, install "
        "it again"
    )


def _text(name: str) -> str:
    return (find_cuda_src() / name).read_text(encoding="utf-8")


@cache
def kernel_source(name: str) -> str:
    """The text of ``cuda_src/<name>`` with each of our headers in place of its first ``#include``."""
    seen: set[str] = set()

    def expand(file: str) -> str:
        seen.add(file)

        def include(match: re.Match[str]) -> str:
            header = match.group(1)
            if header in seen:
                return ""
            after = text.count("\n", 0, match.end()) + 2
            return f'#line 1 "{header}"\n{expand(header)}\n#line {after} "{file}"'

        text = _text(file).replace("#pragma once", "")
        return _INCLUDE.sub(include, text)

    return f'#line 1 "{name}"\n{expand(name)}'


def without_line_directives(source: str) -> str:
    """For text that becomes part of a user's file, whose own lines are the ones that a compiler should name."""
    return _LINE_DIRECTIVE.sub("", source)
