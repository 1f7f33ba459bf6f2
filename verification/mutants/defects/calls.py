"""Defects of what a call takes from elsewhere than its arguments: other calls, places in memory, the default device."""

from __future__ import annotations

from ring import attention, strided_view
from verification.mutants.defect import Edit, defect

_APPLIED = "    out, lse = _RingAttention.apply(q, k, v, walk)\n"
_SAVED = "        q, k, v, out, lse = ctx.saved_tensors\n"
_TRANSPORT = "    transport = _transport(group, layout)\n"

CALLS = (
    defect(
        "lse-of-the-latest-call",
        "Backward takes lse off a stack of the rank's calls: right only where calls end in the opposite order.",
        Edit(
            attention,
            _APPLIED,
            _APPLIED + "    if out.requires_grad:\n"
            '        stacks = vars(ring_attention).setdefault("stacks", {})\n'
            "        stacks.setdefault(transport.rank, []).append(lse.detach())\n",
        ),
        Edit(
            attention,
            _SAVED,
            _SAVED + '        if not hasattr(ctx, "lse"):\n'
            '            ctx.lse = vars(ring_attention)["stacks"][ctx.walk.transport.rank].pop()\n'
            "        lse = ctx.lse\n",
        ),
    ),
    defect(
        "delta-of-the-first-backward",
        "D is kept with the call: a second backward through the graph takes that of the first one's gradients.",
        Edit(
            attention,
            "rows.delta.view(*where).squeeze(-1)",
            'vars(walk).setdefault("delta", rows.delta).view(*where).squeeze(-1)',
        ),
    ),
    defect(
        "output-written-again-without-gradients",
        "Calls without gradients return one output buffer of the rank, which the next such call overwrites.",
        Edit(
            attention,
            _APPLIED,
            _APPLIED + "    if not out.requires_grad:\n"
            '        kept = vars(ring_attention).setdefault("kept", {})\n'
            "        place = (transport.rank, out.shape, out.dtype, out.device)\n"
            "        out = kept.setdefault(place, torch.empty_like(out)).copy_(out)\n",
        ),
    ),
    defect(
        "keys-are-what-lies-first",
        "Keys and values in one storage are taken for a packed pair, whose first half is the keys.",
        Edit(
            attention,
            _TRANSPORT,
            "    if k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():\n"
            "        k, v = sorted((k, v), key=lambda x: x.storage_offset())\n" + _TRANSPORT,
        ),
    ),
    defect(
        "index-on-the-default-device",
        "The heads of listed rows are counted on the default device, whichever that is, and added to rows on the CPU.",
        Edit(strided_view, "torch.arange(groups, device=index.device)", "torch.arange(groups)"),
        provenance="an earlier version of ring/strided_view.py",
    ),
)
