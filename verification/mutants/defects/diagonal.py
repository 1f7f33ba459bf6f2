"""Defects of calls that take heads with shifted grids, and of gradients that are written where one tile reads."""

from __future__ import annotations

from verification.mutants.defect import Defect, Edit

FILE = "ring/plan/diagonal.py"
STORE = "ring/strided_view.py"

_GOES_ON = "goes_on = min(step) >= 0 and (len(run) == 1 or step == run[-2].step(run[-1]))"

DIAGONAL = (
    Defect(
        "shifted-heads-on-the-rows-of-the-first",
        "own",
        "In a call for heads with shifted grids, all read and write the rows of the first.",
        (Edit(STORE, "heads.step * head + rows.head_step * row", "heads.step * head"),),
    ),
    Defect(
        "shifted-heads-on-the-rows-of-the-first-when-listed",
        "own",
        "The same where rows are listed.",
        (
            Edit(
                STORE,
                "return (index + rows.head_step * heads if rows.head_step else index)",
                "return (index)",
            ),
        ),
    ),
    Defect(
        "shifted-by-unequal-steps",
        "own",
        "Heads go into one call whatever the distance to the next: all are taken to be as far apart as the first two.",
        (Edit(FILE, _GOES_ON, "goes_on = min(step) >= 0"),),
    ),
    Defect(
        "shifted-heads-that-share-keys",
        "own",
        "Heads of one call may read the same keys, whose gradients then overwrite each other.",
        (Edit(FILE, "own_keys = packed or", "own_keys = True or"),),
    ),
    Defect(
        "shifted-heads-that-share-gathered-keys",
        "own",
        "The same for gathered keys only: they are taken for packed, where each block has slots of its own.",
        (Edit("ring/plan/plan.py", "number > 0 and not route.whole)", "number > 0)"),),
    ),
    Defect(
        "shifted-heads-of-unequal-folds",
        "own",
        "Heads go into one call although their grids have other numbers of segments.",
        (
            Edit(
                FILE,
                "return rows.step, rows.length, rows.fold_step, rows.folds, index",
                "return rows.step, rows.length, rows.fold_step, index",
            ),
        ),
    ),
    Defect(
        "gradients-of-slots-overwritten",
        "own",
        "Gradients of landed keys that several tiles read are written by each in turn instead of summed.",
        (
            Edit(
                "ring/plan/plan.py",
                "    return read == sum(move.stop - move.start for move in receives)\n",
                "    return read >= sum(move.stop - move.start for move in receives)\n",
            ),
        ),
    ),
    Defect(
        "gradients-of-relayed-slots-written",
        "own",
        "In the ring, too, gradients of landed keys are written, not summed: slots only passed on keep what there was.",
        (Edit("ring/plan/plan.py", 'exchange == "direct" and _read_once(', "_read_once("),),
    ),
)
