"""The command line as a user meets it: with its exit status, its errors and its output."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, verification
from tests.support.plain_case import plain
from tests.support.planted import plant_wrong_result
from tests.support.printed import printed, recording, unbroken
from verification import whole_run
from verification.__main__ import main
from verification.cli import command_line, validate
from verification.cli.arguments import TYPED, check_file, check_folder, find_title
from verification.cli.command_line import COMMANDS
from verification.cli.interrupts import lost_interrupts_repeated
from verification.replay.replay import replay
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.runner import titles

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("command", ("", *COMMANDS, "validate"))
def test_help_says_what_there_is_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="^0$"):
        validate.main(["--help"]) if command == "validate" else main([command, "--help"] if command else ["--help"])
    text = capsys.readouterr().out
    assert "exit status: 0 " in text and "; 2 " in unbroken(text) and max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"), {"verify": ["verification", "run"], "doctor": ["verification.cli.doctor"]}.items()
)
def test_usage_and_errors_name_what_the_user_typed(script: str, words: list[str], tmp_path: Path) -> None:
    """The scripts as they are, but for the environment that they would set up."""
    (tmp_path / "scripts").mkdir()
    typed = shutil.copy(ROOT / "scripts" / script, tmp_path / "scripts")
    (tmp_path / "scripts" / "_setup").write_text(f"python={shlex.quote(sys.executable)}; also() {{ :; }}")
    environment = {name: value for name, value in os.environ.items() if name != TYPED}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "400"}
    for start, name in (([str(typed)], str(typed)), ([sys.executable, "-m", *words], f"python -m {' '.join(words)}")):
        wrong = subprocess.run([*start, "--dance"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        first, *_, last = wrong.stderr.splitlines()
        assert wrong.returncode == 2 and first.startswith(f"usage: {name} ["), wrong.stderr
        assert last == f"{name}: error: unrecognized arguments: --dance"


@pytest.mark.parametrize(
    ("arguments", "named"),
    (
        ("run --world 0", "argument --world"), ("run --world 1,two", "argument --world"),
        ("conformance --json x --page ./x", "argument --page: must be another file than --json, got x"),
        ("run --examples 0", "argument --examples"), ("run --hours -1", "argument --hours"),
        ("run --seed x", "argument --seed"), ("run --real-size 3", "argument --real-size"), ("dance", "dance"),
        ("run --world 2 4", "unrecognized arguments: 4; separate world sizes by commas, as --world 2,4"),
        ("run --world 65", "argument --world: on gloo at most 64 ranks, got 65"),
        *((f"{what} --backend nccl --world 64", "argument --backend: nccl needs 64 GPUs")
          for what in ("run", "training", "model plain")),
        ("run --profile slow", "argument --profile: must be one of quick, ci, thorough, got 'slow'"),
        ("run --profile nightly", "argument --profile: must be one of quick, ci, thorough, got 'nightly'; for a night"),
        ("run --only gradiants", "'gradiants' is no property or law, close to it: 'gradients'; it must be one of"),
        ("run --only e", "argument --only: 'e' is a part of 29 titles; it must be one of these, or a unique part of"),
        ("run --only permute --only ranks", "argument --only: 'ranks' may be 'same on any ranks, layout, exchange' or"),
        ("run --only streams --world 1,2", "there is nothing to check of 'streams do not matter' on gloo, --world 1,2"),
        ("run --backend nccl --jobs 2", "argument --jobs: on nccl one world size at a time"),
        ("run --failures {file}/inside", "argument --failures: cannot write to"),
        ("run --failures /proc/here", "argument --failures: cannot write to"),
        ("run --json {folder}", "argument --json: cannot write"),
        ("run --json {new}/a.json", "argument --json: cannot write {new}/a.json: there is no folder {new}"),
        ("replay nowhere.json", "nowhere.json"), ("replay file", "it is not JSON: Expecting value"),
        ("replay links.json", "write torchrun --nproc-per-node=3 -m verification.cli.validate --backend gloo --replay"),
        ("replay case.json --json {new}/a.json", "there is no folder {new}"),
        ("mutants merge-by-sigmoids", "'merge-by-sigmoids' is no defect; it must be one of the"),
        ("mutants merge-by-sigmoids", " of --list, close to it: merge-by-sigmoid"),
        ("mutants merge-by-sigmoid dance --list", "argument NAME: 'dance' is no defect"),
        ("peers yunchan dance", "it must be package.module:adapter, or one of ring-attention-pytorch"),
        ("peers dance --list", "argument NAME: 'dance' is no peer; for a Peer of your own write dance:adapter"),
        ("peers zz.sane", "'zz.sane' is no peer; for a Peer of your own write zz:sane or zz.sane:"),
        ("peers my/dance.py:sane", "is no peer; for a Peer of your own write my.dance:sane; it must"),
        ("peers yunchang nowhere:adapter --list", "; run this in the folder that has nowhere, or install it"),
        ("peers yunchan", "argument NAME: 'yunchan' is no peer, close to it: yunchang/"),
        ("peers ./my/dance.py", "argument NAME: './my/dance.py' is no peer; for a Peer of your own write my.dance:"),
        ("training --peer --backend nccl", "argument --peer: peers run on gloo, got --backend nccl"),
        ("faults --kind files", "run python -m pytest tests/verification/replay/test_mutated_records.py"),
        ("faults --kind training --count 3", "run python -m pytest tests/scripts/test_checkpoint_damage.py tests/"),
    ),
)  # fmt: skip
def test_impossible_commands_are_refused_in_a_line(
    arguments: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "links.json").write_text('{"links": {"world": 3}}')
    places = {name: str(tmp_path / name) for name in ("file", "folder", "new")}
    try:
        status: Any = main([word.format(**places) for word in arguments.split()])
    except SystemExit as end:  # of the parser, after the usage
        status = end.code
    said = capsys.readouterr()
    first, *titles_listed = said.err[said.err.find(": error: ") :].splitlines()
    assert status == 2 and named.format(**places) in first
    if not said.err.startswith("usage: ") and "64 GPUs" not in named:  # which only the run finds out
        assert [line.strip() for line in titles_listed] == ([*titles()] if "one of these" in first else [])
        assert not said.out
    assert (tmp_path / "file").read_text() == "kept" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ("peers torch-context-parallel", "replay {file}"))
def test_a_gpu_that_is_not_there_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = [word.format(file=tmp_path / "case.json") for word in command.split()]
    assert main([*words, "--device", "cuda"]) == 2
    assert "argument --device: cuda needs a GPU, and torch sees none" in capsys.readouterr().err


def test_a_part_of_a_title_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    found = [find_title(name, titles()) for name in ("gradients", "Permute", "BYTES")]
    assert found == ["gradients", "batches and heads permute", "bytes sent"]
    assert main(("run", "--list")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {*titles(), "    |actual - exact| <= bound, in every entry of the output and of lse."} <= set(lines)


def test_checking_a_path_leaves_its_file_alone(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    check_file("--json", tmp_path / "there")
    check_file("--json", tmp_path / "report.json")
    check_folder("--failures", tmp_path / "new" / "failures")
    assert (tmp_path / "there").read_text() == "kept"
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"there", "new", "new/failures"}


def test_unwritable_paths_are_refused_before_the_run(tmp_path: Path) -> None:
    dangling, to_new = tmp_path / "dangling", tmp_path / "to new"
    dangling.symlink_to(tmp_path / "nowhere" / "report.json")
    to_new.symlink_to(tmp_path / "report.json")
    for file, why in (
        (dangling, "there is no folder"),
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x", "there is no"),
    ):
        with pytest.raises(OSError, match=f"argument --json: cannot write {file}: .*{why}"):
            check_file("--json", file)
    check_file("--json", to_new)
    check_file("--json", Path("/dev/null"))


@pytest.mark.parametrize(
    ("file", "command", "said"),
    (
        ("hypothesis/__init__.py", "verification run", "not today"),
        ("hypothesis.py", "verification run", "hypothesis.py hides the package hypothesis"),
        ("ring.py", "verification run", "ring.py hides the package ring"),
        ("ring.py", "pytest -p verification.pytest_plugin --attention a:b", "ring.py hides the package ring"),
    ),
)
def test_a_package_in_the_way_is_no_counter_example(file: str, command: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise ImportError('not today')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = [sys.executable, "-P", "-m", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, 1) and said in done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_that_holds(tmp_path: Path) -> None:
    words = "run --world 2,1 --examples 12 --seed 7 --real-size 256 --json report.json"
    done = verification(tmp_path, *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--seed 7" in done.stdout and "all held" in done.stdout and "MiB sent" in done.stdout
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["held"] is True and data["failures"] == [] and data["seed"] == 7 and data["seconds"] > 0
    rows = {(row["property"], row["world"]): 0 for row in data["rows"]}
    for row in data["rows"]:
        assert set(row) == {"property", "world", "dtype", "examples", "worst_ratio", "seconds"}
        assert 0 <= row["worst_ratio"] <= 1
        rows[row["property"], row["world"]] += row["examples"]
    assert rows["gradients", 1] == rows["gradients", 2] == rows["every rank answers", 2] == 12 + 1, "one looks for more"
    assert data["real_size"]["tokens"] == 256 and len(data["real_size"]["ranks"]) == 2


@pytest.mark.slow
def test_counter_examples_exit_1_with_a_line_that_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(whole_run, "open_backend", lambda name: GlooBackend(3.0, plant_wrong_result))
    words = "run --world 2,3 --jobs 1 --examples 30 --real-size 0 --seed 4 --json report.json"
    assert main(words.split()) == 1
    said = capsys.readouterr().out
    failures = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert any(line.startswith("replay: ") for line in said.splitlines()[-2:]), "it comes last"
    first = next(failure for failure in failures if failure["property"] == "output and lse")
    assert first["kind"] == "wrong result" and first["case"]["tokens"] == 6
    line = shlex.split(first["replay"])
    shown = shlex.join([*line[:-1], os.path.relpath(line[-1], tmp_path)])  # as seen from the working directory
    assert shown in unbroken(said) and json.dumps(first["case"]) in unbroken(said)
    assert line[1:4] == ["-m", "verification", "replay"] and Path(line[-1]).is_absolute()
    assert {failure["world"] for failure in failures} == {2, 3}, "the run goes on after a failure"
    assert json.loads(Path(line[-1]).read_text()) == first["case"]
    again = replay(Path(line[-1]), Report(recording()), GlooBackend(3.0, plant_wrong_result))
    assert [failure.kind for failure in again.failures] == ["wrong result"]
    verdict = printed(again.console).splitlines()[-1]
    assert verdict.startswith("no example held in ") and verdict.endswith(" s: 1 counter-example")
    mended = subprocess.run(line, cwd=ROOT, capture_output=True)
    assert mended.returncode == 0, "nothing is wrong without the defect"


def started(arguments: list[str], folder: Path, *, limit: int | None = None) -> subprocess.Popen[str]:
    """Start a command. limit: the most blocks of 512 bytes in a file that it writes."""
    limited = [] if limit is None else ["sh", "-c", f'ulimit -f {limit}; exec "$@"', "sh"]
    return subprocess.Popen(
        [*limited, sys.executable, "-m", "verification", *arguments], cwd=folder, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seconds", (0.4, 0.8, 1.6))
def test_ctrl_c_during_imports_is_one_line(seconds: float, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    command = started(["replay", "fifo"], tmp_path)
    time.sleep(seconds)
    command.send_signal(signal.SIGINT)
    assert command.communicate()[1].count("\n") == 1 and command.returncode == 2


def test_ctrl_c_in_a_destructor_is_not_lost() -> None:
    class Ending:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in workers of pytest
    try:
        with pytest.raises(KeyboardInterrupt), lost_interrupts_repeated():
            Ending()
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_no_room_for_files_is_one_line(tmp_path: Path) -> None:
    command = started(["replay", "missing"], tmp_path, limit=0)
    error = command.communicate()[1]
    assert command.returncode == 2 and error.count("\n") == 1 and "cannot start: " in error, error


ENDING = """
import sys
from verification.peers import Peer, claims
adapter = Peer("ends", "nothing", lambda case: case, lambda *_: sys.exit(0), worlds=(1,))
def ends(case): sys.exit(0)
claim = Peer("ends", "nothing", ends, lambda *_: sys.exit(0), worlds=(1,))
later = Peer("ends", "nothing", lambda case: case, lambda *_: sys.exit(0), worlds=(1,), prepare=lambda: sys.exit(0))
"""


@pytest.mark.parametrize(
    "name, status, said",
    [
        ("exits:x", 2, "SystemExit"), ("interrupts:x", 2, "KeyboardInterrupt"), ("ends:later", 2, "SystemExit"),
        ("ends:claim", 1, "SystemExit"), ("ends:adapter", 1, "raised in attend of ends:adapter"),
    ],
)  # fmt: skip
def test_an_adapter_that_ends_the_process_fails(
    name: str,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "exits.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "interrupts.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "ends.py").write_text(ENDING)
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"peer": name, "case": plain(1).to_dict()}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ends", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(("replay", str(file))) == 2
    assert "a replay imports no module that a file names" in unbroken(capfd.readouterr().err)
    assert main(("replay", "--attention", name, str(file))) == status
    assert said in unbroken("".join(capfd.readouterr()))
    assert main(("peers", name, "--examples", "1", "--only", "gradients")) == (2 if name == "ends:claim" else status)


def test_a_command_that_a_users_module_ends_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line.command_module("doctor"), "carry_out", lambda *_: sys.exit(0))
    assert main(("doctor",)) == 2
    assert "error: a user's module raised SystemExit: 0" in capsys.readouterr().err
