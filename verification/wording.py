"""Words for numbers and lists in reports and errors."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 example`, else `2 examples`. noun: in the singular; its plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rate(done: int, seconds: float) -> str:
    """`12/s`, or `3.4 s each` below one per second."""
    per_second = done / max(1e-9, seconds)
    return f"{seconds / done:.1f} s each" if 0 < per_second < 1 else f"{per_second:.0f}/s"
