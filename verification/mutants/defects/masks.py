"""Defects of masks: tokens and segments at the end, causality."""

from __future__ import annotations

from ring import layout
from ring.compute import math_kernel
from ring.plan import range_pairs, ranges, tiling
from verification.mutants.defect import Edit, defect

_HIDDEN = "        hidden = key[:, None, :] > query[:, rows, None]  # (F, L, Lk)\n"
_BLIND = "    blind = np.maximum(ranges.count_until(q.range, first_key - 1) - q.first, 0)\n"
_BEFORE = "    before = (first_query - ranges.position(k.range, k.first)) // ranges.step[k.range]  # c\n"

MASKS = (
    # --- tokens and segments at the end
    defect(
        "remainder-belongs-to-nobody",
        "Even cuts leave the tokens beyond a multiple of the world size to no rank: 7 on 2 ranks are treated as 6.",
        Edit(
            layout,
            "    return tuple(r * n // p for r in range(p + 1))\n",
            "    return tuple(r * (n // p) for r in range(p + 1))\n",
        ),
        provenance="TransformerEngine#1930",
        listed=(22,),
    ),
    defect(
        "last-token-of-a-run-dropped",
        "The last token of every run of positions that a rank holds is on no grid.",
        Edit(
            ranges,
            "np.minimum(-((run.start - (segment + 1) * w) // run.step), run.length)",
            "np.minimum(-((run.start - (segment + 1) * w) // run.step), run.length - 1)",
        ),
        provenance="TransformerEngine#1930",
        listed=(22,),
    ),
    defect(
        "short-tail-dropped-when-listed",
        "In a listed layout the last segment, if it is short, selects nothing.",
        Edit(
            ranges,
            "    within = position % block.segment_length\n",
            "    within = position % block.segment_length\n"
            "    within[position >= len(position) // block.segment_length * block.segment_length] = -1\n",
        ),
        provenance="TransformerEngine#1930",
        listed=(22,),
    ),
    defect(
        "bucket-remainder-dropped",
        "Keys beyond the last whole bucket of a subrange are left out.",
        Edit(ranges, "parts = -(-self.count // most)", "parts = np.maximum(self.count // most, 1)"),
        listed=(22,),
    ),
    defect(
        "grid-count-rounded-down",
        "Where the dilation does not divide what is left of a segment, its last row on the grid is dropped.",
        Edit(ranges, "(high - element + cycle - 1) // cycle, 0)", "(high - element) // cycle, 0)"),
        provenance="torchscale",
        listed=(22, 30),
    ),
    defect(
        "segment-takes-its-neighbours-first",
        "A segment takes the first position of the next one as well.",
        Edit(
            ranges,
            "np.minimum(-((run.start - (segment + 1) * w) // run.step), run.length)",
            "np.minimum(-((run.start - (segment + 1) * w - 1) // run.step), run.length)",
        ),
    ),
    # --- causality
    defect(
        "causal-diagonal-hidden",
        "On a diagonal tile a row does not see its own position.",
        Edit(math_kernel, "hidden = (keys > keys[rows, None])", "hidden = (keys >= keys[rows, None])"),
        provenance="DarcStar V2 collective",
        listed=(23,),
    ),
    defect(
        "causal-diagonal-one-too-many",
        "On a diagonal tile a row sees one key after its own position.",
        Edit(math_kernel, "hidden = (keys > keys[rows, None])", "hidden = (keys > keys[rows, None] + 1)"),
        provenance="DarcStar V2 collective",
        listed=(23,),
    ),
    defect(
        "causal-diagonal-of-the-wrong-sign",
        "On a diagonal tile a row sees what comes after it.",
        Edit(math_kernel, "hidden = (keys > keys[rows, None])", "hidden = (keys < keys[rows, None])"),
        provenance="DarcStar V2 collective",
        listed=(23,),
    ),
    defect(
        "diagonal-lost-when-listed",
        "In a listed layout the last key that a row may see is its own, and counts as beyond it.",
        Edit(
            ranges,
            'self.listing.order, index * self.listing.span + position, side="right")',
            'self.listing.order, index * self.listing.span + position, side="left")',
        ),
        provenance="seen in public ring-attention code",
        listed=(23,),
    ),
    defect(
        "own-position-hidden-in-masks-by-position",
        "Where the mask goes by position a row does not see its own.",
        Edit(math_kernel, _HIDDEN, _HIDDEN.replace(" > ", " >= ")),
        provenance="seen in public ring-attention code",
        listed=(23,),
    ),
    defect(
        "keep-mask-used-as-drop-mask",
        "Where the mask goes by position, what should be kept is hidden.",
        Edit(math_kernel, _HIDDEN, _HIDDEN.replace(" > ", " <= ")),
        provenance="DarcStar bucketed",
        listed=(24,),
    ),
    defect(
        "partly-visible-tiles-skipped",
        "Tiles that need a mask by position, being partly visible, are skipped.",
        Edit(
            tiling,
            "    for mask, part in masked(ranges, found, causal):\n",
            "    for mask, part in masked(ranges, found, causal):\n"
            "        if mask is Mask.POSITION:\n            continue\n",
        ),
        provenance="seen in public ring-attention code",
        listed=(25,),
    ),
    defect(
        "meetings-skipped-unless-wholly-visible",
        "Keys of which the last query row sees only a part are skipped altogether.",
        Edit(range_pairs, "    some = np.flatnonzero(visible)\n", "    some = np.flatnonzero(visible == k.count)\n"),
        provenance="seen in public ring-attention code",
        listed=(25,),
    ),
    defect(
        "rows-below-the-diagonal-dropped",
        "Rows below a causal square, which see all of its keys, are left out.",
        Edit(
            tiling,
            "        (Mask.FULL, below.take(np.flatnonzero(q.count > square))),\n",
            "        (Mask.FULL, below.take(np.flatnonzero(q.count > square)[:0])),\n",
        ),
        listed=(25,),
    ),
    defect(
        "steps-taken-for-equal",
        "Runs of different steps are masked along a diagonal, as if they had one.",
        Edit(
            tiling,
            "    aligned = ranges.step[q.range] == ranges.step[k.range]\n",
            "    aligned = ranges.step[q.range] > 0\n",
        ),
    ),
    defect(
        "full-if-the-first-key-is-visible",
        "A tile counts as wholly visible as soon as its first row sees its first key.",
        Edit(
            tiling,
            "    full = ranges.position(k.range, k.first + k.count - 1) <= first_query\n",
            "    full = ranges.position(k.range, k.first) <= first_query\n",
        ),
        listed=(23,),
    ),
    defect(
        "striped-less-or-equal",
        "A row sees the key of its own number on every rank, also where that lies after it.",
        Edit(range_pairs, _BLIND, "    blind = 0 * q.first\n"),
        Edit(tiling, _BEFORE, _BEFORE + "    before = np.maximum(before, 0)\n"),
        provenance="striped attention: `<` against `<=` between ranks",
        listed=(33,),
    ),
    defect(
        "blind-rows-off-by-one",
        "The first query row that sees a subrange of keys is trimmed with those that see none of it.",
        Edit(range_pairs, "count_until(q.range, first_key - 1)", "count_until(q.range, first_key)"),
        listed=(23, 33),
    ),
)
