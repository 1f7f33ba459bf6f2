"""Defects of what a call takes from elsewhere than its arguments: other calls, places in memory, the default device."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

ATTENTION = "ring/attention.py"
STORE = "ring/strided_view.py"

_APPLIED = "    out, lse = _RingAttention.apply(q, k, v, walk)\n"
_SAVED = "        q, k, v, out, lse = ctx.saved_tensors\n"
_TRANSPORT = "    transport = _transport(group, layout)\n"

CALLS = (
    Defect(
        "lse-of-the-latest-call",
        "own",
        "Backward takes lse off a stack of the rank's calls: right only where calls end in the opposite order.",
        (
            Edit(
                ATTENTION,
                _APPLIED,
                _APPLIED + "    if out.requires_grad:\n"
                '        stacks = vars(ring_attention).setdefault("stacks", {})\n'
                "        stacks.setdefault(transport.rank, []).append(lse.detach())\n",
            ),
            Edit(
                ATTENTION,
                _SAVED,
                _SAVED + '        if not hasattr(ctx, "lse"):\n'
                '            ctx.lse = vars(ring_attention)["stacks"][ctx.walk.transport.rank].pop()\n'
                "        lse = ctx.lse\n",
            ),
        ),
    ),
    Defect(
        "delta-of-the-first-backward",
        "own",
        "D is kept with the call: a second backward through the graph takes that of the first one's gradients.",
        (
            Edit(
                ATTENTION,
                "rows.delta.view(*where).squeeze(-1)",
                'vars(walk).setdefault("delta", rows.delta).view(*where).squeeze(-1)',
            ),
        ),
    ),
    Defect(
        "output-written-again-without-gradients",
        "own",
        "Calls without gradients return one output buffer of the rank, which the next such call overwrites.",
        (
            Edit(
                ATTENTION,
                _APPLIED,
                _APPLIED + "    if not out.requires_grad:\n"
                '        kept = vars(ring_attention).setdefault("kept", {})\n'
                "        place = (transport.rank, out.shape, out.dtype, out.device)\n"
                "        out = kept.setdefault(place, torch.empty_like(out)).copy_(out)\n",
            ),
        ),
    ),
    Defect(
        "keys-are-what-lies-first",
        "own",
        "Keys and values in one storage are taken for a packed pair, whose first half is the keys.",
        (
            Edit(
                ATTENTION,
                _TRANSPORT,
                "    if k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():\n"
                "        k, v = sorted((k, v), key=lambda x: x.storage_offset())\n" + _TRANSPORT,
            ),
        ),
    ),
    Defect(
        "index-on-the-default-device",
        "an earlier version of ring/strided_view.py",
        "The heads of listed rows are counted on the default device, whichever that is, and added to rows on the CPU.",
        (Edit(STORE, "torch.arange(groups, device=index.device)", "torch.arange(groups)"),),
    ),
)
