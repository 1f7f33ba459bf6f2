"""`scripts/validate_nccl.py` under torchrun with gloo: it holds, finds planted defects, names ranks that are lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.support.plain_case import plain
from tests.support.printed import unbroken
from verification.case import Case
from verification.cli import validate
from verification.problems import links, long_problems
from verification.report.report import Report
from verification.run.rank import observe
from verification.run.torchrun.agents import Address, NotUnderTorchrun
from verification.run.torchrun.backend import ShrinkBackend
from verification.run.torchrun.rank_zero import AgentLost, Agents

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[4]
SCRIPT, PROGRAM = ROOT / "scripts/validate_nccl.py", ROOT / "tests/support/torchrun_program.py"
PLENTY = 280  # seconds that no run needs, and less than pytest allows a test
NO_GPUS = "needs 2 GPUs; there, run: torchrun --nproc-per-node=2 scripts/validate_nccl.py"


@dataclass(frozen=True)
class Run:
    status: int
    text: str
    report: dict[str, Any]

    @property
    def failure(self) -> dict[str, Any]:
        (only,) = self.report["failures"]
        assert isinstance(only, dict)
        return only


def under_torchrun(folder: Path, program: Path, *arguments: str, ranks: int = 2) -> Run:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    file = folder / "report.json"
    given = [*arguments, "--failures", str(folder), "--json", str(file)]
    done = subprocess.run(
        [*torchrun, str(program), *given], capture_output=True, text=True, timeout=PLENTY, cwd=folder, env=clean()
    )
    text = done.stdout + done.stderr
    return Run(done.returncode, text, json.loads(file.read_text()) if file.exists() else {})


def clean() -> dict[str, str]:
    """An environment as a user has it: with these packages, without what a torchrun around the tests has set."""
    rest = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return rest | {"PYTHONPATH": str(ROOT)}


def planted(folder: Path, defect: str, *arguments: str) -> Run:
    return under_torchrun(folder, PROGRAM, defect, "--backend", "gloo", "--seed", "1", *arguments)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_right_holds(tmp_path: Path, ranks: int) -> None:
    run = under_torchrun(
        tmp_path, SCRIPT, "--backend", "gloo", "--examples", "6", "--long", "96", "--seed", "5", ranks=ranks
    )
    assert run.status == 0, run.text
    assert run.report["held"] and run.report["world"] == ranks and run.report["seed"] == 5
    titles = {row["property"] for row in run.report["rows"]}
    assert {"output and lse", "gradients", "bytes sent", long_problems.TITLE} <= titles
    assert [one["kind"] for one in run.report["long"]] == list(long_problems.KINDS)
    assert all(one["rows"] == 96 and 0 < max(one["worst_ratio"].values()) <= 1 for one in run.report["long"])
    if ranks == 1:
        assert "there is one rank" in run.text and "links" not in run.report
    else:
        sizes = [rate["size"] for rate in run.report["links"]]
        assert sizes == [size for size in links.SIZES["gloo"] for _ in range(3)]


def test_a_wrong_result_is_shrunk_and_replayed(tmp_path: Path) -> None:
    run = planted(tmp_path, "wrong_result", "--examples", "30", "--long", "0")
    assert run.status == 1, run.text
    found = run.failure
    assert found["kind"] == "wrong result" and found["backend"] == "gloo"
    case = Case.from_json(json.dumps(found["case"]))
    assert (case.world, case.tokens, case.batch, case.heads) == (1, 6, 1, 1)
    *start, option, file = found["replay"].split()
    assert f"replay: {' '.join(start)} {option} {os.path.relpath(file, tmp_path)}" in unbroken(run.text)
    assert "torch.distributed.run" in found["replay"] and option == "--replay" and Path(file).exists()
    again = planted(tmp_path, "wrong_result", "--replay", file)
    assert again.status == 1 and again.failure["case"] == found["case"], again.text
    mended = under_torchrun(tmp_path, SCRIPT, "--backend", "gloo", "--replay", file)
    assert mended.status == 0 and mended.report["held"], mended.text


def test_a_rank_that_stalls_is_named_with_every_stack(tmp_path: Path) -> None:
    run = planted(tmp_path, "stall", "--examples", "20", "--long", "0", "--timeout", "2", "--budget", "5")
    assert run.status == 1, run.text
    assert run.failure["kind"] == "rank hang" and run.failure["world"] == 2
    message = run.failure["message"]
    assert re.search(r"no answer within 2 s.* from ranks? (0, )?1 in ", message)
    stalled = message[message.index("--- rank 1 had not answered") :]
    assert "torchrun_tasks.py" in stalled and "in spoil" in stalled
    assert "--- rank 0 " in message


@pytest.mark.parametrize(
    "defect, kind, said",
    [
        ("exception", "rank error", "rank 1 raised .*CUDA out of memory"),
        ("killed", "rank crash", "rank 1 was killed by SIGKILL"),
        ("process_killed", "rank crash", "the process that torchrun started for rank 1 is gone"),
        ("rank_1_stopped", "rank hang", "no answer within 2 s .*; stopped by a signal: rank 1"),
        ("rank_0_stopped", "rank hang", "no answer within 2 s .*; stopped by a signal: rank 0"),
    ],
)
def test_a_lost_rank_is_a_named_failure(tmp_path: Path, defect: str, kind: str, said: str) -> None:
    run = planted(tmp_path, defect, "--examples", "5", "--long", "0", "--budget", "2", "--timeout", "2")
    assert run.status == 1, run.text
    assert run.failure["kind"] == kind and re.search(said, run.failure["message"])
    assert Case.from_json(json.dumps(run.failure["case"])).world == 2
    assert "replay: " in run.text


@pytest.mark.parametrize(
    "defect, said",
    [
        ("process_stopped", "the process that torchrun started for rank 1 does not answer; it may be stopped"),
        ("first_process_stopped", "the process that torchrun started for rank 0 gave no sign of life for 6 s"),
        ("first_process_killed", "the process that torchrun started for rank 0 is gone"),
    ],
)
def test_a_process_of_torchrun_that_stops_is_named_rank_0_too(tmp_path: Path, defect: str, said: str) -> None:
    given = ["--backend", "gloo", "--seed", "1", "--examples", "5", "--long", "0", "--timeout", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    with subprocess.Popen(
        [*torchrun, defect, *given, "--failures", str(tmp_path / "failures")], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=clean(), cwd=tmp_path,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        text = ""
        while said not in unbroken(text):
            line = run.stdout.readline()
            assert line, text
            text += line
        if "stopped" in defect:  # torchrun would wait for it for half a minute
            os.kill(int((tmp_path / "process").read_text()), signal.SIGCONT)
        run.stdout.read()
        assert run.wait(PLENTY) == 1


def test_torchrun_told_to_end_saves_what_was_under_way(tmp_path: Path) -> None:
    given = ["--backend", "gloo", "--examples", "100000", "--long", "0", "--failures", str(tmp_path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    with subprocess.Popen([*torchrun, *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        said = ""
        while not re.search(r"world 2: \d+/", said):  # until examples are under way
            line = run.stdout.readline()
            assert line, said
            said += line
        run.terminate()
        text = said + run.stdout.read()
        assert run.wait(PLENTY) != 0
    assert "torchrun ends all its processes" in text and "machinery" not in text, text
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_an_interrupt_reports_what_held_until_then(tmp_path: Path) -> None:
    """To torchrun alone, as from a keyboard: each process that it starts has a session of its own, and it tells them
    all."""
    file = tmp_path / "report.json"
    given = ["--backend", "gloo", "--examples", "100000", "--long", "0", "--failures", str(tmp_path / "failures")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    with subprocess.Popen(
        [*torchrun, *given, "--json", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=clean(), cwd=tmp_path,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        said = ""
        while not re.search(r"world 2: [1-9]\d*/", said):  # until examples have held
            line = run.stdout.readline()
            assert line, said
            said += line
        run.send_signal(signal.SIGINT)
        text = said + run.stdout.read()
        assert run.wait(PLENTY) != 0
    assert "error: interrupted" in text and "all held, then interrupted" in text and "machinery" not in text, text
    report = json.loads(file.read_text())
    assert report["interrupted"] is True and not report["held"], report
    assert report["examples"] > 1 and report["failures"] == [] and report["seconds"] > 0
    assert "output and lse" in {row["property"] for row in report["rows"]} and "links" in report
    assert f"{report['examples']} examples, {report['examples']} of them distributed, in " in text, text
    assert not (tmp_path / "failures").exists() or not list((tmp_path / "failures").iterdir())


def test_links_that_lose_a_byte_end_the_run(tmp_path: Path) -> None:
    run = planted(tmp_path, "a_byte_lost", "--examples", "5")
    assert run.status == 1, run.text
    assert run.failure["property"] == links.TITLE and run.failure["case"] == {"links": {"world": 2}}
    assert re.search(r"of 4095 bytes from rank \d, 1 are wrong, the first at 4094", run.failure["message"])
    assert "everything else is left out" in run.text and run.report["examples"] == 0
    file = run.failure["replay"].split()[-1]
    assert planted(tmp_path, "a_byte_lost", "--replay", file).failure["property"] == links.TITLE
    assert under_torchrun(tmp_path, SCRIPT, "--backend", "gloo", "--replay", file).status == 0


def test_a_long_problem_that_is_wrong_is_found_and_replayed(tmp_path: Path) -> None:
    problem = {"long": {"world": 2, "tokens": 96, "kind": "LongNet float32", "seed": 0}}
    file = tmp_path / "long.json"
    file.write_text(json.dumps(problem))
    run = planted(tmp_path, "wrong_when_long", "--replay", str(file))
    assert run.status == 1 and run.failure["case"] == problem, run.text
    assert re.search(r"on rank 0: out of token \d+ is off by .* times its bound", run.failure["message"])
    assert under_torchrun(tmp_path, SCRIPT, "--backend", "gloo", "--replay", str(file)).status == 0


# --- the word to leave ------------------------------------------------------------------------------------------------


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    """With the one agent of a world of one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = Agents(Address(rank=0, local_rank=0, world_size=1, host="127.0.0.1", port=port, served=False), PLENTY)
    yield found
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the farewell is for a process that ends
    found.farewell(0)


