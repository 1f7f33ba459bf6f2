"""The memory of an implementation: does a rank's peak grow with the ranks, if each has as many tokens as before?

A call is measured on p and on p' > p ranks, with m tokens a rank. What a rank holds of its own tokens, of a few other
shards and of scores between shards stays the same; what it holds of all tokens grows by m (p' - p) of them. So a peak
of O(n/p) grows by less than one head of the further keys, without values or gradients: m (p' - p) D numbers. Less than
that, such as a position for each token, is let pass.

Both have 3 ranks or more: on two ranks a ring has no message under way while it computes with another. There are few
tokens and many dimensions, so that scores of m or m p' keys stay below one head of keys. The number of heads is odd:
a hybrid that divides heads among 4 ranks, and not among 3, is a ring on both.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from ring.comm.transport import Transport
from verification.case import Case
from verification.case_line import read_case_line
from verification.check.attention_on_ranks import Implementation
from verification.failures import Refused
from verification.peers.known_peers import ready
from verification.peers.peer_rank import run_peer
from verification.run.rank import shards, whole_tensors

FEWEST = 3  # ranks of a comparison
SHARDS = (2, 4, 8, 16)  # tokens of a rank: the first that the claim leaves as it is
SAME = 12  # as many shards on any ranks, for the ratio that a reader expects


class Judged(NamedTuple):
    """Verdict of a measurement: its Case, the numbers behind it, what they break, if anything, and a cell's text."""

    case: Case
    reason: str
    broken: str
    shown: str = ""


def problems(attention: Implementation, worlds: Sequence[int]) -> dict[int, list[Case]]:
    """Return the Cases to measure by their ranks: of a shard for each rank, and last of SAME. Raises Refused."""
    worlds = [world for world in worlds if world > 1]  # a rank alone has no buffers
    compared = [world for world in worlds if world >= FEWEST]
    pair = sorted({*compared[:1], *compared[-1:]})
    if len(pair) < 2:
        raise Refused(f"two numbers of ranks from {FEWEST} on are compared; the adapter and --world have {worlds}")
    for length in SHARDS:
        alone = alike(attention, pair, length)
        same = {world: _claimed(attention, world, SAME * length) for world in (worlds[0], *pair)}
        if alone and None not in same.values():
            return {world: [x for x in (alone.get(world), case) if x] for world, case in same.items()}
    raise Refused(
        f"the claim leaves no causal Cases on {pair} ranks, {SHARDS} tokens each, 11 heads or 12 of 256 dims, alike"
    )


def alike(attention: Implementation, worlds: Sequence[int], length: int) -> dict[int, Case] | None:
    """Return Cases that differ in their ranks alone, with so many tokens a rank; None if the claim leaves none."""
    cases = {world: _claimed(attention, world, world * length) for world in worlds}
    sizes = {case and replace(case, world=1, group=None, tokens=1) for case in cases.values()}
    return {world: case for world, case in cases.items() if case} if len(sizes) == 1 and None not in sizes else None


def _claimed(attention: Implementation, world: int, tokens: int) -> Case | None:
    line = f"world={world} tokens={tokens} heads=11 head_dim=256 causal=true"
    case = attention.claims(read_case_line(line))
    fits = case is not None and (case.tokens, len(case.ranks)) == (tokens, world) and case.head_dim >= 32
    return case if fits else None


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
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def peak_of_tensors(call: Callable[[], Any]) -> int:
    """Return the peak of torch's allocations on CPUs in the call, scratch memory of its kernels included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events: Any = [x for x in profiled.profiler.kineto_results.events() if x.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def judged(measured: Sequence[tuple[Case, Sequence[int]]]) -> Judged:
    """Compare the peaks of as many tokens on any ranks, and judge those of as many for each rank."""
    peaks = [(case, max(ranks)) for case, ranks in measured]
    most = max(case.tokens for case, _ in peaks)
    (few, first), *_, (many, last) = [x for x in peaks if x[0].tokens == most]
    (before, low), (case, high) = (x for x in peaks if x[0].tokens < most)
    further = case.batch * (case.tokens - before.tokens) * case.head_dim * case.torch_dtype.itemsize
    reason = (
        f"peak x{last / first:.2f} from {few.world} to {many.world} ranks with {most} tokens; x{high / low:.2f} from "
        f"{before.world} to {case.world} ranks with {case.tokens // case.world} tokens each ({low:,} to {high:,} "
        f"bytes; one head of the further keys has {further:,})"
    )
    return Judged(case, reason, "not O(n/p)" if high - low >= further else "")
