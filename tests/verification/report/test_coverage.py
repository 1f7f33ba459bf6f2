"""Features on paper: a Case that has each, and one that has not; and their counts."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from tests.support.printed import unbroken
from verification.report.coverage import FEATURES, GROUPS, Coverage

case = partial(plain, tokens=24, heads=4, kv_heads=4, bucket=16, kernel="auto")


def seen(*branches: Branch) -> dict[str, Any]:
    return {"pattern": Pattern(branches)}


def packed(*documents: int, segment: int | None = None, window: int | None = None) -> dict[str, Any]:
    return {"pattern": Pattern((Branch(segment, window=window),), documents=documents)}


def near(*windows: int | None, causal: bool = True, **branch: Any) -> dict[str, Any]:
    """Branches that differ in their windows."""
    return {"pattern": Pattern(tuple(Branch(window=window, **branch) for window in windows), causal)}


SOME = Branch(heads=range(1, 3))
# Feature -> changes to the Case above that make it have the feature; and changes that come close, and do not.
EXAMPLES: dict[str, tuple[dict[str, Any], ...]] = {
    "subgroup": ({"world": 3, "group": (0, 2)}, {"world": 3, "group": (0, 1, 2)}),
    "subgroup without rank 0": ({"world": 3, "group": (1, 2)}, {"world": 3, "group": (0, 2)}),
    "empty shard": ({"cuts": (0, 0, 24)}, {"cuts": (0, 1, 24)}),
    "fewer tokens than ranks": ({"tokens": 1}, {"tokens": 2}), "ranks do not divide tokens": ({"tokens": 23}, {}),
    "uneven cuts": ({"cuts": (0, 10, 24)}, {"cuts": (0, 12, 24)}), "one token": ({"tokens": 1}, {}),
    "more than 32 tokens": ({"tokens": 33}, {"tokens": 32}), "dense": ({}, seen(Branch(24))),
    "causal": ({"pattern": Pattern.dense(True)}, {}), "not causal": ({}, {"pattern": Pattern.dense(True)}),
    "segments": (seen(Branch(23)), seen(Branch(24))), "segment on several ranks": (seen(Branch(8)), seen(Branch(12))),
    "w > n": (seen(Branch(25)), seen(Branch(24))), "short tail": (seen(Branch(5)), seen(Branch(8))),
    "offset past a short tail": (seen(Branch(5, 5, 4)), seen(Branch(5, 5, 3))),  # the tail has 4 tokens
    "documents": (packed(24), {}), "no documents": ({}, packed(24)),
    "several documents": (packed(1, 23), packed(0, 24, 0)), "empty document": (packed(0, 24), packed(1, 23)),
    "document of one token": (packed(1, 23), packed(2, 0, 22)),
    "equal documents": (packed(10, 4, 10), packed(1, 0, 0, 1, 22)),
    "document on several ranks": (packed(10, 4, 10), packed(10, 2, 12)),
    "document on three ranks": ({"world": 3} | packed(7, 10, 7), {"world": 3} | packed(7, 9, 8)),
    "document that ends by a shard's end": (packed(11, 13), packed(10, 4, 10)),
    "document after a short tail": (packed(10, 14, segment=8), packed(16, 8, segment=8)), "window": (near(23), {}),
    "no window": ({}, near(None, 23)), "window 0": (near(0), near(1)),
    "window that hides nothing": (near(7, segment_length=8), near(6, segment_length=8)),
    "window that is not causal": (near(22, causal=False), near(23, causal=False)),
    "window with dilation": (near(21, dilation_rate=2), near(22, dilation_rate=2)),  # 0 2 4 .. 22
    "window that ends between steps": (near(4, dilation_rate=3), near(3, dilation_rate=3)),
    "window cut by a segment": (near(1, segment_length=8), near(0, segment_length=8)),
    "window cut by a document": (packed(8, 16, window=1), packed(0, 24, window=1)),
    "window over a shard's end": (near(1), near(1, segment_length=4)),
    "window on three ranks": ({"world": 3} | near(9), {"world": 3} | near(8)),  # the second rank has 8 to 15
    "window in some branches only": (near(None, 3), near(3, 4)),
    "several windows": (near(None, 3, 4), near(None, 3, 3)), "dilation": (seen(Branch(8, 2)), seen(Branch(8, 1))),
    "r > w": (seen(Branch(3, 4)), seen(Branch(4, 4))),
    "r does not divide w": (seen(Branch(8, 3)), seen(Branch(8, 4))),
    "offset": (seen(Branch(8, 2, 1)), seen(Branch(8, 2))),
    "offset past the segment": (seen(Branch(3, 4, 3)), seen(Branch(3, 4, 2))),
    "offsets by head": (seen(Branch(8, 2, (0, 0, 0, 1))), seen(Branch(8, 2, (1, 1, 1, 1)))),
    "one branch": (seen(SOME), seen(SOME, SOME)), "several branches": (seen(SOME, SOME), {}),
    "several branches on a row": (
        seen(Branch(8, 2), Branch(8, 3)),
        seen(Branch(None, 2), Branch(None, 2, 1), Branch(heads=range(0, 0 + 1), dilation_rate=30, offset=29)),
    ),
    "branch for some heads only": (seen(SOME), seen(Branch(heads=range(0, 4)))),
    "head without branch": (seen(SOME), seen(SOME, Branch(heads=range(0, 1)), Branch(heads=range(3, 4)))),
    "branches of other heads read one key": (
        {"kv_heads": 2, **seen(Branch(8, 2, heads=range(0, 1)), Branch(None, 5, heads=range(1, 2)))},
        {
            "kv_heads": 2,
            **seen(*(Branch(w, r, heads=range(i, i + 1)) for w, r, i in ((8, 2, 1), (8, 2, 2), (4, 1, 1)))),
        },
    ),
    "dead row": (seen(Branch(8, 2)), seen(Branch(8, 2), Branch(8, 2, 1))),
    "dead key": tuple({"kv_heads": 2, **seen(Branch(8, 2, (0, 1, last, 0)))} for last in (0, 1)),
    "nothing but dead rows": (seen(Branch(2, 3, 2)), seen(Branch(3, 3, 2))), "MHA": ({}, {"heads": 1, "kv_heads": 1}),
    "GQA": ({"kv_heads": 2}, {"kv_heads": 1}), "MQA": ({"kv_heads": 1}, {"kv_heads": 2}),
    "several phases per key/value head": tuple(
        {"kv_heads": 2, **seen(Branch(8, 2, (0, 0, third, 1)))} for third in (0, 1)
    ),
    "several batches": ({"batch": 2}, {}), "head dim 1": ({"head_dim": 1}, {}),
    "head dim no power of two": ({"head_dim": 6}, {"head_dim": 1}),
    "head dim >= 32": ({"head_dim": 32}, {"head_dim": 31}), "bucket by default": ({"bucket": None}, {}),
    "bucket of one token": ({"bucket": 1}, {}), "bucket below a shard": ({"bucket": 11}, {"bucket": 12}),
    "bucket beyond a shard": ({"bucket": 13}, {"bucket": 12}),
    "bucket beyond the sequence": ({"bucket": None}, {"bucket": 24}),  # 1024 by default
    "query rows cut": ({"world": 1, "tokens": 17}, {"world": 1, "tokens": 17, "bucket": 17}),
    "explicit scale": ({"scale": 0.5}, {}), "scale <= 0": ({"scale": 0.0}, {}),
    "huge scores": ({"score_scale": 32.0}, {"score_scale": 4.0}), "strided": ({"strided": True}, {}),
    "measured": ({"measured": True}, {}),
    "scores larger than queries": tuple(  # 12 rows times 12 keys, 12 rows of 11
        {"measured": True, "kernel": "math", "bucket": 12, "head_dim": dim} for dim in (11, 12)
    ),
    "descending stretches": tuple(  # 10 to 19, then 0 to 9; and as they were
        {"world": 1, "tokens": 20, "order": "permuted", "seed": seed} for seed in (5, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("feature", EXAMPLES)
def test_on_paper(feature: str) -> None:
    has, lacks = ({"world": 2} | changes for changes in EXAMPLES[feature])
    assert FEATURES[feature](case(**has)) and not FEATURES[feature](case(**lacks))


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - set(EXAMPLES)))
def test_choices(feature: str) -> None:
    name, choice = feature.split(" ", 1)
    assert FEATURES[feature](case(2, **{name: choice}))
    assert sum(FEATURES[other](case(2)) for other in GROUPS[name]) == 1


@pytest.mark.parametrize(
    ("changes", "cut"),
    (
        (seen(Branch(17)), True), (seen(Branch(16)), False), ({"world": 2}, True), ({"world": 2, "tokens": 32}, False),
        (seen(Branch(None, 2)), True), ({"world": 2, **seen(Branch(None, 2))}, False),
        ({"tokens": 24, **seen(Branch(None, 1, window=1))}, True),
    ),
)  # fmt: skip
def test_rows_of_one_segment_are_cut_only_where_one_rank_holds_too_many(changes: dict[str, Any], cut: bool) -> None:
    assert FEATURES["query rows cut"](case(**{"world": 1, "tokens": 40} | changes)) == cut


def test_counts() -> None:
    coverage, other = Coverage(), Coverage()
    for batch in (1, 2):
        coverage.add(case(2, batch=batch))
    other.add(case(2, batch=2))
    coverage.add_all(other)
    counts = coverage.to_dict()
    assert (coverage.cases, counts["several batches"], counts["dense"], counts["causal"]) == (3, 2, 3, 0)
    assert list(counts) == list(FEATURES)


def test_lines_name_what_is_rare_or_missing_or_every_feature() -> None:
    coverage = Coverage(1000, dict.fromkeys(FEATURES, 500))
    first = f"coverage: 1000 Cases had {len(FEATURES)} of {len(FEATURES)} features"
    assert coverage.rarest() == [first]
    coverage.counts |= {"one token": 0, "measured": 19, "strided": 3, "dense": 20}
    first = first.replace(f"had {len(FEATURES)}", f"had {len(FEATURES) - 1}")
    assert coverage.rarest() == [first, "  none had: one token", "  few had: strided (3), measured (19)"]
    coverage.counts = dict.fromkeys(FEATURES, 0)
    first, *names = coverage.rarest()
    assert len(names) == 2 and re.search(r"and \d+ more$", names[-1]) and max(map(len, names)) <= 80
    coverage.counts = {name: number for number, name in enumerate(FEATURES)}
    text = unbroken("\n".join(coverage.lines()))
    for group, features in GROUPS.items():
        assert f"{group} - " in text
        assert all(f" {name.removeprefix(f'{group} ')}: {coverage.counts[name]}" in text for name in features)
