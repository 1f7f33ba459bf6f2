"""`scripts/validate_nccl.py` under torchrun with gloo: it holds, finds planted defects, names ranks that are lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring.comm import process_group
from tests.support.planted import plant, plant_wrong_result
from tests.support.printed import unbroken
from verification.case import Case
from verification.problems import links, long_problems

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = ROOT / "scripts/validate_nccl.py"
# The same with a defect planted in every rank: the defect's name comes first.
SPOILT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.verification.run.torchrun.test_torchrun import DEFECTS
from verification.cli.validate import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], prepare=DEFECTS[sys.argv[1]]))
"""
PLENTY = 280  # seconds that no run needs, and less than pytest allows a test
NO_GPUS = "needs 2 GPUs; there, run: torchrun --nproc-per-node=2 -m verification.cli.validate"


def strike(culprit: int, deed: Callable[[], object]) -> None:
    """On real ranks only, and before a call with messages: in the simulation, nothing is wrong."""

    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        if dist.get_world_size() > 1 and dist.get_rank() == culprit:
            deed()
        return real(*args, **kwargs)

    plant(spoil)


def fail() -> None:
    raise RuntimeError("CUDA out of memory, or so")


def signal_torchruns(word: signal.Signals) -> None:
    """To the process that torchrun started for the rank, whose number is left in the file `process`."""
    # The rank's parent is the forkserver, and that one's parent is the process.
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    process = int(stat.rpartition(")")[2].split()[1])
    Path("process").write_text(str(process))
    os.kill(process, word)
    if word == signal.SIGSTOP:
        time.sleep(3600)  # so that no answer is on its way


def a_byte_lost() -> None:
    """The last byte of large messages is another than was to be sent."""
    real = process_group.ProcessGroupTransport.post

    def post(self: Any, sends: Any, receives: Any) -> Any:
        for message in sends:
            if message.bytes >= 4095:
                message.tensor.view(-1)[-1:] += 1
        return real(self, sends, receives)

    process_group.ProcessGroupTransport.post = post  # type: ignore[method-assign]


DEEDS: dict[str, Callable[[], object]] = {
    "fails": fail,
    "stalls": partial(time.sleep, 3600),
    "is killed": partial(signal.raise_signal, signal.SIGKILL),
    "is stopped": partial(signal.raise_signal, signal.SIGSTOP),
    "has its process killed": partial(signal_torchruns, signal.SIGKILL),
    "has its process stopped": partial(signal_torchruns, signal.SIGSTOP),
}
DEFECTS: dict[str, Callable[[], None]] = {
    "wrong result": plant_wrong_result,
    "a byte lost": a_byte_lost,
    **{f"{rank} {name}": partial(strike, rank, deed) for rank in (0, 1) for name, deed in DEEDS.items()},
}


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


ALONE = ("--standalone",)