def test_the_word_to_leave_is_heard_when_an_agent_is_next_spoken_to(agents: Agents) -> None:
    turns: list[Callable[[], Any]] = [
        lambda: agents.pump(0.0),
        lambda: agents.send([0], "end", 1, [None]),
        lambda: agents.ask([0], "stacks", None, PLENTY),
        lambda: ShrinkBackend(agents, None).submit(observe, plain(2)),
    ]
    assert agents.ask([0], "stacks", None, PLENTY) == {0: ""}
    agents.told_to_leave()
    for turn in turns:
        with pytest.raises(AgentLost, match="torchrun ends all its processes"):
            turn()
    agents.told_to_leave()  # a second time, while the first is being recorded


def test_the_word_to_leave_wakes_who_waits_for_an_agent(agents: Agents) -> None:
    threading.Timer(0.2, agents.told_to_leave).start()
    with pytest.raises(AgentLost, match="torchrun ends all its processes"):
        agents.pump(PLENTY)


def test_an_interrupt_is_heeded_once_when_an_agent_is_next_spoken_to(agents: Agents) -> None:
    turns: list[Callable[[], Any]] = [
        lambda: agents.pump(0.0),
        lambda: agents.send([0], "end", 1, [None]),
        lambda: agents.ask([0], "stacks", None, PLENTY),
        lambda: ShrinkBackend(agents, None).submit(observe, plain(2)),
    ]
    for turn in turns:
        agents.interrupted()
        agents.interrupted()  # an impatient user's
        with pytest.raises(KeyboardInterrupt):
            turn()
        assert agents.ask([0], "stacks", None, PLENTY) == {0: ""}
    agents.interrupted()
    agents.told_to_leave()
    with pytest.raises(AgentLost):
        agents.heed()


