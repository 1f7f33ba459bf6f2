"""Laws with a peer: each has a peer that breaks it, and asks only what is claimed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.fast_oracle import multiplicity
from tests.support import peer_examples
from tests.support.drawing import draw_many
from tests.support.peer_examples import EXAMPLES
from tests.support.plain_case import PLAIN
from tests.support.printed import unbroken
from verification.__main__ import main
from verification.check.laws.law import changed
from verification.failures import VerificationFailure
from verification.peers.known_peers import load
from verification.peers.peer_experiment import LAWS_OF_ANY, experiments, law_of, nearest_claimed
from verification.replay import registry
from verification.run.backends import GlooBackend
from verification.strategies.cases import LARGE

pytestmark = pytest.mark.ranks

FAULTS_OF_LAWS = [
    ("later tokens change nothing", "peeks", {"position": 1}, "was .* when the tokens after position 1 change"),
    ("batches and heads permute", "numbers_heads", {"batch": [1, 0], "kv_heads": [1, 0]}, "sum of their bounds"),
    ("equal values come out", "adds_up_to_more", {"keys_too": False}, "all values of that head are equal"),
    ("NaN and inf propagate", "hides_nan", {"token": 0, "tensor": "v", "infinite": False}, "which sees NaN in v"),
    ("scores of -inf have no weight", "weighs_hidden", {"hidden": [1], "heads": [0]}, "no query sees this key"),
]


@pytest.mark.parametrize("title, name, how, said", FAULTS_OF_LAWS, ids=[name for name, *_ in FAULTS_OF_LAWS])
def test_a_peer_that_breaks_a_law_is_found(
    backend: GlooBackend, title: str, name: str, how: dict[str, Any], said: str
) -> None:
    case = replace(PLAIN, lse="unused", kernel="math")
    law = next(law for law in LAWS_OF_ANY if law.name == title)
    law.validate(case, how)
    assert law_of(f"{EXAMPLES}:sound", law).check(backend, (case, how))[title] <= 1.0
    broken = law_of(f"{EXAMPLES}:{name}", law)
    with pytest.raises(VerificationFailure, match=said):
        broken.check(backend, (case, how))
    record = json.loads(json.dumps(broken.record_of((case, how))))
    with pytest.raises(ValueError, match=f"imports no module that a file names; .* --attention {EXAMPLES}:{name}"):
        registry.parse(record)
    saved: Any = registry.parse(record, attention=f"{EXAMPLES}:{name}")
    assert saved.subject == (case, how) and saved.experiment.name == broken.name


def test_laws_are_drawn_within_the_claim(backend: GlooBackend) -> None:
    drawn = experiments(f"{EXAMPLES}:sound", 1, 150)
    assert [examples for _, examples in drawn] == [150, len(LARGE), *[15] * len(LAWS_OF_ANY)] and len(LAWS_OF_ANY) == 7
    unsuitable = {"same on any ranks, layout, exchange", "error does not grow with ranks"}  # one process, fp32
    for (one, _), law in zip(drawn[2:], LAWS_OF_ANY, strict=True):
        if law.name not in unsuitable:
            for case, how in draw_many(one.draw(1), 5):
                law.validate(case, how)
                assert nearest_claimed(peer_examples.sound, case) == case
    (only,) = experiments(f"{EXAMPLES}:sound", 1, 30, only=("NaN and inf propagate",))
    assert only[1] == 30 and only[0].name == "peer mine, NaN and inf propagate"


@pytest.mark.parametrize("name", ("ring-flash-attn/zigzag", "ringmaster/ring-varlen"))
@pytest.mark.parametrize("title", ("same on any ranks, layout, exchange", "scores of -inf have no weight"))
def test_a_law_asks_only_what_is_claimed(name: str, title: str) -> None:
    (law,) = (law for law in LAWS_OF_ANY if law.name == title)
    subjects = draw_many(law_of(name, law).draw(3), 30)
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


def test_a_law_without_subjects_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, title = f"{EXAMPLES}:sound", "error does not grow with ranks"
    report = tmp_path / "report"
    status = main(("peers", name, "--only", title, "--failures", str(tmp_path), "--json", str(report)))
    said = f"{title}: does not apply: the claim has no bfloat16 on all ranks, in even shards, without lse"
    printed = unbroken(capsys.readouterr().out)
    assert status == 0 and f"world 1: {said}" in printed, printed
    (peer,) = json.loads(report.read_text())["peers"]
    assert (peer["verdict"], peer["examples"], peer["does_not_apply"]) == ("does not apply", 0, [f"1 rank: {said}"])
