"""A wheel of this clone, and environments of it and what it requires alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = ("reference", "ring", "verification")


def run(folder: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "notebooks", "scripts", "tests"):
        shutil.copytree(ROOT / name, folder / "clone" / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "clone")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    done = run(folder, sys.executable, "-m", "pip", "wheel", folder / "clone", *offline)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def required(by: Distribution) -> set[str]:
    """Names of the distributions that this one brings, without extras."""
    wanted = [x for x in map(Requirement, by.requires or ()) if x.marker is None or x.marker.evaluate({"extra": ""})]
    return {x.name for x in wanted}.union(*(required(distribution(x.name)) for x in wanted))


def unpacked(wheel: Path) -> Distribution:
    return PathDistribution(next(path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")))


def linked(folder: Path, names: Iterable[str]) -> Path:
    """Make an environment with links to these distributions, and return its interpreter."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in names:
        there = distribution(name)
        for top in {file.parts[0] for file in there.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():  # several distributions have a part of `nvidia`
                (packages / top).symlink_to(Path(str(there.locate_file(top))))
    return folder / "bin/python"


@pytest.fixture(scope="session")
def environment(wheel: Path) -> Path:
    """A folder with `bin`, where the wheel and links to what it requires are installed."""
    python = linked(wheel.parent / "environment", required(unpacked(wheel)))
    into = ("--python", python, "install", "--no-deps", "--no-index", wheel)
    done = run(wheel.parent, sys.executable, "-m", "pip", *into)
    assert done.returncode == 0, done.stdout + done.stderr
    return wheel.parent / "environment"
