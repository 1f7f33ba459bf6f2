"""Defects of what a process keeps of a call: plans by a key that lacks a field, tensors, a state that is the user's."""

from __future__ import annotations

from ring import attention
from verification.mutants.defect import Defect, Edit, defect

_PLANNED = "    plan = plan_of(pattern, layout, transport.rank, heads, kv_heads, exchange, bucket, own)\n"
_KEPT = """\
    rank = transport.rank
    kept = globals().setdefault("_plans", {})
    if (KEY) not in kept:
        kept[KEY] = plan_of(pattern, layout, rank, heads, kv_heads, exchange, bucket, own)
    plan = kept[KEY]
"""
_AGREED = "    agree(call, transport, check)\n"
_CONTEXT = "        ctx.walk = walk\n"


def _poor_key(name: str, about: str, key: str) -> Defect:
    return defect(
        name,
        about,
        Edit(attention, _PLANNED, _KEPT.replace("KEY", key)),
    )


KEEPING = (
    _poor_key(
        "plan-kept-without-the-order",
        "Plans are kept by the number of tokens and the cuts: another order of the tokens gets the plan of the first.",
        "pattern, layout.n, layout.cuts, rank, heads, kv_heads, exchange, bucket",
    ),
    _poor_key(
        "plan-kept-without-the-cuts",
        "Plans are kept by the order and the own number of tokens: other ranks' shards are those of the first call.",
        "pattern, layout.counts[rank], layout.runs, str(layout.listed), rank, heads, kv_heads, exchange, bucket",
    ),
    _poor_key(
        "plan-kept-whether-causal-or-not",
        "Plans are kept by the branches of a pattern: a call that is not causal gets the plan of one that is.",
        "pattern.branches, layout, rank, heads, kv_heads, exchange, bucket",
    ),
    _poor_key(
        "plan-kept-for-any-order-of-branches",
        "Plans are kept by the set of branches: one that is there twice counts once.",
        "frozenset(pattern.branches), pattern.causal, layout, rank, heads, kv_heads, exchange, bucket",
    ),
    _poor_key(
        "plan-kept-without-the-bucket",
        "Plans are kept whatever the bucket: a small one gets the plan, and takes the memory, of a large one.",
        "pattern, layout, rank, heads, kv_heads, exchange",
    ),
    _poor_key(
        "plan-kept-without-the-exchange",
        "Plans are kept whatever the exchange: `direct` sends what the ring would.",
        "pattern, layout, rank, heads, kv_heads, bucket",
    ),
    defect(
        "call-seeds-random-numbers",
        "Every call seeds torch's random numbers: the user's dropout and data repeat themselves on all ranks.",
        Edit(attention, _AGREED, _AGREED + "    torch.manual_seed(0)\n"),
    ),
    defect(
        "call-changes-the-default-dtype",
        "Every call makes its own type the default: what the user makes next has it too.",
        Edit(attention, _AGREED, _AGREED + "    torch.set_default_dtype(q.dtype)\n"),
    ),
    defect(
        "context-keeps-the-results",
        "Autograd's context keeps the results as well: a cycle, so that memory is only freed when Python collects it.",
        Edit(attention, _CONTEXT, _CONTEXT + "        ctx.result = (out, lse)\n"),
    ),
    defect(
        "every-landing-is-kept",
        "What was received is kept by the module: memory grows with every call.",
        Edit(
            attention,
            "    for arrival in Exchange(walk.plan, walk.transport, k, v).arrivals():\n",
            "    kept = globals().setdefault('_kept', [])\n"
            "    for arrival in Exchange(walk.plan, walk.transport, k, v).arrivals():\n"
            "        kept.append(arrival)\n",
        ),
    ),
)
