"""One rank's part in an example of a peer: rebuild the tensors, run the peer, return an Observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport, Transport
from verification.case import Case
from verification.failures import Malformed
from verification.peers.jax_arrays import run_jax
from verification.peers.known_peers import ready
from verification.peers.peer import Attend, Peer, Results, outputs_of
from verification.run.observation import Observation
from verification.run.rank import CallResult, InputEdit, Tensors, layout_answers, observation_of, shards, whole_tensors

prepare = ready  # called in new ranks before an example: imports do not count towards its timeout


def observe_peer(
    transport: Transport, case: Case, name: str, edit: InputEdit | None = None, repeat: bool = True
) -> Observation:
    """Task: run the peer's forward and backward, twice if `repeat`, and return the rank's Observation."""
    peer, inputs = ready(name), shards(case, transport.rank, whole_tensors(case, edit))
    copies = [x.clone() for x in inputs]
    run = run_peer(peer, transport, case, inputs)
    again = run_peer(peer, transport, case, inputs) if repeat else run
    return observation_of(layout_answers(case, transport.rank), inputs, copies, run, again)


def run_named(name: str, transport: Transport, case: Case, inputs: Tensors) -> CallResult:
    """Run the peer of that name, as `run_peer`."""
    return run_peer(ready(name), transport, case, inputs)


def run_peer(peer: Peer, transport: Transport, case: Case, inputs: Tensors) -> CallResult:
    """Run forward and, unless the Case has none, backward. Raises Malformed for a malformed result: it may depend on
    the Case, so it is a counter-example."""
    if not isinstance(transport, (ProcessGroupTransport, SoloTransport)):
        raise ValueError("a peer communicates by torch.distributed, which is not simulated; run it on gloo or nccl")
    group = transport.group if isinstance(transport, ProcessGroupTransport) else None
    if peer.heads_first:
        inputs = tuple(x.transpose(1, 2) if x.dim() == 4 else x for x in inputs)
    results = _RUN[peer.arrays](peer.attend, group, case, inputs)
    if peer.heads_first:
        results = tuple(x.transpose(1, 2) if x is not None and x.dim() == 4 else x for x in results)
    return CallResult(results, (), (), (), (), 0, 0)


def _run_torch(attend: Attend, group: Any, case: Case, inputs: Tensors) -> Results:
    *leaves, dout, dlse = inputs
    q, k, v = (x.detach().requires_grad_(case.backward) for x in leaves)
    with torch.set_grad_enabled(case.backward):
        out, lse = outputs_of(attend(q, k, v, case, group), case, dout.shape, dlse.shape)
    if not case.backward:
        return out, lse, None, None, None
    outputs, incoming = [out], [dout]
    if lse is not None and case.through_lse:
        outputs, incoming = ([lse], [dlse]) if case.lse == "alone" else ([out, lse], [dout, dlse])
    return (out, lse, *gradients_of(outputs, (q, k, v), incoming, case.lse == "alone"))


def _run_numpy(attend: Attend, group: Any, case: Case, inputs: Tensors) -> Results:
    if case.backward:
        raise Malformed("NumPy arrays have no gradients; the claim must return claims.forward_only(case)")
    q, k, v, dout, dlse = (x.detach().numpy() for x in inputs)
    out, lse = outputs_of(attend(q, k, v, case, group), case, dout.shape, dlse.shape, np.ndarray)
    return torch.from_numpy(out), None if lse is None else torch.from_numpy(lse), None, None, None


_RUN: dict[str, Callable[[Attend, Any, Case, Tensors], Results]] = {
    "torch": _run_torch, "numpy": _run_numpy, "jax": run_jax,
}  # fmt: skip


def gradients_of(outputs: Sequence[Tensor], leaves: Tensors, douts: Sequence[Tensor], only_lse: bool) -> list[Tensor]:
    """Return dq, dk, dv. only_lse: lse does not depend on v, so dv may be missing. Raises Malformed for others."""
    live = [i for i, x in enumerate(outputs) if x.requires_grad]
    arguments = [outputs[i] for i in live], leaves, [douts[i] for i in live]
    grads = torch.autograd.grad(*arguments, allow_unused=True) if live else (None,) * 3
    missing = [name for name, x in zip("qkv", grads, strict=True) if x is None and not (only_lse and name == "v")]
    if missing:
        raise Malformed(f"no gradient reaches {', '.join(missing)}: the result of attend does not depend on it")
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, grads, strict=True)]
