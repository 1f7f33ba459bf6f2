"""A night's run goes on where it was interrupted, counts on, and keeps what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verification.__main__ import main
from verification.cli import nightly
from verification.cli.nightly import Chunk, Night
from verification.failures import WrongResult
from verification.report.counter_example import save_record
from verification.report.report import Report
from verification.run.backends import Unavailable

pytestmark = pytest.mark.ranks

CHUNKS = (Chunk("sim", 2, 10), Chunk("sim", 3, 10), Chunk("gloo", 2, 10))


class Interrupted(BaseException):
    """As if the process had been killed."""


def fake_chunks(monkeypatch: pytest.MonkeyPatch, most: int) -> list[tuple[int, Chunk]]:
    """Chunks that hold at once; after `most` of them the night is cut short. What was run, with its seed."""
    ran: list[tuple[int, Chunk]] = []

    def run_chunk(night: Night, report: Report, chunk: Chunk) -> None:
        if len(ran) == most:
            raise Interrupted
        ran.append((night.round_seed, chunk))
        report.start_world(chunk.world, chunk.examples)
        for _ in range(chunk.examples):
            report.held("float32", {"gradients": 0.25}, 0.5)
        if chunk.world == 3:
            failure = WrongResult("values: out is wrong")
            report.failed(save_record(failure, "gradients", 3, {"world": 3}, night.failures, "sim"))
        report.end_world()

    monkeypatch.setattr(nightly, "run_chunk", run_chunk)
    return ran


def go(folder: Path, seed: int | None = 7, chunks: tuple[Chunk, ...] = CHUNKS) -> Night:
    night = Night(folder / "night.json", folder, chunks, seed)
    with pytest.raises(Interrupted):
        nightly.run(night, Report(Console(quiet=True)), hours=1000.0)
    return night


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "night.json").read_text())
    return found


def test_it_goes_on_with_the_chunk_and_the_seed_that_are_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for most in (2, 1, 3):
        run = fake_chunks(monkeypatch, most)
        go(tmp_path)
        ran += run
    assert ran == [(7, CHUNKS[0]), (7, CHUNKS[1]), (7, CHUNKS[2]), (8, CHUNKS[0]), (8, CHUNKS[1]), (8, CHUNKS[2])]
    data = record(tmp_path)
    assert data["examples"] == data["distributed"] == 60 and data["held"] is False
    rows = {(row["world"], row["examples"], row["worst_ratio"], row["seconds"]) for row in data["rows"]}
    assert rows == {(2, 40, 0.25, 20.0), (3, 20, 0.25, 10.0)}
    assert len(data["failures"]) == 2 and data["worst_ratio"]["float32"] == 0.25


def test_without_a_seed_every_round_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake_chunks(monkeypatch, 6)
    go(tmp_path, seed=None)
    assert len({seed for seed, _ in ran}) == 2 and ran[0][0] == ran[2][0]


def test_other_chunks_than_last_time_begin_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_chunks(monkeypatch, 1)
    go(tmp_path)
    ran = fake_chunks(monkeypatch, 1)
    go(tmp_path, chunks=CHUNKS[2:])
    assert ran == [(8, CHUNKS[2])] and record(tmp_path)["examples"] == 20


def test_another_seed_than_that_of_the_round_under_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_chunks(monkeypatch, 1)
    go(tmp_path, seed=9)
    with pytest.raises(Unavailable, match="within round 1, of seed 9; leave --seed out"):
        nightly.run(Night(tmp_path / "night.json", tmp_path, CHUNKS, 11), Report(Console(quiet=True)), hours=1.0)
    for seed in (None, 9):
        fake_chunks(monkeypatch, 0)
        assert go(tmp_path, seed).round_seed == 9


def test_a_night_of_which_nothing_held_yet_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_chunks(monkeypatch, 0)
    go(tmp_path)
    assert record(tmp_path)["examples"] == 0 and record(tmp_path)["held"] is False


def test_time_that_is_over_ends_it_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_chunks(monkeypatch, 1)
    go(tmp_path)
    report = nightly.run(Night(tmp_path / "night.json", tmp_path, CHUNKS, 7), Report(Console(quiet=True)), hours=0.0)
    assert report.examples == 10, "nothing was added, nothing lost"


@pytest.mark.parametrize("content", ("", "[]", "{}", "7", '"a"', '{"nightly": 1}', "[" * 100_000))
def test_a_state_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    state = tmp_path / "night.json"
    state.write_text(content)
    with pytest.raises(Unavailable, match="argument --state: cannot go on from"):
        nightly.run(Night(state, tmp_path), Report(Console(quiet=True)), hours=1.0)


CORRUPT: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "done is 99; a round has 3 chunks": (("nightly", "done"), 99),
    "done is -1": (("nightly", "done"), -1),
    "done is '1'": (("nightly", "done"), "1"),
    "round is None": (("nightly", "round"), None),
    "round is 1.5": (("nightly", "round"), 1.5),
    "round_seed is 'x'": (("nightly", "round_seed"), "x"),
    "backend is 'tcp'": (("nightly", "chunks", 0, "backend"), "tcp"),
    "backend is []": (("nightly", "chunks", 0, "backend"), []),
    "world is 0": (("nightly", "chunks", 0, "world"), 0),
    "examples is -5": (("nightly", "chunks", 0, "examples"), -5),
    "examples on sim is 'all'": (("nightly", "examples_on"), {"sim": "all"}),
    "examples is '60'": (("examples",), "60"),
    "distributed is True": (("distributed",), True),
    "seconds is -1.0": (("seconds",), -1.0),
    "seconds is []": (("rows", 0, "seconds"), []),
    "property is 3": (("rows", 0, "property"), 3),
    "dtype is 'float8'": (("rows", 0, "dtype"), "float8"),
    "dtype is []": (("rows", 0, "dtype"), []),
    "worst_ratio is 'large'": (("rows", 0, "worst_ratio"), "large"),
    "a causal pattern is 'x'": (("coverage", "features"), {"a causal pattern": "x"}),
    "cases is None": (("coverage", "cases"), None),
    "world is '3'": (("failures", 0, "world"), "3"),
    "replay is ''": (("failures", 0, "replay"), ""),
    "message is None": (("failures", 0, "message"), None),
}


@pytest.mark.parametrize("said", CORRUPT)
def test_a_state_with_a_wrong_entry_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    fake_chunks(monkeypatch, 2)
    go(tmp_path)
    data = inner = record(tmp_path)
    (*path, last), value = CORRUPT[said]
    for step in path:
        inner = inner[step]  # type: ignore[index]
    inner[last] = value  # type: ignore[index]
    (tmp_path / "night.json").write_text(json.dumps(data))
    arguments = ("run", "--profile", "nightly", "--failures", str(tmp_path), "--state", str(tmp_path / "night.json"))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "argument --state: cannot go on from" in error and said in error and error.count("\n") == 1, error


def test_a_state_of_an_earlier_version_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It called the coverage `reached`."""
    fake_chunks(monkeypatch, 1)
    go(tmp_path)
    data = record(tmp_path)
    covered = data.pop("coverage") | {"cases": 3}
    data["reached"] = {"cases": covered["cases"], "with": covered["features"]}
    (tmp_path / "night.json").write_text(json.dumps(data))
    fake_chunks(monkeypatch, 1)
    go(tmp_path)
    assert record(tmp_path)["examples"] == 20 and record(tmp_path)["coverage"]["cases"] == 3


@pytest.mark.slow
def test_a_real_chunk_on_each_backend(tmp_path: Path) -> None:
    report = Report(Console(quiet=True))
    night = Night(tmp_path / "night.json", tmp_path, round_seed=3)
    for chunk in (Chunk("sim", 3, 12), Chunk("gloo", 2, 12)):
        with report:
            nightly.run_chunk(night, report, chunk)
    nightly.save(night, report)
    assert record(tmp_path)["nightly"]["examples_on"] == night.examples_on
    assert (
        all(count >= 12 for count in night.examples_on.values()) and sum(night.examples_on.values()) == report.examples
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    (
        (("--profile", "nightly", "--examples", "5"), "argument --examples: rounds of --profile nightly"),
        (("--profile", "nightly", "--real-size", "64"), "argument --real-size: rounds of --profile nightly"),
        (("--profile", "nightly", "--world", "7"), "argument --world: a round of --profile nightly has sim 2"),
        (("--hours", "2"), "argument --hours: goes with --profile nightly"),
        (("--state", "night.json"), "argument --state: goes with --profile nightly"),
    ),
)
def test_arguments_that_do_not_go_together(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(("run", "--failures", str(tmp_path), *arguments)) == 2
    assert named in capsys.readouterr().err