# --- what cannot be carried out ---------------------------------------------------------------------------------------


def test_without_torchrun_it_says_how_to_run() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=PLENTY, env=clean())
    assert done.returncode == 2
    assert "torchrun --nproc-per-node=2 scripts/validate_nccl.py" in done.stderr and "RANK" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are GPUs")
def test_without_gpus_nccl_is_refused(tmp_path: Path) -> None:
    run = under_torchrun(tmp_path, SCRIPT)
    assert "exitcode  : 2" in run.text and "there is no GPU for rank" in run.text
    assert run.report == {}


def test_a_replay_of_what_is_no_counter_example_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "no.json"
    file.write_text('{"long": {"world": 2, "tokens": 8, "kind": "dense float32"}}')
    run = under_torchrun(tmp_path, SCRIPT, "--backend", "gloo", "--replay", str(file))
    assert "exitcode  : 2" in run.text and "tokens is 8; it must be an integer of at least 64" in run.text


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NO_GPUS)
def test_nccl_holds_on_gpus(tmp_path: Path) -> None:
    run = under_torchrun(tmp_path, SCRIPT, "--examples", "20", "--long", "4096")
    assert run.status == 0 and run.report["backend"] == "nccl", run.text


def test_an_environment_without_torchrun_is_named() -> None:
    with pytest.raises(NotUnderTorchrun, match="RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        Address.of({})


@pytest.mark.parametrize("last", [None, {"long": {"world": 2}}, plain(2)], ids=("nothing", "long", "Case"))
def test_what_was_under_way_is_saved_as_what_it_is(tmp_path: Path, last: Any) -> None:
    report = Report(Console(quiet=True))
    backend: Any = SimpleNamespace(name="gloo", last=last, agents=SimpleNamespace(place=SimpleNamespace(world_size=2)))
    validate._record_loss(AgentLost({1}), report, backend, tmp_path)
    ((failure,), saved) = report.failures, {} if last is None else last
    wanted = json.loads(saved.to_json()) if isinstance(saved, Case) else saved
    assert failure.record == wanted and json.loads(failure.file.read_text()) == wanted
