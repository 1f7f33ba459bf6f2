"""One rank calls wrongly: every rank raises the same error, which names the argument, and the group goes on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ring.nn import next_tokens
from tests.support.nn_ranks import TOKENS
from tests.support.nn_refusals import (
    a_loss_and_an_attention,
    another_call,
    handles,
    other_data,
    other_layouts,
    other_names,
    refused,
    whole_tokens,
)
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks

X = torch.zeros(2, 2, 16)  # rank 2 has two tokens
WHOLE = torch.zeros(2, TOKENS, 16)
HEADS = torch.zeros(2, 4, 2, 6, dtype=torch.float64)
TOKENS_, LABELS = whole_tokens(), next_tokens(whole_tokens())
LOGITS, LOCAL = torch.zeros(2, 2, 7, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.int64)

SAME = "ValueError: rank 2: "
WRONG: list[tuple[str, dict[str, Any], str]] = [
    # x of a layer
    (
        "self-attention",
        {"x": WHOLE},
        "x must be .* with the 2 tokens of this rank, got 13, the whole sequence: give each",
    ),
    ("self-attention", {"x": X[:, :1]}, "x must be .* with the 2 tokens of this rank, got 1$"),
    ("self-attention", {"x": X[0]}, r"x must be a \(batch, local tokens, dim\) tensor .*, got shape \(2, 16\)"),
    ("self-attention", {"x": None}, "x must be .*NoneType"),
    ("self-attention", {"x": X[..., :8]}, r"x must be a real tensor with last dimension 16, got .*\(2, 2, 8\)"),
    ("self-attention", {"x": X.long()}, "x must be a real tensor .*int64"),
    ("self-attention", {"x": X.double()}, "x must fit the module's parameters, got torch.float64 on cpu: .*dtype"),
    ("self-attention", {"x": X.to("meta")}, "device type must be the same on every rank: rank 0 has cpu, rank 2 meta"),
    ("self-attention", {"x": X[:1]}, "batch size must be the same on every rank: rank 0 has 2, rank 2 1"),
    ("self-attention", {"x": "DTensor"}, "NotImplementedError: rank 2: x must be a plain tensor.*DTensor"),
    ("longnet", {"x": WHOLE}, "x must be .* with the 2 tokens of this rank, got 13, the whole sequence"),
    ("longnet", {"x": X.double()}, "x must fit the module's parameters, got torch.float64"),
    # positions
    ("self-attention", {"positions": torch.arange(2)}, r"positions must be those that the layout gives .* at \(0,\)"),
    ("self-attention", {"positions": torch.arange(2).expand(2, 2)}, r"positions must be those .* at \(0, 0\)"),
    (
        "self-attention",
        {"positions": torch.arange(TOKENS)},
        r"positions must have the shape \(2,\) or \(2, 2\), got \(13,\)",
    ),
    (
        "self-attention",
        {"positions": torch.zeros(2)},
        "positions must be None or an int64 or int32 tensor, got torch.float32",
    ),
    ("self-attention", {"positions": torch.arange(2).to("meta")}, "positions must be on x's device cpu, got meta"),
    ("longnet", {"positions": [0, 1]}, "positions must be None or an int64 or int32 tensor, got .*list"),
    # the inner attention
    ("ring attention", {"attn_mask": HEADS}, "NotImplementedError: rank 2: attn_mask must be None, got Tensor"),
    ("ring attention", {"dropout_p": 0.1}, "NotImplementedError: rank 2: dropout_p must be 0.0, got 0.1"),
    ("ring attention", {"is_causal": False}, "is_causal must be None or what the pattern says, True, got False"),
    ("ring attention", {"is_causal": 1}, "is_causal must be None or what the pattern says, True, got 1"),
    ("ring attention", {"query": HEADS.transpose(1, 2)}, "query must be .* with the 2 tokens of this rank, got 4"),
    ("ring attention", {"value": torch.zeros(2, 4, 13, 6)}, "value must be .* got 13, the whole sequence"),
    ("ring attention", {"key": HEADS[:, :2]}, "key must have query's 4 heads unless enable_gqa=True, got 2"),
    ("ring attention", {"enable_gqa": 1}, "enable_gqa must be True or False, got 1"),
    ("ring attention", {"query": HEADS.half()}, "k must have q's dtype torch.float16"),
    ("ring attention", {"scale": float("nan")}, "scale must be None or a finite number, got nan"),
    # batches
    ("shard_batch", {"tokens": TOKENS_[:, :6]}, r"tokens must have the layout's 13 tokens .* got .*\(2, 6\)$"),
    (
        "shard_batch",
        {"tokens": TOKENS_[:, :2]},
        r"tokens must have .* \(2, 2\): it is sharded here, give each rank the whole",
    ),
    (
        "shard_batch",
        {"tokens": TOKENS_.float()},
        r"tokens must be a \(batch, tokens\) int64 or int32 tensor, got torch.float32",
    ),
    ("shard_batch", {"tokens": TOKENS_[0]}, "tokens must be a .* got torch.int64 of shape"),
    ("shard_batch", {"tokens": "sparse"}, "tokens must be a plain dense tensor of whole sequences"),
    ("shard_batch", {"tokens": "DTensor"}, "tokens must be a plain dense tensor of whole sequences"),
    ("shard_batch", {"tokens": TOKENS_[:0], "labels": None}, "tokens must have tokens' batch size, at least 1"),
    ("shard_batch", {"labels": LABELS[:, :6]}, "labels must have the layout's 13 tokens"),
    ("shard_batch", {"labels": LABELS.double()}, "labels must be a .* got torch.float64"),
    ("shard_batch", {"labels": LABELS[:1]}, "labels must have tokens' batch size"),
    ("shard_batch", {"labels": LABELS.to("meta")}, "labels must be on tokens' device cpu, got meta"),
    ("shard_batch", {"labels": TOKENS_}, "labels must be the next tokens, shifted before they are sharded"),
    ("shard_batch", {"labels": None}, "the tensors given must be the same on every rank"),
    ("shard_batch", {"positions": torch.arange(6)}, r"positions must be int64 or int32 of shape \(13,\)"),
    ("shard_batch", {"positions": torch.arange(13).double()}, "positions must be int64 or int32 .* got torch.float64"),
    ("shard_batch", {"positions": torch.arange(13).to("meta")}, "positions must be on tokens' device cpu, got meta"),
    (
        "shard_batch",
        {"positions": torch.arange(13) % 5},
        "positions must be None or 0 .. 12, by which the pattern goes",
    ),
    ("shard_batch", {"segments": torch.zeros(13)}, "segments must have the layout's 13 tokens along dimension 1"),
    ("shard_batch", {"segments": 5}, "segments must be a plain dense tensor of whole sequences, got .*int"),
    ("gather", {"x": torch.zeros(2, 13, 3)}, "x must be .* with the 2 tokens of this rank, got 13, the whole sequence"),
    ("gather", {"dim": 3}, "x must be a tensor with dimension 3, got"),
    ("gather", {"x": torch.zeros(2, 2, 4).double()}, "other dimensions must be the same on every rank"),
    ("gather", {"x": torch.zeros(2, 2, 3)}, "dtype must be the same on every rank: .* rank 2 torch.float32"),
    ("gather", {"x": "DTensor"}, "NotImplementedError: rank 2: x must be a plain tensor"),
    # losses
    ("cross_entropy", {"logits": LOGITS[0]}, r"logits must be a real \(batch, local tokens, vocabulary\) tensor"),
    ("cross_entropy", {"logits": LOGITS.long()}, "logits must be a real .* got torch.int64"),
    ("cross_entropy", {"logits": "DTensor"}, "NotImplementedError: rank 2: logits must be a plain tensor"),
    ("cross_entropy", {"logits": LOGITS[..., :0]}, "logits must have a vocabulary"),
    ("cross_entropy", {"logits": LOGITS.float()}, "dtype must be the same on every rank: rank 0 has torch.float64"),
    (
        "cross_entropy",
        {"labels": LABELS},
        r"labels must have the shape \(2, 2\) of logits, got \(2, 13\): are they those of the",
    ),
    ("cross_entropy", {"labels": LOCAL[:, :1]}, r"labels must have the shape \(2, 2\) of logits, got \(2, 1\)$"),
    ("cross_entropy", {"labels": LOCAL.float()}, "labels must be an int64 or int32 tensor, got torch.float32"),
    ("cross_entropy", {"labels": LOCAL.to("meta")}, "labels must be on the device of logits, cpu, got meta"),
    ("cross_entropy", {"labels": LOCAL + 7}, "labels must be -100, or from 0 to 6: .*7"),
    ("cross_entropy", {"labels": None}, "labels must be an int64 or int32 tensor, got .*NoneType"),
    ("cross_entropy", {"labelled": -1}, "labelled must be None or an integer >= 0, got -1"),
    ("cross_entropy", {"labelled": 5.0}, "labelled must be None or an integer >= 0, got 5.0"),
    ("cross_entropy", {"labelled": 5}, "labelled must be the same on every rank: rank 0 has None, rank 2 5"),
    ("cross_entropy", {"averaged_over": 0}, "averaged_over must be None or a positive finite number, got 0"),
    (
        "cross_entropy",
        {"averaged_over": float("inf")},
        "averaged_over must be None or a positive finite number, got inf",
    ),
    ("cross_entropy", {"averaged_over": 2}, "averaged_over must be the same on every rank"),
    (
        "cross_entropy",
        {"ignored": -1},
        "ignored must be the same on every rank: rank 0 has -100, rank 2 -1|labels must be -1",
    ),
    ("cross_entropy", {"ignored": None}, "ignored must be an integer, got None"),
    ("token_mean", {"losses": LOGITS}, r"losses must be a real \(batch, local tokens\) tensor"),
    ("token_mean", {"labels": LABELS}, r"labels must have the shape \(2, 2\) of losses"),
    (
        "count_labels",
        {"labels": [LOCAL]},
        "number of micro-batches must be the same on every rank: rank 0 has 2, rank 2 1",
    ),
    ("count_labels", {"labels": [LOCAL.float()] * 2}, "labels must be an int64 or int32 tensor"),
    ("count_labels", {"labels": 5}, "labels must be a tensor or a list of tensors, got .*int"),
    # gradients
    ("average_gradients", {"parameters": []}, "parameters must be the same on every rank"),
    ("average_gradients", {"parameters": [5]}, "parameters must be tensors, got .*int"),
    ("average_gradients", {"parameters": 5}, "TypeError: "),
    ("clip_grad_norm", {"max_norm": float("inf")}, "max_norm must be a positive finite number, got inf"),
    ("clip_grad_norm", {"max_norm": float("nan")}, "max_norm must be a positive finite number, got nan"),
    ("clip_grad_norm", {"max_norm": 0}, "max_norm must be a positive finite number, got 0"),
    ("clip_grad_norm", {"max_norm": "1"}, "max_norm must be a positive finite number, got '1'"),
    ("clip_grad_norm", {"max_norm": 2.0}, "max_norm must be the same on every rank"),
    ("clip_grad_norm", {"parameters": []}, "number of gradients must be the same on every rank"),
]


@pytest.mark.parametrize("what, changes, message", WRONG, ids=[f"{w[0]}-{n}" for n, w in enumerate(WRONG)])
def test_every_rank_raises_the_same_error(pool: Pool, what: str, changes: dict[str, Any], message: str) -> None:
    answers = pool.run(refused, what, changes, 2)
    assert answers == [answers[0]] * 4
    assert_match(message, answers[0])


def assert_match(message: str, answer: str) -> None:
    head = "" if message.startswith(("NotImplementedError", "TypeError")) else r"ValueError: (rank 2: )?"
    assert re.search(head + message, answer), answer


@pytest.mark.parametrize("what", ["cross_entropy", "count_labels", "average_gradients", "clip_grad_norm"])
def test_every_rank_of_a_mesh_of_two_dimensions_raises_it(pool: Pool, what: str) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "cross_entropy": {"labels": LABELS.float()},
        "count_labels": {"labels": 5},
        "average_gradients": {"parameters": []},
        "clip_grad_norm": {"max_norm": -1.0},
    }
    for rank in range(4):
        answers = pool.run(refused, what, wrong[what], rank, "2x2 apart")
        assert answers == [answers[0]] * 4 and answers[0].startswith("ValueError")
        assert f"rank {rank}" in answers[0]


def test_only_the_ranks_of_a_context_group_hear_of_its_error(pool: Pool) -> None:
    answers = pool.run(refused, "self-attention", {"x": X[0]}, 2, "2x2 apart")  # 0 and 2 are a context group
    assert answers[1] == answers[3] == "fine"
    assert answers[0] == answers[2] and "x must be" in answers[0]


def test_handles_that_cannot_be(pool: Pool) -> None:
    answers = pool.run(handles)
    assert answers == [answers[0]] * 4
    two, world, five, layout, group = answers[0]
    assert "group must be a mesh of one dimension, got 2 dimensions" in two and 'mesh["context"]' in two
    assert "layout must be for the 2 ranks of the group, got one for 4" in world
    assert "layout must be for the 4 ranks of the group, got one for 5" in five
    assert "layout must be a Layout, got 'contiguous'" in layout
    assert "group must be a process group, a mesh, a Transport or None, got 'world'" in group


@pytest.mark.parametrize(
    "task, message",
    [
        (other_layouts, "the context's layout must be the same on every rank: rank 0 has"),
        (other_data, "tokens must be the same on every rank: rank 0 has .*, rank 2"),
        (other_names, "the tensors given must be the same on every rank: .*segments.*, rank 1 .*weights"),
        (
            another_call,
            "calls on a group must come in the same order on every rank: .* rank 3 in call [0-9]+ \\('gather'\\)",
        ),
    ],
)
def test_ranks_that_differ(pool: Pool, task: Any, message: str) -> None:
    answers = pool.run(task)
    assert answers == [answers[0]] * 4
    assert_match(message, answers[0])


def test_after_a_loss_met_an_attention_the_calls_go_on_alike(pool: Pool) -> None:
    answers = pool.run(a_loss_and_an_attention)
    first, second = answers[0]
    assert answers == [(first, second)] * 4
    assert_match("calls on a group must .*: rank 0 is in the forward of call [0-9]+.*, rank 1 in count_labels", first)
    assert second == "fine"
