"""One rank calls wrongly: every rank raises the same error, which names the argument, and the group goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ring.nn
from reference import Pattern
from tests.support.nn_ranks import TOKENS, VOCABULARY, context_of, data_index, drawn, mesh_of, said, whole_tokens
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

DIM = 16
Call = tuple[Callable[..., object], dict[str, Any]]


def _calls(mesh: str) -> dict[str, Call]:
    """Right calls of all kinds."""
    over = mesh_of(mesh)
    context = context_of("uneven", over["context"])
    layer = {"x": context.shard(drawn(1, 2, TOKENS, DIM).float()), "context": context}
    query, key, value = (context.shard(drawn(seed, 2, 4, TOKENS, 6), 2) for seed in range(3))
    tokens = torch.randperm(2 * TOKENS, generator=torch.Generator().manual_seed(0)).view(2, TOKENS)
    batch = {"tokens": tokens, "labels": ring.nn.next_tokens(tokens), "weights": drawn(0, 2, TOKENS, 3)}
    logits = context.shard(drawn(1, 2, TOKENS, VOCABULARY))
    labels = context.shard(ring.nn.next_tokens(whole_tokens(data_index(mesh))))
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3, 2), (5,))]
    for number, x in enumerate(parameters):
        x.grad = drawn(number, *x.shape)
    return {
        "self-attention": (ring.nn.SelfAttention(DIM, 4, Pattern.dense(causal=True), name="inner"), layer),
        "longnet": (ring.nn.LongNetBlock(DIM, 4, [4], [2], name="inner"), layer),
        "ring attention": (
            ring.nn.RingAttention(Pattern.dense(causal=True)),
            {"query": query, "key": key, "value": value, "context": context},
        ),
        "shard_batch": (ring.nn.shard_batch, {"context": context, **batch}),
        "gather": (ring.nn.gather, {"context": context, "x": context.shard(drawn(1, 2, TOKENS, 3))}),
        "sequence_mean": (
            ring.nn.sequence_mean,
            {"context": context, "x": context.shard(drawn(1, 2, TOKENS, 3)), "mask": context.shard(tokens > TOKENS)},
        ),
        "sequence_logprobs": (ring.nn.sequence_logprobs, {"logits": logits, "labels": labels, "context": context}),
        "batch_mean": (ring.nn.batch_mean, {"losses": drawn(data_index(mesh), 3), "context": context, "over": over}),
        "cross_entropy": (ring.nn.cross_entropy, {"logits": logits, "labels": labels, "over": over}),
        "token_mean": (ring.nn.token_mean, {"losses": logits.sum(-1), "labels": labels, "over": over}),
        "count_labels": (ring.nn.count_labels, {"labels": [labels] * 2, "over": over}),
        "average_gradients": (ring.nn.average_gradients, {"parameters": parameters, "over": over}),
        "clip_grad_norm": (ring.nn.clip_grad_norm, {"parameters": parameters, "max_norm": 1.0, "over": over}),
    }


def _dtensor(x: Any) -> DTensor:
    return DTensor.from_local(torch.zeros(2, 6, DIM), mesh_of("1x4")["context"], [Shard(1)])


def _other_handle(_: Any) -> ring.nn.ContextParallel:
    return ring.nn.ContextParallel(ring.Layout.from_cuts(range(TOKENS), (0, 1, 7, 9, 13)), mesh_of("1x4")["context"])


def _with_grad(grad: Tensor, x: Tensor | None = None) -> Callable[[Any], list[nn.Parameter]]:
    """Replace the second parameter by one that has this gradient."""

    def change(right: list[nn.Parameter]) -> list[nn.Parameter]:
        other = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype) if x is None else x)
        other.grad = grad
        return [right[0], other]

    return change


def _partial_sum(right: list[nn.Parameter]) -> list[nn.Parameter]:
    mesh = mesh_of("1x4")["context"]
    x, grad = (DTensor.from_local(torch.ones(8), mesh, [kind]) for kind in (Replicate(), Partial()))
    return _with_grad(grad, x)(right)


def _to(value: Any) -> Callable[[Any], Any]:
    return lambda x: value


REORDERED: list[Callable[[Any], Any]] = [  # the same numbers in another order, as after another shuffle
    lambda x: x.flatten()[[-1, *range(1, x.numel() - 1), 0]].view(x.shape),  # the first and the last are exchanged
    lambda x: x.flip(0),
    lambda x: x.roll(2, 1),
]
SPARSE, COMPLEX = torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex64)
POSITIONS, NAN, INF = torch.arange(TOKENS), float("nan"), float("inf")
OVER = ("over", _to("context"), "over must be a process group, a DeviceMesh or None, got 'context'")
# By call: the argument that is wrong on rank 2, which has two tokens; what it is, made of the right one; the error.
REFUSALS: dict[str, list[tuple[str, Callable[[Any], Any], str]]] = {
    "self-attention": [
        ("x", _to(torch.zeros(2, TOKENS, DIM)), "x must be .* with the 2 tokens of this rank, got 13, the whole seq"),
        ("x", lambda x: x[:, :1], "x must be .* with the 2 tokens of this rank, got 1$"),
        ("x", lambda x: x[0], r"x must be a \(batch, local tokens, dim\) tensor .*, got shape \(2, 16\)"),
        ("x", _to(None), "x must be .*NoneType"),
        ("x", lambda x: x[..., :8], r"x must be a real tensor with last dimension 16, got .*\(2, 2, 8\)"),
        ("x", lambda x: x.long(), "x must be a real tensor .*int64"),
        ("x", lambda x: x.double(), "x must fit the module's parameters, got torch.float64 on cpu: .*dtype"),
        ("x", lambda x: x.to("meta"), "device type must be the same on every rank: rank 0 has cpu, rank 2 meta"),
        ("x", lambda x: x[:1], "batch size must be the same on every rank: rank 0 has 2, rank 2 1"),
        ("x", _dtensor, "NotImplementedError: rank 2: x must be a plain tensor.*DTensor"),
        ("positions", _to(POSITIONS[:2]), r"positions must be this rank's global positions: at \(0,\)"),
        ("positions", _to(POSITIONS[:2].expand(2, 2)), r"positions must be this rank's .* at \(0, 0\)"),
        ("positions", _to(POSITIONS), r"positions must have the shape \(2,\) or \(2, 2\), got \(13,\)"),
        ("positions", _to(torch.zeros(2)), "positions must be None or an int64 or int32 tensor, got torch.float32"),
        ("positions", _to(POSITIONS[:2].to("meta")), "positions must be on x's device cpu, got meta"),
        ("context", lambda context: context.with_documents((TOKENS, 0)), "documents must be the same on every rank"),
    ],
    "longnet": [
        ("x", lambda x: x.double(), "x must fit the module's parameters, got torch.float64"),
        ("x", _dtensor, "NotImplementedError: rank 2: x must be a plain tensor.*DTensor"),
        ("positions", _to([0, 1]), "positions must be None or an int64 or int32 tensor, got .*list"),
    ],
    "ring attention": [
        ("attn_mask", _to(torch.ones(1)), "NotImplementedError: rank 2: attn_mask must be None, got Tensor"),
        ("dropout_p", _to(0.1), "NotImplementedError: rank 2: dropout_p must be 0.0, got 0.1"),
        ("is_causal", _to(False), "is_causal must be None or the pattern's, True, got False"),
        ("is_causal", _to(1), "is_causal must be None or the pattern's, True, got 1"),
        ("query", lambda q: q.transpose(1, 2), "query must be .* with the 2 tokens of this rank, got 4"),
        ("query", lambda q: q[0], "query must be a .*, got shape"),
        ("query", lambda q: q.half(), "k must have q's dtype torch.float16"),
        ("key", _to(None), "key must be .*NoneType"),
        ("key", _dtensor, "NotImplementedError: rank 2: key must be a plain tensor"),
        ("key", lambda k: k[:, :2], "key must have query's 4 heads unless enable_gqa=True, got 2"),
        ("value", _to(torch.zeros(2, 4, TOKENS, 6)), "value must be .* got 13, the whole sequence"),
        ("enable_gqa", _to(1), "enable_gqa must be True or False, got 1"),
        ("scale", _to(NAN), "scale must be None or a finite number, got nan"),
    ],
    "shard_batch": [
        ("tokens", lambda x: x[:, :6], r"tokens must have the layout's 13 tokens .* got .*\(2, 6\)$"),
        ("tokens", lambda x: x[:, :2], r"tokens must have .* \(2, 2\): pass the whole tensor, shard_batch shards it"),
        ("tokens", lambda x: x.float(), r"tokens must be a \(batch, tokens\) int64 or int32 tensor, got torch.float32"),
        ("tokens", lambda x: x.tolist(), "tokens must be a plain dense tensor of whole sequences"),
        ("tokens", _dtensor, "tokens must be a plain dense tensor of whole sequences"),
        ("tokens", lambda x: x[:0], "tokens must have at least one sequence on every rank"),
        ("tokens", lambda x: x.int(), "tokens must be the same on every rank"),
        ("tokens", lambda x: x + 1, "tokens must be the same on every rank: rank 0 has .*, rank 2"),
        ("labels", lambda x: x[:, :6], "labels must have the layout's 13 tokens"),
        ("labels", lambda x: x.double(), "labels must be a .* got torch.float64"),
        ("labels", lambda x: x[:1], "labels must have tokens' batch size"),
        ("labels", lambda x: x.to("meta"), "labels must be on tokens' device cpu, got meta"),
        ("labels", lambda _: _calls("1x4")["shard_batch"][1]["tokens"], "labels must be the next tokens, shifted"),
        ("labels", _to(None), "the tensors given must be the same on every rank"),
        ("positions", _to(POSITIONS[:6]), r"positions must be int64 or int32 of shape \(13,\)"),
        ("positions", _to(POSITIONS.to("meta")), "positions must be on tokens' device cpu, got meta"),
        ("positions", _to(POSITIONS % 5), "positions must be None or 0 .. 12, on which the pattern depends"),
        ("positions", _to(torch.stack((POSITIONS, POSITIONS % 12))), "positions must be None or 0 .. 12, on which"),
        ("documents", _to((TOKENS, 1)), "documents must add up to the 13 tokens"),
        ("documents", _to((TOKENS + 1, -1)), "documents must be None or a tuple of lengths"),
        ("documents", _to((1, TOKENS - 1)), "documents must be the same on every rank"),
        ("weights", lambda x: x[:, :1], "weights must have the layout's 13 tokens along dimension 1"),
        ("weights", lambda x: x + 1, "weights must be the same on every rank"),
        ("segments", _to(5), "segments must be a plain dense tensor of whole sequences, got .*int"),
        ("segments", lambda _: whole_tokens(), "the tensors given must be the same on every rank: .*rank 2 .*segments"),
        ("unshifted", _to(("segments",)), r"unshifted must be .* given, \['weights'\], got \('segments'"),
        ("unshifted", _to("weights"), "unshifted must be names of other tensors that are given, .*, got 'weights'"),
        ("unshifted", _to(None), "unshifted must be names of other tensors that are given, .*, got None"),
        ("context", _other_handle, "the context's layout must be the same on every rank: rank 0 has"),
        *(
            (name, change, f"{name} must be the same on every rank: rank 0 has .*, rank 2")
            for name in ("tokens", "weights")
            for change in REORDERED
        ),
    ],
    "gather": [
        ("x", _to(torch.zeros(2, TOKENS, 3)), "x must be .* with the 2 tokens of this rank, got 13, the whole seq"),
        ("x", lambda x: x[..., :2], "other dimensions must be the same on every rank"),
        ("x", lambda x: x.float(), "dtype must be the same on every rank: .* rank 2 torch.float32"),
        ("x", lambda x: x.long(), "dtype must be the same on every rank: .* rank 2 torch.int64"),
        ("x", _dtensor, "NotImplementedError: rank 2: x must be a plain tensor"),
        ("x", _to([1.0]), "x must be a tensor with dimension 1, got .*list"),
        ("dim", _to(3), "x must be a tensor with dimension 3, got"),
        ("dim", _to(0), "dim must be the same on every rank: rank 0 has 1, rank 2 0"),
        ("x", lambda x: x.clone().requires_grad_(), "requires_grad must be the same on every rank: rank 0 has False"),
    ],
    "sequence_mean": [
        ("x", _to(torch.zeros(2, TOKENS, 3)), "x must be .* with the 2 tokens of this rank, got 13, the whole seq"),
        ("x", lambda x: x.long(), "x must be real, got torch.int64; write x.float()"),
        ("mask", lambda mask: mask.float(), "mask must be None, or bool or integers of shape \\(2, 2\\)"),
        ("mask", lambda mask: 2 * mask.long(), "mask must be 1 for tokens that count, and 0 for others"),
        ("mask", _to(None), "mask must be the same on every rank"),
        ("x", lambda x: x.float(), "dtype must be the same on every rank: .* rank 2 torch.float32"),
        ("context", lambda context: context.with_documents((TOKENS, 0)), "documents must be the same on every rank"),
    ],
    "sequence_logprobs": [
        ("logits", lambda x: x.long(), "logits must be a real .* got torch.int64"),
        ("logits", lambda x: x[:, :1], r"labels must have the shape \(2, 1\) of logits"),
        ("logits", lambda x: x.float(), "dtype of logits must be the same on every rank"),
        ("labels", _to(torch.full((2, 2), VOCABULARY)), "labels must be -100, or from 0 to 6: .*7"),
        ("ignored", _to(9), "ignored must be the same on every rank|labels must be 9"),
        ("context", lambda x: x.with_pattern(Pattern.tree([None, 0], [5, 8])), "context must be no tree's"),
        ("context", lambda context: context.with_documents((TOKENS, 0)), "documents must be the same on every rank"),
    ],
    "batch_mean": [
        ("losses", lambda x: x.long(), r"losses must be a real \(...\) tensor, got torch.int64"),
        ("losses", lambda x: x.float(), "dtype must be the same on every rank"),
        ("losses", lambda x: x * (1 + 1e-7), "losses must be the same on every rank of a context group, functions of"),
        ("losses", lambda x: x[:1], "losses must be the same on every rank of a context group"),
        ("context", _to(None), "context must be a ContextParallel, got .*None"),
        ("counted", _to(-1), "counted must be None or an integer >= 0, got -1"),
        ("counted", _to(4), "counted must be the same on every rank: rank 0 has None, rank 2 4"),
        ("averaged_over", _to(0), "averaged_over must be None or a positive finite number, got 0"),
        OVER,
    ],
    "cross_entropy": [
        ("logits", lambda x: x[0], r"logits must be a real \(batch, local tokens, vocabulary\) tensor"),
        ("logits", lambda x: x.long(), "logits must be a real .* got torch.int64"),
        ("logits", lambda x: x + 0j, "logits must be a real .* got torch.complex128"),
        ("logits", _dtensor, "NotImplementedError: rank 2: logits must be a plain tensor"),
        ("logits", lambda x: x[..., :0], "logits must have a vocabulary"),
        ("logits", lambda x: x.float(), "dtype must be the same on every rank: rank 0 has torch.float64"),
        ("labels", lambda _: whole_tokens(), r"labels must .* shape \(2, 2\) of .*, got \(2, 13\): labels of the"),
        ("labels", lambda x: x[:, :1], r"labels must have the shape \(2, 2\) of logits, got \(2, 1\)$"),
        ("labels", lambda x: x.float(), "labels must be an int64 or int32 tensor, got torch.float32"),
        ("labels", _dtensor, "NotImplementedError: rank 2: labels must be a plain tensor"),
        ("labels", lambda x: x.to("meta"), "labels must be on the device of logits, cpu, got meta"),
        ("labels", _to(torch.full((2, 2), VOCABULARY)), "labels must be -100, or from 0 to 6: .*7"),
        ("labels", _to(torch.full((2, 2), -1)), "labels must be -100, or from 0 to 6: .*-1"),
        ("labelled", _to(-1), "labelled must be None or an integer >= 0, got -1"),
        ("labelled", _to(True), "labelled must be None or an integer >= 0, got True"),
        ("labelled", _to(5), "labelled must be the same on every rank: rank 0 has None, rank 2 5"),
        *(
            ("averaged_over", _to(x), f"averaged_over must be None or a positive finite number, got {x}")
            for x in (0, NAN, True)
        ),
        ("averaged_over", _to(2), "averaged_over must be the same on every rank"),
        ("ignored", _to(9), "ignored must be the same on every rank: rank 0 has -100, rank 2 9|labels must be 9"),
        ("ignored", _to(True), "ignored must be an integer, got True"),
        OVER,
    ],
    "token_mean": [
        ("losses", lambda x: x[..., None], "other dimensions must be the same on every rank"),
        ("losses", lambda x: x[0], r"losses must be a real \(batch, local tokens, ...\) tensor"),
        ("losses", lambda x: x.half(), "dtype must be the same on every rank"),
        ("losses", _dtensor, "NotImplementedError: rank 2: losses must be a plain tensor"),
        ("labels", lambda _: whole_tokens(), r"labels must have the shape \(2, 2\) of losses"),
        OVER,
    ],
    "count_labels": [
        ("labels", lambda x: x[:1], "number of micro-batches must be the same on every rank: rank 0 has 2, rank 2 1"),
        ("labels", lambda x: [x[0], x[1].float()], "labels must be an int64 or int32 tensor"),
        ("labels", _to(5), "labels must be a tensor or a list of tensors, got .*int"),
        ("ignored", _to(5), "ignored must be the same on every rank: rank 0 has -100, rank 2 5"),
        OVER,
    ],
    "average_gradients": [
        ("parameters", lambda x: x[::-1], "parameters must be the same on every rank"),
        ("parameters", lambda x: [x[0].float(), x[1]], "parameters must be the same on every rank"),
        ("parameters", _to([5]), "parameters must be tensors, got .*int"),
        ("parameters", lambda _: iter(()), "parameters must hold a tensor, got an iterator at its end"),
        ("parameters", _with_grad(SPARSE), "gradients must be dense, got that of parameter 1"),
        ("parameters", _with_grad(COMPLEX), "NotImplementedError: rank 2: gradients must be real, got .*complex64"),
        ("parameters", _partial_sum, "NotImplementedError: rank 2: parameters must be plain .* DTensor as number 1"),
        ("parameters", _to(5), "TypeError: rank 2: 'int' object is not iterable"),
        OVER,
    ],
    "clip_grad_norm": [
        *(("max_norm", _to(x), f"max_norm must be a positive finite number, got {x!r}") for x in (INF, 0, "1", True)),
        ("max_norm", _to(2.0), "max_norm must be the same on every rank"),
        ("parameters", lambda x: x[:1], "number of gradients must be the same on every rank"),
        ("parameters", _to([None]), "parameters must be tensors, got .*None"),
        ("parameters", lambda _: iter(()), "parameters must hold a tensor, got an iterator at its end"),
        ("parameters", _with_grad(SPARSE), "gradients must be dense, got one in torch.sparse_coo"),
        ("parameters", _with_grad(COMPLEX), "NotImplementedError: rank 2: gradients must be real, got .*complex64"),
        ("parameters", _partial_sum, "NotImplementedError: rank 2: gradients must be averaged before they are clipped"),
        OVER,
    ],
}
NUMBERED = [(call, number) for call, rows in REFUSALS.items() for number in range(len(rows))]


def _refused(call: str, number: int, culprit: int, mesh: str) -> str:
    """Return this rank's error of a call that is wrong on one; all ranks make right calls before and afterwards."""
    argument, change, _ = REFUSALS[call][number]
    function, right = _calls(mesh)[call]
    function(**right)
    wrong = right | ({argument: change(right.get(argument))} if dist.get_rank() == culprit else {})
    answer = said(lambda: function(**wrong))
    function(**right)
    return answer


