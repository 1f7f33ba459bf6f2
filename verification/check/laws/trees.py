"""A tree of shared prefixes equals its leaves computed alone, each with its ancestors as a causal sequence.

The outputs of a node are those of every leaf below it. Its gradients are sums over these leaves; the incoming gradients
of a node are those of one leaf, as each token is counted once.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.slices import tree_slices
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble, compared
from verification.check.laws.law import TAME, How, Law, anything, without_overflow, worst_ratio
from verification.run.rank import InputEdit, whole_tensors
from verification.strategies.cases import cases
from verification.strategies.documents import WAYS, ends_of, lengths_of
from verification.strategies.slices import MOST, parents_of


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = replace(without_overflow(draw(cases(world))), keys=None, measured=False)
    if case.lse == "apart":  # its gradients depend on the rank that holds a token
        case = replace(case, lse="differentiated")
    lengths = lengths_of(draw, draw(st.sampled_from(WAYS)), case.tokens, ends_of(case.shards()))
    lengths = lengths if len(lengths) <= MOST else (*lengths[:MOST], sum(lengths[MOST:]))
    how: How = {"parents": parents_of(draw(st.integers(0, 2**24 - 1)), len(lengths)), "lengths": list(lengths)}
    case = claimed(claims, replace(case, pattern=_tree(how)))
    try:
        _precondition(case, how)
        _leaves_claimed(claims, case, how)
    except ValueError:
        reject()
    return case, how


def _tree(how: How) -> Pattern:
    return Pattern((Branch(slices=tuple(tree_slices(how["parents"], how["lengths"]))),))


def paths(how: How) -> list[list[int]]:
    """Return the positions of each leaf and its ancestors, in order, of those that have any."""
    edges, parents = list(accumulate(how["lengths"], initial=0)), how["parents"]
    inner, leaves = {parent for parent in parents if parent is not None}, list[list[int]]()
    for leaf in range(len(parents)):
        node: int | None = leaf
        path = list[int]()
        while node is not None:
            path, node = [*range(edges[node], edges[node + 1]), *path], parents[node]
        if leaf not in inner and path:
            leaves.append(path)
    return leaves


def alone(case: Case, path: list[int]) -> Case:
    """Return the Case of a leaf with its ancestors."""
    return replace(case, tokens=len(path), cuts=None, pattern=Pattern.dense(causal=True))


def check_leaves(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Outputs are those of each leaf alone, and gradients the sum over the leaves, within the sum of the bounds."""
    observations, whole = ranks.observe_and_expect(case)
    names = compared(case)
    sums, bounds = ({name: np.zeros_like(whole.exact[name]) for name in names} for _ in range(2))
    worst, counted = 0.0, set[int]()
    for path in paths(how):
        leaf = alone(case, path)
        before = tuple(at for at, position in enumerate(path) if position in counted)
        edit = InputEdit("rows", case.tokens, tuple(path), order=before)
        counted.update(path)
        results = ranks.observe(leaf, edit)
        expected = ranks.expect(leaf, whole_tensors(leaf, edit))
        for name in names:
            of_leaf, bound = assemble(leaf, results, name), expected.bound[name]
            if name in ("out", "lse"):
                axis = 2 if name == "lse" else 1
                a, allowed = assemble(case, observations, name).take(path, axis), whole.bound[name].take(path, axis)
                worst = max(worst, worst_ratio(f"{name} of {path}", a, of_leaf, bound + allowed, how))
            else:
                place = ... if name == "dsinks" else (slice(None), path)
                sums[name][place] += of_leaf
                bounds[name][place] += bound
    for name in set(names) - {"out", "lse"}:
        a, allowed = assemble(case, observations, name), whole.bound[name] + bounds[name]
        worst = max(worst, worst_ratio(f"{name}, summed over leaves,", a, sums[name], allowed, how))
    return worst


def _precondition(case: Case, how: How) -> None:
    if sum(how["lengths"]) != case.tokens or case.pattern.branches != _tree(how).branches:
        raise ValueError(f"how is {how}; the Case must have the tokens and slices of that tree")


def _leaves_claimed(claims: Claims, case: Case, how: How) -> None:
    for path in paths(how):
        if claims(alone(case, path)) != alone(case, path):
            raise ValueError(f"how is {how}; each of its leaves must make a Case that is claimed")


TREES_EQUAL_THEIR_LEAVES = Law(
    "a tree equals its leaves", _draw, check_leaves, _precondition, share=0.04,
    how={"parents": anything, "lengths": anything},
    cases=TAME
    | {
        "one sequence without documents": lambda case: case.keys is None and case.pattern.documents is None,
        "gradients that do not depend on the rank: lse other than 'apart'": lambda case: case.lse != "apart",
    },
    of_any="the claim has no slices", of_others=_leaves_claimed,
)  # fmt: skip
