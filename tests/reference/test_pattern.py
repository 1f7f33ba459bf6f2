"""`reference.pattern`: patterns as values, and what is refused."""

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from reference import Branch, Pattern
from reference.pattern import numbered_pattern
from tests.support.drawn_patterns import patterns

COPIES: dict[str, Callable[[Pattern], Pattern]] = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda pattern: pickle.loads(pickle.dumps(pattern)),
    "JSON": lambda pattern: Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))),
    "lists": lambda pattern: Pattern(
        list(pattern.branches),  # type: ignore[arg-type]
        pattern.causal,
        None if pattern.documents is None else list(pattern.documents),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("way", COPIES)
@given(pattern=patterns(3, packed=True))
def test_unpickled_patterns_are_equal_with_new_numbers(way: str, pattern: Pattern) -> None:
    again = COPIES[way](pattern)
    assert again == pattern and hash(again) == hash(pattern) and repr(again) == repr(pattern)
    if pattern.documents is not None:  # 0 is the number of all others
        assert again.number != pattern.number and numbered_pattern(again.number) is again


def test_numbers_of_freed_patterns_find_none() -> None:
    for number in (Pattern.dense(documents=(1, 1)).number, -1, 2**62):
        with pytest.raises(ValueError, match=f"^pattern must be the number of an existing one, got {number}"):
            numbered_pattern(number)


BRANCH = Branch(4, 2, (0, 1), range(2), 3)
CHANGES: list[dict[str, Any]] = [
    {"segment_length": 5}, {"segment_length": None}, {"dilation_rate": 3}, {"offset": (1, 1)}, {"offset": 0},
    {"offset": 1}, {"heads": range(1, 3)}, {"window": 4}, {"window": None}, {"offset": 0, "heads": None},
    {"offset": (0,), "heads": range(1)},
]  # fmt: skip


def test_patterns_differ_by_any_field() -> None:
    branches = [BRANCH, *(replace(BRANCH, **change) for change in CHANGES)]
    listings = [*((one,) for one in branches), (BRANCH, BRANCH), *permutations(branches[:3])]
    packed = (None, (3, 0), (0, 3), (3,), (), (2, 1))
    made = [Pattern(one, causal, lengths) for one in listings for causal in (False, True) for lengths in packed]
    for things in branches, made:
        assert all(one != other for one, other in combinations(things, 2)) and len(set(things)) == len(things)


@given(patterns(3, packed=True))
def test_patterns_copy_their_arguments(pattern: Pattern) -> None:
    branches: Any = list(pattern.branches)
    documents: Any = None if pattern.documents is None else list(pattern.documents)
    made = Pattern(branches, pattern.causal, documents)
    saved = made.to_dict()
    for listed in (branches, documents, saved["branches"], saved["documents"]):
        if listed is not None:
            listed.append(1)
    saved["branches"][0]["segment_length"] = 99
    assert made == pattern and repr(made) == repr(pattern) and made.to_dict() == pattern.to_dict()
    for thing in (made, made.branches[0]):
        for field in fields(thing):
            with pytest.raises(FrozenInstanceError):
                setattr(thing, field.name, None)


def test_older_files_have_no_documents_and_no_windows() -> None:
    saved = Pattern((Branch(4, 2, 1, range(2)),)).to_dict()
    assert saved == {
        "branches": [{"segment_length": 4, "dilation_rate": 2, "offset": 1, "heads": [0, 2], "window": None}],
        "causal": False,
        "documents": None,
    }
    del saved["documents"], saved["branches"][0]["window"]
    assert Pattern.from_dict(saved) == Pattern((Branch(4, 2, 1, range(2)),))


def saved(**changes: Any) -> dict[str, Any]:
    """A saved pattern, its branch with these fields in place of its own."""
    return {"branches": [Pattern.dense().to_dict()["branches"][0] | changes], "causal": False}


def without(name: str) -> dict[str, Any]:
    made = saved()
    del (made if name in made else made["branches"][0])[name]
    return made


MAKERS: dict[str, Callable[..., Pattern]] = {"longnet": Pattern.longnet, "head_groups": Pattern.head_groups}
LISTS = "segment_lengths and dilation_rates must be equally long and not empty, got"
LONGNET, GROUPS = Pattern.longnet([8], [2], 4), Pattern.head_groups([4, 8], [1, 2], 8)
SIX = "pattern must be one for the 6 query heads, got one"
# By what makes it, the beginning of what is said.
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Branch(0), "segment_length must be an integer >= 1 or None, got 0"),
    (lambda: Branch(4, 0), "dilation_rate must be an integer >= 1, got 0"),
    (lambda: Branch(4, None), "dilation_rate must be an integer >= 1, got None"),  # type: ignore[arg-type]
    (lambda: Branch(4, 2, 2), "offset must be less than the dilation rate 2, got 2"),
    (lambda: Branch(4, 2, (0, 2)), "offset must be less than the dilation rate 2, got (0, 2)"),
    (lambda: Branch(4, 2, None), "offset must be an integer >= 0, got None"),  # type: ignore[arg-type]
    (lambda: Branch(4, 2, range(2)), "offset must be an integer >= 0, got range(0, 2)"),  # type: ignore[arg-type]
    (lambda: Branch(4, 2, ()), "offset must be one int or one for every query head, got ()"),
    (lambda: Branch(4, 2, (0, 1), range(1)), "offset must be one int or one for every head of range(0, 1), got (0, 1)"),
    (lambda: Branch(4, 2, (0, 1), range(3)), "offset must be one int or one for every head of range(0, 3), got (0, 1)"),
    (lambda: Branch(heads=(0, 1)), "heads must be a range or None, got (0, 1)"),  # type: ignore[arg-type]
    *((lambda heads=heads: Branch(heads=heads), "heads must be a nonempty range of step 1 from >= 0, got range(")
      for heads in (range(0), range(-1, 2), range(0, 4, 2), range(3, 0, -1))),
    (lambda: Branch(window=-1), "window must be an integer >= 0 or None, got -1; for flash attention's window_size"),
    (lambda: Branch(window=(4, 0)), "window must be an integer >= 0 or None, got (4, 0);"),  # type: ignore[arg-type]
    (lambda: Pattern(()), "branches must be a tuple of at least one Branch, got ()"),
    (lambda: Pattern(Branch()), "branches must be a tuple"),  # type: ignore[arg-type]
    (lambda: Pattern((1,)), "branches must hold Branch objects only, got 1"),  # type: ignore[arg-type]
    (lambda: Pattern((Branch(),), 1), "causal must be True or False, got 1"),  # type: ignore[arg-type]
    *((make, words) for build in MAKERS.values() for make, words in (
        (lambda build=build: build([4], [1, 2], 2), f"{LISTS} 1 and 2"),
        (lambda build=build: build([], [], 2), f"{LISTS} 0 and 0"),
        (lambda build=build: build([4], [1], 0), "heads must be an integer >= 1, got 0"),
        (lambda build=build: build(64, 1, 2), "segment_lengths must be a list with an entry for each branch, as [64],"),
        (lambda build=build: build([64], 1, 2), "dilation_rates must be a list with an entry for each branch, as [1],"),
        (lambda build=build: build([4], [1], 2, 1), "causal must be True or False, got 1"),
    )),
    (lambda: Pattern.longnet([4], [1], 2, offsets="Paper"), "offsets must be one of ['fkodom', 'paper', 'torchscale']"),
    (lambda: Pattern.head_groups([4, 8, 16], [1, 2, 4], 2), "heads must be at least the number of groups, 3, got 2"),
    (lambda: Pattern.dense().validate(0), "num_heads must be an integer >= 1, got 0"),
    (lambda: LONGNET.validate(6), f"{SIX} that was made for 4, with offset (0, 1, 0, 1): make it with heads=6"),
    (lambda: GROUPS.validate(6), f"{SIX} with a branch for heads range(4, 8): make it with heads=6"),
    (lambda: Pattern.from_dict([]), "pattern must be a mapping with the fields"),  # type: ignore[arg-type]
    (lambda: Pattern.from_dict(saved() | {"window": 3}), "pattern: unknown fields ['window'], missing fields []"),
    (lambda: Pattern.from_dict(saved(stride=2)), "branch: unknown fields ['stride'], missing fields []"),
    (lambda: Pattern.from_dict(without("causal")), "pattern: unknown fields [], missing fields ['causal']"),
    (lambda: Pattern.from_dict(without("dilation_rate")), "branch: unknown fields [], missing fields ['dil"),
    (lambda: Pattern.from_dict(saved() | {"branches": 3}), "branches must be a list, got 3"),
    (lambda: Pattern.from_dict(saved() | {"branches": []}), "branches must be a tuple of at least one"),
    (lambda: Pattern.from_dict(saved() | {"branches": [4]}), "branch must be a mapping with the fields"),
    (lambda: Pattern.from_dict(saved() | {"causal": "no"}), "causal must be True or False, got 'no'"),
    (lambda: Pattern.from_dict(saved() | {"documents": 4}), "documents must be None or a tuple of lengths"),
    *((lambda heads=heads: Pattern.from_dict(saved(heads=heads)), f"heads must be [start, stop] or null, got {heads}")
      for heads in ([], [2], [0, 2, 1])),
    (lambda: Pattern.from_dict(saved(heads=[2, 2])), "heads must be a nonempty range"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_malformed_patterns_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        make()


# What takes an integer, and the argument that a refusal names.
INTEGERS: list[tuple[Callable[[Any], object], str]] = [
    (Branch, "segment_length"),
    (lambda x: Branch(4, x), "dilation_rate"),
    (lambda x: Branch(4, 2, x), "offset"),
    (lambda x: Branch(4, 2, (0, x)), "offset"),
    (lambda x: Pattern.dense(window=x), "window"),
    (lambda x: Pattern.dense(documents=(2, x)), "documents"),
    *((lambda x, build=build: build([4], [1], x), "heads") for build in MAKERS.values()),
    *((lambda x, build=build: build([x], [1], 2), "segment_length") for build in MAKERS.values()),
    *((lambda x, build=build: build([4], [x], 2), "dilation_rates") for build in MAKERS.values()),
    (lambda x: Pattern.dense().validate(x), "num_heads"),
    (lambda x: Pattern.from_dict(saved(dilation_rate=2, offset=[x, 0])), "offset"),
    (lambda x: Pattern.from_dict(saved(heads=[x, 2])), "heads"),
    (lambda x: Pattern.from_dict(saved(heads=[0, x])), "heads"),
]


@pytest.mark.parametrize("wrong", (True, 1.0, -1, "1", np.int64(1), [[1]], torch.ones((), dtype=torch.int64)), ids=repr)
@pytest.mark.parametrize(("make", "argument"), INTEGERS)
def test_only_integers_are_integers(make: Callable[[Any], object], argument: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"^{argument} must"):
        make(wrong)


def test_patterns_are_not_causal_by_default() -> None:
    for pattern in (Pattern.dense(), Pattern.longnet([8], [2], 4), Pattern.head_groups([8], [2], 4)):
        assert not pattern.causal
