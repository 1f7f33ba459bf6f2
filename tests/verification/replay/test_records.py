"""Files to replay that were edited, or never were counter-examples: refused in one line, status 2, nothing run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from verification.__main__ import main
from verification.case import Case
from verification.check.laws import LAWS, Law
from verification.check.laws.refusal_cases import MISTAKES
from verification.draw.cases import cases
from verification.replay import records, replay
from verification.replay.registry import SavedExample
from verification.runner import law_experiment


def as_json(case: Case) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(case.to_json())
    return data


def case(**changes: Any) -> dict[str, Any]:
    """A Case as JSON has it; the changes need not be ones that a Case takes."""
    return as_json(plain(2)) | changes


CAUSAL = as_json(plain(2, pattern=Pattern.dense(True)))
PACKED = Pattern.dense(documents=(4, 9)).to_dict()
SPLIT = as_json(plain(2, pattern=Pattern((Branch(heads=range(0, 2)),)), heads=3, kv_heads=3))
LATER, ANYWHERE, PERMUTED = (
    "later tokens change nothing",
    "same on any ranks, layout, exchange",
    "batches and heads permute",
)
POISONED, MISTAKEN, GROWTH = "NaN and inf propagate", "wrong calls refused everywhere", "error does not grow with ranks"
LIKE = "no call takes another for its like"
MOVED = {"group": None, "order": "zigzag", "cuts": None, "exchange": "direct", "bucket": None}


def mistakes(*pairs: Any) -> dict[str, Any]:
    return {"mistakes": list(pairs), "compiled": False, "new_group": False, "without_page": None}


def law(name: str, how: Any, data: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"law": name, "case": case() if data is None else data, "how": how}


def pattern(**changes: Any) -> dict[str, Any]:
    branch = {"segment_length": None, "dilation_rate": 1, "offset": 0, "heads": None} | changes
    return {"branches": [branch], "causal": False}


REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (7, "must be a JSON object, got int"),
    "a list": ([], "must be a JSON object, got list"),
    "nothing": ({}, "missing fields"),
    "tokens": (case(tokens=10**18), "tokens is 1000000000000000000; it must be at most"),
    "heads beyond": (case(heads=10**18, kv_heads=1), "heads is 1000000000000000000; it must be at most"),
    "no heads": (case(heads=0), "heads is 0; it must be an integer of at least 1"),
    "world beyond": (case(world=10**6), "world is 1000000; it must be at most 1024"),
    "bucket": (case(bucket=2**50), "bucket is 1125899906842624; it must be at most"),
    "scores": (case(tokens=2**16), "scores; at most"),
    "numbers": (case(tokens=2**14, head_dim=2**12, batch=2**6), "numbers, "),
    "seed": (case(seed=2**63), "seed is 9223372036854775808; it must be at most"),
    "segment": (case(pattern=pattern(segment_length=10**30)), "an integer of pattern is 10000000000000000000"),
    "a pattern that is none": (case(pattern=[]), "pattern must be a mapping"),
    "scale": (case(scale=float("nan")), "scale is nan; it must be"),
    "flash": (case(kernel="flash", lse="differentiated"), "kernel is 'flash' and lse is 'differentiated'; lse must be"),
    "cudnn on the CPU": (case(kernel="cudnn"), "kernel is 'cudnn' and device is 'cpu'; device must be 'cuda' then"),
    "cudnn: dtype": (
        case(kernel="cudnn", device="cuda", head_dim=8),
        "kernel is 'cudnn' on device 'cuda', dtype is 'float32', head_dim is 8; dtype must be 'float16' or",
    ),
    "real size: no tokens": ({"real_size": {"world": 2, "tokens": 0, "seed": 0}}, "tokens is 0; it must be"),
    "real size: beyond": ({"real_size": {"world": 2, "tokens": 10**18, "seed": 0}}, "tokens is 1000000000000000000;"),
    "real size: field": ({"real_size": {"ranks": 2}}, "real_size must be an object with the fields world"),
    "peer without case": ({"peer": "yunchang"}, "must be an object with the fields peer, case"),
    "peer: number": ({"peer": 3, "case": case()}, "peer is 3; it must be"),
    "law: unknown": (law("gravity", {}), "law is 'gravity'; it must be one of"),
    "law: removed": (law("what is kept is bounded", {}), "it is tested in tests/ring/caching"),
    "mistakes: removed": (law(MISTAKEN, mistakes(["bucket of 0", 0])), "a mistake of how is 'bucket of 0'; it must"),
    "law: without how": ({"law": LATER, "case": CAUSAL}, "must be an object with the fields law, case, how"),
    "later: nothing": (law(LATER, {}, CAUSAL), "how must be an object with the fields position, got the fields"),
    "later: text": (law(LATER, {"position": "1"}, CAUSAL), "position of how is '1'; it must be an integer from 0"),
    "later: not causal": (law(LATER, {"position": 1}), "is one of Cases with a causal pattern"),
    "anywhere: order": (law(ANYWHERE, MOVED | {"order": "random"}), "order is 'random'; it must be one of"),
    "anywhere: huge": (law(ANYWHERE, MOVED, case(values="huge")), "any but 'huge'"),
    "permuted: short": (law(PERMUTED, {"batch": [0], "kv_heads": [0]}), "kv_heads of how is [0]; it must be an order"),
    "permuted: branch": (law(PERMUTED, {"batch": [0], "kv_heads": [0, 2, 1]}, SPLIT), "must leave the heads of every"),
    "poisoned: beyond": (law(POISONED, {"token": 12, "tensor": "v", "infinite": False}), "token of how is 12;"),
    "poisoned: inf": (law(POISONED, {"token": 1, "tensor": "q", "infinite": True}), "infinite of how is True"),
    "mistakes: unknown": (law(MISTAKEN, mistakes(["dance", 0])), "a mistake of how is 'dance'"),
    "mistakes: all": (law(MISTAKEN, mistakes(["another bucket than the others", None])), "it must be an index"),
    "neighbour: none": (law(LIKE, {}), "how is {}; it must be an object with some of the fields"),
    "neighbour: causal": (law(LIKE, {"causal": 1}), "causal of how is 1; it must be True or False"),
    "neighbour: shifted": (law(LIKE, {"shifted": 0}), "shifted of how is 0; that branch must have one offset, and a"),
    "neighbour: documents": (law(LIKE, {"documents": [11, 2]}), "documents must add up to the 12 tokens"),
    "documents": (case(pattern=PACKED), "documents must add up to the 12 tokens of the sequence, got 13 in 2"),
    "neighbour: cuts": (law(LIKE, {"cuts": [0, 13, 12]}), "cuts is (0, 13, 12); it must be 3 non-decreasing offsets"),
    "growth: dtype": (law(GROWTH, {"shift": 1}), "is one of Cases with dtype 'bfloat16'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_counter_example_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, said = REFUSED[name]
    file = tmp_path / "case.json"
    file.write_text(json.dumps(record))
    assert main(("replay", str(file), "--backend", "sim" if "peer" not in name else "gloo")) == 2
    error = capsys.readouterr().err
    assert f"argument FILE: cannot read a counter-example from {file}: " in error and said in error, error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[" * 100_000, "\x00", "1" * 5000),
        *(
            json.dumps(case(**changes))
            for changes in ({"kernel": "x" * 10**5}, {"cuts": [10**5 * "1"]}, {"y" * 10**5: 1})
        ),
    ],
    ids=range(8),
)
def test_a_refusal_is_one_short_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "case.json"
    file.write_text(content)
    assert main(("replay", str(file))) == 2
    error = capsys.readouterr().err
    assert "cannot read a counter-example" in error and error.count("\n") == 1 and len(error) < 1000


def test_a_file_of_many_megabytes_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "case.json"
    file.write_text(" " * replay.MOST_BYTES + json.dumps(case()))
    assert main(("replay", str(file))) == 2
    assert "more than 1048576 bytes; a counter-example has at most that many\n" in capsys.readouterr().err


@pytest.mark.parametrize("dtype, scale", [("float32", 1024), ("bfloat16", 1024), ("float16", -1024)])
def test_a_case_of_which_little_is_known_is_judged_as_far_as_it_can_be(dtype: str, scale: int, tmp_path: Path) -> None:
    large = {"scale": scale, "score_scale": 1024, "values": "huge", "seed": 1, "lse": "differentiated"}
    record = as_json(plain(2, tokens=8, pattern=Pattern.dense(True))) | large | {"dtype": dtype}
    file = tmp_path / "case.json"
    file.write_text(json.dumps(record))
    assert main(("replay", str(file), "--backend", "sim")) == 0


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@given(data=st.data())
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
def test_what_a_law_draws_is_read_again(law: Law, data: st.DataObject) -> None:
    subject = data.draw(law.draw(data.draw(st.sampled_from([p for p in (1, 2, 5) if p >= law.fewest_ranks]))))
    record = json.loads(json.dumps(law_experiment(law).record_of(subject)))
    saved = records.understand(record)
    assert isinstance(saved, SavedExample) and saved.experiment.name == law.name
    assert saved.subject == (subject[0], json.loads(json.dumps(subject[1])))


@given(case=cases(3))
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_what_is_drawn_is_read_again(case: Case) -> None:
    saved = records.understand(json.loads(case.to_json()))
    assert isinstance(saved, SavedExample) and saved.subject == case


@pytest.mark.parametrize("name", ("example", "law", "wrong_calls"))
def test_what_an_earlier_layout_of_the_code_saved_is_replayed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """These files were written before the modules were moved into folders: names of laws and mistakes last."""
    file = Path(__file__).parent / "saved_before" / f"{name}.json"
    assert main(("replay", str(file), "--backend", "sim")) == 0
    assert "1 example" in capsys.readouterr().out


def test_what_all_ranks_do_wrong_together_is_nobodys_in_particular() -> None:
    name = next(name for name, mistake in MISTAKES.items() if mistake.who == "all")
    assert records.understand(law(MISTAKEN, mistakes([name, None]))).world == 2
    with pytest.raises(ValueError, match="all ranks make it together"):
        records.understand(law(MISTAKEN, mistakes([name, 1])))
