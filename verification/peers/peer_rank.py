"""One rank's part in an example of a peer: rebuild the tensors, run the peer twice, report what was seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport, Transport
from verification.case import Case
from verification.peers.known_peers import ready
from verification.peers.peer import Peer
from verification.run.observation import Observation
from verification.run.rank import RunResult, Tensors, division, observation_of, shards, whole_tensors

prepare = ready  # in every new rank before its first example: imports do not count towards an example's timeout


def observe_peer(transport: Transport, case: Case, name: str) -> Observation | str:
    """Forward and backward by the peer of that name; in words, what of the wrong form the adapter returned."""
    peer, inputs = ready(name), shards(case, transport.rank, whole_tensors(case))
    kept = [x.clone() for x in inputs]
    run = run_peer(peer, transport, case, inputs)
    if isinstance(run, str):
        return run
    again = run_peer(peer, transport, case, inputs)
    return again if isinstance(again, str) else observation_of(division(case, transport.rank), inputs, kept, run, again)


def run_peer(peer: Peer, transport: Transport, case: Case, inputs: Tensors) -> RunResult | str:
    """As `observe_peer`. Raises ValueError for a result of another shape, or one that leaves a gradient out: these may
    concern some Cases only, so they are counter-examples and no fault of the adapter."""
    if not isinstance(transport, (ProcessGroupTransport, SoloTransport)):
        return "a peer talks through torch.distributed, which is not simulated; run it on gloo"
    *leaves, dout, dlse = inputs
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    found = peer.attend(q, k, v, case, transport.group if isinstance(transport, ProcessGroupTransport) else None)
    out, lse = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    for name, value in (("out", out), ("lse", lse)):
        if not isinstance(value, Tensor) and (name == "out" or value is not None):
            return f"attend returned {type(value).__name__} as {name}; it must be a tensor, or the pair (out, lse)"
    if case.lse == "unused":
        lse = None
    elif lse is None:
        return f'attend returned no lse, and the claim has lse {case.lse!r}; it must be "unused" then'
    for name, value, like in (("out", out, dout), ("lse", lse, dlse)):
        if value is not None and value.shape != like.shape:
            raise ValueError(f"attend returned {name} of shape {tuple(value.shape)}; it must be {tuple(like.shape)}")
    outputs, incoming = [out], [dout]
    if lse is not None and case.through_lse:
        outputs, incoming = ([lse], [dlse]) if case.lse == "alone" else ([out, lse], [dout, dlse])
    return RunResult((out, lse, *gradients_of(outputs, (q, k, v), incoming, case.lse == "alone")), (), (), (), (), 0, 0)


def gradients_of(outputs: Sequence[Tensor], leaves: Tensors, incoming: Sequence[Tensor], alone: bool) -> list[Tensor]:
    """dq, dk, dv. alone: of lse only, which does not depend on v. Raises ValueError for inputs without gradient."""
    live = [i for i, x in enumerate(outputs) if x.requires_grad]
    chosen = [outputs[i] for i in live], leaves, [incoming[i] for i in live]
    found = torch.autograd.grad(*chosen, allow_unused=True) if live else (None,) * 3
    unreached = [name for name, x in zip("qkv", found, strict=True) if x is None and not (alone and name == "v")]
    if unreached:
        raise ValueError(f"no gradient reaches {', '.join(unreached)}: what attend returned does not depend on it")
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, found, strict=True)]
