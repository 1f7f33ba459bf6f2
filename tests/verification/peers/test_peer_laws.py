"""Laws with a peer: each has a peer that breaks it, and asks only what is claimed."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis.errors import Unsatisfiable

from reference.fast_oracle import multiplicity
from reference.pattern import Branch, Pattern
from reference.slices import tree_slices
from tests.support.drawing import draw_many
from tests.support.peer_examples import EXAMPLES
from tests.support.plain_case import PLAIN, plain
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.laws.law import changed
from verification.check.laws.same_bits import SAME_BITS, other_of
from verification.failures import VerificationFailure
from verification.peers import equal_bits
from verification.peers.known_peers import load
from verification.peers.peer_experiment import LAWS_OF_ANY, implementation, nearest_claimed, peer_law
from verification.replay import registry
from verification.run.backends import GlooBackend

pytestmark = pytest.mark.ranks

TREE = {"parents": [None, 0, 0], "lengths": [1, 2, 2]}
FAULTS_OF_LAWS = [
    ("later tokens change nothing", "peeks", {"position": 1}, "when the tokens change that .* position 1 does not see"),
    (
        "a mask written in another way",
        "drops_slices",
        {"way": "causality and windows", "seed": 0},
        "sum of their bounds",
    ),
    ("a tree equals its leaves", "drops_slices", TREE, "sum of their bounds"),
    ("batches and heads permute", "numbers_heads", {"batch": [1, 0], "kv_heads": [1, 0]}, "sum of their bounds"),
    ("equal values come out", "adds_up_to_more", {"keys_too": False}, "all values of that head are equal"),
    ("NaN and inf propagate", "hides_nan", {"token": 0, "tensor": "v", "infinite": False}, "which sees NaN in v"),
    ("scores of -inf have no weight", "weighs_hidden", {"hidden": [1], "heads": [0]}, "no query sees this key"),
]


@pytest.mark.parametrize("title, name, how, said", FAULTS_OF_LAWS, ids=[name for name, *_ in FAULTS_OF_LAWS])
def test_a_peer_that_breaks_a_law_is_found(
    backend: GlooBackend, title: str, name: str, how: dict[str, Any], said: str
) -> None:
    case, sound = replace(PLAIN, lse="unused", kernel="math"), "with_slices" if "slices" in name else "sound"
    if how is TREE:
        case = replace(case, pattern=Pattern((Branch(slices=tuple(tree_slices(TREE["parents"], TREE["lengths"]))),)))
    law = next(law for law in LAWS_OF_ANY if law.name == title)
    law.validate(case, how)
    assert peer_law(f"{EXAMPLES}:{sound}", law).check(backend, (case, how))[title] <= 1.0
    broken = peer_law(f"{EXAMPLES}:{name}", law)
    with pytest.raises(VerificationFailure, match=said):
        broken.check(backend, (case, how))
    record = json.loads(json.dumps(broken.record_of((case, how))))
    with pytest.raises(ValueError, match=f"imports no module that a file names; .* --attention {EXAMPLES}:{name}"):
        registry.parse(record)
    saved: Any = registry.parse(record, attention=f"{EXAMPLES}:{name}")
    assert saved.subject == (case, how) and saved.experiment.name == broken.name


@pytest.mark.parametrize("name", ("ring-flash-attn/zigzag", "ringmaster/ring-varlen"))
@pytest.mark.parametrize("title", ("same on any ranks, layout, exchange", "scores of -inf have no weight"))
def test_a_law_asks_only_what_is_claimed(name: str, title: str) -> None:
    (law,) = (law for law in LAWS_OF_ANY if law.name == title)
    subjects = draw_many(peer_law(name, law).draw(3), 30)
    assert len(subjects) == 30
    for case, how in subjects:
        if law.name.startswith("same"):
            other = changed(case, how)
            assert nearest_claimed(load(name), other) == other
            assert (case.ranks, case.order, case.exchange) != (other.ranks, other.order, other.exchange)
        else:
            share = case.heads // case.kv_heads
            sees = np.asarray(multiplicity(case.pattern, case.heads, case.tokens) > 0)
            keeps = np.delete(sees, how["hidden"], axis=2).any(2)
            served = [head for head in range(case.heads) if head // share in how["heads"]]
            assert np.asarray(keeps | ~sees.any(2))[served].all()


def test_bits_are_compared_on_other_ranks_where_promised() -> None:
    subject: tuple[Case, dict[str, Any]] = (
        plain(2, tokens=64, head_dim=16, exchange="all-to-all", pattern=Pattern.dense(True), lse="returned"),
        {"world": 1, "group": None, "order": "zigzag", "cuts": None, "exchange": "all-to-all", "bucket": None}
        | {"strided": False, "entry": None},
    )
    by_heads, by_ring = (f"{equal_bits.__name__}:{name}" for name in ("by_heads", "by_ring"))
    with closing(GlooBackend()) as two:
        two.start(2)
        held = peer_law(by_heads, SAME_BITS)
        assert held.validate is not None
        held.validate(subject)
        assert held.check(two, subject) == {SAME_BITS.name: 0.0}
        assert peer_law(by_ring, SAME_BITS).check(two, subject) == {SAME_BITS.name: 0.0}  # it promises nothing
        attention = replace(implementation(by_ring), same_bits=lambda case: ("dv", "dq"))
        by_keys = replace(subject[0], exchange="ring"), subject[1] | {"exchange": "ring"}
        with pytest.raises(VerificationFailure, match=r"^dq at .*; dv at .* differ\): for the Case and with"):
            SAME_BITS.check(AttentionOnRanks(two, attention), *by_keys)
    with pytest.raises(Unsatisfiable):
        draw_many(peer_law(by_ring, SAME_BITS).draw(2), 1)
    for case, how in draw_many(peer_law(by_heads, SAME_BITS).draw(3), 10):
        assert len(other_of(case, how).ranks) in (1, 2, 3) and other_of(case, how).same_bits is None


def test_equal_bits_are_counted_by_result(capsys: pytest.CaptureFixture[str]) -> None:
    equal_bits.main([f"{EXAMPLES}:sound", f"{EXAMPLES}:needy"])
    assert re.search(
        r"\| mine \| - \| out \d+/\d+, dq \d+/\d+, dk \d+/\d+, dv \d+/\d+ \|\n.* not run: ", capsys.readouterr().out
    )
