"""Exchanges without a number, whose groups are the ranks that share a host: "all-to-all+ring" and the like.

The first name is the exchange among the ranks of a host, the second that between hosts. Such a name is resolved to a
numbered one before a call is validated. On two hosts of four ranks each:

    exchange             numbered                 on one host    one rank a host
    all-to-all+ring      all-to-all:4+ring        all-to-all     ring
    ring+all-to-all      ring+all-to-all:2        ring           all-to-all
    ring+direct          ring:4+direct            ring           direct
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from ring.plan.head_groups import ALL_TO_ALL
from ring.plan.plan import EXCHANGES

AUTO = "auto"  # the exchange that is predicted to take the least time, by `ring.estimate.choice`
BY_HOST = (*(f"{ALL_TO_ALL}+{x}" for x in EXCHANGES), *(f"{x}+{ALL_TO_ALL}" for x in EXCHANGES), "ring+direct")
OF_HOSTS = (*BY_HOST, AUTO)  # depend on which ranks share a host


def is_by_host(exchange: object) -> bool:
    """Return True for a name in BY_HOST."""
    return type(exchange) is str and exchange in BY_HOST  # `ring.consensus` asks for the hosts of these alone


def with_number(exchange: str, hosts: Sequence[int]) -> str:
    """Return the exchange whose groups are the hosts; any other exchange as it is.

    hosts: number of each rank's host. Raises ValueError unless hosts have equally many ranks, neighbours in the group.
    """
    if not is_by_host(exchange):
        return exchange
    within, between = exchange.split("+")
    count = len(set(hosts))
    ranks = ranks_per_host(exchange, hosts)
    if count == 1 or ranks == 1:
        return within if count == 1 else between
    return f"{within}+{between}:{count}" if between == ALL_TO_ALL else f"{within}:{ranks}+{between}"


def ranks_per_host(exchange: str, hosts: Sequence[int]) -> int:
    """Return the number of ranks of each host. Raises ValueError as `with_number` does."""
    instead = f"write a number that divides {len(hosts)}, as 'all-to-all:{len(hosts)}+ring', or one exchange, as 'ring'"
    if len(set(Counter(hosts).values())) > 1:
        sizes = ", ".join(map(str, Counter(hosts).values()))
        raise ValueError(
            f"exchange {exchange!r} must have as many ranks of the group on every host, got hosts of {sizes} ranks: "
            f"{instead}"
        )
    if len(list(groupby(hosts))) > len(set(hosts)):
        raise ValueError(
            f"exchange {exchange!r} must have the ranks of a host side by side in the group, got ranks on hosts "
            f"{', '.join(map(str, hosts))}: make the group of ranks host by host, or {instead}"
        )
    return len(hosts) // len(set(hosts))
