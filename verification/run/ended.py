"""What is still in memory of a group that has ended, after calls over it, by an operator of `torch.compile` too."""

from __future__ import annotations

import gc
import weakref
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


def ended(transport: Transport, case: Case) -> str:
    """Task: makes a group of all ranks, calls over it, ends it: what is in memory then, "" if nothing is. The first
    call comes from a thread that has ended when the next one comes.

    Where there are no process groups, that is a transport of its own, which nobody refers to after the calls.
    """
    inputs = shards(case, transport.rank, case.tensors())
    if isinstance(transport, ProcessGroupTransport):
        group = dist.new_group(timeout=TIMEOUT)  # one that only its members make has an old name
        in_second_thread(partial(_call, group, case, inputs))
        _call(group, case, inputs)
        _call_as_compiled(group, case, inputs)
        dist.destroy_process_group(group)
        seen = weakref.ref(group)
        del group
    else:
        own = Own(transport)
        in_second_thread(partial(_call, own, case, inputs))
        _call(own, case, inputs)
        seen = weakref.ref(own)
        del own
    if seen() is not None:
        gc.collect()
    return "" if seen() is None else type(seen()).__name__


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