@contextmanager
def started(
    folder: Path, *arguments: str, defect: str | None = None, ranks: int = 2, hosts: tuple[str, ...] = ALONE
) -> Iterator[subprocess.Popen[str]]:
    """torchrun, with the packages and without what a torchrun around the tests has set. hosts: its options for them."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    (folder / "spoilt.py").write_text(SPOILT)
    program = [str(SCRIPT)] if defect is None else [str(folder / "spoilt.py"), defect, "--seed", "1"]
    outputs = ["--failures", str(folder / "failures"), "--json", str(folder / "report.json")]
    with subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", *hosts, f"--nproc-per-node={ranks}",
            *program, "--backend", "gloo", *arguments, *outputs,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
    ) as run:  # fmt: skip
        yield run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def read(run: subprocess.Popen[str], until: str) -> str:
    """All that it prints until it has printed this."""
    assert run.stdout is not None
    text = ""
    while not re.search(until, unbroken(text)):
        line = run.stdout.readline()
        assert line, text
        text += line
    return text


def ended(run: subprocess.Popen[str], folder: Path, said: str = "") -> Run:
    text, _ = run.communicate(timeout=PLENTY)
    file = folder / "report.json"
    return Run(run.returncode, said + text, json.loads(file.read_text()) if file.exists() else {})


def under_torchrun(folder: Path, *arguments: str, defect: str | None = None, ranks: int = 2) -> Run:
    with started(folder, *arguments, defect=defect, ranks=ranks) as run:
        return ended(run, folder)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sound_runs_hold(tmp_path: Path, ranks: int) -> None:
    run = under_torchrun(tmp_path, "--examples", "6", "--long", "96", "--seed", "5", ranks=ranks)
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


def test_two_torchruns_are_one_run(tmp_path: Path) -> None:
    """Two agents serve one run, as on two hosts."""
    meeting = "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"
    hosts = [(*meeting, f"--node-rank={number}") for number in range(2)]
    words = ("--examples", "6", "--long", "96", "--seed", "5")
    with (
        started(tmp_path, *words, ranks=1, hosts=hosts[0]) as first,
        started(tmp_path, *words, ranks=1, hosts=hosts[1]) as second,
    ):
        run = ended(first, tmp_path)
        assert run.status == 0 and run.report["held"] and run.report["world"] == 2, run.text
        assert second.wait(PLENTY) == 0


def test_a_wrong_result_is_shrunk_and_replayed(tmp_path: Path) -> None:
    run = under_torchrun(tmp_path, "--examples", "30", "--long", "0", defect="wrong result")
    assert run.status == 1, run.text
    found = run.failure
    assert found["kind"] == "wrong result" and found["backend"] == "gloo"
    case = Case.from_json(json.dumps(found["case"]))
    assert (case.world, case.tokens, case.batch, case.heads) == (1, 6, 1, 1)
    *start, option, file = found["replay"].split()
    assert f"replay: {' '.join(start)} {option} {os.path.relpath(file, tmp_path)}" in unbroken(run.text)
    assert "torch.distributed.run" in found["replay"] and option == "--replay" and Path(file).exists()
    again = under_torchrun(tmp_path, "--replay", file, defect="wrong result")
    assert again.status == 1 and again.failure["case"] == found["case"], again.text
    mended = under_torchrun(tmp_path, "--replay", file)
    assert mended.status == 0 and mended.report["held"], mended.text


@pytest.mark.parametrize(
    "defect, kind, said",
    [
        ("1 fails", "rank error", "rank 1 raised .*CUDA out of memory"),
        ("1 is killed", "rank crash", "rank 1 was killed by SIGKILL"),
        ("1 has its process killed", "rank crash", "the process that torchrun started for rank 1 is gone"),
        ("1 is stopped", "rank hang", "no answer within 2 s .*; stopped by a signal: rank 1"),
        ("0 is stopped", "rank hang", "no answer within 2 s .*; stopped by a signal: rank 0"),
        ("1 stalls", "rank hang",
         (r"no answer within 2 s.* from ranks? (0, )?1 in (?s:.*\ntorch's analysis of the flight records:\n.*"
          r"--- rank 0 .*--- rank 1 had.*torchrun\.py.*in spoil)")),
    ],
)  # fmt: skip
def test_a_lost_rank_is_a_named_failure(tmp_path: Path, defect: str, kind: str, said: str) -> None:
    given = ("--examples", "5", "--long", "0", "--budget", "2", "--timeout", "2")
    run = under_torchrun(tmp_path, *given, defect=defect)
    assert run.status == 1, run.text
    assert run.failure["kind"] == kind and re.search(said, run.failure["message"]), run.text
    assert Case.from_json(json.dumps(run.failure["case"])).world == 2
    assert "replay: " in run.text


@pytest.mark.parametrize(
    "defect, said",
    [
        (
            "1 has its process stopped",
            "the process that torchrun started for rank 1 does not answer; it may be stopped",
        ),
        ("0 has its process stopped", "the process that torchrun started for rank 0 gave no sign of life for 6 s"),
        ("0 has its process killed", "the process that torchrun started for rank 0 is gone"),
    ],
)
def test_stopped_processes_are_named_with_rank_0(tmp_path: Path, defect: str, said: str) -> None:
    with started(tmp_path, "--examples", "5", "--long", "0", "--timeout", "2", defect=defect) as run:
        read(run, until=said)
        if "stopped" in defect:  # torchrun would wait for it for half a minute
            os.kill(int((tmp_path / "process").read_text()), signal.SIGCONT)
        assert ended(run, tmp_path).status == 1


@pytest.mark.parametrize("word", (signal.SIGINT, signal.SIGTERM))
def test_an_interrupt_reports_what_held_until_then(tmp_path: Path, word: signal.Signals) -> None:
    """To torchrun alone, as from a keyboard: each process that it starts has a session of its own, and it tells all."""
    with started(tmp_path, "--examples", "100000", "--long", "0") as process:
        said = read(process, until=r"world 2: [1-9]\d*/")  # examples have held
        process.send_signal(word)
        run = ended(process, tmp_path, said)
    assert run.status != 0 and "error: interrupted" in run.text and "all held, then interrupted" in run.text, run.text
    assert "test harness" not in run.text, run.text
    report = run.report
    assert report["interrupted"] is True and not report["held"], report
    assert report["examples"] > 1 and report["failures"] == [] and report["seconds"] > 0
    assert "output and lse" in {row["property"] for row in report["rows"]} and "links" in report
    assert f"{report['examples']} examples, {report['examples']} of them distributed, in " in run.text, run.text
    assert not list(tmp_path.glob("failures/*"))


def test_links_that_lose_a_byte_end_the_run(tmp_path: Path) -> None:
    run = under_torchrun(tmp_path, "--examples", "5", defect="a byte lost")
    assert run.status == 1, run.text
    assert run.failure["property"] == links.TITLE and run.failure["case"] == {"kind": "links", "links": {"world": 2}}
    assert re.search(r"of 4095 bytes from rank \d, 1 are wrong, the first at 4094", run.failure["message"])
    assert "everything else is skipped" in run.text and run.report["examples"] == 0
    file = run.failure["replay"].split()[-1]
    assert under_torchrun(tmp_path, "--replay", file, defect="a byte lost").failure["property"] == links.TITLE
    assert under_torchrun(tmp_path, "--replay", file).status == 0


def test_without_torchrun_the_error_says_how_to_run() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "torchrun --nproc-per-node=2 -m verification.cli.validate" in done.stderr
    assert "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NO_GPUS)
def test_nccl_holds_on_gpus(tmp_path: Path) -> None:
    run = under_torchrun(tmp_path, "--backend", "nccl", "--examples", "20", "--long", "4096")
    assert run.status == 0 and run.report["backend"] == "nccl", run.text
