"""Defects of the order of calls, planted in every rank before its first task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ring import agreement, attention
from ring.comm.calls import Calls, NumberedCall
from verification.run import rank


def keeps_one_output() -> None:
    """All calls of a rank on tensors of one shape give the same output tensor."""
    real: Any = rank.ring_attention
    kept: dict[Any, Tensor] = {}

    def attend(q: Tensor, *args: Any, **options: Any) -> Any:
        found = real(q, *args, **options)
        out = found[0] if isinstance(found, tuple) else found
        place = options["group"].rank if options["group"] is not None else 0
        kept.setdefault(place, out.data).copy_(out.data)
        out.data = kept[place]
        return found

    rank.ring_attention = attend


def compares_no_backwards() -> None:
    attention.agree_backward = lambda numbered, transport, check: None


def never_catches_up() -> None:
    Calls.catch_up = lambda calls, number: None  # type: ignore[method-assign, assignment]


def says_less() -> None:
    real = agreement._joint_error
    agreement._joint_error = lambda said: ValueError(str(real(said)).partition(":")[0])


def lets_any_thread_call() -> None:
    def check(calls: Calls, call: NumberedCall) -> None:
        """Nothing."""

    Calls.check_thread = check  # type: ignore[method-assign, assignment]


def lets_threads_call_at_a_time() -> None:
    @contextmanager
    def turn(calls: Calls) -> Iterator[None]:
        yield

    Calls.turn = turn  # type: ignore[method-assign, assignment]
