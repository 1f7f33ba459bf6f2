"""What is still there of a group that has ended, after calls over it, by an operator of `torch.compile` too."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Transport
from ring.compiled import traced
from verification.case import Case
from verification.run.layouts import layout_of
from verification.run.new_groups import TIMEOUT, Own
from verification.run.programs import in_second_thread
from verification.run.rank import RankCall, Tensors, shards
from verification.run.resources import in_use, left_since, pages


def ended(transport: Transport, case: Case) -> str:
    """Task: makes a group of all ranks, calls over it, ends it: what is there then, "" if nothing is. The first call
    comes from a thread that has ended when the next one comes.

    Where there are no process groups, that is a transport of its own, which nobody refers to after the calls.
    """
    inputs = shards(case, transport.rank, case.tensors())
    if not isinstance(transport, ProcessGroupTransport):
        own = Own(transport)
        _call_often(own, case, inputs)
        seen: weakref.ref[object] = weakref.ref(own)
        del own
        return _in_memory(seen)
    # What a process begins once, with whatever comes first, is no group's: what a second one leaves again is.
    for _ in range(2):
        before = in_use()
        still = _group_that_ends(case, inputs)
        left = ", ".join(left_since(before))
        everyone = transport.all_gather(f"{bool(still):d}{bool(left):d}".encode())
        if set(everyone) == {b"00"} or any(said.startswith(b"1") for said in everyone):
            break
    return still or left


def _group_that_ends(case: Case, inputs: Tensors) -> str:
    """What is still in memory of it, and files of it that have a name: a process that is killed would leave them."""
    group = dist.new_group(timeout=TIMEOUT)  # one that only its members make has an old name
    _call_often(group, case, inputs)
    _call_as_compiled(group, case, inputs)
    named = ", ".join(page for page in pages() if os.path.exists(page))
    dist.destroy_process_group(group)
    seen = weakref.ref(group)
    del group
    return _in_memory(seen) or named


def _in_memory(seen: weakref.ref[object]) -> str:
    if seen() is not None:
        gc.collect()
    return "" if seen() is None else f"{type(seen()).__name__} in memory"


def _call_often(group: Transport | dist.ProcessGroup, case: Case, inputs: Tensors) -> None:
    """In a second thread, then in this one; for every other seed also without a backward, and wrongly on all ranks."""
    in_second_thread(partial(_call, group, case, inputs))
    _call(group, case, inputs)
    if case.seed % 2:
        RankCall.forward(group, case, inputs)
        with suppress(ValueError):
            RankCall.forward(group, replace(case, exchange="teleport"), inputs)


def _call(group: Transport | dist.ProcessGroup, case: Case, inputs: Tensors) -> None:
    RankCall.forward(group, case, inputs).backward(inputs[3:])


def _call_as_compiled(group: dist.ProcessGroup, case: Case, inputs: Tensors) -> None:
    """As a compiled graph calls, without compiling one."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = traced(
        q, k, v, case.pattern, layout_of(case), group=group, kernel=case.kernel, return_lse=False,
        exchange=case.exchange, bucket=case.bucket, scale=case.scale, check=True, name=None,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    torch.autograd.grad(out, (q, k, v), inputs[3])
