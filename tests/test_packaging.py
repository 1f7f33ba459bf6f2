"""Contents of an installed copy: one version, types, commands; and the errors of scripts without one."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ring
from ring.extras import DISTRIBUTION, EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_versions_are_said_once_and_types_are_installed() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    extras = PROJECT["project"]["optional-dependencies"]
    assert {*extras["transformers"]} < {*extras["training"]}
    assert {*EXTRAS.values()} <= {*extras} and PROJECT["project"]["name"] == DISTRIBUTION
    other = {"flash_attn": "flash-attn-4", "IPython": "jupyterlab"}  # under which name, or with which package, it comes
    for package, extra in EXTRAS.items():
        assert any(x.startswith(other.get(package, package.replace("_", "-"))) for x in extras[extra]), package
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ring.__version__"}
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == ring.__version__
    cited = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert (cited["version"], cited["date-released"]) == newest.groups()
    assert all((ROOT / package / "py.typed").is_file() for package in ("reference", "ring", "verification"))
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["*"]


def test_the_page_of_support_has_the_versions_that_are_set_up() -> None:
    page, workflow = (ROOT / "ring/SUPPORT.md").read_text(), (ROOT / ".github/workflows/tests.yml").read_text()
    pythons = re.findall(r"^\| Python (3\.\d+)", page, re.MULTILINE)
    assert re.findall(r":: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"])) == pythons
    listed = ", ".join(f'"{version}"' for version in pythons)
    assert f"version in ({listed})" in (ROOT / "scripts/_setup").read_text()
    assert re.findall(r"python: \[(.*)\]", workflow) == [listed, listed]
    torches = re.findall(r"torch (\d+\.\d+\.\d+) \|", page.partition("---")[0])
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert f"torch>={torches[0].removesuffix('.0')}" in PROJECT["project"]["dependencies"] and pinned in torches


@pytest.mark.parametrize("target", PROJECT["project"]["scripts"].values(), ids=PROJECT["project"]["scripts"])
def test_console_scripts_call_what_is_there(target: str) -> None:
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_script_without_an_install_says_how_to_install(tmp_path: Path) -> None:
    alone = [sys.executable, "-I", "-S", str(ROOT / "scripts/validate_nccl.py")]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2 and said.startswith("error: install the packages") and "-m verification.cli." in said
