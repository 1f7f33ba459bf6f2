"""Faults of a running `scripts/train.py` on two ranks: kills, stops, a full disk, a second training."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ring.nn.frameworks import checkpoint
from verification.faults.fault_experiment import MishandledFault
from verification.run.backends import Unavailable
from verification.run.processes.process_tree import alive, descendants

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train.py"
SMALL = (
    "--ranks 2 --steps 1000000 --every 1 --tokens 32 --layers 1 --dim 16 --heads 2 --segment-length 16 32 "
    "--dilated-ratio 1 2 --dtype float64"
)  # fmt: skip
STRIKES = {
    "launcher": "kill -9 of the launcher",
    "terminate": "SIGTERM to the launcher",
    "rank": "kill -9 of a rank",
    "stop": "SIGSTOP, then kill -9",
    "disk": "a disk full in training",
    "second": "a second training",
}
BEGUN, ENDED = 120.0, 15.0  # seconds to the first checkpoint, and to the end of all processes


def striking(kind: str) -> Callable[[random.Random, Path], None]:
    """Return the strike of a kind of STRIKES. It raises Unavailable where the script is not installed."""

    def strike(draw: random.Random, folder: Path) -> None:
        if not SCRIPT.is_file():
            raise Unavailable(f"faults of processes train with {SCRIPT}, which is missing: run in the repository")
        saved = folder / "training"
        with begun(saved) as launcher, ThreadPoolExecutor(1) as reader:
            assert launcher.stderr is not None
            errors, pids = reader.submit(launcher.stderr.read), {launcher.pid}
            try:
                wait_for(lambda: any(saved.glob("step-*")) or launcher.poll() is not None, BEGUN, "no checkpoint")
                time.sleep(draw.random() / 4)
                pids |= descendants(launcher.pid)
                strike_at(kind, draw, launcher, sorted(pids - {launcher.pid}), saved)
                wait_for(lambda: launcher.poll() is not None, ENDED, f"the launcher, after {STRIKES[kind]}")
                if launcher.returncode == 0:
                    raise MishandledFault(f"silent: the launcher returned 0 after {STRIKES[kind]}")
                wait_for(lambda: not alive(pids), ENDED, f"processes {alive(pids)}", "left behind")
            finally:
                for pid in alive(pids):
                    os.kill(pid, signal.SIGKILL)
        check_folder(saved, clean=kind == "disk")
        if kind == "disk" and "MiB are free on its disk" not in (text := errors.result()):
            raise MishandledFault(f"misnamed: {STRIKES[kind]}, got: {text[-1000:]}")

    return strike


def begun(folder: Path) -> subprocess.Popen[str]:
    """Start a training, which ends with this process. Its errors go to a pipe: the limit of a full disk cuts files."""
    command = [sys.executable, str(SCRIPT), *SMALL.split(), "--folder", str(folder)]
    own = {"TRAIN_LAUNCHER": str(os.getpid())}
    return subprocess.Popen(
        command, env=environment() | own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def strike_at(kind: str, draw: random.Random, launcher: subprocess.Popen[str], ranks: list[int], folder: Path) -> None:
    """Inject the fault."""
    if len(ranks) != 2:
        raise MishandledFault(f"lost: the training ended by itself, or has the ranks {ranks}")
    if kind == "second":
        second_training(ranks, folder)
    elif kind == "disk":
        most = draw.randrange(10_000)
        for rank in ranks:
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (most, most))
        return
    elif kind in ("rank", "stop"):
        os.kill(draw.choice(ranks), signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
    if kind != "rank":
        launcher.send_signal(signal.SIGTERM if kind == "terminate" else signal.SIGKILL)


def second_training(ranks: list[int], folder: Path) -> None:
    """Start another training in the folder, as one that resumes. It must be refused with the holder's number."""
    command = [sys.executable, str(SCRIPT), "--resume", "--steps", "1000000", "--folder", str(folder)]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=BEGUN)
    except subprocess.TimeoutExpired:
        raise MishandledFault("silent: two trainings ran in one folder") from None
    if done.returncode == 0 or not any(f"is held by process {rank} of " in done.stderr for rank in ranks):
        raise MishandledFault(f"misnamed: a folder that another training holds, got: {done.stderr[-1000:]}")


def check_folder(folder: Path, clean: bool) -> None:
    """Raise MishandledFault unless the last checkpoint is whole, and, once the folder is held again, nothing else is
    there. clean: True where nothing may be there before, either."""
    if clean and (left := [path.name for path in folder.glob(".*.new")]):
        raise MishandledFault(f"left behind: {', '.join(left)}")
    with checkpoint.hold(folder):
        steps = {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*")}
        if not steps:
            raise MishandledFault("lost: the last checkpoint")
        last = steps[max(steps)]
        try:
            checkpoint.read_progress(last, whole=True)
        except ValueError as error:
            raise MishandledFault(f"lost: the last checkpoint: {error}") from error
        if others := {path.name for path in folder.iterdir()} - {".lock", *(path.name for path in steps.values())}:
            raise MishandledFault(f"left behind: {', '.join(sorted(others))}")


def wait_for(done: Callable[[], bool], seconds: float, what: str, verdict: str = "hung") -> None:
    """Wait for a condition. Raises MishandledFault after so many seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise MishandledFault(f"{verdict}: {what}, for {seconds:g} s")
        time.sleep(0.02)
