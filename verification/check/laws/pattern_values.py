"""Patterns are values in every field: what comes back from JSON, from pickle, a copy or a graph's text is equal, what
differs in one field is not, and nothing that a caller does with what it gave or was given changes a pattern.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np

from reference.pattern import Branch, Pattern, numbered_pattern
from ring import compiled
from verification.case import Case
from verification.draw.pattern_lists import some_pattern

PATTERNS, HEADS = 7, 4  # of an example
_COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


def patterns(case: Case) -> Iterator[str]:
    rng = np.random.default_rng(case.seed)
    for pattern in (case.pattern, *(some_pattern(rng, HEADS) for _ in range(PATTERNS))):
        yield from _come_back(pattern)
        yield from _differ(pattern)
        yield from _own_memory(pattern)
        yield from _frozen(pattern)


def _come_back(pattern: Pattern) -> Iterator[str]:
    saved = json.loads(json.dumps(pattern.to_dict()))
    older = {name: value for name, value in saved.items() if name != "documents" or value is not None}
    older["branches"] = [{n: x for n, x in b.items() if n != "window" or x is not None} for b in saved["branches"]]
    made = {way: make(pattern) for way, make in _COPIES.items()}
    made |= {
        "JSON": Pattern.from_dict(saved),
        "JSON from before there were documents and windows": Pattern.from_dict(older),
        "to_dict itself": Pattern.from_dict(pattern.to_dict()),
        "lists in place of tuples": Pattern(list(pattern.branches), pattern.causal, _listed(pattern.documents)),  # type: ignore[arg-type]
        "a graph's text": replace(
            compiled.pattern_of(compiled.text_of(pattern)), documents=pattern.documents
        ),
    }  # fmt: skip
    for way, one in made.items():
        if not _same(pattern, one):
            yield f"a pattern and what {way} makes of it must be equal and hash alike, got {one} of {pattern}"
        elif one.documents is not None and (one.number == pattern.number or numbered_pattern(one.number) is not one):
            yield f"a pattern of documents by {way} must have a number of its own, by which it is found"
    for branch in pattern.branches:
        for way, make in _COPIES.items():
            if not _same(branch, make(branch)):
                yield f"a branch and what {way} makes of it must be equal and hash alike, for {branch}"


def _same(one: Pattern | Branch, other: Pattern | Branch) -> bool:
    """By ==, as keys, and by every field that a user reads, with its type."""
    equal = one == other and hash(one) == hash(other) and len({one, other}) == 1
    return equal and repr(one) == repr(other)


def _listed(documents: tuple[int, ...] | None) -> list[int] | None:
    return None if documents is None else list(documents)


def _differ(pattern: Pattern) -> Iterator[str]:
    """Of one more or of none, in each field by itself."""
    others = [replace(pattern, causal=not pattern.causal), replace(pattern, branches=pattern.branches * 2)]
    lengths = pattern.documents
    for unlike in (None, (), (*(lengths or ()), 0), (0, *(lengths or ())), (lengths or ())[1:], (lengths or ())[::-1]):
        if unlike != lengths:
            others.append(replace(pattern, documents=unlike))
    for number, branch in enumerate(pattern.branches):
        for changed in _other_branches(branch):
            if changed == branch:
                yield f"branches that differ in a field must not be equal: {changed} and {branch}"
            branches = (*pattern.branches[:number], changed, *pattern.branches[number + 1 :])
            others.append(replace(pattern, branches=branches))
    if pattern.branches != pattern.branches[::-1]:
        others.append(replace(pattern, branches=pattern.branches[::-1]))
    text = compiled.text_of(pattern)
    for other in others:
        if other == pattern:
            yield f"patterns that differ in a field must not be equal: {other} and {pattern}"
        alone, of_pattern = (replace(one, documents=None) for one in (other, pattern))  # of these a graph's text tells
        if alone != of_pattern and compiled.text_of(other) == text:
            yield f"patterns that differ in a field must not have one text in a graph: {other} and {pattern}"


def _other_branches(branch: Branch) -> Iterator[Branch]:
    offset, heads, rate = branch.offset, branch.heads, branch.dilation_rate
    for name in ("segment_length", "window"):
        value = getattr(branch, name)
        for other in (1, 2, None) if value is None else (None, value + 1):
            if other != value:
                changed: dict[str, Any] = {name: other}
                yield replace(branch, **changed)
    yield replace(branch, dilation_rate=rate + 1)
    if isinstance(offset, int):
        yield from [replace(branch, offset=(offset + 1) % rate)] if rate > 1 else []
        yield replace(branch, heads=range(1) if heads is None else range(heads.start, heads.stop + 1))
        yield replace(branch, heads=range(7, 9) if heads is None else range(heads.start + 1, heads.stop + 1))
    else:
        if rate > 1:
            yield replace(branch, offset=(*offset[:-1], (offset[-1] + 1) % rate))
        if heads is None:
            yield replace(branch, offset=(*offset, 0))
            yield replace(branch, heads=range(len(offset)))
        else:
            yield replace(branch, heads=range(heads.start + 1, heads.stop + 1))
            yield replace(branch, heads=None)


def _own_memory(pattern: Pattern) -> Iterator[str]:
    """Of what a pattern was made of, and of what it gives, everything may change afterwards."""
    before = repr(pattern)
    branches, documents = list(pattern.branches), _listed(pattern.documents)
    made = Pattern(branches, pattern.causal, documents)  # type: ignore[arg-type]
    branches.append(Branch(1))
    branches[0] = Branch(1, 3, 2)
    if documents is not None:
        documents.append(1)
    if repr(made) != before:
        yield f"a pattern changes with the lists that it was made of: {made}, was {before}"
    for saved in (pattern.to_dict(), made.to_dict()):
        for one in saved["branches"]:
            if isinstance(one["offset"], list):
                one["offset"].append(9)
            if one["heads"] is not None:
                one["heads"][0] = 9
            one["window"] = 99
        saved["branches"].append(1)
        if saved["documents"] is not None:
            saved["documents"].append(1)
        saved["causal"] = None
    if repr(pattern) != before or Pattern.from_dict(pattern.to_dict()) != made:
        yield f"a pattern changes with what to_dict gave of it: {pattern}, was {before}"
    offsets = [0, 1]
    branch = Branch(4, 2, offsets)  # type: ignore[arg-type]
    offsets[0] = 1
    if branch.offset != (0, 1) or hash(branch) != hash(Branch(4, 2, (0, 1))):
        yield f"a branch changes with the list of offsets that it was made of: {branch}"


def _frozen(pattern: Pattern) -> Iterator[str]:
    branch = pattern.branches[0]
    fields: list[tuple[Any, str]] = [(pattern, name) for name in ("branches", "causal", "documents")]
    fields += [(branch, name) for name in ("segment_length", "dilation_rate", "offset", "heads", "window")]
    for one, name in fields:
        try:
            setattr(one, name, getattr(one, name))
        except FrozenInstanceError:
            continue
        yield f"{name} of a {type(one).__name__}, a key of caches, can be set"
