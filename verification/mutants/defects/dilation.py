"""Defects of dilation and segments, of heads, and of layouts."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

BLOCKS = "ring/plan/blocks.py"
KERNELS = "ring/compute/kernels.py"
LAYOUT = "ring/layout.py"
MEETINGS = "ring/plan/range_pairs.py"
PATTERN = "reference/pattern.py"
PIECES = "ring/plan/ranges.py"
PLAN = "ring/plan/plan.py"
ROWS = "ring/plan/rows.py"

_TARGET = "    target = segment * w + offset - start\n"
_OFFSETS = "        for head, offset in enumerate(branch.offsets(heads)):\n"
_MEET = "    found = meet(pieces, queries, keys.stretches, causal)\n"

DILATION = (
    # --- dilation and segments
    Defect(
        "phase-from-local-rows",
        "DarcStar HybridFixed",
        "The dilated grid counts rows of the shard instead of positions of the sequence.",
        (Edit(PIECES, _TARGET, "    target = segment * w + offset - at\n"),),
        (26,),
    ),
    Defect(
        "phase-from-local-rows-when-listed",
        "DarcStar HybridFixed",
        "In a listed layout the dilated grid counts rows of the shard.",
        (Edit(PIECES, "within = position % block.segment_length", "within = rows % block.segment_length"),),
        (26,),
    ),
    Defect(
        "phase-not-restarted",
        "DarcStar HybridFixed",
        "The grid runs on from segment to segment instead of beginning anew in each.",
        (Edit(PIECES, _TARGET, "    target = offset - start\n"),),
        (26,),
    ),
    Defect(
        "phase-not-restarted-when-listed",
        "DarcStar HybridFixed",
        "In a listed layout the grid runs on from segment to segment.",
        (
            Edit(
                PIECES,
                "on_grid = (within >= block.offset) & ((within - block.offset) % block.dilation_rate == 0)",
                "on_grid = (within >= block.offset) & ((position - block.offset) % block.dilation_rate == 0)",
            ),
        ),
        (26,),
    ),
    Defect(
        "offset-by-key-value-head",
        "seen in public ring-attention code",
        "All query heads of a key/value head have the offset of the first of them.",
        (
            Edit(
                BLOCKS,
                _OFFSETS,
                "        share = heads // kv_heads\n"
                "        by_kv = branch.offsets(heads)\n"
                "        for head, offset in enumerate(by_kv[h // share * share] for h in range(heads)):\n",
            ),
        ),
        (27,),
    ),
    Defect(
        "padding-keys-attended",
        "torchscale",
        "Tiles of an odd number of keys are padded with a zero key that nothing hides: it adds e^0 to the denominator.",
        (
            Edit(
                KERNELS,
                "        total = weights.sum(-1, keepdim=True)\n",
                "        total = weights.sum(-1, keepdim=True) + k.shape[-2] % 2 * torch.exp(-top)\n",
            ),
        ),
        (28,),
    ),
    Defect(
        "segments-ignored",
        "torchscale causal sequence parallel",
        "Rows meet the keys of all segments.",
        (
            Edit(
                MEETINGS,
                "    group = pieces.block * span + pieces.segment\n",
                "    group = pieces.block * span\n",
            ),
        ),
        (29,),
    ),
    Defect(
        "segments-across-ranks-ignored",
        "torchscale causal sequence parallel",
        "Of segments after the first, only the part on the own rank is attended to.",
        (
            Edit(
                PLAN,
                _MEET,
                _MEET + "    own = pieces.rank[found.key.piece] == rank\n"
                "    found = found.take(np.flatnonzero(own | (pieces.segment[found.key.piece] == 0)))\n",
            ),
        ),
        (29,),
    ),
    Defect(
        "own-shard-left-out",
        "torchscale causal sequence parallel",
        "On several ranks only what others hold is attended to.",
        (
            Edit(
                PLAN,
                "    which = np.flatnonzero(own.rank == rank)\n",
                "    which = np.flatnonzero((own.rank == rank) & (pieces.rank.max() == 0))\n",
            ),
        ),
        (29,),
    ),
    Defect(
        "own-pieces-joined-across-gaps",
        "own",
        "Own pieces of a segment become one call though their rows do not follow each other.",
        (Edit(PIECES, "(row[1:] == row[:-1] + count[:-1] * step[:-1]) & (np.diff(step)", "(np.diff(step)"),),
    ),
    Defect(
        "own-pieces-joined-out-of-order",
        "own",
        "Own pieces of a segment become one call though the second lies before the end of the first.",
        (Edit(PIECES, " & (pieces.first[own][1:] > last[:-1])", ""),),
    ),
    Defect(
        "queries-joined-across-gaps",
        "own",
        "Query rows that see the same keys share a call, as one stretch even if they do not follow each other.",
        (
            Edit(
                PLAN,
                "                last = replace(last, query=rows)\n",
                "                last = replace(last, query=replace(rows, index=None))\n",
            ),
            Edit(PLAN, "if rows.index is None and rows.length", "if rows.length"),
        ),
    ),
    Defect(
        "queries-joined-beyond-the-bucket",
        "own",
        "Query rows that see the same keys share a call, however many they are.",
        (Edit(PLAN, " and rows.length * rows.folds <= most_rows:", ":"),),
    ),
    Defect(
        "fold-distance-of-the-first-pair",
        "torchscale",
        "Segments are folded as if all lay as far apart as the first two: rows are read and scattered to wrong places.",
        (Edit(ROWS, "    opens[2:] |= uneven\n", ""),),
        (30,),
    ),
    Defect(
        "fold-runs-into-the-next",
        "own",
        "A fold that is full takes one member more, which the next fold has as well.",
        (
            Edit(
                ROWS,
                "            stop = min(at + limit, end)\n",
                "            stop = min(at + limit + (limit > 1), end)\n",
            ),
        ),
    ),
    Defect(
        "listed-rows-taken-for-regular",
        "own",
        "Rows that are listed count as regular if their last one lies where a regular grid would have it.",
        (
            Edit(
                ROWS,
                "np.array_equal(rows.listed(), index)",
                "rows.listed()[-1, -1] == index[-1, -1]",
            ),
        ),
        (30,),
    ),
    Defect(
        "segment-begins-off-the-grid",
        "own",
        "Where a run enters a segment in its middle, the first row taken is off the grid.",
        (
            Edit(
                PIECES,
                "    element = low + (phase - low) % cycle\n",
                "    element = np.maximum(low, phase)\n",
            ),
        ),
        (26,),
    ),
    Defect(
        "phase-without-inverse",
        "own",
        "The grid meets a run at a phase that lacks the modular inverse of the run's step.",
        (
            Edit(
                PIECES,
                "known = {(v, m): pow(v, -1, m) if m > 1 else 0",
                "known = {(v, m): v % m if m > 1 else 0",
            ),
        ),
        (26,),
    ),
    Defect(
        "grid-that-is-never-met",
        "own",
        "A run whose step never meets the dilated grid is taken to meet it.",
        (
            Edit(
                PIECES,
                "count = np.where(target % common == 0, (high",
                "count = np.where(target % common >= 0, (high",
            ),
        ),
        (26,),
    ),
    Defect(
        "equal-branches-counted-once",
        "own",
        "A branch that stands in the pattern twice is counted once.",
        (Edit(BLOCKS, "    return tuple(blocks)\n", "    return tuple(dict.fromkeys(blocks))\n"),),
    ),
    # --- heads
    Defect(
        "heads-of-other-shares-unwritten",
        "fkodom/dilated-attention-pytorch",
        "Where key/value heads serve unequally many heads of a branch, only those that serve most are computed.",
        (
            Edit(
                BLOCKS,
                "    for size in sorted({len(r) for r in readers.values()}):\n",
                "    for size in sorted({len(r) for r in readers.values()})[-1:]:\n",
            ),
        ),
        (31,),
    ),
    Defect(
        "irregular-heads-as-a-range",
        "fkodom/dilated-attention-pytorch",
        "Heads at unequal distances are addressed as if the first two told them all: ranges overlap.",
        (Edit(BLOCKS, "None if regular else ids)", "None)"),),
        (31,),
    ),
    Defect(
        "head-range-starts-at-zero",
        "fkodom/dilated-attention-pytorch",
        "A branch for a range of heads serves the first heads instead.",
        (
            Edit(
                PATTERN,
                "return (None,) * served.start + offset + (None,) * (num_heads - served.stop)",
                "return offset + (None,) * (num_heads - len(offset))",
            ),
        ),
        (31,),
    ),
    Defect(
        "sequence-and-head-axes-swapped",
        "DarcStar TrueRing",
        "Gathered shards are packed head by head and read token by token: queries attend across heads.",
        (
            Edit(
                PLAN,
                "slots = [Rows(copy * tokens * kv_heads, kv_heads, tokens) for",
                "slots = [Rows(copy * tokens * kv_heads, 1, tokens) for",
            ),
            Edit(
                PLAN,
                "return tuple(Pack(Rows(0, 1, tokens), heads, place, heads) for place in slots)",
                "columns = Heads.of(tuple((head * tokens,) for head in range(kv_heads)))\n"
                "    return tuple(Pack(Rows(0, 1, tokens), heads, place, columns) for place in slots)",
            ),
        ),
        (32,),
    ),
    Defect(
        "query-heads-interleaved",
        "own",
        "Query head h reads key/value head h mod Hk instead of h // (Hq / Hk).",
        (
            Edit(BLOCKS, "served, heads // kv_heads))", "served, kv_heads))"),
            Edit(BLOCKS, "readers.setdefault(head // share, [])", "readers.setdefault(head % share, [])"),
        ),
        (27,),
    ),
    Defect(
        "columns-by-head-number",
        "own",
        "Packed slots are read at the number of the key/value head instead of its column in the block.",
        (
            Edit(
                BLOCKS,
                "column=Heads.of(tuple((kv.index(h),) for h in members)),",
                "column=Heads.of(tuple((h,) for h in members)),",
            ),
        ),
        (31,),
    ),
    # --- layouts
    Defect(
        "zigzag-halves-swapped",
        "seen in public ring-attention code",
        "A rank holds its two chunks of the zigzag in the other order.",
        (
            Edit(
                LAYOUT,
                "chunks = [c for r in range(p) for c in (r, 2 * p - 1 - r)]",
                "chunks = [c for r in range(p) for c in (2 * p - 1 - r, r)]",
            ),
        ),
        (34,),
    ),
    Defect(
        "zigzag-second-half-in-order",
        "own",
        "Rank r holds the chunks r and p + r, as if the second half ran forward.",
        (
            Edit(
                LAYOUT,
                "chunks = [c for r in range(p) for c in (r, 2 * p - 1 - r)]",
                "chunks = [c for r in range(p) for c in (r, p + r)]",
            ),
        ),
        (34,),
    ),
    Defect(
        "cut-run-without-its-step",
        "own",
        "A run that is cut between ranks begins too early on the second of them, as if its step were 1.",
        (Edit(LAYOUT, "Run(start + low * step, step, high - low)", "Run(start + low, step, high - low)"),),
    ),
    Defect(
        "unshard-without-the-order",
        "own",
        "Shards are put together in rank order, whatever positions they hold.",
        (
            Edit(
                LAYOUT,
                "        return torch.empty_like(gathered).index_copy_(dim, order, gathered)\n",
                "        return torch.empty_like(gathered).index_copy_(dim, order.sort().values, gathered)\n",
            ),
        ),
    ),
    Defect(
        "hilbert-without-the-turn",
        "own",
        "Quadrants of the Hilbert curve are not turned: it is a Z-order, and not the layout that was asked for.",
        (
            Edit(
                LAYOUT,
                "        x, y = np.where(up == 0, y, x), np.where(up == 0, x, y)\n",
                "",
            ),
        ),
    ),
)
