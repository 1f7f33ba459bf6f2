"""`pytest --attention`: the suite as a user runs it, in a folder of their own, and what it says of wrong adapters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from verification.failures import RankHang
from verification.report.counter_example import CounterExample
from verification.search.experiment import Experiment
from verification.testing import conformance
from verification.testing.conformance import SLUGS, Conformance, CounterExamples, NotChecked, Outcome

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
# One process each, so that a test costs no more ranks than it needs.
ADAPTERS = """\
import os, threading
from dataclasses import replace
from tests.support import peer_examples
from tests.support.peer_examples import sound

def claim_of_mine(case):
    raise KeyError("window")

def hang(*arguments):
    threading.Event().wait()

def die(*arguments):
    os._exit(5)

def fail(*arguments):
    raise RuntimeError("not today")

claims_raise = replace(sound, claims=claim_of_mine)
hangs = replace(sound, attend=hang)
dies = replace(sound, attend=die)
raises = replace(sound, attend=fail)
peeks = peer_examples.peeks
"""
QUICK = ("--examples", "3", "-p", "no:cacheprovider", "-p", "no:randomly")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: adapters, a test of their own, the adapter to copy, and the test that the page shows."""
    made = tmp_path_factory.mktemp("user")
    (made / "mine.py").write_text(ADAPTERS)
    (made / "test_own.py").write_text("def test_own():\n    pass\n")
    shutil.copy(ROOT / "verification/peers/example.py", made / "my_attention.py")
    page = (ROOT / "verification/README.md").read_text()
    (code,) = re.findall(r"```python\n# test_my_kernel\.py\n(.*?)```", page, re.DOTALL)
    (made / "test_my_kernel.py").write_text(code)
    return made


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status and the output, in one line: messages are wrapped."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *QUICK, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return done.returncode, " ".join((done.stdout + done.stderr).split())


