"""scripts/train.py: the same training on any number of ranks, also from a checkpoint of another number of ranks."""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import torch

from verification.run.processes.process_tree import alive, descendants

ROOT = Path(__file__).parents[1]
SMALL = "--tokens 64 --layers 1 --dim 16 --heads 2 --segment-length 16 64 --dilated-ratio 1 2 --dtype float64"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
ONE_RANK = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments, *SMALL.split()]
    return subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)


def recorded(folder: Path, arguments: str) -> Any:
    """Return the record of a training."""
    folder.mkdir(exist_ok=True)
    record = folder / "record.json"
    places = ("--folder", str(folder), "--json", str(record), "--every", "1")
    done = run("scripts/train.py", *places, *arguments.split())
    assert done.returncode == 0, done.stderr
    return json.loads(record.read_text())


def trained(folder: Path, arguments: str) -> Any:
    """The losses of all steps."""
    return recorded(folder, arguments)["losses"]


@pytest.mark.ranks
@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    wanted = trained(tmp_path / "alone", "--steps 4")
    trained(tmp_path / "shared", "--steps 2 --ranks 4 --data 2")
    found = trained(tmp_path / "shared", "--steps 4 --ranks 2 --resume")
    assert len(set(found)) == 4
    assert found == pytest.approx(wanted, rel=1e-12, abs=0)


@pytest.mark.ranks
@pytest.mark.slow
def test_same_bits_on_any_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--steps 3 --held-out 2 --same-bits 16"
    with monkeypatch.context() as patch:
        patch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "2")  # as torchrun lets a rank alone have several threads
        alone = recorded(tmp_path / "alone", words)
    for own in ("--ranks 2", "--ranks 3", "--ranks 4 --data 2"):
        found = recorded(tmp_path / own, f"{words} {own}")
        assert found == alone | {name: found[name] for name in ("ranks", "activations")}


def train_options(folder: Path) -> dict[str, Any]:
    """Options that a checkpoint keeps."""
    train = importlib.import_module("train")
    options = train.parser_of().parse_args([*SMALL.split(), "--folder", str(folder)])
    return {name: getattr(options, name) for name in train.KEPT} | {"text_digest": train.text_digest(options)}


def checkpointed(folder: Path, **changes: Any) -> Any:
    """Save the checkpoint of step 2 of a training of one process, and return the script's module."""
    train, kept = importlib.import_module("train"), train_options(folder)
    model = train.Model(train.parser_of().parse_args([*SMALL.split(), "--folder", str(folder)])).double()
    kept |= {name: changes.pop(name) for name in train.KEPT if name in changes}
    progress = {"step": 2, "losses": [5.5, 5.25], "options": kept} | changes
    checkpoint.save(folder / "step-2", model, torch.optim.AdamW(model.parameters()), **progress)
    return train


def test_options_default_to_the_checkpoints(tmp_path: Path) -> None:
    train = checkpointed(tmp_path)
    words = f"--resume --lr 0.5 --layout striped --ranks 2 --tokens 64 --segment-length 16 64 --folder {tmp_path}"
    options = train.parse(train.parser_of(), words.split())
    assert (options.lr, options.layout, options.ranks) == (0.5, "striped", 2)
    assert (options.tokens, options.dim, options.dtype, options.seed) == (64, 16, "float64", 0)


def test_checkpoints_without_the_option_have_no_chunks(tmp_path: Path) -> None:
    options = train_options(tmp_path)
    del options["same_bits"]
    train = checkpointed(tmp_path, options=options)
    assert train.parse(train.parser_of(), ["--resume", "--folder", str(tmp_path)]).same_bits == 0


