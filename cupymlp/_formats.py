"""Binary floating-point formats: the numbers that error bounds are made of."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True)
class Format:
    """A format of p significant bits, whose least normal number is 2^least."""

    p: int
    least: int

    @property
    def unit(self) -> float:
        """The unit roundoff u: half the distance from 1 to the next number."""
        return 2.0**-self.p

    @property
    def normal(self) -> float:
        """The least normal number."""
        return 2.0**self.least

    @property
    def subnormal(self) -> float:
        """The least number above 0."""
        return 2.0 ** (self.least - self.p + 1)

    @property
    def most(self) -> float:
        """The largest finite number."""
        return float((2 - 2.0 ** (1 - self.p)) * 2.0 ** (1 - self.least))


FORMATS = {
    "float16": Format(11, -14),
    "bfloat16": Format(8, -126),
    "float32": Format(24, -126),
    "float64": Format(53, -1022),
}
