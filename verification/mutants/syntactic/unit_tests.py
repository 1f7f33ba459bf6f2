"""The unit tests of a module: those of one process in the process of a rank whose modules were changed, then those that
start ranks in a copy of the project whose file was changed."""

from __future__ import annotations

import io
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# What tests need of the project.
COPIED = ("reference", "ring", "scripts", "tests", "verification", "pyproject.toml")


@dataclass(frozen=True)
class Verdict:
    """What the unit tests said: the first that failed, and the error; None if all passed."""

    failed: str | None
    message: str | None


def limit_processor(seconds: int, pid: int = 0) -> None:
    """End a process when it has used so many seconds of the processor more than now. pid 0: this one."""
    fields = Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK")  # in user mode, in the kernel
    _, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
    resource.prlimit(pid, resource.RLIMIT_CPU, (used + 1 + seconds, hard))


def run_tests(files: Sequence[str], seconds: int) -> Verdict:
    """These test files, in this process, until the first failure or so many seconds of the processor.

    Tests that draw draw the same every time. Those with ranks of their own are `run_tests_with_ranks`'s: a rank starts
    no processes.

    Raises RuntimeError where pytest itself cannot do its work.
    """
    import hypothesis
    import pytest
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()  # the pool's own: tests begin without any
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True, deadline=None)
    hypothesis.settings.load_profile("mutants")
    os.chdir(ROOT)
    limit_processor(seconds)
    first = _First()
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = pytest.main(
            ["-x", "-q", "-m", "not ranks", "--capture=sys", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist",
             "-p", "no:faulthandler", "-o", "addopts=", "--import-mode=importlib", *files],
            plugins=[first],
        )  # fmt: skip
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and first.failed is None:
        raise RuntimeError(f"pytest ended with status {status}: {said.getvalue()[-2000:]}")
    return Verdict(first.failed, first.message)


def run_tests_with_ranks(files: Sequence[str], changed: str, source: str, seconds: float) -> Verdict:
    """The tests of these files that start ranks, in a copy of the project where `changed` is `source`, until the
    first failure or so many seconds.

    Raises RuntimeError where pytest itself cannot do its work.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        (folder / changed).write_text(source)
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "ranks and not slow and not gpu", "--tb=no",
            "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "--import-mode=importlib", *files,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": name}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Verdict("tests with ranks", f"they had not ended after {seconds:.0f} s")
    return _said_by_pytest(process.returncode, said)


def _said_by_pytest(status: int, said: str) -> Verdict:
    """Raises RuntimeError."""
    first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", said, re.MULTILINE)
    if first is not None:
        return Verdict(first[1], (first[2] or "")[:200])
    if status in (0, 5):  # all passed, or none is selected
        return Verdict(None, None)
    raise RuntimeError(f"pytest ended with status {status}: {said[-2000:]}")


class _First:
    """A plugin of pytest that remembers the first failure, in a test or in the import of its file."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self.message: str | None = None

    def _note(self, where: str, error: object) -> None:
        if self.failed is None:
            lines = [line for line in str(error).splitlines() if line.strip()]
            said = lines[-1].strip().removeprefix(f"{ROOT}/") if lines else ""  # pytest says where, by the whole path
            self.failed, self.message = where, said[:200]

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False):
            self._note(getattr(report, "nodeid", "?"), getattr(report, "longrepr", ""))

    def pytest_collectreport(self, report: object) -> None:
        if getattr(report, "failed", False):
            self._note(getattr(report, "nodeid", "?"), getattr(report, "longrepr", ""))
