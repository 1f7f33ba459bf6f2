"""Defects of calls that take heads with shifted grids, and of gradients that are written where one tile reads."""

from __future__ import annotations

from ring import strided_view
from ring.plan import diagonal, plan, tiling
from verification.mutants.defect import Edit, defect

_GOES_ON = "goes_on = min(step) >= 0 and (len(run) == 1 or step == run[-2].step(run[-1]))"

DIAGONAL = (
    defect(
        "shifted-heads-on-the-rows-of-the-first",
        "In a call for heads with shifted grids, all read and write the rows of the first.",
        Edit(strided_view, "heads.step * head + rows.head_step * row", "heads.step * head"),
    ),
    defect(
        "shifted-heads-on-the-rows-of-the-first-when-listed",
        "The same where rows are listed.",
        Edit(strided_view, "return (index + rows.head_step * heads if rows.head_step else index)", "return (index)"),
    ),
    defect(
        "shifted-by-unequal-steps",
        "Heads go into one call whatever the distance to the next: all are taken to be as far apart as the first two.",
        Edit(diagonal, _GOES_ON, "goes_on = min(step) >= 0"),
    ),
    defect(
        "shifted-heads-that-share-keys",
        "Heads of one call may read the same keys, whose gradients then overwrite each other.",
        Edit(diagonal, "own_keys = packed or", "own_keys = True or"),
    ),
    defect(
        "shifted-heads-that-share-gathered-keys",
        "The same for gathered keys only: they are taken for packed, where each block has slots of its own.",
        Edit(tiling, "packed=number > 0 and not route.whole)", "packed=number > 0)"),
    ),
    defect(
        "shifted-heads-of-unequal-folds",
        "Heads go into one call although their grids have other numbers of segments.",
        Edit(
            diagonal,
            "return rows.step, rows.length, rows.fold_step, rows.folds, index",
            "return rows.step, rows.length, rows.fold_step, index",
        ),
    ),
    defect(
        "gradients-of-slots-overwritten",
        "Gradients of received keys that several tiles read are written by each in turn instead of summed.",
        Edit(
            plan,
            "    return read == sum(transfer.stop - transfer.start for transfer in receives)\n",
            "    return read >= sum(transfer.stop - transfer.start for transfer in receives)\n",
        ),
    ),
    defect(
        "gradients-of-relayed-slots-written",
        "In the ring, too, gradients of received keys are written, not summed: slots passed on keep what was there.",
        Edit(plan, "once=once and _read_once(", "once=_read_once("),
    ),
)
