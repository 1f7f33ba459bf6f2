"""Calls a prepared model with the whole batch of a collator: sharded before the model, the loss of all tokens after it.

The batch is that of Hugging Face: labels that are not shifted, or `shift_labels`; an attention mask that marks padding;
position_ids that restart in each packed document. Rows that are packed from different documents become one long row. So
do rows with different padding where labels are those of the tokens themselves: that attention may see later tokens.
Rows with padding before their tokens are rolled to their start, and results back: rotary positions are relative.
With `same_bits` rows are filled up to whole chunks, so that a sequence has the same chunks whatever it is padded to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from reference.documents import Documents, documents_from_positions
from ring.integrations.trainers.scores import of_last_tokens, scores_sequences
from ring.integrations.transformers.call import is_given, prepared_call
from ring.integrations.transformers.padding import check_values, separated
from ring.nn.batch import IGNORED, Batch, next_tokens, shard_batch
from ring.nn.batch_group import BatchRanks
from ring.nn.context import ContextParallel
from ring.nn.loss import cross_entropy, sequence_logprobs
from ring.nn.same_weights.wrapper import SameWeights
from ring.nn.sequence import gather, sequence_sum

TENSORS = ("input_ids", "labels", "attention_mask", "position_ids")
MORE = {True: "shift_labels", False: "token_type_ids"}  # where labels are those of the next tokens, or are not
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # of packed documents, as position_ids say them as well
OTHERS = ("max_length_q", "max_length_k", "seq_idx", "num_items_in_batch", "use_cache", "fused_lm_head", "return_dict")
# Arguments that a trainer or `compute_loss` adds, each with what to write instead; a collator adds others.
ADDED = {
    "output_hidden_states": "a rank has those of its shard: take logits, or gather them in a loop of your own",
    "output_attentions": "ring attention does not compute weights",
    "output_router_logits": "the auxiliary loss would be over the tokens of a rank; write router_aux_loss_coef=0.0 in "
    "the arguments of TRL's trainer, or add that loss by token_mean in a loop of your own",
    "logits_to_keep": "the call returns all logits: slice these",
    "past_key_values": "a cache holds the keys of one shard",
    **dict.fromkeys(("token_type_ids", "mm_token_type_ids", "pattern"), "masks of images and trees need a loop of your "
                    "own, with shard_batch(context, tokens, labels, token_type_ids=... or pattern=...)"),
    "inputs_embeds": "give input_ids: noise and changes of embeddings belong into the model's embedding layer",
}  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """A whole batch.

    tokens, targets: (B, n), or (1, B n) for rows of different documents; targets are what the model predicts at each
    token. mask: alike, 1 for tokens and 0 for padding; None without padding. types: alike, of BERT; None without.
    before: (B,), places by which each row is rolled to its start, since it had so much padding before; None: none.
    """

    tokens: Tensor
    targets: Tensor | None
    mask: Tensor | None
    documents: Documents | None
    types: Tensor | None
    before: Tensor | None = None


@dataclass(frozen=True)
class ShardedCall:
    """The model's call in `Trainer.compute_loss`, on every rank.

    model: prepared, maybe wrapped. mesh: ("data", "context"). handle: returns the context of so many tokens, and of
    documents. shifts: True if a token's label is for the one before it. whole: True for logits of the whole sequence.
    inner: the model without wrapper. draws: the stream of the model's random numbers on CPUs. Shards of unequal length
    draw unequally, so that a collator on the common stream would then draw other batches on each rank. chunk: tokens of
    a chunk of `SameWeights`, or None. losses: of the calls so far.
    """

    model: nn.Module
    mesh: DeviceMesh
    handle: Callable[[int, Documents | None], ContextParallel]
    shifts: bool
    whole: bool
    inner: nn.Module
    draws: torch.Generator
    chunk: int | None = None
    losses: list[Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model if hasattr(self.model, name) else self.inner, name)

    @property
    def scores(self) -> bool:
        """True for a model that scores whole sequences."""
        inner: Any = self.inner
        return scores_sequences(inner.get_base_model() if hasattr(inner, "peft_config") else inner)

    def train(self, mode: bool = True) -> ShardedCall:
        """Set the model's mode, and return this call, as modules do."""
        self.model.train(mode)
        return self

    def eval(self) -> ShardedCall:
        """Set the model's mode to that of evaluation."""
        return self.train(False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the data rank's loss, if there are labels, and the logits (B, n, V), if they are wanted.

        The loss is the sum over the tokens of the data rank, divided by `num_items_in_batch`, or by their number. With
        `fused_lm_head`, TRL's keyword, return TRL's output of a value for each label, (B, n - 1) as without shards.
        """
        named = signature(type(self.inner).forward).bind_partial(self.inner, *args).arguments
        inputs = dict(**dict(list(named.items())[1:]), **options)
        if self.scores:
            inputs.pop("margin", None)  # of a pair, which TRL hands to the model as well
        ranks = BatchRanks(None)
        given = ranks.agree("the Trainer's batch", lambda: ({}, self._whole_batch(inputs)))
        batch = ranks.agree("the Trainer's batch", lambda: ({}, self._shard(given)))
        others = dict(batch.others)
        labels = batch.labels if self.shifts else others.pop("targets", None)
        call = partial(
            self._called, input_ids=batch.tokens, position_ids=batch.positions[None], context=batch.context, **others
        )
        shape, before = inputs["input_ids"].shape, given.before
        if self.scores:
            scores = _rolled(gather(batch.context, call().logits), before)
            padding = self.config.get_text_config().pad_token_id
            return CausalLMOutput(logits=of_last_tokens(scores, inputs["input_ids"], padding))
        if inputs.get("fused_lm_head") and self.chunk is None:
            fused = call(shift_labels=labels, fused_lm_head=True)
            values = {k: _whole(x, batch.context, shape) for k, x in fused.items() if x.dim() == 2}
            return replace(fused, **{k: _rolled(x, before) for k, x in values.items()})
        logits, loss = call().logits, None
        if labels is not None:
            loss = self._loss(logits, labels, batch.context, inputs.get("num_items_in_batch"))
            self.losses.append(loss)
        if inputs.get("fused_lm_head"):
            assert labels is not None
            values = _of_labels(logits.detach(), labels)
            return SimpleNamespace(**{k: _whole(x, batch.context, shape) for k, x in values.items()})
        filled = gather(batch.context, logits) if self.whole or loss is None else None
        gathered = None if filled is None else filled[:, : shape.numel() // len(filled)].reshape(*shape, -1)
        output = CausalLMOutput(loss=loss, logits=None if gathered is None else _rolled(gathered, before))
        return output.to_tuple() if inputs.get("return_dict") is False else output

    def _whole_batch(self, inputs: Mapping[str, Any]) -> Whole:
        rolls = self.shifts and self.chunk is None and _is_relative(self.inner)
        batch = whole_batch(inputs, self.shifts, rolls)
        if self.scores and (batch.documents is not None or batch.targets is not None):
            raise NotImplementedError(
                "batch must have whole sequences, padded, without labels or position_ids, for a model that scores the "
                "last token of a sequence"
            )
        if self.chunk is None:
            return batch
        config = self.config.get_text_config()
        limit = None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)
        return _filled_up(batch, self.chunk, self.mesh["context"].size(), limit)

    def _loss(self, logits: Tensor, labels: Tensor, context: ContextParallel, items: Any) -> Tensor:
        """Return the loss of the data rank, over `items` or its own labels, or in training by chunks that of all."""
        labelled = None if items is None else int(items)
        if not isinstance(self.model, SameWeights):
            return cross_entropy(logits, labels, self.mesh["context"], labelled=labelled)
        if torch.is_grad_enabled():
            return cross_entropy(logits, labels, self.model, labelled=labelled)
        logprobs = sequence_logprobs(logits, labels, context)
        count = int(sequence_sum(context, labels != IGNORED).sum())
        return logprobs.new_tensor(-math.fsum(logprobs.flatten().tolist()) / max(1, count))

    def _called(self, **inputs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.draws.get_state())
            output = self.model(**inputs)
            self.draws.set_state(torch.get_rng_state())
        return output

    def _shard(self, given: Whole) -> Batch:
        labels, targets = (given.targets, None) if self.shifts else (None, given.targets)
        tensors = {"attention_mask": given.mask, "token_type_ids": given.types, "targets": targets}
        others: dict[str, Any] = {name: x for name, x in tensors.items() if x is not None}
        context = self.handle(given.tokens.shape[1], None if self.chunk is None else given.documents)
        return shard_batch(context, given.tokens, labels, documents=given.documents, unshifted=tuple(others), **others)


def _whole(x: Tensor, context: ContextParallel, shape: torch.Size) -> Tensor:
    """Return values of all tokens but those of the last column, which has no next token.

    Leaves out the token that stands in on a rank without tokens, and those that fill up the last chunk.
    """
    return gather(context, x[:, : context.tokens])[:, : shape.numel() // len(x)].reshape(shape)[:, :-1]


def _rolled(x: Tensor, places: Tensor | None) -> Tensor:
    """Return x (B, n, ...) with each row moved by so many places along dimension 1; what leaves it comes in again."""
    if places is None:
        return x
    index = (torch.arange(x.shape[1], device=x.device) - places[:, None]) % x.shape[1]
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _is_relative(model: Any) -> bool:
    """True if a whole row may begin at any position: positions are rotary, or the model counts them from its mask."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    call, config = prepared_call(inner.base_model) or prepared_call(inner), inner.config.get_text_config()
    if call is not None and call.counts_mask:
        return True
    absolute = any(getattr(config, name, None) for name in ("attention_chunk_size", "attn_temperature_tuning"))
    return bool(getattr(config, "rope_parameters", None)) and not absolute


@torch.no_grad()
def _of_labels(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the values (B, N) that TRL logs of each label, by TRL's names, 0 without label."""
    mask, logprobs = labels != IGNORED, functional.log_softmax(logits.float(), -1)
    values = {
        "log_probs": logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0],
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "is_top1": logits.argmax(-1) == labels,
    }
    return {"label_mask": mask, **{name: x * mask for name, x in values.items()}}


def _filled_up(batch: Whole, chunk: int, ranks: int, limit: int | None) -> Whole:
    """Return the batch without a mask, its rows filled up to whole chunks, packed rows by documents of a chunk.

    Each rank of a row gets two chunks or sequences, which `SameWeights` compares. limit: of learned positions.
    """
    mask, (rows, n), before = batch.mask, batch.tokens.shape, batch.documents
    right = mask is None or (mask.shape == batch.tokens.shape and bool((mask[:, 1:] <= mask[:, :-1]).all()))
    if not right or (mask is not None and before is not None):
        raise NotImplementedError(
            "attention_mask must have its zeros on the right of each row with same_bits, and be left out of packed "
            "rows, got another one: let the tokenizer pad on the right"
        )
    missing = max(0, ranks * (2 if rows == 1 else 1) - sum(-(-length // chunk) for length in before or (n,)))
    after = Documents((*before, *[chunk] * missing) if before else (n + -n % chunk + missing * chunk,))
    if limit is not None and max(before or (n,)) <= limit < max(after):
        raise ValueError(
            f"same_bits must be a shorter chunk: rows of {n} tokens are filled up to whole chunks on each rank, "
            f"{after.tokens} tokens, and the model has max_position_embeddings={limit}, got same_bits={chunk}"
        )
    tokens = functional.pad(batch.tokens, (0, after.tokens - n))
    targets = None if batch.targets is None else functional.pad(batch.targets, (0, after.tokens - n), value=IGNORED)
    return Whole(tokens, targets, None, after if before else None, None)


def whole_batch(inputs: Mapping[str, Any], shifts: bool, rolls: bool = False) -> Whole:
    """Return the batch of a collator.

    Args:
        inputs: by the names of the model's arguments.
        shifts: True if a token's label is for the one before it.
        rolls: True to roll rows with padding before their tokens to their start.

    Raises:
        ValueError, NotImplementedError: tensors that are not understood, or labels that cross the ends of documents.
    """
    allowed = (*TENSORS, MORE[shifts])
    for name, value in inputs.items():
        if name not in allowed + ENDS + OTHERS and is_given(value):
            if name in ADDED:
                raise NotImplementedError(f"{name} must be left out of the model's call: {ADDED[name]}")
            raise NotImplementedError(
                f"batch must have {', '.join(allowed)} alone, got {name}: let the collator omit it, or compute_loss "
                "take it out of the inputs"
            )
        if name in allowed and not isinstance(value, Tensor | None):
            raise ValueError(f"{name} must be a tensor, got {type(value)}")
    tokens, mask, positions, types = (
        inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids", "token_type_ids")
    )
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise ValueError("batch must have input_ids (batch, tokens)")
    targets = _targets(inputs, tokens, shifts)
    if mask is not None and mask.shape == tokens.shape and bool((mask == 1).all()):
        mask = None
    documents = None if positions is None else _documents(positions, tokens)
    _check_lengths(inputs, (tokens.numel(),) if documents is None else documents)
    if documents is not None:
        if targets is not None and shifts:
            _check_ends(targets, documents)
        whole = _joined(Whole(tokens, targets, mask, documents, types))
    else:
        whole = Whole(tokens, targets, mask, None, types)
    if whole.mask is not None and whole.mask.shape == whole.tokens.shape:  # otherwise shard_batch refuses it
        check_values(whole.mask)
        if rolls and documents is None:
            whole = _rolled_to_start(whole)
        assert whole.mask is not None
        real = whole.mask.bool()
        if separated(real, documents, is_own=True) is None and not shifts:
            lengths = real.sum(1)
            apart = torch.stack((lengths, real.shape[1] - lengths), 1).flatten().tolist()
            return _joined(replace(whole, mask=None, documents=Documents(apart)))
    return whole


def _rolled_to_start(whole: Whole) -> Whole:
    """Return the batch without padding before tokens, where that differs between rows."""
    tokens, targets, mask = whole.tokens, whole.targets, whole.mask
    assert mask is not None
    before = mask.long().argmax(1)
    if bool((mask == mask[:1]).all()) or not bool(before.any()):
        return whole
    rows = torch.arange(len(mask), device=mask.device)
    if targets is not None and bool(((targets[rows, before - 1] != IGNORED) & (before > 0)).any()):
        raise ValueError(
            f"labels must be {IGNORED} for the first token behind padding on the left, since padding would predict it, "
            "got others: let the tokenizer pad on the right"
        )
    moved = None if targets is None else _rolled(targets, -before)
    return Whole(_rolled(tokens, -before), moved, _rolled(mask, -before), None, whole.types, before)


def _joined(whole: Whole) -> Whole:
    """Return the batch as one long row."""
    rows = (whole.tokens, whole.targets, whole.mask, whole.types)
    tokens, targets, mask, types = (None if x is None else x.reshape(1, -1) for x in rows)
    assert tokens is not None
    return Whole(tokens, targets, mask, whole.documents, types)


def _targets(inputs: Mapping[str, Any], tokens: Tensor, shifts: bool) -> Tensor | None:
    """Return what the model predicts at each token, (B, n); None without labels."""
    shifted, labels = inputs.get("shift_labels"), inputs.get("labels")
    for name, x in (("shift_labels", shifted), ("labels", labels)):
        if x is not None and x.shape != tokens.shape:
            raise ValueError(f"{name} must have the shape of input_ids, {tuple(tokens.shape)}, got {tuple(x.shape)}")
    if shifted is not None or labels is None:
        return shifted
    return next_tokens(labels) if shifts else labels


def _documents(positions: Tensor, tokens: Tensor) -> Documents | None:
    """Return the lengths of the documents of all rows, one after the other; None if each row is one document."""
    rows, n = tokens.shape
    if positions.shape in ((rows, n), (1, n), (n,)):
        whole = torch.arange(n, device=tokens.device)
        if bool((positions == whole).all()):
            return None
    if positions.shape != tokens.shape:
        raise ValueError(
            f"position_ids must have the shape of input_ids, {tuple(tokens.shape)}, got {tuple(positions.shape)}"
        )
    return Documents(documents_from_positions(positions.reshape(-1)))


def _check_lengths(inputs: Mapping[str, Any], documents: Sequence[int]) -> None:
    for name in ENDS:
        ends = inputs.get(name)
        if ends is not None and ends.tolist() != [0, *accumulate(documents)]:
            raise ValueError(f"{name} must be the ends of documents in position_ids, got others")


def _check_ends(targets: Tensor, documents: Documents) -> None:
    ends = torch.tensor(documents, device=targets.device).cumsum(0) - 1
    if bool((targets.reshape(-1)[ends] != IGNORED).any()):
        raise ValueError(
            f"labels must be {IGNORED} for the first token of each document, as DataCollatorWithFlattening has them, "
            "got others: the last token of a document would predict the next document"
        )
