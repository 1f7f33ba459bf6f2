"""Faults of trainings are handled; one that is not is found, with its verdict, saved, and replayed."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ring import whole_file
from ring.nn.frameworks import checkpoint
from verification.__main__ import main
from verification.faults import checkpoint_faults, training_faults, training_process
from verification.faults.fault_experiment import MishandledFault
from verification.faults.fault_run import COUNT
from verification.faults.training_faults import IN_FILES, IN_PROCESSES, KINDS, DrawnFault, drawn, run_faults
from verification.report.report import Report

pytestmark = pytest.mark.ranks


def struck(kind: str, seed: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    KINDS[kind].strike(random.Random(seed), folder)


@pytest.mark.parametrize("kind", IN_FILES)
def test_a_fault_of_files_is_handled(tmp_path: Path, kind: str) -> None:
    for seed in range(6):
        struck(kind, seed, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", IN_PROCESSES)
def test_a_fault_of_processes_is_handled(tmp_path: Path, kind: str) -> None:
    struck(kind, 1, tmp_path)


def nothing(*args: Any, **options: Any) -> None: ...


# What breaks the handling of each kind: an object, its attribute, and the verdict.
BROKEN: list[tuple[tuple[str, ...], object, str, str]] = [
    (("flip", "zero", "swap", "cut", "missing"), checkpoint, "_checked", "silent|misnamed"),
    (("foreign",), checkpoint, "_check_kinds", "silent|misnamed"),
    (("full", "killed"), shutil, "rmtree", "left behind: "),
    (("held",), fcntl, "flock", "silent: a folder was held twice"),
    (("taken",), checkpoint, "save", "silent: a checkpoint was saved over another"),
]


@pytest.mark.parametrize("kinds, owner, name, verdict", BROKEN)
def test_a_fault_that_is_mishandled_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], owner: object, name: str, verdict: str
) -> None:
    checkpoint_faults.stock()
    monkeypatch.setattr(owner, name, nothing)
    for kind in kinds:
        with pytest.raises(MishandledFault, match=verdict):
            for seed in range(20):
                struck(kind, seed, tmp_path / f"{kind} {seed}")


def test_what_a_training_loses_or_leaves_behind_is_found(tmp_path: Path) -> None:
    with pytest.raises(MishandledFault, match="lost: the last checkpoint$"):
        training_process.check_folder(tmp_path, clean=True)
    shutil.copytree(checkpoint_faults.stock() / "1", tmp_path / "step-1")
    training_process.check_folder(tmp_path, clean=True)
    (tmp_path / ".checkpoint-0123456789abcdef.new").mkdir()
    with pytest.raises(MishandledFault, match="left behind: .checkpoint-0123456789abcdef.new"):
        training_process.check_folder(tmp_path, clean=True)
    training_process.check_folder(tmp_path, clean=False)  # removed by the next that holds the folder
    (tmp_path / "other").mkdir()
    with pytest.raises(MishandledFault, match="left behind: other"):
        training_process.check_folder(tmp_path, clean=True)
    (tmp_path / "step-1" / "state.pt").unlink()
    with pytest.raises(MishandledFault, match="lost: the last checkpoint: .* is missing"):
        training_process.check_folder(tmp_path, clean=True)
    with pytest.raises(MishandledFault, match=r"hung: it, for 0.1 s"):
        training_process.wait_for(lambda: False, 0.1, "it")


def test_each_step_of_a_saving_can_be_its_last(tmp_path: Path) -> None:
    last = 1
    while checkpoint_faults.killed_at(tmp_path / str(last), last) == last:
        last += 1
    assert last > 12


def sum_of_a_copy(file: Path, real: Any = checkpoint._sum) -> Any:
    """Put a copy in the place of a file, which is not on the disk."""
    os.replace(shutil.copy(file, file.with_suffix(".copy")), file)
    return real(file)


@pytest.mark.parametrize(
    "owner, name, broken",
    [(checkpoint, "write", Path.write_text), (whole_file, "sync_folder", nothing), (checkpoint, "_sum", sum_of_a_copy)],
)
def test_a_saving_without_an_fsync_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: object
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(MishandledFault, match="lost: the checkpoint at step"):
        for last in range(1, 30):
            checkpoint_faults.killed_at(tmp_path / str(last), last)


def test_a_default_run_draws_every_kind_in_an_order_of_its_seed() -> None:
    runs = [[fault.kind for fault in drawn(seed, COUNT)] for seed in range(9)]
    for kinds, some in ((IN_FILES, 30), (IN_PROCESSES, 1)):
        assert all(run.count(kind) // some in (1 // some, 1, 2) for run in runs for kind in kinds)
        assert len({tuple(kind for kind in run if kind in kinds) for run in runs}) == len(runs)
    assert list(drawn(3, COUNT)) == list(drawn(3, COUNT))


def test_a_mishandled_fault_is_saved_and_holds_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(Console(quiet=True))
    monkeypatch.setattr(training_faults, "drawn", lambda seed, count: [DrawnFault("held", 5)] * count)
    monkeypatch.setattr(fcntl, "flock", nothing)
    run_faults(report, 2, 1, tmp_path)
    (failure,) = report.failures
    assert failure.kind == "mishandled fault" and failure.broken == "a folder that is held"
    monkeypatch.undo()
    assert main(("replay", str(failure.file))) == 0
    assert "it held" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_has_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("faults", "--kind", "training", "--count", "10", "--seed", "3", "--failures", str(tmp_path))
    assert main(words) == 0
    text = capsys.readouterr().out
    assert all(f"\n{kind.title} " in text for kind in KINDS.values())
    assert "10 faults in " in text and ": all named, nothing left over" in text


def test_a_world_of_faults_that_have_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("faults", "--kind", "training", "--world", "2")) == 2
    assert "argument --world: it is of --kind attention, got --kind training" in capsys.readouterr().err