@pytest.mark.parametrize(("call", "number"), NUMBERED, ids=[f"{c}-{REFUSALS[c][n][0]}-{n}" for c, n in NUMBERED])
def test_every_rank_raises_the_same_error(ranks: Ranks, call: str, number: int) -> None:
    (answer,) = set(ranks(4).run(_refused, call, number, 2, "1x4"))
    message = REFUSALS[call][number][2]
    head = "" if re.match("[A-Za-z]+Error: ", message) else "ValueError: (rank 2: )?"
    assert re.search(f"^{head}({message})", answer), answer


@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize("call", ["cross_entropy", "count_labels", "average_gradients", "clip_grad_norm"])
def test_all_ranks_of_a_two_dimensional_mesh_raise(ranks: Ranks, call: str, culprit: int) -> None:
    (answer,) = set(ranks(4).run(_refused, call, 0, culprit, "2x2 apart"))
    assert answer.startswith("ValueError") and f"rank {culprit}" in answer


def test_errors_stay_in_their_context_group(ranks: Ranks) -> None:
    answers = ranks(4).run(_refused, "self-attention", 2, 2, "2x2 apart")  # 0 and 2 are a context group
    assert answers[1] == answers[3] == "fine"
    assert answers[0] == answers[2] and "x must be" in answers[0]


