"""What one rank does with a Case and a peer: rebuild the tensors, run it twice, say what was seen."""

from __future__ import annotations

import torch
from torch import Tensor

from ring.transport import ProcessGroupTransport, SoloTransport, Transport
from verification.case import Case
from verification.execute import Pass, Tensors, division, observation_of, shards, whole_tensors
from verification.observation import Observation
from verification.peers.peer import Peer, ready


def prepare(spec: str) -> None:
    """In every new rank, before its first example: imports are not held to an example's patience."""
    ready(spec)


def observe_peer(transport: Transport, case: Case, spec: str) -> Observation | str:
    """Forward and backward by the peer that `spec` names; a string where the adapter does not keep to its form."""
    peer = ready(spec)
    inputs = shards(case, transport.rank, whole_tensors(case))
    kept = [x.clone() for x in inputs]
    run = run_peer(peer, transport, case, inputs)
    if isinstance(run, str):
        return run
    again = run_peer(peer, transport, case, inputs)
    return again if isinstance(again, str) else observation_of(division(case, transport.rank), inputs, kept, run, again)


def run_peer(peer: Peer, transport: Transport, case: Case, inputs: Tensors) -> Pass | str:
    if not isinstance(transport, (ProcessGroupTransport, SoloTransport)):
        return "a peer talks through torch.distributed, which is not simulated; run it on gloo"
    *leaves, dout, dlse = inputs
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    group = transport.group if isinstance(transport, ProcessGroupTransport) else None
    found = peer.attend(q, k, v, case, group)
    out, lse = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    for name, value in (("out", out), ("lse", lse)):
        if not isinstance(value, Tensor) and (name == "out" or value is not None):
            return f"attend returned {type(value).__name__} as {name}; it must be a tensor, or the pair (out, lse)"
    if case.lse == "unused":
        lse = None
    elif lse is None:
        return f'attend returned no lse, and the claim has lse {case.lse!r}; it must be "unused" then'
    outputs, incoming = [out], [dout]
    if lse is not None and case.through_lse:
        outputs, incoming = ([lse], [dlse]) if case.lse == "alone" else ([out, lse], [dout, dlse])
    gradients = torch.autograd.grad(outputs, (q, k, v), incoming)
    return Pass((out, lse, *gradients), (), (), (), (), 0, 0)
