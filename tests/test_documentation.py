"""The documentation is built without a warning, and every example on a page is executed by a test."""

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ring import Layout, Pattern, ring_attention
from tests.support.plain_case import PLAIN

ROOT = Path(__file__).parents[1]
FOLDERS = ("reference", "ring", "verification", "notebooks")
PAGES = sorted({*ROOT.glob("*.md")} | {page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")})
BLOCKS = [
    (str(page.relative_to(ROOT)), block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]
PROGRAMS = {x[1]: x for _, block in BLOCKS if (x := re.match(r"# (\w+)\.py", block))}
# Lines of a program that another test runs.
PARTS = {
    "README.md": "tests/support/llama_sharded.py",
    "ring/integrations/TRAINERS.md": "tests/support/trainer_llama.py tests/support/sft_llama.py",
}
RUN_HERE = ("ring/README.md", "notebooks/README.md", "verification/README.md")
RUN_BY_TEST_SEQUENCE = ("ring/nn/README.md",)


def fragments(page: str) -> list[str]:
    return [block for where, block in BLOCKS if where == page and not block.startswith("# ")]


def statements(text: str) -> set[str]:
    """Return the statements of a program, without those of which they are made up."""
    kinds = ast.Expr, ast.Assign, ast.Import, ast.ImportFrom, ast.ClassDef
    return {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    words = ["-q", "-W", "--keep-going", "-c", "scripts/documentation", "-b", "html", ".", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "scripts/documentation/api.html").read_text()
    assert [name for name in ("ring.ring_attention", "ring.nn.SameWeights") if f'id="{name}"' not in api] == []


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"own_store"}))  # which runs below
def test_a_program_of_a_page_is_run_by_a_test(name: str) -> None:
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__))
    assert re.search(rf'"{name}[":]|\b{name}\\?\.py', tests)


@pytest.mark.parametrize("page", sorted(PARTS))
def test_fragments_are_of_programs_that_run(page: str) -> None:
    whole = set().union(*(statements((ROOT / file).read_text()) for file in PARTS[page].split()))
    assert [line for block in fragments(page) for line in sorted(statements(block) - whole)] == []


@pytest.mark.parametrize("page", RUN_HERE)
def test_fragments_run(page: str) -> None:
    known: dict[str, Any] = {"pattern": Pattern.dense(causal=True), "layout": Layout.contiguous(64, 1)}
    known |= {"ring_attention": ring_attention} | dict.fromkeys("qkv", torch.randn(1, 64, 4, 32))
    for block in fragments(page):
        exec(block, known)
    if page == "verification/README.md":
        assert torch.equal(known["mask_of"](PLAIN), torch.ones(PLAIN.heads, 5, 5, dtype=torch.bool).tril())


@pytest.mark.ranks
def test_ranks_meet_in_a_store_of_their_own(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = tmp_path / "own_store.py"
    program.write_text(PROGRAMS["own_store"].string.replace("29515", str(port)))
    ranks = [subprocess.Popen([sys.executable, str(program), str(rank)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]


def test_every_fragment_is_looked_at() -> None:
    with_fragments = {page for page, block in BLOCKS if not block.startswith("# ")}
    assert with_fragments == {*PARTS, *RUN_HERE, *RUN_BY_TEST_SEQUENCE}
