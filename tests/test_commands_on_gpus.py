"""Every command of a page that names NCCL or GPUs holds as written, on the GPUs of this machine.

The programs that a page shows lie in the working directory, beside the example of an adapter and the project that
verification/CI.md names. A command that names more GPUs than there are is skipped; one of several pages runs once.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_readme import PAGES, ROOT

OF_GPUS = re.compile(r"\bnccl\b|--device cuda|-m verification\.cli\.validate", re.IGNORECASE)
SHORT = {"run": "python -m verification run"}  # which verification/CHECKLIST.md writes
LONG = 280  # seconds of a command, within those of a test


def commands(text: str) -> list[str]:
    """Return the commands of a page that name NCCL or a GPU, or need one."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    named = [" ".join(line.split()) for line in (*lines, *inline) if OF_GPUS.search(line) and "gloo" not in line]
    written = [re.sub(r"^\w+", lambda word: SHORT.get(word[0], word[0]), line) for line in named]
    return [line for line in written if line.startswith(("python -m", "torchrun ", "scripts/", "pytest "))]


ALL = {command: page for page in PAGES for command in commands(page.read_text())}


def test_pages_have_commands_for_gpus() -> None:
    assert {command.split()[0] for command in ALL} >= {"python", "torchrun"} and len(ALL) >= 8


def ranks_of(command: str) -> int:
    found = re.search(r"--nproc-per-node=(\d+)|--world (\d+)", command)
    return int(found[1] or found[2]) if found else 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(ALL))
def test_a_command_for_gpus_holds(command: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks_of(command):
        pytest.skip(f"needs {ranks_of(command)} GPUs")
    page = ALL[command]
    shutil.copytree(ROOT / "tests/support/outside", tmp_path, dirs_exist_ok=True)
    shutil.copy(ROOT / "verification/peers/example.py", tmp_path / "my_attention.py")
    for name, program in re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
        (tmp_path / name).write_text(program)
    words = shlex.split(command)
    start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    start |= {"pytest": [sys.executable, "-m", "pytest"]}
    of_root = [str(ROOT / word) if "/" in word and (ROOT / word).exists() else word for word in words[1:]]
    arguments = start.get(words[0], [str(ROOT / words[0])]) + of_root
    paths = os.pathsep.join((str(ROOT), str(tmp_path / "src"), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    wanted = 1 if page.parent.name == "findings" else 0  # a finding fails
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == wanted, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
