"""Records say their kind and are read again, also older ones; what is no record is refused in one line, nothing run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from ring.regular_file import MAX_BYTES
from tests.support.plain_case import plain
from tests.support.training_cases import small_step
from verification.__main__ import main
from verification.case import Case
from verification.check.laws import LAWS, Law
from verification.check.laws.refusal_cases import MISTAKES
from verification.experiments import law_experiment
from verification.problems.links import Links
from verification.problems.long_problems import LongProblem
from verification.record_kinds import KINDS, Record, kind_of
from verification.replay import registry
from verification.run.backends import SimBackend, Unavailable
from verification.strategies.cases import cases

FOLDER, FINDINGS = Path(__file__).parent / "saved_before", Path(__file__).parents[3] / "verification/peers/findings"


def as_json(case: Case) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(case.to_json())
    return data


def case(**changes: Any) -> dict[str, Any]:
    """A Case as JSON has it; the changes need not be ones that a Case takes."""
    return as_json(plain(2)) | changes


def mistakes(*pairs: Any) -> dict[str, Any]:
    return {"mistakes": list(pairs), "compiled": False, "new_group": False, "without_page": None}


def law(name: str, how: Any, data: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"law": name, "case": case() if data is None else data, "how": how}


def ordered(**changes: Any) -> dict[str, Any]:
    order = [["forward", 0], ["forward", 1], ["backward", 1], ["backward", 0]]
    how = {"members": None, "groups": [0, 0], "names": [None, "b"], "order": order, "deviation": None}
    return law("calls are not confused", how | changes, as_json(plain(3)))


def fault(case: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"fault": {"kind": "kill", "rank": 1, "post": 0, "send": 0} | changes, "case": case}


CAUSAL = as_json(plain(2, pattern=Pattern.dense(True)))
SPLIT = as_json(plain(2, pattern=Pattern((Branch(heads=range(0, 2)),)), heads=3, kv_heads=3))
LATER, ANYWHERE = "later tokens change nothing", "same on any ranks, layout, exchange"
PERMUTED, POISONED = "batches and heads permute", "NaN and inf propagate"
MISTAKEN, GROWTH = "wrong calls refused everywhere", "error does not grow with ranks"
COMMON = next(name for name, mistake in MISTAKES.items() if mistake.who == "all")
LIKE = "no call takes another for its like"
MOVED = {"group": None, "order": "zigzag", "cuts": None, "exchange": "direct", "bucket": None}
LONG = {"world": 2, "tokens": 128, "kind": "dense float32"}
OWN = {"world": 2, "tokens": 64, "kind": "own", "line": "tokens=64 causal=true"}
STEP = {"step_peer": "fairscale/guarded", "training_case": small_step(2).to_dict()}
CALL = {"peer": "torchscale", "case": case()}
REFUSED: list[tuple[Any, str]] = [
    (7, "must be a JSON object, got int"),
    ({}, "missing fields"),
    ({"peer": "os:system", "case": {}}, "a replay imports no module that a file names; if it is yours, write --attent"),
    ({"peer": "os:system", "law": "x", "case": {}, "how": {}}, "imports no module that a file names"),
    ({"step_peer": "os:system", "training_case": {}}, "imports no module that a file names"),
    ({"model": "os:system", "case": {}}, "a replay imports no module that a file names; if it is yours, write --model"),
    ({"peer": "os", "case": case()}, "'os' is no peer"),
    (case(tokens=10**18), "tokens is 1000000000000000000; it must be at most"),
    (case(world=10**6), "world is 1000000; it must be at most 1024"),
    (case(tokens=2**16), "scores; at most"),
    (case(tokens=2**14, head_dim=2**12, batch=2**6), "numbers, "),
    (case(pattern={"branches": [{"segment_length": 10**30}]}), "an integer of pattern is 10000000000000000000"),
    (case(kernel="cudnn"), "kernel is 'cudnn' and device is 'cpu'; device must be 'cuda' then"),
    (case(kernel="cudnn", device="cuda", head_dim=8),
     "kernel is 'cudnn' on device 'cuda', dtype is 'float32', head dims are (8, 8), softcap is None; that kernel"),
    (case(kernel="fa4"), "kernel is 'fa4' and device is 'cpu'; device must be 'cuda' then"),
    (case(kernel="fa4", device="cuda", dtype="bfloat16", head_dim=40), "equal head dims, one of (32, 64, "),
    (case(kernel="flash", softcap=1.0), "softcap is 1.0; that kernel takes no value_dim and no softcap"),
    (case(value_dim=10**6), "value_dim is 1000000; it must be at most 4096"),
    ({"real_size": {"world": 2, "tokens": 10**18, "seed": 0}}, "tokens is 1000000000000000000;"),
    ({"real_size": {"ranks": 2}}, "a RealSizeProblem: unknown field ranks, missing field world"),
    (law(["x"], {}), "law is ['x']; it must be text"),  # type: ignore[arg-type]
    (law("gravity", {}), "law is 'gravity'; it must be one of"),
    ({"law": LATER, "case": CAUSAL}, "must be an object with the fields law, case, how"),
    (law(LATER, {}, CAUSAL), "how must be an object with the fields position, got the fields"),
    (law(LATER, {"position": "1"}, CAUSAL), "position of how is '1'; it must be an integer from 0"),
    (law(LATER, {"position": 1}), "applies only to Cases with a causal pattern"),
    (law(ANYWHERE, MOVED | {"order": "random"}), "order is 'random'; it must be one of"),
    (law(ANYWHERE, MOVED, case(values="huge")), "values other than 'huge'"),
    (law(PERMUTED, {"batch": [0], "kv_heads": [0]}), "kv_heads of how is [0]; it must be an order"),
    (law(PERMUTED, {"batch": [0], "kv_heads": [0, 2, 1]}, SPLIT), "must leave the heads of every"),
    (law(POISONED, {"token": 12, "tensor": "v", "infinite": False}), "token of how is 12;"),
    (law(POISONED, {"token": 1, "tensor": "q", "infinite": True}), "infinite of how is True"),
    (law(MISTAKEN, mistakes(["bucket of 0", 0])), "a mistake of how is 'bucket of 0'; it must be one of"),
    (law(MISTAKEN, mistakes(["another bucket than the others", None])), "it must be an index"),
    (law(MISTAKEN, mistakes([COMMON, 1])), "all ranks make it together"),
    (law(LIKE, {}), "how is {}; it must be an object with some of the fields"),
    (law(LIKE, {"causal": 1}), "causal of how is 1; it must be True or False"),
    (law(LIKE, {"shifted": 0}), "shifted of how is 0; that branch must have one offset, and a"),
    (law(GROWTH, {"shift": 1}), "applies only to Cases with dtype 'bfloat16'"),
    (ordered(members=[0, 1, 2]), "members of how is [0, 1, 2]; it must be some ranks"),
    (ordered(members=[2, 0]), "members of how is [2, 0]; it must be ascending"),
    (ordered(groups=[0, 1]), "they must be of 1 to 4 calls, groups numbers up to 0"),
    (ordered(names=[None, 3]), "names of how is [None, 3]"),
    (ordered(order=[["backward", 0], ["forward", 0]]), "a call must have one forward, before its backwards"),
    (ordered(order=[["sideways", 0]]), "a direction of how is 'sideways'"),
    (ordered(order=[["forward", 2]]), "its calls must be numbers below 2"),
    (ordered(deviation=["skips", 0, 1]), "deviation of how is ['skips', 0, 1]; it must be null or one of"),
    (ordered(more=1), "how must be an object with the fields"),
    (fault(case(), kind="burn"), "kind is 'burn'; it must be"),
    (fault(case(), post=-1), "post is -1; it must be"),
    (fault(case(), more=1), "how must be an object with the fields kind, rank, post, send"),
    (fault(as_json(plain(2, pattern=Pattern((Branch(6),))))), "the ranks of case send no messages"),
    (CALL | {"peer": 3}, "peer is 3; it must be text"),
    (CALL | {"peer": "no.such:peer"}, "a replay imports no module that a file names"),
    (CALL | {"peer": "this"}, "'this' is no peer; it must be package.module:adapter, or one of"),
    (case(backward=False), "backward is False; it must be True: only peers run forward alone"),
    (STEP | {"step_peer": 3}, "step_peer is 3; it must be text"),
    (STEP | {"training_case": {}}, "a TrainingCase: missing fields"),
    (STEP | {"more": 1}, "a counter-example of a peer in a training step"),
    ({"kind": "gravity"} | case(), "kind is 'gravity'; it must be one of peer law, peer, "),
    ({"kind": ["peer"]} | CALL, "kind is ['peer']; it must be one of"),
    ({"kind": "law"} | CALL, "a counter-example of a law must be an object with the fields law, case, how"),
    ({"kind": "peer", "peer": "os:system", "case": {}}, "a replay imports no module that a file names"),
    ({"kind": "case"} | CALL, "a Case: unknown fields case, peer"),
    ({"links": {"world": 2}, "before": []}, "before must be null, or a list of examples, in the record of an example"),
    ({"links": 1}, "a Links must be a JSON object, got int"),
    ({"links": {"world": "\x1b[31m"}}, r"world is '\x1b[31m'; it must be an integer from 1 to 65536"),
    ({"links": {"world": 2}, "long": LONG}, "links between ranks must be an object with the fields links"),
    ({"long": [LONG]}, "a LongProblem must be a JSON object, got list"),
    ({"long": {"tokens": 64}}, "a LongProblem: missing fields kind, world"),
    ({"long": LONG | {"world": None}}, "world is None; it must be an integer"),
    ({"long": LONG | {"tokens": 10**12}}, "tokens is 1000000000000; it must be at most"),
    ({"long": LONG | {"kind": []}}, "kind is "),
    ({"long": OWN | {"line": 5}}, "line is 5"),
    ({"long": OWN | {"line": "tokens=64 heads=9999999999"}}, "an integer of line is 9999999999"),
    ({"long": OWN | {"line": "tokens=64 world=3"}}, "world is 3"),
]  # fmt: skip


@pytest.mark.parametrize("record, said", REFUSED, ids=[said for _, said in REFUSED])
def test_refuses_files_that_are_no_counter_examples(record: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        registry.parse(record)


@pytest.mark.parametrize("record", (fault(case()), CALL, STEP), ids=("fault", "peer", "step"))
def test_refuses_a_simulation_of_what_needs_processes(record: dict[str, Any]) -> None:
    with pytest.raises(Unavailable, match="argument --backend: a .* needs processes; write gloo, not sim"):
        registry.parse(record).prepare(SimBackend())


@pytest.mark.parametrize(
    "content",
    ["", "{", "[" * 100_000, "\x00", "1" * 5000, "7",
     *(json.dumps(case(**x)) for x in ({"kernel": "x" * 10**5}, {"cuts": [10**5 * "1"]}, {"y" * 10**5: 1})),
     " " * MAX_BYTES + json.dumps(case())],
    ids=range(10),
)  # fmt: skip
def test_a_refusal_is_one_short_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "case.json"
    file.write_text(content)
    assert main(("replay", str(file))) == 2
    error = capsys.readouterr().err
    assert f"argument FILE: cannot read a counter-example from {file}: " in error
    assert error.count("\n") == 1 and len(error) < 1000
    assert ("more than 1048576 bytes" in error) == (len(content) > MAX_BYTES)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@given(data=st.data())
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
def test_records_of_drawn_laws_are_read_again(law: Law, data: st.DataObject) -> None:
    subject = data.draw(law.draw(data.draw(st.sampled_from([p for p in (1, 2, 5) if p >= law.fewest_ranks]))))
    record = json.loads(json.dumps(law_experiment(law).record_of(subject)))
    saved = registry.parse(record)
    assert record["kind"] == "law" and saved.experiment is not None and saved.experiment.name == law.name
    assert saved.subject == (subject[0], json.loads(json.dumps(subject[1])))


@given(case=cases(3))
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_records_of_drawn_cases_are_read_again(case: Case) -> None:
    record = json.loads(json.dumps(Record("case", case.to_dict()).to_dict()))
    assert registry.parse(record).subject == case == Case.from_json(json.dumps(record))
    assert registry.parse(law(MISTAKEN, mistakes([COMMON, None]))).world == 2


# Records of every kind, saved before records said it.
BEFORE = {
    FOLDER / f"{name}.json": kind
    for name, kind in {
        "example": "case", "after_another": "case", "law": "law", "wrong_calls": "law", "fault": "fault",
        "links": "links", "long": "long", "model": "model", "real_size": "real size", "training": "training",
    }.items()
} | {
    FINDINGS / "torch_sdpa_nan.json": "peer law", FINDINGS / "torch_sdpa_scale.json": "peer",
    FINDINGS / "diffusers_ring_checkpointing.json": "step peer",
}  # fmt: skip


def test_every_kind_was_saved_before_and_has_a_replayer() -> None:
    assert {*BEFORE.values(), "server"} == {*KINDS} == {*registry.REPLAYERS}  # those of servers always said it
    assert {path for path in BEFORE if path.parent == FOLDER} == {*FOLDER.iterdir()}


@pytest.mark.parametrize("file, kind", BEFORE.items(), ids=lambda value: getattr(value, "stem", None))
def test_tells_the_kind_of_records_without_one(file: Path, kind: str) -> None:
    old = json.loads(file.read_text())
    saved = registry.parse(old, old.get("model"))
    assert "kind" not in old and saved.record.kind == kind_of(old) == kind
    new = json.loads(json.dumps(saved.record.to_dict()))
    assert new == {"kind": kind, **old}
    assert registry.parse(new, old.get("model")).subject == saved.subject


@pytest.mark.parametrize("name", ("example", "law", "wrong_calls", "after_another"))
def test_records_of_an_earlier_folder_layout_are_replayed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """These files were written before the modules were moved into folders: names of laws and mistakes last."""
    file = FOLDER / f"{name}.json"
    assert main(("replay", str(file), "--backend", "sim")) == 0
    assert "1 example" in capsys.readouterr().out


def test_problems_of_torchrun_are_read() -> None:
    assert registry.parse({"links": {"world": 3}}).case == Links(3)
    assert registry.parse({"long": LONG}).case == LongProblem(2, 128, "dense float32")
    assert registry.parse({"long": OWN}).case == LongProblem(**OWN)  # type: ignore[arg-type]


@pytest.mark.ranks
def test_a_peer_that_is_not_installed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peer.json"
    file.write_text(json.dumps(CALL))
    assert main(("replay", str(file))) == 2
    error = capsys.readouterr().err
    assert "torchscale" in error and error.count("\n") == 1