REFUSED = [
    ("ringmaster", (), "ringmaster names several; it must be one of ringmaster/p2p,"),
    ("mine:claims_raise", (), "mine.py, line 7, in claim_of_mine"),
    ("mine:sound", ("--attention-xfails", "none.txt"), "--attention-xfails: [Errno 2] No such file or directory"),
    ("mine:sound", ("--examples", "none"), "'none' is no number of examples; it must be an integer from 1 up"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, options, said", REFUSED, ids=[f"{name} {' '.join(o)}" for name, o, _ in REFUSED])
def test_uncheckable_adapters_are_refused_before_tests(
    folder: Path, name: str, options: tuple[str, ...], said: str
) -> None:
    status, output = run_pytest(folder, "--attention", name, *options)
    assert status == pytest.ExitCode.USAGE_ERROR and said in output, output
    assert "Traceback" not in output and "INTERNALERROR" not in output


WRONG = [
    ("raises", "rank 0 raised in attend of mine:raises (world of 1): RuntimeError: not today"),
    ("dies", "rank 0 ended with exit code 5 in attend of mine:dies (world of 1)"),
    ("hangs", "no answer within 10 s from rank 0 in attend of mine:hangs (world of 1)"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, said", WRONG, ids=[name for name, _ in WRONG])
def test_wrong_adapters_are_named_by_function(folder: Path, name: str, said: str) -> None:
    chosen = "every_rank or types_shapes or later_tokens or NaN"
    status, output = run_pytest(folder, "--attention", f"mine:{name}", "-k", chosen, "-rs", "--examples", "30")
    assert status == pytest.ExitCode.TESTS_FAILED and said in output, output
    frames = re.findall(r'File "([^"]+)", line', output)
    assert not [file for file in frames if file.startswith(str(ROOT / "verification"))], frames
    assert "not checked: " in output and "see every_rank_answers" in output, output
    assert "1 failed, 3 skipped" in output, output


@pytest.mark.slow
def test_a_session(folder: Path) -> None:
    """Two attentions beside own tests, on two workers; one law is broken, expectedly in one run."""
    names = ("--attention", "mine:sound", "--attention", "mine:peeks")
    chosen = ("-k", "own or later_tokens or error_does or gradients", "--examples", "20", "-rfsx")
    status, output = run_pytest(folder, *names, *chosen, "-n", "2", "test_own.py")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "FAILED mine:peeks::later_tokens_change_nothing - counter-example: later tokens" in output, output
    assert "error does not grow with ranks: does not apply: the claim has no bfloat16" in output, output
    replay = "replay --attention mine:peeks .verification/failures/wrong-result-world-1-"
    assert replay in output.replace(" \\ ", " "), output  # lines of the shell break where the interpreter's path says
    assert "2 failed, 3 passed, 2 skipped" in output, output
    (folder / "xfails.txt").write_text(
        "# known\nmine:peeks: later tokens change nothing\nmine:peeks: gradients  # of v\n"
    )
    deselected = ("--deselect", "mine:sound::gradients", "--attention-xfails", "xfails.txt", "--hypothesis-seed", "5")
    status, output = run_pytest(folder, *names, *chosen, *deselected)
    assert status == 0 and "1 passed, 2 skipped, " in output and "2 xfailed" in output, output
    assert "named in xfails.txt" in output and "test_own" not in output


class Planned(Conformance):
    """A suite whose searches have these outcomes, by the first title."""

    outcomes: dict[str, Outcome]

    def _explore(self, titles: tuple[str, ...]) -> Outcome:
        return self.outcomes[titles[0]]


def planned(**changes: Outcome) -> Planned:
    suite = Planned("mine:sound")
    suite.outcomes = {title: Outcome(held=5) for title in SLUGS.values()} | {SLUGS[k]: v for k, v in changes.items()}
    return suite


def failure(broken: str, kind: str = "wrong result") -> CounterExample:
    return CounterExample(
        kind, broken, 2, {"case": {}}, Path("file"), f"{broken} is broken", "gloo", ("replay", "file")
    )


GRADIENTS, ANSWERS, LATER = "gradients", "every rank answers", "later tokens change nothing"
ALL = set(SLUGS.values())


def test_failures_fail_their_own_property_alone() -> None:
    suite = planned(every_rank_answers=Outcome([failure(GRADIENTS)], held=7))
    for title in SLUGS.values():
        if title != GRADIENTS:
            suite.check(title, ALL)
    with pytest.raises(CounterExamples, match="gradients is broken"):
        suite.check(GRADIENTS, ALL)


def test_dead_ranks_break_every_selected_property() -> None:
    crash = Outcome([failure(ANSWERS, "rank crash")], held=7)
    suite = planned(gradients=crash)
    with pytest.raises(CounterExamples, match="every rank answers is broken"):
        suite.check(GRADIENTS, {GRADIENTS})
    suite = planned(every_rank_answers=crash)
    suite.check(GRADIENTS, {ANSWERS, GRADIENTS})


def test_properties_without_examples_are_skipped() -> None:
    suite = planned(every_rank_answers=Outcome([failure(ANSWERS)]))
    with pytest.raises(CounterExamples):
        suite.check(ANSWERS, ALL)
    with pytest.raises(NotChecked, match="no example got as far, see every_rank_answers"):
        suite.check(GRADIENTS, ALL)
    with pytest.raises(NotChecked, match="no plain example holds, see every_rank_answers"):
        suite.check(LATER, ALL)
    suite = planned(later_tokens_change_nothing=Outcome(without_subjects="does not apply: no causal pattern"))
    with pytest.raises(NotChecked, match="no causal pattern"):
        suite.check(LATER, ALL)
    suite = planned(gradients=Outcome())
    with pytest.raises(CounterExamples, match="mine:sound supports none of the Cases drawn"):
        suite.check(GRADIENTS, {GRADIENTS})


def test_expected_failures_leave_the_rest() -> None:
    suite = planned(every_rank_answers=Outcome(held=3, expected=Counter({GRADIENTS: 4})))
    with pytest.raises(CounterExamples, match="4 examples failed, as expected"):
        suite.check(GRADIENTS, ALL)
    suite.check("output and lse", ALL)


def test_no_law_is_run_after_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost a timeout."""
    searched: list[str] = []

    class Hanging:
        examples, expected_failures = 4, Counter[str]()

        def __init__(self, experiment: Experiment, *others: object, **named: object) -> None:
            searched.append(experiment.name)

        def explore(self, examples: int, seed: int) -> list[CounterExample]:
            return [failure(ANSWERS, RankHang.kind)]

    monkeypatch.setattr(conformance, "Search", Hanging)
    monkeypatch.setattr(conformance, "save", lambda found, *others: found)
    suite = Conformance("tests.support.peer_examples:sound")
    monkeypatch.setattr(suite, "_on", lambda world, experiment: None)
    with pytest.raises(CounterExamples, match="every rank answers is broken"):
        suite.check(ANSWERS, ALL)
    with pytest.raises(NotChecked, match="ranks hang, see every_rank_answers"):
        suite.check(LATER, ALL)
    assert searched == ["peer mine"]


@pytest.mark.slow
def test_the_adapter_to_copy_holds_by_default(folder: Path) -> None:
    status, output = run_pytest(folder, "--attention", "my_attention:adapter", "-rs", "--examples", "20")
    assert status == 0 and "11 passed, 5 skipped" in output, output
    assert "does not apply: the claim has no bfloat16 on all ranks" in output
    assert "does not apply: the claim has one group, order and exchange only" in output
    assert "does not apply: it promises no bits" in output


@pytest.mark.slow
def test_example_of_the_page_finds_wrong_kernels(folder: Path) -> None:
    status, output = run_pytest(folder, "test_my_kernel.py")
    assert status == 0, output
    code = (folder / "test_my_kernel.py").read_text()
    (folder / "test_wrong_kernel.py").write_text(code.replace("is_causal=causal", "is_causal=False"))
    status, output = run_pytest(folder, "test_wrong_kernel.py")
    assert status == 1 and re.search(r"out is .* at batch 0, token 0, head 0, dim 0, expected", output), output
