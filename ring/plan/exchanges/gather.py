"""The exchange "gather": every rank receives every shard whole, and returns the gradients of each.

Its memory is O(n): the baseline of the others.
"""

from __future__ import annotations

from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.schedule import NOTHING, KeyRows, Schedule, Sizes, Stage, transfers


def schedule(rows: KeyRows) -> Schedule:
    """Return one stage: every shard to all ranks. A shard's slots are its rows, each with all key/value heads."""
    layout, kv_heads, rank = rows.layout, rows.kv_heads, rows.rank
    slots = [count * kv_heads for count in layout.counts]
    others = [peer for peer in range(layout.world_size) if peer != rank]
    if not others:
        return Schedule((), Sizes(receive=0, send=0, returned=0, receive_buffers=1), whole=True)
    receives, stop = [], 0
    for peer in others:
        receives.append((peer, stop, stop + slots[peer]))
        stop += slots[peer]
    own = slots[rank]
    received = transfers(*receives)
    stage = Stage(
        gathers=NOTHING,
        sends=transfers(*((peer, 0, own) for peer in others)),
        relayed=False,
        receives=received,
        received=NOTHING,
        return_sends=received,
        return_receives=transfers(*((peer, copy * own, (copy + 1) * own) for copy, peer in enumerate(others))),
        carried=0,
        scatters=NOTHING,
    )
    sizes = Sizes(receive=stop, send=own, returned=len(others) * own, receive_buffers=1)
    return Schedule((stage,), sizes, whole=True)


GATHER = KeyExchange("gather", schedule, whole=True)
