"""Notebooks are executed by kernels that no other process can take a port from."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
# Jupyter's own manager would give five more; the one is the kernel's own, for what its subprocesses print.
LISTENING = """\
import glob, psutil, tempfile
listening = [at for at in psutil.Process().net_connections("inet") if at.status == psutil.CONN_LISTEN]
assert len(listening) == 1 and len(glob.glob(tempfile.gettempdir() + "/kernel-*")) == 5, listening
"""


def test_kernels_listen_at_no_port_and_remove_sockets(tmp_path: Path) -> None:
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LISTENING)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "ports.ipynb")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "--nbmake"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.glob("kernel-*"))
