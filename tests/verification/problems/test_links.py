"""The checks of the links between ranks, judged: what they name."""

from __future__ import annotations

from typing import Any

import pytest

from verification.failures import WrongResult
from verification.problems import links


def test_a_number_at_the_wrong_hop_is_named() -> None:
    links.check_round([[2, 1, 0], [0, 2, 1], [1, 0, 2]])
    with pytest.raises(WrongResult, match=r"rank 1 got the numbers \[2, 0, 1\]; they must be \[0, 2, 1\]"):
        links.check_round([[2, 1, 0], [2, 0, 1], [1, 0, 2]])


def test_what_is_not_refused_is_named() -> None:
    said = {what: f"it is not {word}" for what, word in links.NAMED.items()}
    links.check_refusals([said, said])
    with pytest.raises(WrongResult, match="rank 1 said nothing to an empty send"):
        links.check_refusals([said, said | {"an empty send": ""}])


def test_the_rate_is_that_of_the_slowest_rank() -> None:
    answers: list[Any] = [([], [(1, 1e-3), (2, 1e-3)]), ([], [(1, 2e-3), (2, 4e-3)])]
    assert [(x.ways, round(x.rate, 9)) for x in links.check_transfers(10**6, answers)] == [(1, 0.5), (2, 0.5)]


def test_contents_tell_sender_and_direction() -> None:
    seen = {tuple(links.contents(64, sender, shift).tolist()) for sender in range(8) for shift in (-1, 1)}
    assert len(seen) == 16