def _unlike(what: str) -> str:
    """Rank 1 has another module, or writes into the positions of its handle, and gives them."""
    other = dist.get_rank() == 1
    module, right = _calls("1x4")["self-attention"]
    if what == "positions":
        right["positions"] = right["context"].positions_on(torch.device("cpu"))
        if other:
            right["positions"].add_(0)
    elif other:
        name = "layer 1" if what == "name" else "inner"
        module = ring.nn.SelfAttention(DIM, 4, Pattern.dense(what == "name"), name=name)
    return said(lambda: module(**right))


@pytest.mark.parametrize(
    ("what", "words"),
    [("positions", "rank 1: positions must not be modified"), ("name", ".*layer 1"), ("pattern", ".*pat")],
)
def test_modules_and_positions_must_agree_between_ranks(ranks: Ranks, what: str, words: str) -> None:
    (answer,) = set(ranks(4).run(_unlike, what))
    assert re.match(f"ValueError: {words}", answer)


def _handles() -> None:
    """On every rank the same, without a message."""
    four: Any = ring.Layout.contiguous(TOKENS, 4)
    wrong: list[tuple[Any, Any, str]] = [
        (four, mesh_of("2x2"), "group must be a mesh of one dimension, got 2 dimensions"),
        (ring.Layout.contiguous(TOKENS, 5), None, "layout must be for the 4 ranks of the group, got one for 5"),
        (four, mesh_of("2x2")["context"], "layout must be for the 2 ranks of the group, got one for 4"),
        ("contiguous", None, "layout must be a Layout, got 'contiguous'"),
        (four, "world", "group must be a process group, a mesh, a Transport or None, got 'world'"),
    ]
    for layout, group, words in wrong:
        with pytest.raises(ValueError, match=words):
            ring.nn.ContextParallel(layout, group)


