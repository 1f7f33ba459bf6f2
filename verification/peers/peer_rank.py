"""One rank's part in an example of a peer: rebuild the tensors, run the peer, return an Observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from verification.peers.side_effects import left_as_they_were, must_leave_nothing
from verification.run.observation import Observation
from verification.run.rank import (
    LEAVES,
    CallResult,
    InputEdit,
    Tensors,
    layout_answers,
    negated,
    observation_of,
    shards,
    whole_tensors,
)

# Kinds of second runs that any attention owes, see `Case.again`. Those of REPEATING have the bits of the first run.
REPEATING = ("alike", "between", "pipelined")
RUNS = (*REPEATING, "no_grad", "q", "k", "v", "qk", "qv", "kv")
SEEDS_PER_LEAK = 16  # of as many seeds, one is checked for leaks, which costs more calls
prepare = ready  # called in new ranks before an example: imports do not count towards its timeout


def observe_peer(
    transport: Transport, case: Case, name: str, edit: InputEdit | None = None, repeat: bool = True
) -> Observation:
    """Task: run the peer's forward and backward, twice if `repeat`, and return the rank's Observation.

    A second run without gradients, or with some only, may use other kernels. So it need not repeat the bits of the
    first one; its results take the place of the first one's.
    """
    peer, inputs = ready(name), shards(case, transport.rank, whole_tensors(case, edit))
    copies = [x.clone() for x in inputs]
    run = run_peer(peer, transport, case, inputs)
    again = run_peer(peer, transport, case, inputs, case.again) if repeat else run
    if repeat and case.seed % SEEDS_PER_LEAK == 0 and peer.arrays == "torch":
        must_leave_nothing(f"attend of {peer.name}", lambda: run_peer(peer, transport, case, inputs))
    if case.again not in REPEATING:
        results = tuple(x if y is None else y for x, y in zip(run.results, again.results, strict=True))
        run = again = replace(run, results=results)
    return observation_of(layout_answers(case, transport.rank), inputs, copies, run, again)


def run_named(name: str, transport: Transport, case: Case, inputs: Tensors) -> CallResult:
    """Run the peer of that name, as `run_peer`."""
    return run_peer(ready(name), transport, case, inputs)


def run_peer(peer: Peer, transport: Transport, case: Case, inputs: Tensors, variant: str = "alike") -> CallResult:
    """Run forward and, unless the Case has none, backward. Raises Malformed for a malformed result: it may depend on
    the Case, so it is a counter-example. variant: a kind of second run, one of RUNS."""
    if not isinstance(transport, (ProcessGroupTransport, SoloTransport)):
        raise ValueError("a peer communicates by torch.distributed, which is not simulated; run it on gloo or nccl")
    group = transport.group if isinstance(transport, ProcessGroupTransport) else None
    if peer.heads_first:
        inputs = tuple(x.transpose(1, 2) if x.dim() == 4 else x for x in inputs)

    def attend(*arguments: Any, **sinks: Any) -> Any:
        with left_as_they_were(f"attend of {peer.name}"):
            return peer.attend(*arguments, **sinks)

    with left_as_they_were(f"the backward of {peer.name}"):
        if peer.arrays == "torch":
            results = _run_torch(attend, group, case, inputs, variant)
        else:
            results = _RUN[peer.arrays](attend, group, case, inputs)
    if peer.heads_first:
        results = tuple(x.transpose(1, 2) if x is not None and x.dim() == 4 else x for x in results)
    return CallResult(results, (), (), (), (), 0, 0)


def _run_torch(attend: Attend, group: Any, case: Case, inputs: Tensors, variant: str = "alike") -> Results:
    call = _TorchCall(attend, group, case, inputs, variant)
    others = negated(inputs) if variant in ("between", "pipelined") else ()  # of a second call, as another layer's
    if variant == "between":
        _run_torch(attend, group, case, others)
    later = _TorchCall(attend, group, case, others) if variant == "pipelined" else None
    grads = call.grads()
    if later is not None:
        later.grads()
    return call.out, call.lse, *grads


class _TorchCall:
    """One forward, and the leaves of its graph. variant: "no_grad", or which of q, k and v alone require gradients."""

    def __init__(self, attend: Attend, group: Any, case: Case, inputs: Tensors, variant: str = "alike") -> None:
        self.dout, self.dlse = inputs[3:5]
        self.case, backward = case, case.backward and variant != "no_grad"
        differentiated = "" if not backward else variant if set(variant) <= set("qkv") else LEAVES
        named = zip(LEAVES, inputs[:3] + inputs[5:], strict=False)  # sinks come last, if there are any
        leaves = {name: x.detach().requires_grad_(name in differentiated) for name, x in named}
        self.leaves = {name: x for name, x in leaves.items() if x.requires_grad}
        with torch.set_grad_enabled(backward):
            result = attend(*map(leaves.pop, "qkv"), case, group, **leaves)
        self.out, self.lse = outputs_of(result, case, self.dout.shape, self.dlse.shape)

    def grads(self) -> tuple[Tensor | None, ...]:
        """Run the backward; return dq, dk, dv, dsinks, None for those that are not asked for."""
        if not self.leaves:
            return (None,) * len(LEAVES)
        outputs, incoming = [self.out], [self.dout]
        if self.lse is not None and self.case.through_lse:
            alone = self.case.lse == "alone"
            outputs, incoming = ([self.lse], [self.dlse]) if alone else ([self.out, self.lse], [self.dout, self.dlse])
        grads = differentiate(outputs, self.leaves, incoming, self.case.lse == "alone")
        return tuple(map(grads.get, LEAVES))


def _run_numpy(attend: Attend, group: Any, case: Case, inputs: Tensors) -> Results:
    if case.backward:
        raise Malformed("NumPy arrays have no gradients; the claim must return claims.forward_only(case)")
    q, k, v, dout, dlse, *sinks = (x.detach().numpy() for x in inputs)
    result = attend(q, k, v, case, group, **({"sinks": sinks[0]} if sinks else {}))
    out, lse = outputs_of(result, case, dout.shape, dlse.shape, np.ndarray)
    return torch.from_numpy(out), None if lse is None else torch.from_numpy(lse), *(None,) * len(LEAVES)


_RUN: dict[str, Callable[[Attend, Any, Case, Tensors], Results]] = {"numpy": _run_numpy, "jax": run_jax}


def differentiate(
    outputs: Sequence[Tensor], leaves: dict[str, Tensor], douts: Sequence[Tensor], only_lse: bool
) -> dict[str, Tensor]:
    """Return the gradients by the names of the leaves, out of LEAVES. only_lse: lse does not depend on v, so dv may be
    missing. Raises Malformed for others."""
    live = [i for i, x in enumerate(outputs) if x.requires_grad]
    arguments = [outputs[i] for i in live], list(leaves.values()), [douts[i] for i in live]
    grads = torch.autograd.grad(*arguments, allow_unused=True) if live else (None,) * len(leaves)
    missing = [name for name, x in zip(leaves, grads, strict=True) if x is None and not (only_lse and name == "v")]
    if missing:
        raise Malformed(f"no gradient reaches {', '.join(missing)}: the result of attend does not depend on it")
    pairs = zip(leaves.items(), grads, strict=True)
    return {name: torch.zeros_like(x) if dx is None else dx for (name, x), dx in pairs}
