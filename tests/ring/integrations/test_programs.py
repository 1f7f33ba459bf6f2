"""Whole programs: a Llama of Hugging Face and its trainers, and what the modules import."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.ring.nn.test_programs import ROOT, run, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def test_frameworks_are_imported_by_their_own_module_only() -> None:
    modules = "ring.nn, ring.integrations.wrappers.ddp, ring.integrations.wrappers.fsdp"
    optional = "{'transformers', 'accelerate', 'trl', 'deepspeed', 'fairscale', 'lightning'}"
    assert run("-c", f"import sys, {modules}; print({optional} & {{*sys.modules}})") == "set()\n"


@pytest.mark.parametrize("name, changed", [("trainer_llama", 2), ("sft_llama", 3)])
def test_few_lines_shard_a_trainer(name: str, changed: int, tmp_path: Path) -> None:
    """The lines behind `# was:` are those of one process, and the page has those before them."""
    sharded, page = (
        (ROOT / path).read_text() for path in (f"tests/support/{name}.py", "ring/integrations/TRAINERS.md")
    )
    lines = re.findall(r"^ *(.*?)  # (?:type: .*  # )?was:.*$", sharded, re.MULTILINE)
    assert len(lines) == changed and all(line in page for line in lines)
    alone = tmp_path / "alone.py"
    alone.write_text(re.sub(r"^( *).*# was:(?: (.*))?$", r"\1\2", sharded, flags=re.MULTILINE))
    (before,) = re.findall(r"rank 0: (.*)", run(alone, folder=tmp_path))
    after = re.findall(r"rank \d: (.*)", torchrun(4, tmp_path, sharded))
    expected = [float(x) for x in before.split()]
    assert len(after) == 4 and len(expected) >= 7
    for numbers in after:  # printed with five digits; rounding of fp32 is less
        assert all(abs(float(x) - y) < 1e-4 for x, y in zip(numbers.split(), expected, strict=True)), (numbers, before)


def test_thirteen_lines_make_it_sharded(tmp_path: Path) -> None:
    """The two programs differ in thirteen lines and empty ones, and end with the same loss, to fp32 rounding.

    A thread of gloo that gives back what a backward left with it while Python ends aborts the process.
    """
    alone, sharded = (ROOT / f"tests/support/llama_{name}.py" for name in ("alone", "sharded"))
    before, after = [path.read_text().splitlines()[1:] for path in (alone, sharded)]
    changed = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:]]
    assert sum(line.startswith("+") for line in changed) <= 13 and sum(line.startswith("-") for line in changed) <= 2
    names = "\nfrom pathlib import Path\nfor x in Path('/proc/self/task').iterdir(): print((x / 'comm').read_text())\n"
    printed = run(alone) + torchrun(2, tmp_path, sharded.read_text() + names)
    first, *others = [float(word) for word in printed.split() if word[0].isdigit()]
    assert len(others) == 2 and all(abs(loss - first) < 1e-5 for loss in others)
    assert "python" in printed and "gloo" not in printed
