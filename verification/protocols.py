"""CaseLike: the interface of a Case for ranks, the search and reports."""

from __future__ import annotations

from typing import Protocol


class CaseLike(Protocol):
    """A `verification.case.Case`, a TrainingCase or a similar one.

    world   number of ranks that exist
    ranks   ranks of the group, ascending
    dtype   of the tensors; reports count results by it
    device  "cpu" or "cuda"
    seed    of the tensors
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
