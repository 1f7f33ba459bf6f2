"""Runs that are saved at one number of ranks and resumed at another go on as one process does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ring.nn.frameworks.checkpoint import _some
from tests.support.checkpoint_tasks import both_meshes, part, refused
from tests.support.framework_example import APART, EXACT, SHORT, Example, dense, differences
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks
PRELOAD = ("torch", "torch._dynamo", "tests.support.checkpoint_tasks")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    with Pool(2, preload=PRELOAD) as two, Pool(4, preload=PRELOAD) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize("first, second", [("fsdp", "fsdp"), ("ddp", "ddp"), ("ddp", "fsdp"), ("fsdp", "ddp")])
@pytest.mark.parametrize("grows", [True, False])
def test_resumed_at_another_number_of_ranks(
    pools: dict[int, Pool], tmp_path: Path, first: str, second: str, grows: bool
) -> None:
    """Two steps on two ranks and one on four, or the other way round: another layout, the same global batch."""
    small = Example(SHORT, "zigzag", sequences=4, steps=3, silent=False)
    large = Example(APART, "striped", sequences=2, steps=3, silent=False)
    before, after = (small, large) if grows else (large, small)
    exact = dense(small)
    count = {True: (2, 4), False: (4, 2)}[grows]
    begun = pools[count[0]].run(part, before, first, tmp_path, 0, 2)
    ended = pools[count[1]].run(part, after, second, tmp_path, 2, 3)
    for result in ended:
        result.losses = begun[0].losses + result.losses
        assert max(differences(result, exact).values()) < EXACT, differences(result, exact)


def test_what_would_be_read_in_part_is_refused(pools: dict[int, Pool], tmp_path: Path) -> None:
    for other, late, again, progress in pools[2].run(refused, tmp_path):
        assert "model must have the parameters of the checkpoint: layers.1." in other
        assert "optimizer must have no gradients" in late
        assert "folder must hold no checkpoint" in again
        assert "not JSON serializable" in progress


def test_torch_saves_swapped_parts_where_ranks_are_not_in_ascending_order(
    pools: dict[int, Pool], tmp_path: Path
) -> None:
    """A flattened mesh of the ranks 0, 2, 1, 3 (torch 2.13): it saves other values than the ranks have."""
    right = [float(row) for row in range(8)]
    for torchs, ours in pools[4].run(both_meshes, tmp_path):
        assert torchs == (right, [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0])
        assert ours == (right, right)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "nothing is"),
        (("b", "a"), "a, b is"),
        (("c", "b", "a"), "a, b, c is"),
        (("d", "c", "b", "a"), "a, b, c and 1 more are"),
    ],
)
def test_up_to_three_names_are_said(names: tuple[str, ...], said: str) -> None:
    assert _some(set(names)) == said
