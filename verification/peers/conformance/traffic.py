"""The bytes that a rank sends: do they grow with the ranks as those of a ring, or faster?

They are counted where they leave, by the kernel, on every TCP connection of the rank's process: so over gloo no
collective, group or thread is missed, and a collective costs what it really sends. Not seen are other ways, as shared
memory and files, and a connection that is closed within the call: who sends less than a head of keys is not judged.

A call is made on p and on p' > p ranks, with m tokens a rank: a forward alone, then one with its backward. A ring sends
(p - 1) / p of all keys and values forward, the same again and their gradients backward (`reference.cost`). What a rank
sends may grow by the ring's growth and less than one head of the further keys, m (p' - p) D numbers, so headers of
messages are let pass, and a hop more on any ranks.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch.distributed as dist

from reference.pattern import Pattern
from ring.comm.transport import Transport
from verification.case import Case
from verification.check.attention_on_ranks import Implementation
from verification.check.checks import costs
from verification.failures import Refused
from verification.peers.conformance.memory import Judged, alike
from verification.peers.known_peers import ready
from verification.peers.peer_rank import run_peer
from verification.run.rank import shards, whole_tensors

SHARDS = (16, 32)  # tokens of a rank: the first that the claim leaves as it is
SENT = struct.Struct("200x2Q")  # tcp_info of linux/tcp.h up to bytes_sent, bytes_retrans


def problems(attention: Implementation, worlds: Sequence[int]) -> dict[int, list[Case]]:
    """Return the Cases to measure by their ranks. Raises Refused."""
    several = sorted(world for world in worlds if world > 1)
    if len(several) < 2:
        raise Refused(f"two numbers of ranks from 2 on are compared; the adapter and --world have {several}")
    for length in SHARDS:
        if cases := alike(attention, (several[0], several[-1]), length):
            return {world: [case] for world, case in cases.items()}
    raise Refused(f"the claim leaves no causal Cases on {several} ranks, {SHARDS} tokens each, alike")


def sent_on_rank(transport: Transport, case: Case, name: str) -> tuple[int, int]:
    """Task: the bytes that the rank sends in a forward alone, and in one with its backward."""
    inputs = shards(case, transport.rank, whole_tensors(case))
    counts = []
    for variant in ("alike", "no_grad", "alike"):  # the first call opens connections
        run_peer(ready(name), transport, case, inputs, variant)
        dist.barrier(transport.group)  # type: ignore[attr-defined]  # until all that was sent has left
        counts.append(sent_by_connection())
    forward, both = (sum(x - a.get(at, 0) for at, x in b.items()) for a, b in pairwise(counts))
    return forward, both


def sent_by_connection() -> dict[int, int]:
    """Return the bytes that this process has sent on each of its TCP connections so far, by inode."""
    sent = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed since, or no socket of TCP
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                borrowed = socket.socket(fileno=descriptor)
                try:
                    info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SENT.size)
                finally:
                    borrowed.detach()
                total, again = SENT.unpack(info)
                sent[status.st_ino] = total - again
    return sent


def judged(measured: Sequence[tuple[Case, Sequence[tuple[int, int]]]]) -> Judged:
    """Compare the growth of what the busiest rank sends with a ring's. Raises Refused where nothing is seen."""
    few, many = (case for case, _ in measured)
    sent = [tuple(map(max, *ranks)) for _, ranks in measured]  # forward, both
    costs_of = [costs(replace(case, pattern=Pattern.dense(), exchange="ring")) for case in (few, many)]
    rings = [(x.sent_forward[0].sum(), (x.sent_forward + x.sent_backward)[0].sum()) for x in costs_of]
    shard = rings[0][0] / (few.world - 1)  # its keys and values
    head = few.batch * (many.tokens - few.tokens) * few.head_dim * few.torch_dtype.itemsize
    if min(max(both) for both in sent) < head:
        raise Refused(
            f"its ranks send {sent[0][1]:,} and {sent[1][1]:,} bytes over TCP: keys take a way that is not seen"
        )
    shown = [", ".join(f"x{x / shard:.1f}" for x in ranks) for ranks in zip(*sent, strict=True)]
    broken = any(b - a >= to - at + head for a, b, at, to in zip(*sent, *rings, strict=True))
    reason = (
        f"a rank sends {shown[0]} of a shard's keys and values forward on {few.world} and {many.world} ranks, "
        f"{shown[1]} with backward ({sent[0][1]:,}, {sent[1][1]:,} bytes; a ring {rings[0][1]:,}, {rings[1][1]:,})"
    )
    return Judged(many, reason, "more than a ring" if broken else "", "; ".join(shown))
