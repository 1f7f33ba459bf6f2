"""A call whose forward and backward are issued on streams of their own, as programs do that overlap work on a GPU.

Whatever a call reads becomes right late, on the stream on which it is called: before that it is NaN. So what a call
does on another stream, without waiting, shows. Without a GPU the same steps give the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ring.comm.transport import RecordingTransport, Transport
from verification.case import Case
from verification.run import rank
from verification.run.observation import Observation
from verification.run.rank import RankCall, Tensors

LATE = 2_000_000  # cycles of a GPU, a millisecond or two: longer than a call of few tokens takes to be issued


class Side:
    """A stream beside the current one; on a CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def on(self) -> AbstractContextManager[object]:
        """Within it this is the current stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def late(self, into: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
        """On the current stream, after a while, the numbers come into these tensors."""
        if self._stream is not None:
            torch.cuda._sleep(LATE)
        for x, right in zip(into, numbers, strict=True):
            x.copy_(right)

    def follows(self, other: Side | None = None) -> None:
        """What comes now on this stream waits for all that was issued on the other, or on the current one."""
        if self._stream is not None:
            before = torch.cuda.current_stream() if other is None else other._stream
            assert before is not None
            self._stream.wait_stream(before)

    def joins(self) -> None:
        """What comes now on the current stream waits for this one."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def observe_on_streams(transport: Transport, case: Case) -> Observation:
    """Task: what the call gives on side streams, with the messages and buffers of the same call on the current stream,
    and as `repeat_equal` whether both gave the same bits."""
    inputs = rank.shards(case, transport.rank, rank.whole_tensors(case))
    kept = [x.clone() for x in inputs]
    plain = rank.attend(transport, case, inputs)
    aside = replace(plain, results=results_on_streams(transport, case, inputs))
    return rank.observation_of(rank.division(case, transport.rank), inputs, kept, aside, plain)


def results_on_streams(transport: Transport, case: Case, inputs: Tensors) -> tuple[Tensor | None, ...]:
    """out, lse, dq, dk, dv: the forward on one side stream, the backward on another."""
    places = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs)
    given = tuple(x.fill_(torch.nan) for x in places)
    there, back = Side(rank.rank_device()), Side(rank.rank_device())
    there.follows()  # whatever the current stream has to do with these tensors comes first
    with there.on():
        there.late(given[:3], inputs[:3])
        call = RankCall.forward(RecordingTransport(transport), case, given, loss=case.loss_of(transport.rank))
    back.follows(there)
    with back.on():
        back.late(given[3:], inputs[3:])
        found = call.backward(given[3:])
    there.joins()
    back.joins()
    return call.out, call.lse, found["q"], found["k"], found["v"]
