"""Reads or replays a file in a process with a deadline, and judges what came of it."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console

from verification.faults.fault_experiment import MishandledFault
from verification.faults.training_process import environment, wait_for
from verification.regular_file import MAX_BYTES
from verification.replay.replay import replay
from verification.report.report import Report
from verification.run.backends import GlooBackend, Unavailable
from verification.run.processes.parent_death import end_with_parent

DEADLINE, COMMAND_DEADLINE, ENDED = 20.0, 180.0, 15.0  # seconds
MEMORY = 2**30  # bytes that reading a file may take
LONGEST = 1500  # characters of a refusal
TRAP = "import os, pathlib; pathlib.Path('imported').touch(); os._exit(0)"  # a module in the working directory


class _Read(BaseException):
    """The file was read, and its ranks would start."""


class _Reader(GlooBackend):
    def start(self, world: int) -> None:
        raise _Read


def read_in_fork(file: Path) -> None:
    """Read a file as a replay does, up to the start of its ranks. Raises MishandledFault unless it is read, or refused
    in one line."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(sender, file), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(DEADLINE):
            raise MishandledFault(f"hung: reading {shown(file)}, for {DEADLINE:g} s")
        refusal, trace = receiver.recv()
    except EOFError:
        process.join()
        raise MishandledFault(f"silent: reading {shown(file)} ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if trace:
        raise MishandledFault(f"traceback: reading {shown(file)}:\n{trace}")
    if not refusal and not holds_object(file):
        raise MishandledFault(f"silent: {shown(file)} was read")
    if "\n" in refusal or len(refusal) > LONGEST:
        raise MishandledFault(f"long: {shown(file)} is refused in {refusal!r}")
    check_folder(file)


def _answer(sender: Connection, file: Path) -> None:
    """Send the refusal, "" if the file was read; and the traceback of any other exception."""
    end_with_parent()
    torch.set_num_threads(1)  # threads of the parent's pool do not exist here
    os.chdir(file.parent)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        replay(file, Report(Console(file=io.StringIO())), _Reader())
    except Unavailable as error:
        sender.send((str(error), ""))
    except _Read:
        sender.send(("", ""))
    except BaseException:
        sender.send(("", traceback.format_exc()))


def replay_by_command(file: Path) -> None:
    """Replay a file with the command. Raises MishandledFault unless it is refused with status 2 in one line, or
    replayed; or if a process or a file is left behind."""
    temporary = file.parent / "temporary"
    temporary.mkdir()
    command = subprocess.Popen(
        [sys.executable, "-m", "verification", "replay", file.name], cwd=file.parent, text=True, errors="replace",
        env=environment() | {"TMPDIR": str(temporary)}, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, error = command.communicate(timeout=COMMAND_DEADLINE)
        wait_for(lambda: not _runs(command.pid), ENDED, f"processes of a replay of {shown(file)}", "left behind")
    except subprocess.TimeoutExpired:
        raise MishandledFault(f"hung: a replay of {shown(file)}, for {COMMAND_DEADLINE:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    lines, status = error.splitlines(), command.returncode
    refused = status == 2 and len(lines) == 1 and lines[0].startswith("python -m verification: error: ") and not out
    replayed = holds_object(file) and (
        (status == 0 and "it held" in out) or (status == 1 and "1 counter-example" in out)
    )
    if not refused and not replayed:
        raise MishandledFault(f"misnamed: a replay of {shown(file)} ended with {status}: {out[-500:]}{error[-2000:]}")
    if not all(x.isprintable() or x in "\n\t" for x in out + error):
        raise MishandledFault(f"unprintable: a replay of {shown(file)} printed {(out + error)!r}")
    if left := [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]:  # torch's cache
        raise MishandledFault(f"left behind: {', '.join(left)} by a replay of {shown(file)}")
    shutil.rmtree(temporary)
    check_folder(file)


def holds_object(file: Path) -> bool:
    """True for a regular file with a JSON object; any other must be refused."""
    try:
        return file.is_file() and file.stat().st_size <= MAX_BYTES and isinstance(json.loads(file.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False


def _runs(group: int) -> bool:
    """True if a process of the group has not ended."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def check_folder(file: Path) -> None:
    """Raise MishandledFault for anything but the file and the trap in its folder."""
    left = {path.name for path in file.parent.iterdir()} - {file.name, "trap.py", "__pycache__"}
    if left:
        raise MishandledFault(f"{'imported: a module' if 'imported' in left else 'left behind'}: {left}, {shown(file)}")


def shown(file: Path) -> str:
    """Describe a file: the beginning of its contents, or its kind."""
    return (
        repr(file.read_bytes()[:2000])
        if file.is_file() and file.stat().st_size <= MAX_BYTES
        else f"{file.name} (special)"
    )
