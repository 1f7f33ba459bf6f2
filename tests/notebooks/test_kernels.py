"""Notebooks are executed by kernels that no other process can take a port from."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from kernels import SocketFileKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
# Jupyter's own manager would give five more; the one is the kernel's own, for what its subprocesses print.
LISTENING = """\
import psutil
listening = [at for at in psutil.Process().net_connections("inet") if at.status == psutil.CONN_LISTEN]
assert len(listening) == 1, listening
"""


def notebook_of(cell: str) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


def test_a_kernel_removes_its_socket_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notebook = notebook_of("import glob, tempfile\nlen(glob.glob('kernel-*'))")
    NotebookClient(notebook, timeout=100, kernel_manager_class=SocketFileKernelManager).execute(cwd=str(tmp_path))
    assert notebook.cells[0].outputs[0]["data"]["text/plain"] == "5"
    assert not list(tmp_path.glob("kernel-*"))


def test_nbmake_starts_our_kernels_which_listen_at_no_port_that_is_given_to_them(tmp_path: Path) -> None:
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    nbformat.write(notebook_of(LISTENING), tmp_path / "ports.ipynb")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "--nbmake"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
