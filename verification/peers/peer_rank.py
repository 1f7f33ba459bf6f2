"""One rank's part in an example of a peer: rebuild the tensors, run the peer twice, return an Observation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport, Transport
from verification.case import Case
from verification.peers.known_peers import ready
from verification.peers.peer import Peer, outputs_of
from verification.run.observation import Observation
from verification.run.rank import CallResult, Tensors, layout_answers, observation_of, shards, whole_tensors

prepare = ready  # called in new ranks before an example: imports do not count towards its timeout


def observe_peer(transport: Transport, case: Case, name: str) -> Observation:
    """Run the peer's forward and backward twice."""
    peer, inputs = ready(name), shards(case, transport.rank, whole_tensors(case))
    copy = [x.clone() for x in inputs]
    run, rerun = (run_peer(peer, transport, case, inputs) for _ in range(2))
    return observation_of(layout_answers(case, transport.rank), inputs, copy, run, rerun)


def run_peer(peer: Peer, transport: Transport, case: Case, inputs: Tensors) -> CallResult:
    """Run forward and backward once. Raises ValueError for a malformed result or a missing gradient: these may depend
    on the Case, so they are counter-examples."""
    assert isinstance(transport, (ProcessGroupTransport, SoloTransport)), "a peer needs torch.distributed"
    *leaves, dout, dlse = inputs
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    result = peer.attend(q, k, v, case, transport.group if isinstance(transport, ProcessGroupTransport) else None)
    out, lse = outputs_of(result, dout.shape)
    if case.lse == "unused":
        lse = None
    elif lse is None:
        raise ValueError(f'attend returned no lse, and the claim has lse {case.lse!r}; it must be "unused" then')
    outputs, incoming = [out], [dout]
    if lse is not None and case.through_lse:
        outputs, incoming = ([lse], [dlse]) if case.lse == "alone" else ([out, lse], [dout, dlse])
    grads = gradients_of(outputs, (q, k, v), incoming, case.lse == "alone")
    return CallResult((out, lse, *grads), (), (), (), (), 0, 0)


def gradients_of(outputs: Sequence[Tensor], leaves: Tensors, douts: Sequence[Tensor], only_lse: bool) -> list[Tensor]:
    """Return dq, dk, dv. only_lse: lse does not depend on v, so dv may be missing. Raises ValueError for others."""
    live = [i for i, x in enumerate(outputs) if x.requires_grad]
    arguments = [outputs[i] for i in live], leaves, [douts[i] for i in live]
    grads = torch.autograd.grad(*arguments, allow_unused=True) if live else (None,) * 3
    missing = [name for name, x in zip("qkv", grads, strict=True) if x is None and not (only_lse and name == "v")]
    if missing:
        raise ValueError(f"no gradient reaches {', '.join(missing)}: the result of attend does not depend on it")
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, grads, strict=True)]
