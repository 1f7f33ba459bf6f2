"""The cause of a real ring's wrong results on real ranks, found from a small Case, and what the command says of it.

`test_causes.py` has all causes, in one process.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from reference.pattern import Pattern
from tests.support.backends import shared
from tests.support.plain_case import plain
from tests.support.printed import unbroken
from verification.__main__ import main
from verification.causes.find import drawn_cases, larger_cases
from verification.failures import WrongResult
from verification.peers.known_peers import load
from verification.peers.peer_experiment import experiment, nearest_claimed
from verification.run.backends import GlooBackend

pytestmark = pytest.mark.ranks

RINGS = "tests.support.ring_with_mistakes"
SMALL = plain(2, tokens=4, pattern=Pattern.dense(True), heads=4, kv_heads=2, head_dim=2)
CAUSES = {
    "local_mask": "out, dq, dk and dv are, to rounding, as if the mask compared positions within the shards",
    "neighbours_gradients": "dk and dv on rank 0 are, to rounding, what rank 1 should hold",
    "partial_lse": "as if, in the backward, lse were each time that of one rank's keys, not of all",
    "bf16_gradients": "dk and dv are, to rounding, as if dk and dv were rounded to bfloat16 after each rank's part",
    "shared_buffer": "is shared by calls",
}


backend = shared(GlooBackend, 2)


@pytest.mark.parametrize("mistake", CAUSES)
def test_the_mistake_of_a_ring_is_named(backend: GlooBackend, mistake: str) -> None:
    spec = f"{RINGS}:{mistake}"
    again = "between" if mistake == "shared_buffer" else "alike"
    case, found = replace(nearest_claimed(load(spec), SMALL) or SMALL, again=again), experiment(spec)
    with pytest.raises(WrongResult) as caught:
        found.check(backend, case)
    found.add_cause(caught.value, backend, case, case)
    assert re.search(CAUSES[mistake], caught.value.__notes__[0])


@pytest.mark.parametrize(
    "ring, said",
    [("right", []), ("bf16_sum", [r"note: .*it would also hide 16-bit sums"])],  # no rounding is advised
)
def test_a_ring_without_a_usual_mistake_has_no_cause(backend: GlooBackend, ring: str, said: list[str]) -> None:
    case, failure = nearest_claimed(load(f"{RINGS}:{ring}"), SMALL), WrongResult()
    failure.check = "values"
    experiment(f"{RINGS}:{ring}").add_cause(failure, backend, case, case)
    for note, words in zip(getattr(failure, "__notes__", []), said, strict=True):
        assert re.match(words, note)


def test_further_cases_are_claimed_and_differ() -> None:
    def claim(case: object) -> object:
        return nearest_claimed(load(f"{RINGS}:right"), case)  # type: ignore[arg-type]

    for cases in (larger_cases(SMALL, claim), drawn_cases(SMALL, claim)):  # type: ignore[arg-type]
        assert len(cases) >= 4 and len(set(cases)) == len(cases)
        assert all(case == claim(case) and case.dtype == "float64" and case.world == 2 for case in cases)


@pytest.mark.slow
def test_the_command_prints_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    name, cause = f"{RINGS}:neighbours_gradients", f"cause: {CAUSES['neighbours_gradients']}"
    places = ("--failures", str(tmp_path / "kept"), "--json", str(tmp_path / "report.json"))
    assert main(["peers", name, "--examples", "5", "--seed", "1", *places]) == 1
    assert cause in unbroken(capsys.readouterr().out)
    (peer,) = json.loads((tmp_path / "report.json").read_text())["peers"]
    assert cause in peer["message"]
    (file,) = (tmp_path / "kept").iterdir()
    assert main(["replay", str(file), "--attention", name]) == 1
    assert cause in unbroken(capsys.readouterr().out)