def test_handles_that_cannot_be(ranks: Ranks) -> None:
    ranks(4).run(_handles)


def _apart(one: str, others: str, culprit: int) -> tuple[str, list[str]]:
    """Return the error where one rank is in another call than the others on one group, then those of right calls."""
    group = mesh_of("1x4")["context"]

    def called(name: str) -> Callable[[], object]:
        function, right = _calls("1x4")[name.removesuffix(", backward")]
        right |= {"over": group} if "over" in right else {}
        if not name.endswith("backward"):
            return lambda: function(**right)
        right["query"].requires_grad_()
        out: Any = function(**right)  # by all ranks, before they are apart
        return lambda: out.sum().backward()

    calls = {name: called(name) for name in (one, others)}
    answer = said(calls[one if dist.get_rank() == culprit else others])
    return answer, [said(called(name)) for name in (*REFUSALS, "ring attention, backward")]


@pytest.mark.parametrize(
    ("one", "others", "culprit"),
    [
        ("self-attention", "count_labels", 0),
        ("gather", "cross_entropy", 3),
        ("clip_grad_norm", "shard_batch", 0),
        ("average_gradients", "ring attention", 3),
        ("longnet", "token_mean", 3),
        ("ring attention, backward", "count_labels", 0),
    ],
)
def test_ranks_go_on_together_after_differing_calls(ranks: Ranks, one: str, others: str, culprit: int) -> None:
    answers = ranks(4).run(_apart, one, others, culprit)
    answer, afterwards = answers[0]
    assert answers == [(answer, afterwards)] * 4
    assert "calls on a group must come in the same order on every rank" in answer
    assert set(afterwards) == {"fine"}
