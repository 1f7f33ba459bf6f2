"""Defects of masks: tokens and segments at the end, causality."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

KERNELS = "ring/compute/kernels.py"
LAYOUT = "ring/layout.py"
MEETINGS = "ring/plan/range_pairs.py"
PIECES = "ring/plan/ranges.py"
PLAN = "ring/plan/plan.py"

_HIDDEN = "        hidden = key[:, None, :] > query[:, rows, None]  # (F, L, Lk)\n"
_BLIND = "    blind = np.maximum(pieces.count_until(q.piece, first_key - 1) - q.first, 0)\n"
_BEFORE = "    before = (first_row - pieces.position(k.piece, k.first)) // pieces.step[k.piece]  # c\n"

MASKS = (
    # --- tokens and segments at the end
    Defect(
        "remainder-belongs-to-nobody",
        "TransformerEngine#1930",
        "Even cuts leave the tokens beyond a multiple of the world size to no rank: 7 on 2 ranks are treated as 6.",
        (
            Edit(
                LAYOUT,
                "    return tuple(r * n // p for r in range(p + 1))\n",
                "    return tuple(r * (n // p) for r in range(p + 1))\n",
            ),
        ),
        (22,),
    ),
    Defect(
        "last-token-of-a-run-dropped",
        "TransformerEngine#1930",
        "The last token of every run of positions that a rank holds is on no grid.",
        (
            Edit(
                PIECES,
                "np.minimum(-((start - (segment + 1) * w) // step), length)",
                "np.minimum(-((start - (segment + 1) * w) // step), length - 1)",
            ),
        ),
        (22,),
    ),
    Defect(
        "short-tail-dropped-when-listed",
        "TransformerEngine#1930",
        "In a listed layout the last segment, if it is short, selects nothing.",
        (
            Edit(
                PIECES,
                "        chosen.append(np.flatnonzero(on_grid))\n",
                "        on_grid &= position < layout.n // block.segment_length * block.segment_length\n"
                "        chosen.append(np.flatnonzero(on_grid))\n",
            ),
        ),
        (22,),
    ),
    Defect(
        "bucket-remainder-dropped",
        "own",
        "Keys beyond the last whole bucket of a stretch are left out.",
        (Edit(MEETINGS, "parts = -(-self.count // most)", "parts = np.maximum(self.count // most, 1)"),),
        (22,),
    ),
    Defect(
        "grid-count-rounded-down",
        "torchscale",
        "Where the dilation does not divide what is left of a segment, its last row on the grid is dropped.",
        (
            Edit(
                PIECES,
                "(high - element + cycle - 1) // cycle, 0)",
                "(high - element) // cycle, 0)",
            ),
        ),
        (22, 30),
    ),
    Defect(
        "segment-takes-its-neighbours-first",
        "own",
        "A segment takes the first position of the next one as well.",
        (
            Edit(
                PIECES,
                "np.minimum(-((start - (segment + 1) * w) // step), length)",
                "np.minimum(-((start - (segment + 1) * w - 1) // step), length)",
            ),
        ),
    ),
    # --- causality
    Defect(
        "causal-diagonal-hidden",
        "DarcStar V2 collective",
        "On a diagonal tile a row does not see its own position.",
        (Edit(KERNELS, "hidden = (keys > keys[rows, None])", "hidden = (keys >= keys[rows, None])"),),
        (23,),
    ),
    Defect(
        "causal-diagonal-one-too-many",
        "DarcStar V2 collective",
        "On a diagonal tile a row sees one key after its own position.",
        (Edit(KERNELS, "hidden = (keys > keys[rows, None])", "hidden = (keys > keys[rows, None] + 1)"),),
        (23,),
    ),
    Defect(
        "causal-diagonal-of-the-wrong-sign",
        "DarcStar V2 collective",
        "On a diagonal tile a row sees what comes after it.",
        (Edit(KERNELS, "hidden = (keys > keys[rows, None])", "hidden = (keys < keys[rows, None])"),),
        (23,),
    ),
    Defect(
        "diagonal-lost-when-listed",
        "seen in public ring-attention code",
        "In a listed layout the last key that a row may see is its own, and counts as beyond it.",
        (
            Edit(
                PIECES,
                'np.searchsorted(self._sorted, piece * self._span + position, side="right")',
                'np.searchsorted(self._sorted, piece * self._span + position, side="left")',
            ),
        ),
        (23,),
    ),
    Defect(
        "own-position-hidden-in-masks-by-position",
        "seen in public ring-attention code",
        "Where the mask goes by position a row does not see its own.",
        (Edit(KERNELS, _HIDDEN, _HIDDEN.replace(" > ", " >= ")),),
        (23,),
    ),
    Defect(
        "keep-mask-used-as-drop-mask",
        "DarcStar bucketed",
        "Where the mask goes by position, what should be kept is hidden.",
        (Edit(KERNELS, _HIDDEN, _HIDDEN.replace(" > ", " <= ")),),
        (24,),
    ),
    Defect(
        "partly-visible-tiles-skipped",
        "seen in public ring-attention code",
        "Tiles that need a mask by position, being partly visible, are skipped.",
        (
            Edit(
                PLAN,
                "    for mask, part in masked(pieces, found, causal):\n",
                "    for mask, part in masked(pieces, found, causal):\n"
                "        if mask is Mask.POSITION:\n            continue\n",
            ),
        ),
        (25,),
    ),
    Defect(
        "meetings-skipped-unless-wholly-visible",
        "seen in public ring-attention code",
        "Keys of which the last query row sees only a part are skipped altogether.",
        (Edit(MEETINGS, "    some = np.flatnonzero(visible)\n", "    some = np.flatnonzero(visible == k.count)\n"),),
        (25,),
    ),
    Defect(
        "rows-below-the-diagonal-dropped",
        "own",
        "Rows below a causal square, which see all of its keys, are left out.",
        (
            Edit(
                MEETINGS,
                "        (Mask.FULL, below.take(np.flatnonzero(q.count > square))),\n",
                "        (Mask.FULL, below.take(np.flatnonzero(q.count > square)[:0])),\n",
            ),
        ),
        (25,),
    ),
    Defect(
        "steps-taken-for-equal",
        "own",
        "Runs of different steps are masked along a diagonal, as if they had one.",
        (
            Edit(
                MEETINGS,
                "    aligned = pieces.step[q.piece] == pieces.step[k.piece]\n",
                "    aligned = pieces.step[q.piece] > 0\n",
            ),
        ),
    ),
    Defect(
        "full-if-the-first-key-is-visible",
        "own",
        "A tile counts as wholly visible as soon as its first row sees its first key.",
        (
            Edit(
                MEETINGS,
                "    full = pieces.position(k.piece, k.first + k.count - 1) <= first_row\n",
                "    full = pieces.position(k.piece, k.first) <= first_row\n",
            ),
        ),
        (23,),
    ),
    Defect(
        "striped-less-or-equal",
        "striped attention: `<` against `<=` between ranks",
        "A row sees the key of its own number on every rank, also where that lies after it.",
        (
            Edit(MEETINGS, _BLIND, "    blind = 0 * q.first\n"),
            Edit(MEETINGS, _BEFORE, _BEFORE + "    before = np.maximum(before, 0)\n"),
        ),
        (33,),
    ),
    Defect(
        "blind-rows-off-by-one",
        "own",
        "The first query row that sees a stretch of keys is trimmed with those that see none of it.",
        (Edit(MEETINGS, "count_until(q.piece, first_key - 1)", "count_until(q.piece, first_key)"),),
        (23, 33),
    ),
)
