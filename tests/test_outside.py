"""Somebody else's project and its CI: `tests/support/outside`, copied out of the clone, with the wheel alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

from tests.support.installed import ROOT, linked, required, run, unpacked
from tests.support.printed import unbroken

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

OUTSIDE = ROOT / "tests/support/outside"
PAGE = (ROOT / "verification/CI.md").read_text()
WORKFLOW = (OUTSIDE / ".github/workflows/ci.yml").read_text()
LINES = re.findall(r"- run: (.*)", WORKFLOW)
INSTALLS, CHECKS = LINES[:2], LINES[2:]


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, installed by its workflow in an environment that has what a registry would give."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(OUTSIDE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(wheel, folder / "ci")
    with (folder / "expected_failures.txt").open("a") as file:
        file.write("equal values come out  # which holds\n")
    theirs = {"pip", "setuptools", "pytest"}
    linked(folder / ".venv", required(unpacked(wheel)).union(theirs, *(required(distribution(x)) for x in theirs)))
    for line in INSTALLS:
        done = shell(folder, line)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the workflow in a pull request, without a network."""
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: the option itself is a negative
    path = f"{folder / '.venv/bin'}:/usr/bin:/bin"
    return run(folder, "bash", "-c", line, PATH=path, SEED="1", COLUMNS="200", **offline)


def test_the_page_shows_the_workflow() -> None:
    assert f"```yaml\n{WORKFLOW}```" in PAGE


def commands() -> list[str]:
    """Commands of the page, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [line.partition("  #")[0].strip() for kind, block in blocks if not kind for line in block.splitlines()]


SAID = (
    (
        "ci.adapter:adapter: failed as --xfails expects: scores of -inf have no weight (",
        "ci.adapter:adapter: held, though --xfails names it: equal values come out",
    ),
    ("XPASS ci.adapter:adapter::equal_values_come_out", ", 1 xfailed, 1 xpassed", "tests/test_ring.py ."),
)


@pytest.mark.parametrize("line, said", [*zip(CHECKS, SAID, strict=True)], ids=("command", "pytest"))
def test_a_right_ring_passes_with_expected_failures(project: Path, line: str, said: tuple[str, ...]) -> None:
    done = shell(project, line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [x for x in said if x not in unbroken(done.stdout)] == [], done.stdout


@pytest.mark.parametrize("line", CHECKS, ids=("command", "pytest"))
def test_a_mistake_fails_with_its_cause(project: Path, line: str) -> None:
    """The counter-example, as uploaded, is replayed until the mistake is mended."""
    source, saved = project / "src/their_ring/attention.py", project / ".verification/failures"
    right = source.read_text()
    source.write_text(right.replace(" * q.shape[-1] ** -0.5", ""))
    try:
        shutil.rmtree(saved, ignore_errors=True)
        done = shell(project, line)
        said = unbroken(done.stdout)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "cause: out, dq, dk and dv are, to rounding, as if the scale of the scores were left out" in said
        shutil.copytree(saved, project / "failures", dirs_exist_ok=True)
        name = re.findall(r"replay: .*?/(\S+)\.json", said)[0].rpartition("/")[2]
        replay = next(line for line in commands() if " replay " in line).replace("FILE", name)
        again = shell(project, replay)
        assert again.returncode == 1, again.stdout + again.stderr
    finally:
        source.write_text(right)
    mended = shell(project, replay)
    assert mended.returncode == 0, mended.stdout + mended.stderr


@pytest.mark.parametrize("line", [line for line in commands() if " replay " not in line])
def test_commands_of_the_page(project: Path, line: str) -> None:
    done = shell(project, line)
    missing = "nccl" in line and torch.cuda.device_count() < 2
    assert done.returncode == (2 if missing else 0), done.stdout + done.stderr
    assert not missing or "GPU" in done.stdout + done.stderr