@pytest.mark.parametrize(
    "words, said",
    [
        ("--seed 1", "seed is 1, was 0"),
        ("--same-bits 128", "same-bits is 128, was 0"),
        ("--tokens 128", "tokens is 128, was 64"),
        ("--batch 4", "batch is 4, was 2"),
        ("--dtype float32", "dtype is float32, was float64"),
        ("--heads 4", "heads is 4, was 2"),
        ("--text library", "text is library, was manual; text-digest is "),
        ("--segment-length 64 64", "segment-length is [64, 64], was [16, 64]"),
        ("--layers 2 --dim 32", "layers is 2, was 1; dim is 32, was 16. Only these may change: ranks, data, steps"),
        ("--check", "--check trains from the beginning: leave it out"),
    ],
)
def test_options_unlike_the_checkpoint_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    train = checkpointed(tmp_path)
    with pytest.raises(SystemExit):
        train.parse(train.parser_of(), ["--resume", "--folder", str(tmp_path), *words.split()])
    assert f"--resume: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"step": "x"}, "must be that of its name, got 'x'"),
        ({"step": -5}, "must be that of its name, got -5"),
        ({"step": 2.5}, "must be that of its name, got 2.5"),
        ({"losses": [1.0]}, "must be 2 numbers"),
        ({"losses": [1.0, "x"]}, "must be 2 numbers"),
        ({"options": {"lr": 0.1}}, "must be tokens, batch"),
        ({"tokens": -64}, "argument --tokens: must be an integer >= 1"),
        ({"heads": 0}, "argument --heads: must be an integer >= 1"),
        ({"lr": -1.0}, "argument --lr: must be a number above 0"),
        ({"same_bits": 8}, "argument --same-bits: must be 0 or a multiple of"),
        ({"seed": 2**99}, "argument --seed: must be an integer from 0"),
        ({"dilated_ratio": []}, "argument --dilated-ratio: expected"),
        ({"segment_length": ["--check"]}, "must be integers"),
        ({"layout": "--check"}, "argument --layout: invalid choice"),
        ({"dtype": "float8"}, "argument --dtype: invalid choice"),
        ({"m\x1b[2J": 1}, r"'m\x1b[2J'"),
        ({"more": 1}, "must be a checkpoint of this script, got one with"),
    ],
)
def test_every_field_of_a_checkpoint_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    train = checkpointed(tmp_path, **changes)
    with pytest.raises(SystemExit):
        train.parse(train.parser_of(), ["--resume", "--folder", str(tmp_path)])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        ("--same-bits 8", "argument --same-bits: must be 0 or a multiple of"),
        ("--same-bits -128", "argument --same-bits: must be 0 or a multiple of"),
        ("--same-bits 512 --ranks 3", "--same-bits is 512; it must make 3 chunks, one per context rank, or more"),
        ("--same-bits 1024 --ranks 4 --data 2", "--same-bits is 1024; it must make 2 chunks"),
        ("--same-bits 128 --layout zigzag", "--layout must be left out with --same-bits"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    train = importlib.import_module("train")
    with pytest.raises(SystemExit):
        train.launched(train.parser_of(), ["--folder", str(tmp_path), *words.split()])
    assert said in capsys.readouterr().err


def test_unusable_paths_are_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = checkpointed(tmp_path / "full")
    missing = tmp_path / "dangling.json"
    missing.symlink_to(tmp_path / "nowhere" / "record.json")
    for words, said in (
        (("--folder", f"{tmp_path}/full"), "has step-2: write --resume, or name another folder"),
        (("--folder", f"{tmp_path}/new", "--resume"), "has no checkpoint: leave it out"),
        (("--folder", f"{tmp_path}/new", "--json", str(tmp_path)), "argument --json: cannot write"),
        (("--folder", f"{tmp_path}/new", "--json", str(missing)), "argument --json: cannot write"),
        (("--folder", str(missing / "x")), "argument --folder: cannot write to"),
    ):
        with pytest.raises(SystemExit):
            train.launched(train.parser_of(), words)
        assert said in capsys.readouterr().err


def until(done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    return done()


@contextmanager
def training_of_two(folder: Path, *start: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a training on two ranks, which the block ends: no process is left, and the last checkpoint is whole."""
    words = (
        *(start or STARTS["train.py"]),
        *SMALL.split(),
        "--folder",
        str(folder),
        "--steps",
        "1000000",
        "--every",
        "1",
    )
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *words], env=ENVIRONMENT, cwd=ROOT, **pipes) as launcher:
        assert until(lambda: any(folder.glob("step-*")), 60)
        ranks = sorted(descendants(launcher.pid))
        assert len(ranks) == 2
        yield launcher, ranks
        assert until(lambda: not alive({launcher.pid, *ranks}), 60), alive({launcher.pid, *ranks})
    with checkpoint.hold(folder):
        train = importlib.import_module("train")
        *before, last = train.checkpoints(folder)
        assert {path.name for path in folder.iterdir()} == {".lock", last.name, *(x.name for x in before)}
        model = train.Model(train.parser_of().parse_args(SMALL.split())).double()
        progress = checkpoint.load(last, model, torch.optim.AdamW(model.parameters()))
        assert f"step-{progress['step']}" == last.name


STARTS = {
    "train.py": ("scripts/train.py", "--ranks", "2"),
    "torchrun": (*ONE_RANK[:-1], "--nproc-per-node=2", "scripts/train.py"),
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("start, number", [("train.py", 9), ("train.py", 15), ("torchrun", 9), ("torchrun", 15)])
def test_ranks_end_with_their_launcher(tmp_path: Path, start: str, number: int) -> None:
    """The last checkpoint stays whole, and the lock is free."""
    with training_of_two(tmp_path, *STARTS[start]) as (launcher, _):
        launcher.send_signal(number)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    with training_of_two(tmp_path / "killed", *STARTS["train.py"], "--same-bits", "16") as (launcher, _):
        launcher.kill()
    *_, last = importlib.import_module("train").checkpoints(tmp_path / "killed")
    steps = int(last.name.removeprefix("step-")) + 2
    resumed = recorded(tmp_path / "killed", f"--resume --ranks 3 --steps {steps}")
    whole = recorded(tmp_path / "whole", f"--same-bits 16 --steps {steps}")
    assert (resumed["digest"], resumed["losses"]) == (whole["digest"], whole["losses"])


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_training(tmp_path: Path) -> None:
    with training_of_two(tmp_path) as (_, ranks):
        os.kill(ranks[1], 9)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_disk_that_becomes_full_is_named(tmp_path: Path) -> None:
    with training_of_two(tmp_path) as (launcher, ranks):
        resource.prlimit(ranks[1], resource.RLIMIT_FSIZE, (1000, 1000))
        assert "MiB are free on its disk" in launcher.communicate(timeout=60)[1]
        assert launcher.returncode and not list(tmp_path.glob(".*.new"))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_second_training_in_a_folder_is_refused(tmp_path: Path) -> None:
    with training_of_two(tmp_path) as (launcher, ranks):
        second = run("scripts/train.py", "--resume", "--folder", str(tmp_path))
        assert second.returncode == 2 and any(f"is held by process {rank} of " in second.stderr for rank in ranks)
        launcher.kill()


def test_a_rank_whose_launcher_has_ended_does_not_begin() -> None:
    environment = ENVIRONMENT | {"RANK": "0", "TRAIN_LAUNCHER": "1"}
    command = [sys.executable, "scripts/train.py"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Error" not in done.stderr  # it would miss its group's address


def test_data_groups_must_divide_the_ranks() -> None:
    done = run("scripts/train.py", "--ranks", "4", "--data", "3")
    assert done.returncode == 2
    assert "--data is 3; it must divide the 4 ranks and the batch of 2" in done.stderr


def test_no_step_sees_the_windows_that_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    train = importlib.import_module("train")
    monkeypatch.setattr(train, "text", lambda name: torch.tensor([0] * 512 + [1] * 512, dtype=torch.uint8))
    options = argparse.Namespace(text="manual", tokens=64, batch=4, held_out=8, seed=1)
    training_text, held_out = train.split_text(options)
    assert held_out.shape == (8, 64) and held_out.all() and training_text.shape == (512,)
    assert not any(train.windows(step, options).any() for step in range(500))


@pytest.mark.ranks
@pytest.mark.slow
def test_both_patterns_train_on_equal_bytes(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    own = ("--seconds", "0.5", "--held-out", "2", "--every", "2", "--seeds", "3", "4", "--json", str(file))
    done = run(*ONE_RANK, "scripts/bench", "patterns", *own)
    assert done.returncode == 0, done.stderr
    dense, dilated, other, _ = trainings = json.loads(file.read_text())["trainings"]
    assert [(one["seed"], one["pattern"]) for one in trainings] == [*product((3, 4), ("dense", "dilated"))]
    assert dense["losses"][0] != other["losses"][0] and dense["losses"][0] != dilated["losses"][0]
    assert (dense["segment_length"], dense["dilated_ratio"], dilated["segment_length"]) == ([64], [1], [16, 64])
    assert len(dense["losses"]) <= len(dilated["losses"])
    for training in (dense, dilated):
        assert len(training["losses"]) == len(training["seconds"]) == training["steps"]
        assert training["held_out"][-1]["step"] == training["steps"] and training["seconds"][-1] >= 0.5
