"""What wrong calls of ring_attention do with their layout."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from reference.pattern import Pattern
from ring import Layout, Transport, ring_attention
from ring.comm.transport import SoloTransport
from verification.case import Case
from verification.run.given_group import bare

Arguments = dict[str, Any]  # of ring_attention, by name


def other_layout(arguments: Arguments, case: Case) -> None:
    arguments["layout"] = Layout.contiguous(case.tokens, len(case.ranks) + 1)


def _order(layout: Layout) -> torch.Tensor:
    return torch.cat([layout.positions(rank) for rank in range(layout.world_size)])


def shuffled_layout(arguments: Arguments, case: Case) -> None:
    """As many tokens on every rank, other ones."""
    layout = arguments["layout"]
    arguments["layout"] = Layout.from_cuts(_order(layout).flip(0), layout.cuts)


def late_difference(arguments: Arguments, case: Case) -> None:
    """As many tokens on every rank, all but the last two of the order in the same places."""
    layout = arguments["layout"]
    order = _order(layout)
    arguments["layout"] = Layout.from_cuts(torch.cat((order[:-2], order[-2:].flip(0))), layout.cuts)


def second_half_first(arguments: Arguments, case: Case) -> None:
    """If the order was one run, two runs: another layout may then begin with the same run."""
    layout = arguments["layout"]
    arguments["layout"] = Layout.from_cuts(_order(layout).roll(layout.n // 2), layout.cuts)


def other_cuts_elsewhere(arguments: Arguments, case: Case) -> None:
    """As many tokens in all and on this rank; but one other rank has a token that was another's."""
    layout = arguments["layout"]
    counts = list(layout.counts)
    giver, taker, *_ = sorted(set(range(len(counts))) - {arguments["group"].rank}, key=lambda i: (-counts[i], i))
    counts[giver] -= 1
    counts[taker] += 1
    arguments["layout"] = Layout.from_cuts(_order(layout), (0, *accumulate(counts)))


def longer_elsewhere(arguments: Arguments, case: Case) -> None:
    """As many tokens on this rank, one more on another."""
    layout = arguments["layout"]
    last = layout.world_size - 1
    more = last - (arguments["group"].rank == last)
    cuts = [cut + (rank > more) for rank, cut in enumerate(layout.cuts)]
    order = _order(layout)
    at = layout.cuts[more + 1]
    arguments["layout"] = Layout.from_cuts(torch.cat((order[:at], torch.tensor([layout.n]), order[at:])), cuts)


def own_tokens_alone(arguments: Arguments, case: Case) -> None:
    """As if this rank were all there is; with group=None, where that is all ranks."""
    arguments["layout"] = Layout.contiguous(arguments["q"].shape[1], 1)
    arguments["group"] = bare(arguments["group"])


class _OneRankMore(SoloTransport):
    """The ranks of another transport and one more, as a rank sees them that needs nothing of them."""

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self.rank, self.world_size = inner.rank, inner.world_size + 1


def right_on_one_rank_more(arguments: Arguments, case: Case) -> None:
    """The same call, where each token sees itself and nothing is sent, was right on a group of one rank more."""
    layout = arguments["layout"]
    longer = Layout.from_cuts(range(layout.n + 1), (*layout.cuts, layout.n + 1))
    arguments.update(layout=longer, pattern=Pattern.dense(causal=True, window=0), exchange="direct")
    ring_attention(**arguments | {"group": _OneRankMore(arguments["group"])})
