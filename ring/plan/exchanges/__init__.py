"""Exchanges of keys: a file and a row each. The first one that is as fast as others is taken by `exchange="auto"`."""

from __future__ import annotations

from ring.plan.exchanges.direct import DIRECT, DIRECT_KEPT
from ring.plan.exchanges.gather import GATHER
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.exchanges.ring import RING

KEY_EXCHANGES: dict[str, KeyExchange] = {exchange.name: exchange for exchange in (RING, DIRECT, GATHER)}
ALONE: dict[str, KeyExchange] = {DIRECT_KEPT.name: DIRECT_KEPT}  # those that go with no exchange of heads
