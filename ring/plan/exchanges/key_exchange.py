"""The record of an exchange of keys: what the plan, the messages and the estimate of a call ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ring.plan.schedule import KeyRows, Schedule


@dataclass(frozen=True)
class KeyExchange:
    """An exchange of keys among ranks with the same heads.

    Args:
        name: as in `ring_attention`.
        schedule: makes the schedule of a rank.
        straight: each received slot is read by this rank and its gradient returned to the owner at once. So gradients
            are complete when they are sent, and may travel in the working dtype.
        whole: every rank receives all keys, so that memory does not shrink with more ranks.
        group: neighbours that pass keys round; None: all ranks, or none.
        kept: the backward has the keys that the forward received, and no rank sends its own again.
    """

    name: str
    schedule: Callable[[KeyRows], Schedule]
    straight: bool = False
    whole: bool = False
    group: int | None = None
    kept: bool = False
