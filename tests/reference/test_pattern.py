"""`reference.pattern`: what may be said, the published rules, and multiplicity against its definition."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import Branch, Pattern
from reference.pattern import multiplicity, selected


def naive_multiplicity(pattern: Pattern, i_positions: list[int], j_positions: list[int], heads: int) -> Any:
    """c[h, i, j] pair by pair, straight from the definition."""
    c = np.zeros((heads, len(i_positions), len(j_positions)), dtype=int)
    for branch in pattern.branches:
        r = branch.dilation_rate
        served = list(range(heads)) if branch.heads is None else list(branch.heads)
        for index, h in enumerate(served):
            o = branch.offset[index] if isinstance(branch.offset, tuple) else branch.offset
            for a, i in enumerate(i_positions):
                for b, j in enumerate(j_positions):
                    w = branch.segment_length or max(i, j) + 1
                    same_segment = i // w == j // w
                    i_selected = i % w >= o and (i % w - o) % r == 0
                    j_selected = j % w >= o and (j % w - o) % r == 0
                    near = branch.window is None or -branch.window <= i - j <= branch.window
                    seen = same_segment and i_selected and j_selected and near
                    c[h, a, b] += seen and (not pattern.causal or j <= i)
    return c


@st.composite
def patterns(draw: st.DrawFn, heads: int) -> Pattern:
    branches = []
    for _ in range(draw(st.integers(1, 3))):
        rate = draw(st.integers(1, 5))
        start = draw(st.integers(0, heads - 1))
        served = draw(st.sampled_from([None, *(range(start, stop) for stop in range(start + 1, heads + 1))]))
        one = st.integers(0, rate - 1)
        count = heads if served is None else len(served)
        offset = draw(one | st.lists(one, min_size=count, max_size=count).map(tuple))
        window = draw(st.none() | st.integers(0, 10))
        branches.append(Branch(draw(st.none() | st.integers(1, 12)), rate, offset, served, window))
    return Pattern(tuple(branches), draw(st.booleans()))


positions = st.lists(st.integers(0, 30), max_size=8)


@given(st.data(), st.integers(1, 4), positions, positions)
def test_multiplicity_is_the_definition(data: st.DataObject, heads: int, i: list[int], j: list[int]) -> None:
    pattern = data.draw(patterns(heads))
    c = multiplicity(pattern, torch.tensor(i, dtype=torch.int64), torch.tensor(j, dtype=torch.int64), heads)
    np.testing.assert_array_equal(c.numpy(), naive_multiplicity(pattern, i, j, heads))


@given(st.none() | st.integers(1, 12), st.integers(1, 6), st.data())
def test_selected_is_the_definition(w: int | None, r: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, r - 1))
    got = selected(Branch(w, r), torch.arange(30), offset)
    local = [p % (w or 30) for p in range(30)]
    assert got.tolist() == [p >= offset and (p - offset) % r == 0 for p in local]


@pytest.mark.parametrize(
    ("branch", "offset", "n", "positions_selected"),
    [
        (Branch(4, 2), 0, 10, [0, 2, 4, 6, 8]),
        (Branch(4, 2), 1, 9, [1, 3, 5, 7]),  # the tail is position 8 alone: offset 1 lies beyond it
        (Branch(5, 3), 0, 12, [0, 3, 5, 8, 10]),  # r does not divide w: the phase restarts at 5 and at 10
        (Branch(5, 3), 2, 12, [2, 7]),
        (Branch(3, 5), 0, 9, [0, 3, 6]),  # r > w
        (Branch(3, 5), 4, 9, []),  # an offset beyond the segment selects nothing
        (Branch(100, 4), 3, 9, [3, 7]),  # w > n
        (Branch(None, 4), 1, 9, [1, 5]),
    ],
)
def test_selected_by_hand(branch: Branch, offset: int, n: int, positions_selected: list[int]) -> None:
    assert selected(branch, torch.arange(n), offset).nonzero().flatten().tolist() == positions_selected


def test_multiplicity_by_hand() -> None:
    # Two branches that overlap: pairs within {0, 1}, {2, 3}, and pairs of even positions within {0, 1, 2, 3}.
    pattern = Pattern((Branch(2), Branch(4, 2)))
    assert multiplicity(pattern, torch.arange(4), torch.arange(4), 1)[0].tolist() == [
        [2, 1, 1, 0],
        [1, 1, 0, 0],
        [1, 0, 2, 1],
        [0, 0, 1, 1],
    ]
    causal = multiplicity(Pattern(pattern.branches, causal=True), torch.tensor([2]), torch.arange(4), 1)
    assert causal[0].tolist() == [[1, 0, 2, 0]]


def test_head_that_no_branch_serves_sees_nothing() -> None:
    c = multiplicity(Pattern((Branch(heads=range(1, 2)),)), torch.arange(3), torch.arange(3), 3)
    assert [int(h.sum()) for h in c] == [0, 9, 0]


def test_published_longnet_setting() -> None:
    pattern = Pattern.longnet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), heads=12)
    pattern.validate(12)
    assert 16384 % 6 and 32768 % 12  # r does not divide w in two branches
    assert pattern.branches[3].offset == (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5)
    assert pattern.branches[4].offset == tuple(range(12))
    # The second segment of 16384 starts with its own offset, whatever the first left over.
    points = torch.arange(16384, 16384 + 12)
    assert selected(pattern.branches[3], points, 2).nonzero().flatten().tolist() == [2, 8]


@pytest.mark.parametrize(
    ("rule", "rate", "expected"),
    [
        ("paper", 3, (0, 1, 2, 0, 1, 2, 0)),
        ("torchscale", 3, (0, 0, 0, 1, 1, 1, 2)),  # ceil(7 / 3) = 3 heads to an offset
        ("torchscale", 5, (0, 0, 1, 1, 2, 2, 3)),
        ("torchscale", 9, (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_offset_rules(rule: str, rate: int, expected: tuple[int, ...]) -> None:
    assert Pattern.longnet([8], [rate], 7, offsets=rule).branches[0].offset == expected


def test_fkodom_rule_is_one_constant_per_branch() -> None:
    pattern = Pattern.longnet([4, 8, 16, None], [1, 3, 2, 4], 6, offsets="fkodom")
    assert [b.offset for b in pattern.branches] == [0, 1, 0, 3]


@given(st.integers(1, 9), st.integers(1, 20), st.sampled_from(["paper", "torchscale", "fkodom"]))
def test_every_rule_gives_offsets_below_the_rate(rate: int, heads: int, rule: str) -> None:
    pattern = Pattern.longnet([8, None], [rate, rate], heads, offsets=rule)
    for branch in pattern.branches:
        assert all(o is not None and 0 <= o < rate for o in branch.offsets(heads))


def test_head_groups() -> None:
    pattern = Pattern.head_groups([4, 8, None], [1, 2, 2], heads=8, causal=True)
    assert pattern.causal
    assert [b.heads for b in pattern.branches] == [range(0, 3), range(3, 6), range(6, 8)]  # 8 = 3 + 3 + 2
    assert [b.offset for b in pattern.branches] == [0, 1, 0]
    assert pattern.branches[1].offsets(8) == (None, None, None, 1, 1, 1, None, None)
    with pytest.raises(ValueError, match="heads must be at least the number of groups, 3, got 2"):
        Pattern.head_groups([4, 8, 16], [1, 2, 4], heads=2)


def test_dense_sees_every_pair_once() -> None:
    assert multiplicity(Pattern.dense(), torch.arange(3), torch.arange(5), 2).eq(1).all()
    causal = multiplicity(Pattern.dense(causal=True), torch.arange(5), torch.arange(5), 1)[0]
    assert causal.equal(torch.ones(5, 5, dtype=torch.int32).tril())


BAD_BRANCHES: list[tuple[dict[str, Any], str]] = [
    ({"segment_length": 0}, "segment_length"),
    ({"segment_length": -4}, "segment_length"),
    ({"segment_length": 4.0}, "segment_length"),
    ({"segment_length": True}, "segment_length"),
    ({"dilation_rate": 0}, "dilation_rate"),
    ({"dilation_rate": True}, "dilation_rate"),
    ({"dilation_rate": None}, "dilation_rate"),
    ({"dilation_rate": np.int64(2)}, "dilation_rate"),
    ({"offset": -1, "dilation_rate": 2}, "offset"),
    ({"offset": 2, "dilation_rate": 2}, "offset"),
    ({"offset": False}, "offset"),
    ({"offset": (0, 2), "dilation_rate": 2}, "offset"),
    ({"offset": (0, True), "dilation_rate": 2}, "offset"),
    ({"offset": ()}, "offset"),
    ({"offset": None}, "offset"),
    ({"offset": (0, 0), "heads": range(3)}, "offset"),
    ({"heads": range(0)}, "heads"),
    ({"heads": range(-1, 2)}, "heads"),
    ({"heads": range(0, 4, 2)}, "heads"),
    ({"heads": range(3, 0, -1)}, "heads"),
    ({"heads": (0, 1)}, "heads"),
]


@pytest.mark.parametrize(("fields", "name"), BAD_BRANCHES)
def test_bad_branch_is_refused_at_construction(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        Branch(**fields)


def test_bad_pattern_is_refused_at_construction() -> None:
    bad: list[tuple[Any, Any, str]] = [
        ((), False, "branches"),
        (Branch(), False, "branches"),
        ((1,), False, "branches"),
        ((Branch(),), 1, "causal"),
    ]
    for branches, causal, name in bad:
        with pytest.raises(ValueError, match=f"^{name} must"):
            Pattern(branches, causal)
    for build in (Pattern.longnet, Pattern.head_groups):
        with pytest.raises(ValueError, match="segment_lengths and dilation_rates"):
            build([4, 8], [1], 2)
        with pytest.raises(ValueError, match="dilation_rates must"):
            build([4], [0], 2)
        with pytest.raises(ValueError, match="^heads must"):
            build([4], [1], 0)
        with pytest.raises(ValueError, match="not empty"):
            build([], [], 2)
    with pytest.raises(ValueError, match="offsets must be one of"):
        Pattern.longnet([4], [1], 2, offsets="Paper")


def test_validate_against_the_number_of_heads() -> None:
    Pattern((Branch(4, 2, (0, 1), range(1, 3)),)).validate(3)
    for branch in (Branch(4, 2, (0, 1)), Branch(heads=range(1, 4))):
        with pytest.raises(ValueError, match="3 query heads|heads range"):
            Pattern((Branch(), branch)).validate(3)
    with pytest.raises(ValueError, match="num_heads"):
        Pattern.dense().validate(0)


@given(st.data(), st.integers(1, 4))
def test_dict_round_trip(data: st.DataObject, heads: int) -> None:
    pattern = data.draw(patterns(heads))
    again = Pattern.from_dict(json.loads(json.dumps(pattern.to_dict())))
    assert again == pattern and hash(again) == hash(pattern)


def test_from_dict_is_strict() -> None:
    good = Pattern((Branch(4, 2, 1, range(2)),)).to_dict()
    assert good == {
        "branches": [{"segment_length": 4, "dilation_rate": 2, "offset": 1, "heads": [0, 2], "window": None}],
        "causal": False,
        "documents": None,
    }
    branch = good["branches"][0]
    without_rate = {name: value for name, value in branch.items() if name != "dilation_rate"}
    bad: list[tuple[Any, str]] = [
        ({**good, "window": 3}, "window"),
        ({**good, "branches": [{**branch, "window": -1}]}, "window"),
        ({**good, "branches": [{**branch, "window": 2.0}]}, "window"),
        ({"branches": good["branches"]}, "causal"),
        ({**good, "branches": 3}, "branches"),
        ({**good, "branches": [{**branch, "stride": 2}]}, "stride"),
        ({**good, "branches": [without_rate]}, "dilation_rate"),
        ({**good, "branches": [{**branch, "heads": [0, 2, 1]}]}, "heads"),
        ({**good, "branches": [{**branch, "heads": [0, 2.0]}]}, "heads"),
        ({**good, "branches": [{**branch, "heads": [2, 2]}]}, "heads"),
        ({**good, "causal": "no"}, "causal"),
        ([], "pattern"),
    ]
    for data, name in bad:
        with pytest.raises(ValueError, match=name):
            Pattern.from_dict(data)


def test_lists_are_normalised_so_that_patterns_hash() -> None:
    offset: Any = [0, 1]
    branches: Any = [Branch(4, 2, offset)]
    assert hash(Pattern(branches)) == hash(Pattern((Branch(4, 2, (0, 1)),)))
    assert Pattern(branches) == Pattern((Branch(4, 2, (0, 1)),))


# --- at the edges -----------------------------------------------------------------------------------------------------


def _listed(heads: list[int]) -> dict[str, Any]:
    branch = {"segment_length": 4, "dilation_rate": 2, "offset": 1, "heads": heads}
    return {"branches": [branch], "causal": False}


@pytest.mark.parametrize(
    ("make", "argument", "allowed", "got"),
    [
        (lambda: Branch(4, 2, 3), "offset", "dilation rate 2", "3"),
        (lambda: Branch(4, 2, ()), "offset", "every query head", "()"),
        (lambda: Branch(4, 2, (0, 1), range(1)), "offset", "every head of range(0, 1)", "(0, 1)"),
        (lambda: Branch(4, 2, (0, 1), range(3)), "offset", "every head of range(0, 3)", "(0, 1)"),
        (lambda: Pattern((Branch(4, 2, (0, 1, 0, 1)),)).validate(3), "offset", "3 query heads", "(0, 1, 0, 1)"),
        (lambda: Pattern.head_groups([8], [2], 0), "heads", "integer >= 1", "0"),
        (lambda: Pattern.from_dict(_listed([2])), "heads", "[start, stop] or null", "[2]"),
        (lambda: Pattern.from_dict(_listed([])), "heads", "[start, stop] or null", "[]"),
        (lambda: Pattern.from_dict(_listed([-1, 2])), "heads", "integer >= 0", "-1"),
        (lambda: Pattern.longnet([4], [1, 2], 2), "segment_lengths and dilation_rates", "equally long", "1 and 2"),
        (lambda: Pattern.head_groups([4], [1, 2], 2), "segment_lengths and dilation_rates", "equally long", "1 and 2"),
    ],
)
def test_a_refusal_names_the_argument_what_is_allowed_and_what_was_given(
    make: Callable[[], object], argument: str, allowed: str, got: str
) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    said = str(refused.value)
    assert said.startswith(f"{argument} ") and allowed in said and said.endswith(f" {got}")


def test_torchscale_rule_where_the_rate_divides_the_heads() -> None:
    assert Pattern.longnet([8], [2], 4, offsets="torchscale").branches[0].offset == (0, 0, 1, 1)


def test_no_pattern_is_causal_unless_it_is_said() -> None:
    for pattern in (Pattern.dense(), Pattern.longnet([8], [2], 4), Pattern.head_groups([8], [2], 4)):
        assert not pattern.causal


@pytest.mark.parametrize("groups", (1, 2, 3))
def test_as_many_heads_as_groups_are_one_each(groups: int) -> None:
    pattern = Pattern.head_groups([8] * groups, [2] * groups, groups)
    assert [branch.heads for branch in pattern.branches] == [range(i, i + 1) for i in range(groups)]
