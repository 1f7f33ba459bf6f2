"""The programs that pages show run, and print or draw what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("ring/README.md", "ring/MASKS.md", "ring/nn/SAME_WEIGHTS.md", "ring/integrations/README.md", "README.md")
PICTURES = {"pictures": 4, "mask_pictures": 8, "mask": 1}  # that a program draws


def output_of(folder: Path, name: str, ranks: int) -> str:
    """Run an example in a folder."""
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    (text,) = re.findall(rf"```python\n(# {name}\.py.*?)```", pages, re.DOTALL)
    script = folder / f"{name}.py"
    script.write_text(text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *torchrun, str(script)]
    # Sooner than the limit of a test, which ends the worker and tells nothing of the ranks.
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("name, ranks", [
    ("one_process", 1), ("example", 2), ("pictures", 1), ("llama", 2),
    ("mask_pictures", 1), ("converted", 1), ("tree", 2), ("joint", 2), ("prefill", 2), ("mask", 1),
])  # fmt: skip
def test_the_examples_run(tmp_path: Path, name: str, ranks: int) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    output = output_of(tmp_path, name, ranks)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert len(drawn) == PICTURES.get(name, 0)
    if name == "mask_pictures":
        committed = {path.name: path.read_text() for path in (ROOT / "ring/images").glob("*.svg")}
        assert drawn == {file: text for file, text in committed.items() if file != "front.svg"}
    assert name != "one_process" or float(output.removeprefix("largest error ")) < 1e-5


@pytest.mark.ranks
def test_same_weights_print_one_line_on_any_ranks(tmp_path: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        alone = output_of(tmp_path, "same_weights", 1)
    assert alone.startswith("loss ") and output_of(tmp_path, "same_weights", 3) == alone
