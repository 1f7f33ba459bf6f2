"""Checks of the links between ranks, over the implementation's own transport, before anything is computed.

- Every rank's number goes all the way round the ring, and is checked at each hop.
- A message that is not contiguous, or empty, or to a rank that does not exist, is refused by name, without damage.
- Messages from a byte to 256 MiB between every two ranks, in each direction and in both at once, arrive unchanged:
  over the process group and, where GPUs of one host share memory, through that.
  Their rates within hosts, and between hosts, are reported, not judged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import SymmetricTransport, transport_of
from ring.comm.transport import Message, Outgoing, Transport
from verification.failures import WrongResult
from verification.run.rank import rank_device
from verification.saved_fields import SavedFields, integer

TITLE = "links between the ranks"
# Bytes: sizes around a word and a page, odd ones, then large ones.
SIZES = {
    "gloo": (1, 7, 8, 4095, 4096, 65_537, 2**20, 2**22),
    "nccl": (1, 7, 8, 4095, 4096, 65_537, 2**20, 2**24, 2**26, 2**28),
}
ROUNDS = 4  # the fastest is reported
PRIME = 251  # period of the contents in bytes; no power of two, so that a misplaced block is noticed


@dataclass(frozen=True)
class Links(SavedFields):
    """The links between that many ranks, as saved."""

    world: int = field(metadata=integer(1, 2**16))


@dataclass(frozen=True)
class Rate:
    """The slowest rank's sending rate, in GB/s (10^9 bytes).

    ways: 1 to the next rank, -1 to the previous one, 2 both at once, in which case the bytes of both count.
    between: False among the ranks of a host, True from each rank to the one at its place on the next host. shared:
    through memory that the GPUs share."""

    size: int
    ways: int
    rate: float
    between: bool = False
    shared: bool = False


Timing = tuple[bool, int, float]  # between, ways, seconds


def pass_round() -> list[int]:
    """Pass numbers round the ring; return the number received at each of the p hops. Runs on every rank."""
    transport = ProcessGroupTransport()
    rank, world = transport.rank, transport.world_size
    number = torch.full((1,), rank, dtype=torch.int64, device=rank_device())
    numbers = []
    for hop in range(world):
        received = torch.full_like(number, -1)
        send = Message((rank + 1) % world, number, f"number {hop}")
        receive = Message((rank - 1) % world, received, f"number {hop}")
        transport.post([send], [receive]).wait()
        numbers.append(int(received.item()))
        number = received
    return numbers


def refusals() -> dict[str, str]:
    """Post messages that the transport must refuse; return the errors, or "" for none. Runs on every rank."""
    transport = ProcessGroupTransport()
    rank, world = transport.rank, transport.world_size
    other, whole = (rank + 1) % world, torch.zeros(4, 4, device=rank_device())
    wrong = {
        "a send that is not contiguous": ([Message(other, whole.T[1:], "columns")], []),
        "a receive that is not contiguous": ([], [Message(other, whole[:, 1], "a column")]),
        "an empty send": ([Message(other, whole[:0], "nothing")], []),
        "a send to itself": ([Message(rank, whole, "to itself")], []),
        "a send to nobody": ([Message(world, whole, "to nobody")], []),
    }
    errors = {}
    for name, (sends, receives) in wrong.items():
        try:
            transport.post(sends, receives)
            errors[name] = ""
        except ValueError as error:
            errors[name] = str(error)
    return errors


# A word that each refusal must contain.
NAMED = {
    "a send that is not contiguous": "contiguous",
    "a receive that is not contiguous": "contiguous",
    "an empty send": "not empty",
    "a send to itself": "peer",
    "a send to nobody": "peer",
}


def shares_memory() -> bool:
    """Return True if messages between GPUs go through memory that they share. Runs on every rank."""
    return isinstance(transport_of(None), SymmetricTransport)


def transfers(size: int, shared: bool = False) -> tuple[list[str], list[Timing]]:
    """Exchange messages of so many bytes with every other rank; return errors, and the times. shared: through memory
    that GPUs share. If there is none for messages of this size, they go over the process group, and have no times.
    """
    transport = transport_of(None) if shared else ProcessGroupTransport()
    wrong, timings, everyone = [], [], range(transport.world_size)
    for shift in everyone[1:]:
        wrong += _exchange(transport, size, everyone, [shift])[0]
    for between, ring in _rings(transport.rank, transport.hosts):
        for ways, shifts in ((1, [1]), (-1, [-1]), (2, [1, -1])):
            rounds = [_exchange(transport, size, ring, shifts) for _ in range(ROUNDS)]
            wrong += [error for errors, _ in rounds for error in errors]
            if len(ring) > 1 and not (isinstance(transport, SymmetricTransport) and transport.by_nccl):
                timings.append((between, ways, min(seconds for _, seconds in rounds)))
    return wrong, timings


def _rings(rank: int, hosts: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    """Iterate over the ring of the ranks on this rank's host and, where there are several hosts, that of the ranks at
    its place on each. They may hold this rank alone."""
    within = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    yield False, within
    if len(set(hosts)) > 1:
        place = within.index(rank)
        yield True, [other for other, host in enumerate(hosts) if hosts[:other].count(host) == place]


def contents(size: int, sender: int, shift: int) -> Tensor:
    """Return bytes that differ by sender, by direction, and by place in the message."""
    start = (31 * sender + 101 * shift) % PRIME
    row = (torch.arange(PRIME, device=rank_device()) + start).remainder_(PRIME).to(torch.uint8)
    return row.repeat(-(-size // PRIME))[:size]


def _exchange(transport: Transport, size: int, ring: Sequence[int], shifts: list[int]) -> tuple[list[str], float]:
    """Send to the ranks these shifts ahead in a ring, receive from those behind. A rank alone waits for the others.

    Returns errors, and the seconds from when all ranks are ready until the messages have arrived."""
    rank, place, count = transport.rank, ring.index(transport.rank), len(ring)
    shifts = shifts if count > 1 else []
    sources = [ring[(place - shift) % count] for shift in shifts]
    received = [torch.full((size,), 255, dtype=torch.uint8, device=rank_device()) for _ in shifts]

    def sends_of(buffers: Sequence[Tensor]) -> list[Message]:
        return [Message(ring[(place + x) % count], y, f"{size} bytes") for x, y in zip(shifts, buffers, strict=True)]

    def outgoing() -> list[Outgoing]:
        blank = [torch.empty(size, dtype=torch.uint8, device="meta") for _ in shifts]
        return [message.announced(f"buffer {i}") for i, message in enumerate(sends_of(blank))]

    transport.prepare(("links", size, count, *shifts), outgoing)
    buffers = [transport.empty(f"buffer {i}", (size,), torch.uint8, rank_device()) for i in range(len(shifts))]
    for shift, buffer in zip(shifts, buffers, strict=True):
        buffer.copy_(contents(size, rank, shift))
    sends = sends_of(buffers)
    receives = [Message(peer, x, f"{size} bytes") for peer, x in zip(sources, received, strict=True)]
    dist.barrier()
    finish()
    started = time.perf_counter()
    transport.post(sends, receives).wait()
    finish()
    seconds, wrong = time.perf_counter() - started, []
    for peer, shift, x in zip(sources, shifts, received, strict=True):
        differ = x != contents(size, peer, shift)
        if differ.any():
            first = int(differ.nonzero()[0])
            wrong.append(f"of {size} bytes from rank {peer}, {int(differ.sum())} are wrong, the first at {first}")
    return wrong, seconds


def finish() -> None:
    """Wait for the GPU, if there is one."""
    if rank_device().type == "cuda":
        torch.cuda.synchronize()


def check_round(answers: list[list[int]]) -> None:
    """Raise WrongResult unless rank r got (r - 1 - hop) mod p at each hop. answers: numbers by rank."""
    world = len(answers)
    for rank, numbers in enumerate(answers):
        expected = [(rank - 1 - hop) % world for hop in range(world)]
        if numbers != expected:
            raise WrongResult(f"links: round the ring, rank {rank} got the numbers {numbers}; they must be {expected}")


def check_refusals(answers: list[dict[str, str]]) -> None:
    """Raise WrongResult unless every rank refused every message with the word in NAMED. answers: errors by rank."""
    for rank, errors in enumerate(answers):
        for name, word in NAMED.items():
            if word not in errors[name]:
                reply = repr(errors[name]) if errors[name] else "nothing"
                raise WrongResult(f"links: rank {rank} said {reply} to {name}; the error must name {word!r}")


def check_transfers(size: int, answers: list[tuple[list[str], list[Timing]]], shared: bool = False) -> list[Rate]:
    """Return the rates. Raises WrongResult for a message that did not arrive unchanged."""
    for rank, (wrong, _) in enumerate(answers):
        if wrong:
            raise WrongResult(f"links: on rank {rank}: {'; '.join(wrong)}")
    slowest: dict[tuple[bool, int], float] = {}
    for between, ways, seconds in sorted(timing for _, timings in answers for timing in timings):
        slowest[between, ways] = seconds
    return [Rate(size, ways, abs(ways) * size / seconds / 1e9, far, shared) for (far, ways), seconds in slowest.items()]


def check_links(run: Any, sizes: tuple[int, ...]) -> list[Rate]:
    """Run all checks. run: calls `run(function, *arguments)` in every rank and returns the results.

    Raises WrongResult, or the RankFailure of a rank that crashed, raised or hung."""
    check_round(run(pass_round))
    check_refusals(run(refusals))
    check_round(run(pass_round))  # refused messages must leave nothing behind
    through = (False, True) if all(run(shares_memory)) else (False,)
    pairs = [(size, shared) for shared in through for size in sizes]
    return [rate for size, shared in pairs for rate in check_transfers(size, run(transfers, size, shared), shared)]


def table(rates: list[Rate]) -> list[str]:
    """One line for each size, for the slowest rank: of each kind of link."""
    lines = []
    for kind, some in _kinds(rates):
        lines.append(f"  bytes       GB/s {kind}to the next rank, to the one before, both at once")
        for size in dict.fromkeys(rate.size for rate in some):
            by_ways = {rate.ways: rate.rate for rate in some if rate.size == size}
            lines.append(f"  {size:>9,}   " + "".join(f"{by_ways[ways]:>12.3g}" for ways in (1, -1, 2)))
    return lines


def _kinds(rates: list[Rate]) -> list[tuple[str, list[Rate]]]:
    """Return the rates of each kind of link, with what lines say of it: nothing if all are within a host."""
    kinds = {(False, False): "within a host ", (True, False): "between hosts ", (False, True): "through shared memory "}
    there = {(x.between, x.shared) for x in rates}
    name_of = dict.fromkeys(kinds, "") if there == {(False, False)} else kinds
    return [(name_of[kind], [x for x in rates if (x.between, x.shared) == kind]) for kind in kinds if kind in there]


def fastest(rates: list[Rate]) -> str:
    """Describe the rates of the largest messages."""
    largest = max(rate.size for rate in rates)
    lines = []
    for kind, some in _kinds([x for x in rates if x.size == largest]):
        by_ways = {x.ways: f"{x.rate:.3g}" for x in some}
        lines.append(
            f"{kind}{by_ways[1]} GB/s to the next rank, {by_ways[-1]} to the one before, {by_ways[2]} both at once"
        )
    return f"links, messages of {largest:,} bytes: {'; '.join(lines)}"
