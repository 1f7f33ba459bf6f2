"""Faults of saved files: mutated records of every kind, and what is no regular file. Each must be refused in one line,
or read, by a process with a deadline; by the command, refused or replayed."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, find, settings
from rich.console import Console

from ring.regular_file import MAX_BYTES
from verification.check.laws import LAWS
from verification.experiments import EXAMPLES, law_experiment
from verification.faults.fault_experiment import FAULTS, MishandledFault
from verification.faults.seeded_faults import SeededFault, SeededFaults
from verification.faults.training_process import environment, wait_for
from verification.models.strategies import model_cases
from verification.peers.peer_experiment import LAWS_OF_ANY, experiment, law_of
from verification.peers.training.step_peer_experiment import step_experiment
from verification.replay.replay import replay
from verification.report.report import Report
from verification.run.backends import GlooBackend, Unavailable
from verification.run.processes.parent_death import end_with_parent
from verification.training.training_run import TRAINING

DEADLINE, COMMAND_DEADLINE, ENDED = 20.0, 180.0, 15.0  # seconds
MEMORY = 2**30  # bytes that reading a file may take
LONGEST = 1500  # characters of a refusal
WORLD = 2
TRAP = "import os, pathlib; pathlib.Path('imported').touch(); os._exit(0)"  # a module in the working directory
ACTING = ("\x1b[2J", "\x1b]0;title\x07", "\r", "\x00", "\x7f", "\x9b31m", "\u202e", "\u2066", "\u2028", "\ud800")
TYPES = ("null", "true", "0", "-1", "1.5", '""', '"x"', "[]", "{}", "[[]]", "[0, null]", '{"a": 0}')
NAMES = (
    "trap:adapter",
    "trap:adapter.x",
    "trap",
    "os:system",
    "verification.peers.adapters.trap:x",
    "./trap.py:x",
    ":",
)
_MARK = "a mark that stands for raw text"
_FIRST = settings(
    phases=[Phase.generate], database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


@cache
def stock() -> list[dict[str, Any]]:
    """Return a record of each kind that runs save, of each law too, on WORLD ranks."""
    experiments = [EXAMPLES, FAULTS, TRAINING, *map(law_experiment, LAWS), step_experiment("fairscale/guarded")]
    experiments += [experiment("ring-attention-pytorch"), law_of("ring-attention-pytorch", LAWS_OF_ANY[0])]
    model = find(model_cases(WORLD), lambda case: True, settings=_FIRST)
    return [
        *(x.record_of(find(x.draw(WORLD), lambda subject: subject is not None, settings=_FIRST)) for x in experiments),
        {"model": "trap:adapter", "case": model.to_dict()},
        {"real_size": {"world": WORLD, "tokens": 512, "seed": 0}},
        {"links": {"world": WORLD}},
        {"long": {"world": WORLD, "tokens": 64, "kind": "own", "seed": 0, "line": "tokens=64 causal=true"}},
        {"training_fault": {"kind": "flip", "seed": 1}},
        {"file_fault": {"kind": "bits", "seed": 1}},
    ]


def _bits(draw: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _splice(draw: random.Random, text: bytes) -> bytes:
    other = json.dumps(draw.choice(stock())).encode()
    return text[: draw.randrange(len(text))] + other[draw.randrange(len(other)) :]


def _raw(choose: Callable[[random.Random], str]) -> Callable[[random.Random, bytes], bytes]:
    """Return the mutation that puts raw text in the place of a value."""

    def mutate(draw: random.Random, text: bytes) -> bytes:
        record = json.loads(text)
        container, key = draw.choice(list(_places(record)))
        container[key] = _MARK
        return json.dumps(record).replace(json.dumps(_MARK), choose(draw)).encode()

    return mutate


def _number(draw: random.Random) -> str:
    power = f"{draw.choice(('', '-'))}{10 ** draw.randint(6, 4000)}"
    return draw.choice((power, "9" * 5000, "1e400", "1e308", "1e-320"))


def _nested(draw: random.Random) -> str:
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    depth = int(10 ** draw.uniform(1, 5))
    return f"{opening * depth}0{closing * depth}"


def _keys(draw: random.Random, text: bytes) -> bytes:
    """Drop a key, or give its value to another one or to two."""
    record = json.loads(text)
    container, key = draw.choice([(x, key) for x, key in _places(record) if isinstance(x, dict)])
    value, others = container[key], [k for x, k in _places(draw.choice(stock())) if isinstance(x, dict)]
    if draw.random() < 0.7:
        del container[key]
    if draw.random() < 0.8:
        container[draw.choice((*others, "", "__class__", draw.choice(ACTING)))] = value
    return json.dumps(record).encode()


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a record with each of its keys or indices."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


def _huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**40)


MUTATIONS: dict[str, tuple[str, Callable[[random.Random, bytes], bytes]]] = {
    "bits": ("flipped bits", _bits),
    "cut": ("a cut file", lambda draw, text: text[: draw.randrange(len(text))]),
    "splice": ("two files spliced", _splice),
    "type": ("a value of another type", _raw(lambda draw: draw.choice(TYPES))),
    "number": ("a huge number", _raw(_number)),
    "nested": ("deep nesting", _raw(_nested)),
    "nan": ("NaN or infinity", _raw(lambda draw: draw.choice(("NaN", "Infinity", "-Infinity")))),
    "keys": ("other keys", _keys),
    "control": ("control characters", _raw(lambda draw: json.dumps("".join(draw.choices(ACTING, k=3))))),
    "name": ("a name of a module", _raw(lambda draw: json.dumps(draw.choice(NAMES)))),
}
SPECIAL: tuple[Callable[[Path], object], ...] = (
    os.mkfifo, Path.mkdir, Path.touch, lambda file: socket.socket(socket.AF_UNIX).bind(str(file)), _huge,
    *(lambda file, target=target: file.symlink_to(target) for target in ("/dev/zero", "/dev/null", "/dev/tty", "none")),
)  # fmt: skip


def mutated(kind: str, draw: random.Random) -> bytes:
    """Return a record of the stock with a mutation of that kind."""
    return MUTATIONS[kind][1](draw, json.dumps(draw.choice(stock())).encode())


def _written(draw: random.Random, folder: Path, kind: str) -> Path:
    """Write the file of a kind beside a module that would end the process."""
    (folder / "trap.py").write_text(TRAP)
    file = folder / "case.json"
    draw.choice(SPECIAL)(file) if kind == "special" else file.write_bytes(mutated(kind, draw))
    return file


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


class _Read(BaseException):
    """The file was read, and its ranks would start."""


class _Reader(GlooBackend):
    def start(self, world: int) -> None:
        raise _Read


def _answer(sender: Connection, file: Path) -> None:
    """Send the refusal, "" if the file was read; and the traceback of any other exception."""
    end_with_parent()
    torch.set_num_threads(1)  # threads of the parent's pool do not exist here
    os.chdir(file.parent)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    refusal = trace = ""
    try:
        replay(file, Report(Console(file=io.StringIO())), _Reader())
    except Unavailable as error:
        refusal = str(error)
    except _Read:
        pass
    except BaseException:
        trace = traceback.format_exc()
    sender.send((refusal, trace))


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
    ended = (status == 0 and "it held" in out) or (status == 1 and "1 counter-example" in out)
    if not refused and not (ended and holds_object(file)):
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
    short = file.is_file() and file.stat().st_size <= MAX_BYTES
    return repr(file.read_bytes()[:2000]) if short else f"{file.name} (special)"


def _fault(title: str, kind: str) -> SeededFault:
    return SeededFault(title, "refused in a line, or read", lambda draw, at: read_in_fork(_written(draw, at, kind)))


def _replayed(draw: random.Random, folder: Path) -> None:
    replay_by_command(_written(draw, folder, draw.choice((*MUTATIONS, "special"))))


IN_FORKS = {kind: _fault(title, kind) for kind, (title, _) in MUTATIONS.items()}
IN_FORKS["special"] = _fault("no regular file", "special")
FILE_FAULTS = SeededFaults(
    "file_fault", "file", IN_FORKS,
    {"command": SeededFault("any of these, by the command", "refused in a line, or replayed", _replayed)}, every=64,
)  # fmt: skip
