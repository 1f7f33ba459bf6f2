"""The names of what is called beside the steps: `verification.training.rank.all_calls` has the calls. They
are saved with counter-examples: do not change them."""

from __future__ import annotations

CALLS = (
    "the mean of losses in 16 bits", "labels of micro-batches, counted", "a tensor of any type, gathered",
    "layers of two types on one handle", "gradients averaged as they lie",
    "handles as they were made", "layers that differ on one handle", "cross entropy by the formula",
    "labels of the next tokens", "batches of any type", "batches that are not compared",
    "shards that lie anyhow, gathered", "gradients averaged over any ranks", "gradients of any type, averaged",
    "gradients on several meshes, clipped", "attention over a handle's documents", "a module in a plan, with DTensors",
    "rotary positions by the formula", "copies of modules", "patterns of LongNet's configurations",
    "a run that is saved and taken up", "wrappers over any mesh", "units of a policy",
    "layers that are computed again", "losses that are computed again", "options of units",
    "names like a checkpoint's own", "calls after ranks were apart", "twice as many labels",
    "labels that are real", "logits of two dimensions", "losses of three dimensions", "averaged over nothing",
    "labelled that is a flag", "fewer labelled than there are", "another label to ignore than the others",
    "another number of labelled than the others", "a micro-batch less to count than the others",
    "labels that are real, over ranks in reverse order", "a parameter of another shape than the others",
    "a sparse gradient", "an iterator at its end", "a norm of at most 0", "another norm at most than the others",
    "gradients that were not averaged", "a mask", "dropout", "is_causal unlike the pattern",
    "fewer heads of keys without enable_gqa", "queries of a token more", "a shard of a token more, to gather",
    "another type than the others, to gather", "another size than the others, to gather",
    "other tokens than the others", "labels of a token less than tokens", "documents of a token too many",
    "a policy of bf16 that does not say in what to sum", "a policy of fp16 that does not say in what to sum",
    "layers that are not there", "a checkpoint with a buffer more", "a checkpoint with a buffer less",
    "rotary positions of an odd head dim", "rotary positions of other tokens",
    "arguments of losses", "labels beyond the vocabulary", "arguments of losses unlike the others'",
    "a loss over what is no group", "gradients that cannot be averaged or clipped", "gradients unlike the others'",
    "batches that cannot be sharded or gathered", "batches unlike the others'", "arguments of modules",
    "positions that are not the layout's", "modules unlike the others'", "modules that cannot be made",
    "meshes, options, layers and plans that do not fit", "DTensors that are placed otherwise",
    "a batch in another order than the others'", "parameters in another order than the others'",
    "attention as a layer of transformers calls it", "what a layer of transformers may not ask for",
)  # fmt: skip


def checked_calls(calls: object) -> tuple[str, ...]:
    """ValueError for anything but a list or a tuple of such names."""
    if not isinstance(calls, (tuple, list)) or not set(map(str, calls)) <= set(CALLS):
        raise ValueError(f"calls is {calls!r}; it must be a list of some of {', '.join(CALLS)}")
    return tuple(calls)
