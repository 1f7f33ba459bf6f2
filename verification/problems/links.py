"""The links between ranks, before anything is computed over them: over the implementation's own transport.

- every rank's number goes all the way round the ring, and is checked at each hop;
- a message that is not contiguous, or empty, or to nobody, is refused by name, and the links work afterwards;
- messages from a byte to 256 MiB between every two ranks, in each direction and in both at once, arrive as they were
  sent, to the byte. How fast they went is told, not judged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Message, Transport
from verification.failures import WrongResult
from verification.run.rank import rank_device

TITLE = "links between the ranks"
# Bytes: around a word and a page, uneven ones, then large ones.
SIZES = {
    "gloo": (1, 7, 8, 4095, 4096, 65_537, 2**20, 2**22),
    "nccl": (1, 7, 8, 4095, 4096, 65_537, 2**20, 2**24, 2**26, 2**28),
}
ROUNDS = 4  # of which the fastest is reported
PRIME = 251  # contents repeat after so many bytes: no power of two, so that a block in a wrong place is noticed


@dataclass(frozen=True)
class Rate:
    """GB/s (10^9 bytes) that each rank sent at: of the slowest rank. ways: 1 to the next rank, -1 to the one before, 2
    both at once, in which case the bytes of both count."""

    size: int
    ways: int
    rate: float


def go_round() -> list[int]:
    """In a rank: the number that arrived at each of the p hops that it takes until the own number is back."""
    transport = ProcessGroupTransport()
    rank, world = transport.rank, transport.world_size
    held = torch.full((1,), rank, dtype=torch.int64, device=rank_device())
    seen = []
    for hop in range(world):
        received = torch.full_like(held, -1)
        send = Message((rank + 1) % world, held, f"number {hop}")
        receive = Message((rank - 1) % world, received, f"number {hop}")
        transport.post([send], [receive]).wait()
        seen.append(int(received.item()))
        held = received
    return seen


def refusals() -> dict[str, str]:
    """In a rank: what the transport says to messages that it must refuse."""
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
    said = {}
    for what, (sends, receives) in wrong.items():
        try:
            transport.post(sends, receives)
            said[what] = ""
        except ValueError as error:
            said[what] = str(error)
    return said


# What a refusal must name.
NAMED = {
    "a send that is not contiguous": "contiguous",
    "a receive that is not contiguous": "contiguous",
    "an empty send": "not empty",
    "a send to itself": "peer",
    "a send to nobody": "peer",
}


def transfers(size: int) -> tuple[list[str], list[tuple[int, float]]]:
    """In a rank: messages of so many bytes to and from every other rank. (what was wrong, (ways, seconds))."""
    transport = ProcessGroupTransport()
    wrong, spent = [], []
    for shift in range(1, transport.world_size):
        wrong += _exchange(transport, size, [shift])[0]
    for ways, shifts in ((1, [1]), (-1, [-1]), (2, [1, -1])):
        rounds = [_exchange(transport, size, shifts) for _ in range(ROUNDS)]
        wrong += [said for found, _ in rounds for said in found]
        spent.append((ways, min(seconds for _, seconds in rounds)))
    return wrong, spent


def contents(size: int, sender: int, shift: int) -> Tensor:
    """Bytes from which the sender, the direction and their place in the message follow."""
    start = (31 * sender + 101 * shift) % PRIME
    row = (torch.arange(PRIME, device=rank_device()) + start).remainder_(PRIME).to(torch.uint8)
    return row.repeat(-(-size // PRIME))[:size]


def _exchange(transport: Transport, size: int, shifts: list[int]) -> tuple[list[str], float]:
    """To the ranks that are these shifts ahead, from those behind: what is wrong, and the seconds from when all ranks
    are ready to when the messages are here."""
    rank, world = transport.rank, transport.world_size
    sources = [(rank - shift) % world for shift in shifts]
    received = [torch.full((size,), 255, dtype=torch.uint8, device=rank_device()) for _ in shifts]
    sends = [Message((rank + shift) % world, contents(size, rank, shift), f"{size} bytes") for shift in shifts]
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
            at = int(differ.nonzero()[0])
            wrong.append(f"of {size} bytes from rank {peer}, {int(differ.sum())} are wrong, the first at {at}")
    return wrong, seconds


def finish() -> None:
    """Wait for the GPU, if there is one."""
    if rank_device().type == "cuda":
        torch.cuda.synchronize()


def check_round(seen: list[list[int]]) -> None:
    """Raises WrongResult unless rank r got (r - 1 - hop) mod p at each hop."""
    world = len(seen)
    for rank, numbers in enumerate(seen):
        wanted = [(rank - 1 - hop) % world for hop in range(world)]
        if numbers != wanted:
            raise WrongResult(f"links: round the ring, rank {rank} got the numbers {numbers}; they must be {wanted}")


def check_refusals(said: list[dict[str, str]]) -> None:
    """Raises WrongResult unless every rank refused everything, naming what was wrong."""
    for rank, answers in enumerate(said):
        for what, word in NAMED.items():
            if word not in answers[what]:
                reply = repr(answers[what]) if answers[what] else "nothing"
                raise WrongResult(f"links: rank {rank} said {reply} to {what}; the error must name {word!r}")


def check_transfers(size: int, answers: list[tuple[list[str], list[tuple[int, float]]]]) -> list[Rate]:
    """The rates; raises WrongResult for a message that did not arrive as it was sent."""
    for rank, (wrong, _) in enumerate(answers):
        if wrong:
            raise WrongResult(f"links: on rank {rank}: {'; '.join(wrong)}")
    slowest = [(ways, max(spent[at][1] for _, spent in answers)) for at, (ways, _) in enumerate(answers[0][1])]
    return [Rate(size, ways, abs(ways) * size / seconds / 1e9) for ways, seconds in slowest]


def check_links(run: Any, sizes: tuple[int, ...]) -> list[Rate]:
    """All of it; `run(function, *arguments)` calls a function in every rank and gives what each returned.

    Raises WrongResult, or the RankFailure of a rank that crashed, raised or hung."""
    check_round(run(go_round))
    check_refusals(run(refusals))
    check_round(run(go_round))  # what was refused has left nothing behind
    return [rate for size in sizes for rate in check_transfers(size, run(transfers, size))]


def table(rates: list[Rate]) -> list[str]:
    """One line for each size, of the slowest rank."""
    lines = ["  bytes       GB/s to the next rank, to the one before, both at once"]
    for size in dict.fromkeys(rate.size for rate in rates):
        found = {rate.ways: rate.rate for rate in rates if rate.size == size}
        lines.append(f"  {size:>9,}   " + "".join(f"{found[ways]:>12.3g}" for ways in (1, -1, 2)))
    return lines


def fastest(rates: list[Rate]) -> str:
    """The rates of the largest messages, in words."""
    largest = max(rate.size for rate in rates)
    found = {rate.ways: f"{rate.rate:.3g}" for rate in rates if rate.size == largest}
    each = f"{found[1]} GB/s to the next rank, {found[-1]} to the one before, {found[2]} both at once"
    return f"links, messages of {largest:,} bytes: {each}"
