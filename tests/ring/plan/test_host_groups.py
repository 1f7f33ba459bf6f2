"""Exchanges by hosts become the numbered ones whose groups are the hosts."""

from __future__ import annotations

import pytest

from ring.plan.head_groups import head_groups
from ring.plan.host_groups import BY_HOST, is_by_host, with_number


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
def test_the_first_exchange_goes_between_the_ranks_of_a_host(name: str, hosts: tuple[int, ...]) -> None:
    groups = head_groups(with_number(name, hosts), 6)
    assert groups is not None
    within, between = groups.dividing, groups.alike
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
