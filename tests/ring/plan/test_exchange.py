"""Names of exchanges are parsed to the ranks that divide heads and those that pass keys."""

from __future__ import annotations

import re
from typing import Any

import pytest

from reference.head_groups import groups_of
from ring.plan.exchange import BY_HOST, is_by_host, parse, with_number


@pytest.mark.parametrize(
    ("exchange", "hosts", "expected"),
    [
        ("all-to-all+ring", (0, 0, 0, 0, 1, 1, 1, 1), "all-to-all:4+ring"),
        ("all-to-all+ring", (0, 0, 1, 1, 2, 2), "all-to-all:2+ring"),
        ("ring+all-to-all", (0, 0, 0, 0, 1, 1, 1, 1), "ring+all-to-all:2"),
        ("gather+all-to-all", (0, 0, 1, 1, 2, 2), "gather+all-to-all:3"),
        ("ring+direct", (0, 0, 0, 0, 1, 1, 1, 1), "ring:4+direct"),
        *((name, (0, 0, 0), name.split("+")[0]) for name in BY_HOST),
        *((name, (0, 1, 2), name.split("+")[1]) for name in BY_HOST),
        *((name, (0,), name.split("+")[0]) for name in BY_HOST),
        *((name, (0, 1, 0), name) for name in ("ring", "all-to-all", "all-to-all:3+ring", "direct+ring", 3)),
    ],
)
def test_names_are_resolved(exchange: str, hosts: tuple[int, ...], expected: str) -> None:
    assert with_number(exchange, hosts) == expected
    assert is_by_host(exchange) is (exchange in BY_HOST)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1)])
@pytest.mark.parametrize("name", [name for name in BY_HOST if "all-to-all" in name])
def test_first_exchange_stays_within_a_host(name: str, hosts: tuple[int, ...]) -> None:
    spec = parse(with_number(name, hosts), 6)
    within, between = spec.dividing, spec.same_heads
    if name.endswith("all-to-all"):
        within, between = between, within
    for rank in range(6):
        assert {hosts[other] for other in within(rank)} == {hosts[rank]}
        assert sorted(hosts[other] for other in between(rank)) == sorted(set(hosts))


@pytest.mark.parametrize("name", BY_HOST)
def test_uneven_and_interleaved_hosts_are_refused(name: str) -> None:
    for hosts, said in (
        ((0, 0, 1), "as many ranks of the group on every host, got hosts of 2, 1 ranks: write a number that divides 3"),
        ((0, 1, 0, 1), "side by side in the group, got ranks on hosts 0, 1, 0, 1: make the group .* or write a number"),
        ((0, 1, 1, 0), "side by side in the group, got ranks on hosts 0, 1, 1, 0"),
    ):
        with pytest.raises(ValueError, match=said):
            with_number(name, hosts)


HYBRIDS = (
    "all-to-all:2+ring", "ring+all-to-all:2", "direct+all-to-all:3", "all-to-all:3+gather", "all-to-all:6+ring",
    "gather+all-to-all:1",
)  # fmt: skip


@pytest.mark.parametrize("exchange", ("all-to-all", *HYBRIDS))
def test_the_oracle_has_the_same_groups(exchange: str) -> None:
    for p in range(1, 13):
        if exchange != "all-to-all" and p % int(re.sub("[^0-9]", "", exchange)):
            with pytest.raises(ValueError, match=f"exchange must divide the {p} ranks"):
                parse(exchange, p)
            with pytest.raises(ValueError, match=f"two that divide {p} ranks"):
                groups_of(exchange, p)
            continue
        spec, groups = parse(exchange, p), groups_of(exchange, p)
        assert (spec.keys.name, spec.degree) == (groups.exchange, groups.degree)
        for rank in range(p):
            assert tuple(spec.dividing(rank)) in groups.dividing and rank in spec.dividing(rank)
            assert tuple(spec.same_heads(rank)) in groups.alike and rank in spec.same_heads(rank)


@pytest.mark.parametrize(
    "exchange", ("all-to-all:2", "ring+direct", "ring+all-to-all", "all-to-all:2+ring+all-to-all:3", "ring:2",
                 "all-to-all:02+ring", "all-to-all:2+all-to-all:3", "all-to-all:\u0662+ring", "", None, 2, ["ring"]),
)  # fmt: skip
def test_other_exchanges_are_unknown(exchange: Any) -> None:
    with pytest.raises(ValueError, match="exchange must be one of"):
        parse(exchange, 6)
    with pytest.raises(ValueError, match="exchange is .*; it must be one of"):
        groups_of(exchange, 6)
