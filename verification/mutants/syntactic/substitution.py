"""A changed source in place of a module's own, in the process of a rank: for changes that know no structure.

The named defects are grafted onto the live modules (`verification.mutants.plant`), which refuses a decorator that is
gone or a default of another type. Here the modules of the project are forgotten instead, and imported again when they
are needed next, one of them from the changed text: the same as an edited file in a new process, without the seconds
that torch takes to import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import resource
import sys
import types
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("reference", "ring", "verification")
# What runs in a rank while the others are forgotten. It knows nothing of `ring`.
_KEPT = (
    "verification.failures",
    "verification.run.processes.pool",
    "verification.run.processes.rendezvous",
    "verification.run.processes.worker",
)
# Beyond what a rank has when the changed source comes: a loop that fills memory ends here.
MEMORY = 3 * 2**30
ROOT = Path(__file__).resolve().parents[3]


class _Loader(importlib.machinery.SourceFileLoader):
    """The module's file with another content."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self._source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, path: str, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=_Loader(fullname, self._path, self._source)
        )


def substitute(module: str, source: str) -> None:
    """Whoever imports `module` from now on gets `source`, and all modules of the project are imported anew.

    Nothing is imported here: a source that does not even import is for the next call of the rank to find.
    """
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        raise ValueError(f"module must be one of a file of the project, got {module!r}")
    sys.meta_path.insert(0, _Finder(module, str(path), source))
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES and name not in _KEPT]:
        del sys.modules[name]
    limit = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


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

    Tests that draw draw the same every time.

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
            ["-x", "-q", "--capture=sys", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-p",
             "no:faulthandler", "-o", "addopts=", *files],
            plugins=[first],
        )  # fmt: skip
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and first.failed is None:
        raise RuntimeError(f"pytest ended with status {status}: {said.getvalue()[-2000:]}")
    return Verdict(first.failed, first.message)


class _First:
    """A plugin of pytest that remembers the first failure, in a test or in the import of its file."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self.message: str | None = None

    def _note(self, where: str, error: object) -> None:
        if self.failed is None:
            lines = [line for line in str(error).splitlines() if line.strip()]
            self.failed, self.message = where, lines[-1][:200] if lines else ""

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False):
            self._note(getattr(report, "nodeid", "?"), getattr(report, "longrepr", ""))

    def pytest_collectreport(self, report: object) -> None:
        if getattr(report, "failed", False):
            self._note(getattr(report, "nodeid", "?"), getattr(report, "longrepr", ""))
