"""The memory of an implementation: does a rank's peak grow with the ranks, if each has as many tokens as before?

A call is measured on p and on p' > p ranks, with m tokens a rank. What a rank holds of its own tokens, of a few other
shards and of scores between shards stays the same; what it holds of all tokens grows by m (p' - p) of them. So a peak
of O(n/p) grows by less than one head of the further keys, without values or gradients: m (p' - p) D numbers. Less than
that, such as a position for each token, is let pass.

Both have 3 ranks or more: on two ranks a ring has no message under way while it computes with another. There are few
tokens and many dimensions: scores of m or m p' keys stay below one head of keys for either side.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ring.comm.transport import Transport
from verification.case import Case
from verification.case_line import read_case_line
from verification.check.attention_on_ranks import Implementation
from verification.failures import Refused
from verification.peers.known_peers import ready
from verification.peers.peer_rank import run_peer
from verification.run.backends import Backend
from verification.run.rank import shards, whole_tensors

FEWEST = 3  # ranks of a comparison
SHARDS = (2, 4, 8, 16)  # tokens of a rank: the first that the claim leaves as it is
SAME = 24  # tokens, whatever the ranks, for the ratio that a reader expects


@dataclass(frozen=True)
class Measured:
    """A call's Case, and its largest peak on a rank beyond its inputs, in bytes."""

    case: Case
    peak: int


def problem(attention: Implementation, world: int, tokens: int) -> Case:
    """Return the claimed Case with that many tokens. Raises Refused if the claim has other numbers."""
    line = f"world={world} tokens={tokens} heads=12 head_dim=256 causal=true"
    case = attention.claims(read_case_line(line))
    if case is None or case.tokens != tokens or len(case.ranks) != world or case.head_dim < 32:
        raise Refused(f"the claim leaves no Case of {line!r} with its tokens, ranks, and 32 dims or more")
    return case


def problems(attention: Implementation, worlds: Sequence[int]) -> dict[int, list[Case]]:
    """Return the Cases to measure by their ranks: those of one shard first. Raises Refused."""
    worlds = [world for world in worlds if world > 1]  # a rank alone has no buffers
    compared = [world for world in worlds if world >= FEWEST]
    if len(compared) < 2:
        raise Refused(
            f"two numbers of ranks from {FEWEST} on are compared; of the adapter's and --world's there "
            f"{'is' if compared else 'are'} {compared[0] if compared else 'none'}"
        )
    pair, reason = (compared[0], compared[-1]), Refused()
    for length in SHARDS:
        try:
            cases = {world: [problem(attention, world, world * length)] for world in pair}
        except Refused as error:
            reason = error
            continue
        first, second = (replace(case, world=1, group=None, tokens=1) for (case,) in cases.values())
        if first == second:
            break
        reason = Refused(f"the claim has other sizes on {pair[0]} than on {pair[1]} ranks")
    else:
        raise reason
    for world in {min(worlds), *pair}:
        case = problem(attention, world, SAME * max(1, length // 2))
        cases.setdefault(world, []).append(case)
    return cases


def measure(backend: Backend, name: str, case: Case) -> Measured:
    """Return the peak of the Case on its ranks, which the backend has. Raises VerificationFailure."""
    backend.submit(peak_on_rank, case, name)
    return Measured(case, max(backend.collect()))


def growth(measured: Sequence[Measured]) -> tuple[int, int]:
    """Return the bytes by which the peak grew from the fewest to the most ranks, and one head of the further keys."""
    first, second = measured
    case, further = second.case, second.case.tokens - first.case.tokens
    return second.peak - first.peak, case.batch * further * case.head_dim * case.torch_dtype.itemsize


def peak_on_rank(transport: Transport, case: Case, name: str) -> int:
    """Task: the peak of one forward and backward beyond the inputs, in bytes. Caches that the call fills count."""
    peer = ready(name)
    inputs = shards(case, transport.rank, whole_tensors(case))
    gc.collect()  # what is freed within the call must not be older
    call = partial(run_peer, peer, transport, case, inputs)
    return peak_of_arrays(call) if peer.arrays == "numpy" else peak_of_tensors(call)


def peak_of_arrays(call: Callable[[], Any]) -> int:
    """Return the peak of memory that Python and NumPy allocate in the call."""
    tracemalloc.start()
    try:
        results = call()
        return tracemalloc.get_traced_memory()[1] * (results is not None)
    finally:
        tracemalloc.stop()


def peak_of_tensors(call: Callable[[], Any]) -> int:
    """Return the peak of torch's allocations on CPUs in the call, scratch memory of its kernels included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        results = call()
    del results
    events = profiled.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((x for x in events if x.name() == "[memory]"), key=lambda x: x.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
