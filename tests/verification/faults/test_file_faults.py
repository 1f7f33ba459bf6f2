"""Mutated files are refused in a line or read; what handles them wrongly is found, with its verdict."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from verification.__main__ import main
from verification.faults import files
from verification.faults.fault_experiment import MishandledFault
from verification.faults.files import FILE_FAULTS, IN_FORKS, stock
from verification.replay import records, registry, replay
from verification.run.backends import Unavailable

pytestmark = pytest.mark.ranks


def struck(kind: str, seed: int, folder: Path) -> None:
    folder.mkdir()
    FILE_FAULTS.kinds[kind].strike(random.Random(seed), folder)


def test_the_stock_has_every_kind_of_record() -> None:
    assert {*registry.READERS, "links", "long", "pattern"} <= {field for record in stock() for field in record}
    for record in stock():
        if not {"links", "long", "model"} & set(record):
            assert records.parse(record).world >= 1


@pytest.mark.parametrize("kind", IN_FORKS)
def test_a_fault_of_a_file_is_handled(kind: str, tmp_path: Path) -> None:
    for seed in range(8):
        struck(kind, seed, tmp_path / str(seed))


@pytest.mark.slow
def test_a_fault_is_handled_by_the_command(tmp_path: Path) -> None:
    for seed in range(3):
        struck("command", seed, tmp_path / str(seed))


def test_the_same_seed_mutates_alike() -> None:
    for kind in files.MUTATIONS:
        texts = [files.mutated(kind, random.Random(seed)) for seed in (*range(20), *range(20))]
        assert texts[:20] == texts[20:] and len(set(texts)) > 10


def two_lines(*args: Any) -> object:
    raise Unavailable("a\nb")


BROKEN: list[tuple[str, str, object, str, object]] = [
    ("special", "hung: reading case.json", replay, "read_regular", lambda file: file.read_bytes()),
    ("special", "silent: case.json .special. was read", replay, "read_record", lambda file: stock()[0]),
    ("cut", "silent: b'", replay, "read_record", lambda file: stock()[0]),
    ("name", "silent: reading .* ended with 0", records, "OWN_ADAPTERS", ""),
    ("nested", "traceback: .*Error: ", replay, "naming", lambda file, argument: nullcontext()),
    ("bits", "long: .* is refused in 'a.nb'", replay, "parse", two_lines),
]


@pytest.mark.parametrize("kind, verdict, owner, name, broken", BROKEN)
def test_a_fault_that_is_mishandled_is_found(
    kind: str, verdict: str, owner: object, name: str, broken: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock()
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(files, "DEADLINE", 2.0)
    with pytest.raises(MishandledFault, match=f"(?s){verdict}"):
        for seed in range(30):
            struck(kind, seed, tmp_path / str(seed))


@pytest.mark.parametrize(
    "script, verdict",
    [
        ("exit 0", "misnamed: .* ended with 0"),
        ("echo Traceback >&2; exit 2", "misnamed: .* ended with 2: Traceback"),
        ("echo 'python -m verification: error: \033[2J' >&2; exit 2", "unprintable: "),
        ("touch $TMPDIR/x; echo 'python -m verification: error: x' >&2; exit 2", "left behind: x"),
        ("touch imported; echo 'python -m verification: error: x' >&2; exit 2", "imported: a module"),
        ("sleep 9 <&- >&- 2>&- & echo 'python -m verification: error: x' >&2; exit 2", "left behind: processes"),
        ("sleep 9", "hung: a replay of "),
        ("echo it held", "misnamed"),  # the file is no JSON
        ("echo 'python -m verification: error: x' >&2; exit 2", None),
    ],
)
def test_what_the_command_does_wrong_is_found(
    script: str, verdict: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, folder = tmp_path / "command", tmp_path / "folder"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    folder.mkdir()
    (folder / "case.json").write_text("{")
    monkeypatch.setattr(sys, "executable", str(command))
    monkeypatch.setattr(files, "COMMAND_DEADLINE", 1.0)
    monkeypatch.setattr(files, "ENDED", 1.0)
    if verdict is None:
        files.replay_by_command(folder / "case.json")
    else:
        with pytest.raises(MishandledFault, match=f"(?s){verdict}"):
            files.replay_by_command(folder / "case.json")


@pytest.mark.slow
def test_the_command_line_has_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("faults", "--kind", "files", "--count", "30", "--seed", "3", "--failures", str(tmp_path))) == 0
    text = capsys.readouterr().out
    assert all(f"\n{kind.title} " in text for kind in FILE_FAULTS.kinds.values())
    assert "30 faults in " in text and ": all named, nothing left over" in text
