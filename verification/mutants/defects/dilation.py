"""Defects of dilation and segments, of heads, and of layouts."""

from __future__ import annotations

from reference import pattern
from ring import layout
from ring.compute import math_kernel
from ring.plan import blocks, plan, range_pairs, ranges, rows, tiling
from verification.mutants.defect import Edit, defect

_TARGET = "    target = segment * w + block.offset - run.start\n"
_OFFSETS = "        for head, offset in enumerate(branch.offsets(heads)):\n"
_MEET = "    found = pair_up(ranges, queries, keys.subranges, causal)\n"

DILATION = (
    # --- dilation and segments
    defect(
        "phase-from-local-rows",
        "The dilated grid counts rows of the shard instead of positions of the sequence.",
        Edit(ranges, _TARGET, "    target = segment * w + block.offset - run.row\n"),
        provenance="DarcStar HybridFixed",
        listed=(26,),
    ),
    defect(
        "phase-from-local-rows-when-listed",
        "In a listed layout the dilated grid counts rows of the shard.",
        Edit(ranges, "_selected(block, layout.listed)", "_selected(block, rows)"),
        provenance="DarcStar HybridFixed",
        listed=(26,),
    ),
    defect(
        "phase-not-restarted",
        "The grid runs on from segment to segment instead of beginning anew in each.",
        Edit(ranges, _TARGET, "    target = block.offset - run.start\n"),
        provenance="DarcStar HybridFixed",
        listed=(26,),
    ),
    defect(
        "phase-not-restarted-when-listed",
        "In a listed layout the grid runs on from segment to segment.",
        Edit(
            ranges,
            "(within >= block.offset) & ((within - block.offset) % block.dilation_rate == 0)",
            "(within >= block.offset) & ((position - block.offset) % block.dilation_rate == 0)",
        ),
        provenance="DarcStar HybridFixed",
        listed=(26,),
    ),
    defect(
        "offset-by-key-value-head",
        "All query heads of a key/value head have the offset of the first of them.",
        Edit(
            blocks,
            _OFFSETS,
            "        share = heads // kv_heads\n"
            "        by_kv = branch.offsets(heads)\n"
            "        for head, offset in enumerate(by_kv[h // share * share] for h in range(heads)):\n",
        ),
        provenance="seen in public ring-attention code",
        listed=(27,),
    ),
    defect(
        "padding-keys-attended",
        "Tiles of an odd number of keys are padded with a zero key that nothing hides: it adds e^0 to the denominator.",
        Edit(
            math_kernel,
            "        total = weights.sum(-1, keepdim=True)\n",
            "        total = weights.sum(-1, keepdim=True) + k.shape[-2] % 2 * torch.exp(-top)\n",
        ),
        provenance="torchscale",
        listed=(28,),
    ),
    defect(
        "segments-ignored",
        "Rows meet the keys of all segments.",
        Edit(range_pairs, "    group = ranges.block * span + ranges.segment\n", "    group = ranges.block * span\n"),
        provenance="torchscale causal sequence parallel",
        listed=(29,),
    ),
    defect(
        "segments-across-ranks-ignored",
        "Of segments after the first, only the part on the own rank is attended to.",
        Edit(
            tiling,
            _MEET,
            _MEET + "    own = ranges.rank[found.key.range] == rank\n"
            "    found = found.take(np.flatnonzero(own | (ranges.segment[found.key.range] == 0)))\n",
        ),
        provenance="torchscale causal sequence parallel",
        listed=(29,),
    ),
    defect(
        "own-shard-left-out",
        "On several ranks only what others hold is attended to.",
        Edit(
            tiling,
            "_own_keys(own, rank), limits.own",
            "_own_keys(own, rank if layout.world_size == 1 else -1), limits.own",
        ),
        provenance="torchscale causal sequence parallel",
        listed=(29,),
    ),
    defect(
        "own-pieces-joined-across-gaps",
        "Own ranges of a segment become one call though their rows do not follow each other.",
        Edit(ranges, "(row[1:] == row[:-1] + count[:-1] * step[:-1]) & (step", "(step"),
    ),
    defect(
        "own-pieces-joined-out-of-order",
        "Own ranges of a segment become one call though the second lies before the end of the first.",
        Edit(ranges, " & (chosen.first[1:] > last[:-1])", ""),
    ),
    defect(
        "queries-joined-across-gaps",
        "Query rows that see the same keys share a call, as one subrange even if they do not follow each other.",
        Edit(
            tiling,
            "                last = replace(last, query=rows)\n",
            "                last = replace(last, query=replace(rows, index=None))\n",
        ),
        Edit(tiling, "if rows.index is None and rows.length", "if rows.length"),
    ),
    defect(
        "queries-joined-beyond-the-bucket",
        "Query rows that see the same keys share a call, however many they are.",
        Edit(tiling, " and rows.length * rows.folds <= most_rows:", ":"),
    ),
    defect(
        "fold-distance-of-the-first-pair",
        "Segments are folded as if all lay as far apart as the first two: rows are read and scattered to wrong places.",
        Edit(rows, "    opens[2:] |= uneven\n", ""),
        provenance="torchscale",
        listed=(30,),
    ),
    defect(
        "fold-runs-into-the-next",
        "A fold that is full takes one member more, which the next fold has as well.",
        Edit(
            rows, "            stop = min(at + limit, end)\n", "            stop = min(at + limit + (limit > 1), end)\n"
        ),
    ),
    defect(
        "listed-rows-taken-for-regular",
        "Rows that are listed count as regular if their last one lies where a regular grid would have it.",
        Edit(rows, "np.array_equal(rows.listed(), index)", "rows.listed()[-1, -1] == index[-1, -1]"),
        listed=(30,),
    ),
    defect(
        "segment-begins-off-the-grid",
        "Where a run enters a segment in its middle, the first row taken is off the grid.",
        Edit(ranges, "    element = low + (phase - low) % cycle\n", "    element = np.maximum(low, phase)\n"),
        listed=(26,),
    ),
    defect(
        "phase-without-inverse",
        "The grid meets a run at a phase that lacks the modular inverse of the run's step.",
        Edit(ranges, "pow(value, -1, modulus) for", "value % modulus for"),
        listed=(26,),
    ),
    defect(
        "grid-that-is-never-met",
        "A run whose step never meets the dilated grid is taken to meet it.",
        Edit(ranges, "target % divisor == 0\n", "target % divisor >= 0\n"),
        listed=(26,),
    ),
    defect(
        "equal-branches-counted-once",
        "A branch that stands in the pattern twice is counted once.",
        Edit(blocks, "    return tuple(blocks)\n", "    return tuple(dict.fromkeys(blocks))\n"),
    ),
    # --- heads
    defect(
        "heads-of-other-shares-unwritten",
        "Where key/value heads serve unequally many heads of a branch, only those that serve most are computed.",
        Edit(
            blocks,
            "    for size in sorted({len(r) for r in readers.values()}):\n",
            "    for size in sorted({len(r) for r in readers.values()})[-1:]:\n",
        ),
        provenance="fkodom/dilated-attention-pytorch",
        listed=(31,),
    ),
    defect(
        "irregular-heads-as-a-range",
        "Heads at unequal distances are addressed as if the first two told them all: ranges overlap.",
        Edit(blocks, "None if regular else ids)", "None)"),
        provenance="fkodom/dilated-attention-pytorch",
        listed=(31,),
    ),
    defect(
        "head-range-starts-at-zero",
        "A branch for a range of heads serves the first heads instead.",
        Edit(
            pattern,
            "return (None,) * served.start + offset + (None,) * (num_heads - served.stop)",
            "return offset + (None,) * (num_heads - len(offset))",
        ),
        provenance="fkodom/dilated-attention-pytorch",
        listed=(31,),
    ),
    defect(
        "sequence-and-head-axes-swapped",
        "Gathered shards are packed head by head and read token by token: queries attend across heads.",
        Edit(
            plan,
            "slots = [Rows(start=copy * tokens * kv_heads, step=kv_heads,",
            "slots = [Rows(start=copy * tokens * kv_heads, step=1,",
        ),
        Edit(
            plan,
            "return tuple(SlotMap(Rows(0, 1, tokens), heads, place, heads) for place in slots)",
            "columns = Heads.column([head * tokens for head in range(kv_heads)])\n"
            "    return tuple(SlotMap(Rows(0, 1, tokens), heads, place, columns) for place in slots)",
        ),
        provenance="DarcStar TrueRing",
        listed=(32,),
    ),
    defect(
        "query-heads-interleaved",
        "Query head h reads key/value head h mod Hk instead of h // (Hq / Hk).",
        Edit(blocks, "share=heads // kv_heads))", "share=kv_heads))"),
        Edit(blocks, "readers.setdefault(head // share, [])", "readers.setdefault(head % share, [])"),
        listed=(27,),
    ),
    defect(
        "columns-by-head-number",
        "Packed slots are read at the number of the key/value head instead of its column in the block.",
        Edit(
            blocks,
            "column=Heads.column([kv.index(h) for h in members]),",
            "column=Heads.column(members),",
        ),
        listed=(31,),
    ),
    # --- layouts
    defect(
        "zigzag-halves-swapped",
        "A rank holds its two chunks of the zigzag in the other order.",
        Edit(
            layout,
            "chunks = [c for r in range(p) for c in (r, 2 * p - 1 - r)]",
            "chunks = [c for r in range(p) for c in (2 * p - 1 - r, r)]",
        ),
        provenance="seen in public ring-attention code",
        listed=(34,),
    ),
    defect(
        "zigzag-second-half-in-order",
        "Rank r holds the chunks r and p + r, as if the second half ran forward.",
        Edit(
            layout,
            "chunks = [c for r in range(p) for c in (r, 2 * p - 1 - r)]",
            "chunks = [c for r in range(p) for c in (r, p + r)]",
        ),
        listed=(34,),
    ),
    defect(
        "cut-run-without-its-step",
        "A run that is cut between ranks begins too early on the second of them, as if its step were 1.",
        Edit(layout, "Run(start + low * step, step, high - low)", "Run(start + low, step, high - low)"),
    ),
    defect(
        "unshard-without-the-order",
        "Shards are put together in rank order, whatever positions they hold.",
        Edit(
            layout,
            "        return torch.empty_like(gathered).index_copy_(dim, order, gathered)\n",
            "        return torch.empty_like(gathered).index_copy_(dim, order.sort().values, gathered)\n",
        ),
    ),
    defect(
        "hilbert-without-the-turn",
        "Quadrants of the Hilbert curve are not turned: it is a Z-order, and not the layout that was asked for.",
        Edit(layout, "        x, y = np.where(up == 0, y, x), np.where(up == 0, x, y)\n", ""),
    ),
)
