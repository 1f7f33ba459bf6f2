"""Syntactic changes: they are brought into ranks, found or not, remembered, and summed up."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from verification.cli import mutate as syntactic
from verification.cli.mutate import read_results, sample
from verification.mutants.defect import NotSane
from verification.mutants.syntactic import judging, targets
from verification.mutants.syntactic.judging import Task, judge
from verification.mutants.syntactic.mutations import Mutation, NoGenerator, mutation, mutations_of
from verification.mutants.syntactic.page import (
    SURVIVORS,
    Reason,
    Record,
    counts,
    explained,
    interval,
    markdown,
    rate,
    read_reasons,
)

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[3]
SEED = 5


def change(file: str, was: str, becomes: str) -> Mutation:
    source = (ROOT / file).read_text()
    assert source.count(was) == 1, (file, was)
    return mutation(file, source, source.replace(was, becomes), "by hand")


WRONG = (
    "ring/compute/accumulator.py",
    "merged = (weight / share).unsqueeze(-1) * out + (new_weight / share).unsqueeze(-1) * new_out",
    "merged = (weight / share).unsqueeze(-1) * out - (new_weight / share).unsqueeze(-1) * new_out",
)
SAME = ("ring/strided_view.py", "@lru_cache(maxsize=256)", "@lru_cache(maxsize=257)")


@pytest.fixture(autouse=True)
def no_outcomes_of_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(syntactic, "KEPT", tmp_path / "none")


# --- one change -------------------------------------------------------------------------------------------------------


def test_a_wrong_change_is_killed_by_a_property() -> None:
    record = judge(Task(change(*WRONG), SEED, 0, 30))
    assert (record.outcome, record.kind) == ("properties", "wrong result"), "of whichever property is drawn first"
    assert 1 <= record.examples <= 30
    lines = (ROOT / WRONG[0]).read_text().splitlines()
    assert (lines[record.line - 1].strip(), record.function) == (WRONG[1], "merge")


def test_a_change_that_does_not_import_is_killed() -> None:
    record = judge(Task(change(WRONG[0], "import torch\n", "import torch\n1 / 0\n"), SEED, 0, 5))
    assert (record.outcome, record.by, record.examples) == ("properties", "every rank answers", 1)
    assert "ZeroDivisionError" in str(record.message)


def test_a_change_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "TIMEOUT", 1)
    record = judge(Task(change(WRONG[0], WRONG[1], "while True:\n        pass"), SEED, 0, 5))
    assert (record.outcome, record.kind) == ("properties", "rank crash")


@pytest.mark.slow
def test_an_equivalent_change_survives_examples_and_tests() -> None:
    shown = judge(Task(change(*SAME), SEED, 0, 10))
    assert (shown.outcome, shown.examples, shown.tested) == ("survived", 10, False)
    tested = judge(Task(change(*SAME), SEED, 10, 10, tests=True))
    assert (tested.outcome, tested.examples, tested.tested) == ("survived", 10, True)


@pytest.mark.slow
def test_unit_tests_kill_what_they_see() -> None:
    record = judge(Task(change("reference/pattern.py", "at least one Branch, got", "got"), SEED, 0, 5, tests=True))
    assert record.outcome == "survived"  # a wording
    wrong = change("reference/pattern.py", 'raise ValueError(f"heads {self.heads!r} of', 'raise TypeError(f"heads of')
    record = judge(Task(wrong, SEED, 0, 5, tests=True))
    assert record.outcome == "tests"
    assert str(record.by).startswith("tests/reference/test_pattern.py::")


def test_a_fault_of_the_tool_is_no_verdict() -> None:
    record = judge(Task(replace(change(*SAME), file="ring/missing.py"), SEED, 0, 5))
    assert (record.outcome, record.kind) == ("not run", "Unavailable")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"ring/compute/accumulator.py": [change(*WRONG)], "ring/strided_view.py": [change(*SAME)]}
    monkeypatch.setattr(syntactic, "mutations_of", made.__getitem__)
    results, summary, outcomes = tmp_path / "results", tmp_path / "summary", tmp_path / "outcomes"
    arguments = ["--files", *made, "--jobs", "1", "--results", str(results), "--summary", str(summary)]
    arguments += ["--json", str(outcomes), "--limit"]
    assert syntactic.main([*arguments, "8"]) in (0, 1)
    lines = results.read_text().splitlines()
    assert [(line["outcome"], line["tested"]) for line in map(json.loads, lines)] == [
        ("properties", False), ("survived", False), ("survived", True),
    ]  # fmt: skip
    assert [entry["outcome"] for entry in json.loads(outcomes.read_text())] == ["properties", "survived"]
    assert "| `ring/strided_view.py` | 1 | 0 | 0 | 0 |" in summary.read_text()

    results.write_text("\n".join([*lines, lines[0][:40]]))  # interrupted while writing
    assert syntactic.main([*arguments, "8"]) in (0, 1)
    assert results.read_text().splitlines()[:3] == lines
    assert len(read_results(results)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("verdict", "tested"), [("equivalent", False), ("performance", False), ("gap", True)])
def test_settled_survivors_may_be_left_out_of_the_unit_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, tested: bool
) -> None:
    made = change(*SAME)
    monkeypatch.setattr(syntactic, "mutations_of", {"ring/strided_view.py": [made]}.__getitem__)
    monkeypatch.setattr(syntactic, "read_reasons", lambda path: {record_of(made).place: Reason(verdict, "because")})
    results = tmp_path / "results"
    arguments = [
        "--files",
        "ring/strided_view.py",
        "--jobs",
        "1",
        "--limit",
        "3",
        "--unsettled",
        "--results",
        str(results),
    ]
    assert syntactic.main(arguments) == (1 if verdict == "gap" else 0)
    assert [json.loads(line)["tested"] for line in results.read_text().splitlines()] == [False, True][: 1 + tested]


def test_a_run_begins_with_the_outcomes_of_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = change(*WRONG)
    monkeypatch.setattr(syntactic, "mutations_of", {made.file: [made]}.__getitem__)
    syntactic.KEPT.write_text(json.dumps(asdict(replace(record_of(made), outcome="properties"))) + "\n")
    results = tmp_path / "results"
    assert syntactic.main(["--files", made.file, "--results", str(results)]) == 0
    assert results.read_text() == "", "nothing was left to judge"


def test_outcomes_of_other_machines_can_be_read() -> None:
    file = Path(judging.__file__).with_name("outcomes.jsonl")
    known = read_results(file)
    assert len(known) == len(file.read_text().splitlines()), "each is there once"
    assert all(record.outcome in ("properties", "tests", "survived") for record in known.values())


@pytest.mark.parametrize("sound", [True, False])
def test_no_outcome_is_believed_before_code_without_changes_survives(sound: bool) -> None:
    unchanged, first, other = Future[Record](), Future[Record](), Future[Record]()
    survived, killed = record_of(change(*SAME)), replace(record_of(change(*WRONG)), outcome="properties")
    believed = judging._believed({unchanged: "shown"}, {first: "shown", other: "shown"})
    first.set_result(killed)
    unchanged.set_result(survived if sound else killed)
    other.set_result(survived)
    if sound:
        assert Counter(record.outcome for record in believed) == {"properties": 1, "survived": 1}
    else:
        with pytest.raises(NotSane, match="without any change"):
            list(believed)


def test_more_examples_are_for_survivors_only() -> None:
    killed, survivor = change(*WRONG), change(*SAME)
    known = {
        killed.key: replace(record_of(killed), outcome="properties"),
        survivor.key: replace(record_of(survivor), examples=100, tested=True),
    }
    task = judging._task
    assert task(killed, known, SEED, 500, False) is None
    assert task(survivor, known, SEED, 100, False) is None
    assert task(survivor, known, SEED, 500, False) == Task(survivor, SEED, 100, 500)
    assert task(survivor, known, SEED + 1, 100, False) == Task(survivor, SEED + 1, 0, 100)
    assert task(survivor, known, SEED, 500, True) is None
    assert task(survivor, {}, SEED, 100, False) == Task(survivor, SEED, 0, 100)


def test_a_line_that_is_no_outcome_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text('{"file": 1}\n{"file": 2}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_results(file)


def test_an_unknown_file_ends_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert syntactic.main(["--files", "ring/none.py", "--results", str(tmp_path / "results")]) == 2
    assert "--files must be of" in capsys.readouterr().err


# --- the summary ------------------------------------------------------------------------------------------------------


def record_of(made: Mutation) -> Record:
    return Record(
        **made.described(), outcome="survived", by=None, kind=None, message=None, examples=9, tested=True, seed=SEED,
        seconds=0.5,
    )  # fmt: skip


def test_counts_add_up() -> None:
    one = record_of(change(*SAME))
    outcomes = ["properties", "properties", "tests", "survived", "survived", "survived", "survived", "not run"]
    records = [replace(one, outcome=outcome, after=f"{i}") for i, outcome in enumerate(outcomes)]
    verdicts = {3: "equivalent", 4: "performance", 5: "gap"}
    reasons = {records[i].place: Reason(verdict, "because") for i, verdict in verdicts.items()}
    judged = explained(records, reasons)
    assert counts(judged) == (8, 1, 2, 1, 1, 1, 1, 1)
    assert counts(judged)[0] == sum(counts(judged)[1:])
    assert rate(judged) == 3 / 5  # of two killed by properties, one by tests, a gap and an unexplained one
    assert rate(explained(records[-1:], {})) == 1.0
    assert "A sample of 8 of the 80 small changes" in markdown(records, reasons, SEED, [one.file], [], "abc", 80)
    text = markdown(records, reasons, SEED, [one.file], ["ring/plan/rows.py"], "abc", 8)
    assert "Every small change of the code of commit `abc`" in text and "Not judged: `ring/plan/rows.py`." in text
    assert "The 4 survivors have seen 9 to 9 examples in the simulation, and 4 of them the unit tests." in text
    assert "| `ring/strided_view.py` | 8 | 1 | 2 | 1 | 1 | 1 | 1 | 1 | 60.0% |" in text
    assert Counter(line for line in text.splitlines() if line.startswith("## ")) == {
        "## Not run": 1, "## Unexplained (1)": 1, "## Gaps: a legal call can tell, and no check does (1)": 1,
    }  # fmt: skip


def test_what_a_sample_says_of_all() -> None:
    """The numbers of Brown, Cai, DasGupta (2001), and no more than is known."""
    one = record_of(change(*SAME))
    killed = [replace(one, outcome="tests", after=f"{i}") for i in range(10)]
    judged = explained([*killed[:9], replace(one, after="10")], {})
    assert interval(judged) == pytest.approx((0.596, 0.982), abs=1e-3)
    assert interval(explained(killed, {})) == pytest.approx((0.722, 1.0), abs=1e-3)
    assert interval([]) == (0.0, 1.0)


def test_a_sample_is_part_of_a_greater_one() -> None:
    found = {file: mutations_of(file) for file in ("ring/budget.py", "ring/precision.py")}
    every = {change.key for changes in found.values() for change in changes}
    few, more = ({change.key for changes in sample(found, count).values() for change in changes} for count in (5, 20))
    assert len(few) == 5 and len(more) == 20 and few < more < every
    assert sample(found, 10**6) == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    (
        ('[[survivor]]\nfile = "a"\n', "needs file"),
        ('[[survivor]]\nfile="a"\nfunction=""\nbefore="b"\nafter="c"\nverdict="fine"\nreason="d"\n', "verdict must be"),
        ('[[survivor]]\nfile="a"\nfunction=""\nbefore="b"\nafter="c"\nverdict="gap"\nreason=""\n', "with a reason"),
        (2 * '[[survivor]]\nfile="a"\nfunction=""\nbefore="b"\nafter="c"\nverdict="gap"\nreason="d"\n', "twice"),
    ),
)
def test_reasons_that_do_not_do_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "survivors.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_reasons(file)


def test_every_reason_is_for_a_line_that_is_there() -> None:
    for file, _, before, after in read_reasons(SURVIVORS):
        lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
        assert before in lines, (file, before)
        assert before != after


# --- where the changes come from --------------------------------------------------------------------------------------


def test_changes_of_a_file_are_programs_and_distinct() -> None:
    made = mutations_of("ring/strided_view.py")
    assert len({one.key for one in made}) == len(made) > 50
    for one in made:
        compile(one.source, one.file, "exec")
    decorators = [(one.before, one.after) for one in made if one.operator == "RemoveDecorator"]
    source = (ROOT / "ring/strided_view.py").read_text()
    assert decorators == [(line.strip(), "") for line in source.splitlines() if line.strip().startswith("@")]
    assert ("_head_index", "@lru_cache(maxsize=257)") in {(one.function, one.after) for one in made}


def test_annotations_and_texts_of_errors_are_left_alone() -> None:
    for one in mutations_of("ring/agreement.py"):
        assert "int & None" not in one.after
        assert not one.before.startswith(('f"', "f'")) or "layout" in one.before, one


def test_a_missing_generator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cosmic_ray.plugins", None)  # as if it were not installed
    with pytest.raises(NoGenerator, match="requirements-mutate.txt"):
        mutations_of("ring/strided_view.py")


# --- what is changed, and which tests see it --------------------------------------------------------------------------


def test_every_module_is_changed_unless_only_gpus_run_it() -> None:
    files = targets.files()
    assert {"ring/attention.py", "ring/plan/plan.py", "ring/comm/transport.py", "reference/pattern.py"} <= set(files)
    assert not set(files) & set(targets.files_on_gpus())
    assert all((ROOT / file).is_file() for file in (*files, *targets.files_on_gpus()))


def test_what_only_gpus_run_is_there() -> None:
    for file, names in targets.functions_on_gpus().items():
        assert set(names) <= defined(ast.parse((ROOT / file).read_text())), file


def defined(where: ast.Module | ast.ClassDef, before: str = "") -> set[str]:
    """Functions, classes and methods (`Class.method`)."""
    found: set[str] = set()
    for node in where.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(before + node.name)
        if isinstance(node, ast.ClassDef):
            found |= defined(node, f"{before}{node.name}.")
    return found


def test_a_method_that_only_gpus_run_is_left_out_and_its_class_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(change(*SAME), file="ring/some.py")
    monkeypatch.setattr(targets, "functions_on_gpus", lambda: {made.file: ["Kept.method", "alone", "Whole"]})
    left_out = ("Kept.method", "Kept.method.inner", "alone", "alone.inner", "Whole", "Whole.method")
    for function in (*left_out, "Kept", "Kept.method_too", "Kept.other", "lonely", "alone_too", "method", ""):
        assert targets.runs_on_gpus_only(replace(made, function=function)) == (function in left_out)
    assert not targets.runs_on_gpus_only(replace(made, file="ring/other.py", function="alone"))


def test_the_tests_of_a_file_mirror_it() -> None:
    for file in targets.files():
        tests = targets.tests_of(file)
        assert tests and all((ROOT / test).is_file() for test in tests), file
        mirrored = Path("tests", file).with_name(f"test_{Path(file).name}")
        assert tests[0] == mirrored.as_posix() or not (ROOT / mirrored).is_file(), file
    assert "tests/ring/test_attention_on_ranks.py" not in targets.tests_of("ring/attention.py")
    assert set(targets.tests_of("ring/plan/schedule.py")) > {"tests/ring/plan/test_plan.py", *targets.WHOLE_CALLS}
