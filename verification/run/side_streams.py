"""A call whose forward and backward are issued on two side streams, as programs do that overlap work on a GPU.

Its inputs are NaN until they are written late, on the stream of the call. So work that the call issues on another
stream without waiting shows as NaN. Without a GPU the same steps give the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ring.comm.transport import Transport
from verification.case import Case
from verification.run import rank
from verification.run.observation import Observation
from verification.run.rank import RankCall, Tensors
from verification.run.recording_transport import RecordingTransport

LATE = 2_000_000  # GPU cycles, a millisecond or two: longer than a call of few tokens takes to be issued


class SideStream:
    """A stream beside the current one; its methods do nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this is the current stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def copy_late(self, into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Issue, on the current stream, a delay and then copies of the sources into these tensors."""
        if self._stream is not None:
            torch.cuda._sleep(LATE)
        for x, source in zip(into, sources, strict=True):
            x.copy_(source)

    def wait_for(self, other: SideStream | None = None) -> None:
        """Make this stream wait for all work issued so far on the other one, or on the current one."""
        if self._stream is not None:
            before = torch.cuda.current_stream() if other is None else other._stream
            assert before is not None
            self._stream.wait_stream(before)

    def join(self) -> None:
        """Make the current stream wait for this one."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def observe_on_streams(transport: Transport, case: Case) -> Observation:
    """Task: run the call on the current stream, then on side streams; both must give the same bits (`repeat_equal`).

    Returns the results on side streams with the messages and buffers of the first run."""
    inputs = rank.shards(case, transport.rank, rank.whole_tensors(case))
    copies = [x.clone() for x in inputs]
    plain = rank.run_attention(transport, case, inputs)
    aside = replace(plain, results=results_on_streams(transport, case, inputs))
    return rank.observation_of(rank.layout_answers(case, transport.rank), inputs, copies, aside, plain)


def results_on_streams(transport: Transport, case: Case, inputs: Tensors) -> tuple[Tensor | None, ...]:
    """Return out, lse, dq, dk, dv, dsinks of a forward on one side stream and a backward on another."""
    empty = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs)
    late = tuple(x.fill_(torch.nan) for x in empty)
    first, second = SideStream(rank.rank_device()), SideStream(rank.rank_device())
    first.wait_for()  # the current stream may still be writing these tensors
    with first.current():
        first.copy_late(late[:3] + late[5:], inputs[:3] + inputs[5:])
        call = RankCall.forward(RecordingTransport(transport), case, late, loss=case.loss_of(transport.rank))
    second.wait_for(first)
    with second.current():
        second.copy_late(late[3:5], inputs[3:5])
        grads = call.backward(late[3:5])
    first.join()
    second.join()
    return call.out, call.lse, *map(grads.get, rank.LEAVES)
