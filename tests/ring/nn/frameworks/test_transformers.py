"""A Llama of random weights from Hugging Face's transformers: trained as in one process, and what is refused."""

from __future__ import annotations

import difflib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

from ring.nn import next_tokens
from ring.nn.frameworks import transformers
from tests.support.framework_example import APART, EXACT, SHORT, TOGETHER, Example, dense, differences
from tests.support.transformers_tasks import (
    LONGNET,
    in_16_bits,
    llama,
    logits_of,
    logits_on_ranks,
    packed,
    packed_tokens,
    positions_changed_in_place,
    refused,
    train,
    windowed,
    without_a_handle,
)
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[4]
SUPPORT = ROOT / "tests" / "support"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(
        4, preload=("torch", "torch._dynamo", "transformers", "tests.support.transformers_tasks"), timeout=60
    ) as ranks:
        yield ranks


CHECKPOINTING: list[dict[str, Any] | None] = [
    None, {"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "keep_attention": True},
]  # fmt: skip


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
@pytest.mark.parametrize("mesh", [TOGETHER, APART, ((0, 1, 2, 3),)])
def test_it_trains_as_one_process(pool: Pool, mesh: Any, checkpointing: dict[str, Any] | None) -> None:
    example = Example(mesh, clip=0.5)
    exact = dense(example, llama(), logits_of)
    for result in pool.run(train, example, checkpointing):
        assert max(differences(result, exact).values()) < EXACT, differences(result, exact)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_it_trains_under_fsdp(pool: Pool, checkpointing: dict[str, Any] | None) -> None:
    example = Example(APART, clip=0.5)
    exact = dense(example, llama(), logits_of)
    for result in pool.run(train, example, checkpointing, "fsdp"):
        assert max(differences(result, exact).values()) < EXACT, differences(result, exact)


@pytest.mark.parametrize("mesh", [TOGETHER, ((0, 1, 2, 3),)])
def test_sliding_windows_are_the_models(pool: Pool, mesh: Any) -> None:
    example = Example(mesh, clip=0.5)
    exact = dense(example, windowed(), logits_of)
    assert differences(dense(example, llama(), logits_of), exact)["losses"] > 1e-6, "a window that hides nothing"
    for result in pool.run(train, example, None, "ddp", windowed):
        assert max(differences(result, exact).values()) < EXACT, differences(result, exact)


def test_a_step_in_bf16_autocast(pool: Pool) -> None:
    """Rotary positions leave q and k in fp32, and v is bf16. An operation in bf16 rounds by 2^-9."""
    exact = dense(Example(APART, steps=1), llama(), logits_of)
    for result in pool.run(in_16_bits, Example(APART, steps=1)):
        assert 1e-7 < abs(result.losses[0] - exact.losses[0]) < 0.02 * exact.losses[0]
        assert 1e-7 < abs(result.norms[0] - exact.norms[0]) < 0.05 * exact.norms[0]


@pytest.mark.parametrize("pattern", [None, LONGNET], ids=["dense", "longnet"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_ranks_give_what_one_gives(pool: Pool, autocast: bool, pattern: Any) -> None:
    """In bf16 under autocast, where rotary positions leave q and k in fp32 and v is bf16: to within its rounding."""
    example = Example(SHORT)
    alone, *_ = pool.run(logits_on_ranks, example, (0,), autocast, pattern)
    bound = 2e-2 if autocast else 1e-5
    for found in pool.run(logits_on_ranks, example, (0, 1, 2, 3), autocast, pattern):
        assert found is not None and alone is not None
        assert float((found - alone).abs().max()) < bound * float(alone.abs().max())


REFUSED = {
    "a padding mask": "attention_mask must be None, got a mask",
    "a whole mask": "attention_mask must be None, got Tensor",
    "dropout": "dropout of attention must be 0, got 0.1",
    "no positions": "position_ids must be",
    "positions of the shard": "position_ids must be",
    "packed positions": "position_ids must be",
    "whole positions": "position_ids must be",
    "dynamic rotary scaling": "rope_type must not depend on the positions of a rank",
    "longrope": "rope_type must not depend on the positions of a rank",
    "a cache": "use_cache must be left out",
    "a cache that is given": "past_key_values must be left out",
    "attention weights": "output_attentions must be left out",
    "labels": "labels must be left out",
    "the last logits": "logits_to_keep must be left out",
    "packed lengths": "cu_seq_lens_q must be left out",
    "a softcap": "softcap must be left out",
    "sinks": "s_aux must be left out",
    "a pattern beside a sliding window": "pattern must be None for a layer with a sliding window of 5 tokens",
    "another sliding window": "sliding_window must be at least 1 token",
    "a pattern that is not causal": "pattern must be causal as the model is",
    "no pattern": "pattern must be a Pattern or None",
}


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_packed_documents_are_as_each_by_itself(pool: Pool, order: str) -> None:
    """Logits by the model's own attention; the last token of a document has no label, and positions begin anew."""
    lengths = (5, 1, 9, 8)
    tokens = packed_tokens(lengths).split(lengths, dim=1)
    with torch.no_grad():
        exact = torch.cat([logits_of(llama().eval(), document) for document in tokens], dim=1)
    labels = torch.cat([next_tokens(document) for document in tokens], dim=1)
    for logits, found, positions in pool.run(packed, lengths, order):
        torch.testing.assert_close(logits, exact, rtol=EXACT, atol=EXACT)
        assert torch.equal(found, labels)
        assert positions[0].tolist() == [i for length in lengths for i in range(length)]


@pytest.mark.parametrize("on", [None, (1,)], ids=["all", "one rank"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_on_every_rank(pool: Pool, name: str, on: tuple[int, ...] | None) -> None:
    """On every rank of a context group in which one is wrong; the group can be used afterwards."""
    answers = pool.run(refused, name, on)
    for rank, (said, after) in enumerate(answers):
        assert (REFUSED[name] in said) == (on is None or rank in (0, 1)), f"rank {rank}: {said}"
        assert math.isfinite(after)


def test_a_call_without_a_handle_is_refused(pool: Pool) -> None:
    assert all("context must be given to the model's call" in said for said in pool.run(without_a_handle))


def test_masks_that_a_model_makes_by_itself_are_not_dropped() -> None:
    """Blocks of an image, which see each other, and a function of one's own; without these there is no mask."""
    transformers.register()
    config = llama().config
    config._attn_implementation = transformers.NAME
    x, positions = torch.zeros(1, 6, 32), torch.tensor([[0, 1, 2, 9, 10, 11]])
    blocks, function = {"block_sequence_ids": torch.zeros(1, 6, dtype=torch.int64)}, {"and_mask_function": max}
    made = [create_causal_mask(config, x, None, None, positions, **extra) for extra in ({}, blocks, function)]
    assert made == [None, "a mask function", "a mask function"]
    config.attention_chunk_size = 4
    chunks = create_chunked_causal_mask(config, x, None, None, positions)
    assert chunks == "a mask of chunks or windows of 4 tokens"


def test_positions_that_change_are_seen(pool: Pool) -> None:
    assert all("position_ids must be" in said for said in pool.run(positions_changed_in_place))


@pytest.mark.slow
def test_twelve_lines_make_it_sharded() -> None:
    """The two programs differ in twelve lines and empty ones, and end with the same loss, to fp32 rounding."""
    alone, sharded = (SUPPORT / "llama_alone.py", SUPPORT / "llama_sharded.py")
    before, after = [path.read_text().splitlines()[1:] for path in (alone, sharded)]
    changed = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:]]
    assert sum(line.startswith("+") for line in changed) <= 12 and sum(line.startswith("-") for line in changed) <= 2
    first, *others = [float(word) for done in (run(alone), torchrun(sharded)) for word in done.stdout.split()]
    assert len(others) == 2 and all(abs(loss - first) < 1e-5 for loss in others)


@pytest.mark.slow
def test_its_threads_have_ended_before_python_ends(tmp_path: Path) -> None:
    """Of gloo: one that gives back what a backward left with it while Python ends aborts the process."""
    script = tmp_path / "threads.py"
    names = (
        "\nfrom pathlib import Path\nfor one in Path('/proc/self/task').iterdir(): print((one / 'comm').read_text())\n"
    )
    script.write_text((SUPPORT / "llama_sharded.py").read_text() + names)
    done = torchrun(script)
    assert "python" in done.stdout and "gloo" not in done.stdout


def torchrun(script: Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done
