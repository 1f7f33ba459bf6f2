"""Example: what ranks, the search and reports need to know of an example."""

from __future__ import annotations

from typing import Protocol


class Example(Protocol):
    """A `verification.case.Case`, or what takes its place on another road.

    world   ranks that exist; ranks: those that take part, ascending
    dtype   of the numbers, by which results are counted
    device  "cpu" or "cuda"
    seed    of all that is drawn anew from it
    """

    @property
    def world(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
