"""The exchange of a call, parsed from its name: which ranks divide the heads of their rows, and how keys travel.

Six ranks, two of which divide the heads, with a ring between those that have the same:

    exchange               divide the heads     have the same heads
    all-to-all:2+ring      0 1 | 2 3 | 4 5      0 2 4 | 1 3 5
    ring+all-to-all:2      0 3 | 1 4 | 2 5      0 1 2 | 3 4 5

The first exchange goes between neighbours, which is the faster link where hosts hold neighbours. Without a number it is
the exchange among the ranks of a host, and the second one that between hosts. On two hosts of four ranks each:

    exchange             numbered                 on one host    one rank a host
    all-to-all+ring      all-to-all:4+ring        all-to-all     ring
    ring+all-to-all      ring+all-to-all:2        ring           all-to-all
    ring+direct          ring:4+direct            ring           direct

By "all-to-all-kept" rows of a rank's heads, and their results, are kept for the backward.

Names are parsed here alone. Everything below asks the record.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ring.plan.exchanges import ALONE, DIRECT, KEY_EXCHANGES, RING
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.exchanges.ring import relayed

HEADS = "all-to-all"
HEADS_KEPT = "all-to-all-kept"
NAMES = (*KEY_EXCHANGES, *ALONE, HEADS, HEADS_KEPT)
AUTO = "auto"  # the exchange that is predicted to take the least time
_RELAYED = f"{RING.name}+{DIRECT.name}"
BY_HOST = (*(f"{HEADS}+{keys}" for keys in KEY_EXCHANGES), *(f"{keys}+{HEADS}" for keys in KEY_EXCHANGES), _RELAYED)
_OF_HOSTS = (*BY_HOST, AUTO)
_NUMBER = re.compile(r":([1-9][0-9]{0,8})(?=\+|$)")


@dataclass(frozen=True)
class ExchangeSpec:
    """The exchange of a call among so many ranks.

    Args:
        name: with numbers.
        ranks: of the group.
        degree: ranks that divide the heads of their rows; 1: each computes all heads of its own.
        neighbours: True if those that divide the heads are neighbours.
        keys: exchange of keys among the ranks with the same heads.
        keeps_heads: backward has the rows of heads that forward received, and their results.
    """

    name: str
    ranks: int
    degree: int
    neighbours: bool
    keys: KeyExchange
    keeps_heads: bool = False

    @property
    def kept(self) -> bool:
        """True if something is kept for the backward."""
        return self.keys.kept or self.keeps_heads

    @property
    def others(self) -> int:
        """Number of ranks with the same heads."""
        return self.ranks // self.degree

    def dividing(self, rank: int) -> range:
        """Return the ranks that divide the heads with this one."""
        if self.neighbours:
            first = rank - rank % self.degree
            return range(first, first + self.degree)
        return range(rank % self.others, self.ranks, self.others)

    def same_heads(self, rank: int) -> range:
        """Return the ranks that have the same heads as this one."""
        if self.neighbours:
            return range(rank % self.degree, self.ranks, self.degree)
        first = rank - rank % self.others
        return range(first, first + self.others)


class _Name(NamedTuple):
    """The parts of a name. size: of the groups; 0: all ranks. heads: True if the groups divide the heads, and kept if
    these are.
    """

    size: int
    heads: bool
    neighbours: bool
    keys: KeyExchange
    kept: bool = False


_SINGLE = {name: _Name(1, True, True, keys) for name, keys in (KEY_EXCHANGES | ALONE).items()}
_SINGLE |= {HEADS: _Name(0, True, True, DIRECT), HEADS_KEPT: _Name(0, True, True, DIRECT, kept=True)}


def _parse(name: object) -> _Name | None:
    """Return the parts of a name with numbers; None for any other object."""
    if type(name) is str:
        return _SINGLE.get(name) or _parse_two(name)
    return None


def _parse_two(name: str) -> _Name | None:
    unnumbered, numbers = _NUMBER.sub("", name), _NUMBER.findall(name)
    within, _, between = unnumbered.partition("+")
    if unnumbered not in BY_HOST or len(numbers) != 1:
        return None
    size, first_numbered = int(numbers[0]), name.partition("+")[0] != within  # the first of both has the number
    if unnumbered == _RELAYED:
        return _Name(size, False, True, relayed(size)) if first_numbered else None
    if first_numbered != (within == HEADS):
        return None
    return _Name(size, True, first_numbered, KEY_EXCHANGES[between if first_numbered else within])


def check_name(name: object, besides: str = "in a call also without the number, or 'auto'") -> None:
    """Raise ValueError unless `name` is an exchange with numbers. besides: end of the list of allowed ones."""
    if _parse(name) is None:
        raise ValueError(
            f"exchange must be one of {', '.join(map(repr, NAMES))}, or two that keep nothing, as 'all-to-all:2+ring', "
            f"'ring+all-to-all:2' and 'ring:2+direct', {besides}, got {name!r}"
        )


def key_exchange(name: object) -> KeyExchange:
    """Return the exchange of keys of a name with numbers, whatever the ranks. Raises ValueError if it is unknown."""
    check_name(name)
    parts = _parse(name)
    assert parts is not None
    return parts.keys


def parse(name: object, ranks: int) -> ExchangeSpec:
    """Return the exchange of a name with numbers among so many ranks.

    Raises ValueError if the name is unknown, or its number does not divide the ranks.
    """
    check_name(name)
    parts = _parse(name)
    assert parts is not None and isinstance(name, str)
    size = parts.size or ranks
    if ranks % size:
        raise ValueError(
            f"exchange must divide the {ranks} ranks of the group into groups of one size, got {name!r}; "
            f"allowed after {HEADS if parts.heads else RING.name}: are divisors of {ranks}"
        )
    return ExchangeSpec(name, ranks, size if parts.heads else 1, parts.neighbours, parts.keys, parts.kept)


def candidates(ranks: int) -> list[str]:
    """Return the exchanges to choose from: all but those of whole shards, whose memory does not shrink with more ranks.

    The first is taken where times are equal.
    """
    if ranks == 1:
        return [DIRECT.name]
    keys = [DIRECT.name, RING.name]
    names = [*keys, HEADS]
    for size in (size for size in range(2, ranks) if ranks % size == 0):
        names.append(relayed(size).name)
        names += [f"{HEADS}:{size}+{name}" for name in keys]
        names += [f"{name}+{HEADS}:{size}" for name in keys]
    return names


# --- hosts ------------------------------------------------------------------------------------------------------------


def is_by_host(name: object) -> bool:
    """Return True for a name whose groups are the hosts."""
    return type(name) is str and name in BY_HOST


def depends_on_hosts(name: object) -> bool:
    """Return True for a name that is resolved by the hosts of the ranks."""
    return type(name) is str and name in _OF_HOSTS


def is_auto(name: object) -> bool:
    """Return True if the exchange is to be chosen by prediction."""
    return type(name) is str and name == AUTO  # an array is compared entry by entry


def with_number(name: str, hosts: Sequence[int]) -> str:
    """Return the exchange whose groups are the hosts; any other exchange as it is.

    hosts: number of each rank's host. Raises ValueError unless hosts have equally many ranks, neighbours in the group.
    """
    if not is_by_host(name):
        return name
    within, between = name.split("+")
    count = len(set(hosts))
    ranks = ranks_per_host(name, hosts)
    if count == 1 or ranks == 1:
        return within if count == 1 else between
    return f"{within}+{between}:{count}" if between == HEADS else f"{within}:{ranks}+{between}"


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
