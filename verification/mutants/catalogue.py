"""All seeded defects: small named changes of `ring` and of `reference/pattern.py`, each of which the checks must find.

A defect is killed when the ordinary properties and laws find it. No check knows any of them. The catalogue follows a
list of defect classes that were seen in public ring-attention code, by number in `Defect.listed`, and adds others.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from verification.mutants.defect import Defect
from verification.mutants.defects.agreement import AGREEMENTS
from verification.mutants.defects.backward import BACKWARD
from verification.mutants.defects.calls import CALLS
from verification.mutants.defects.communication import COMMUNICATION
from verification.mutants.defects.diagonal import DIAGONAL
from verification.mutants.defects.dilation import DILATION
from verification.mutants.defects.keeping import KEEPING
from verification.mutants.defects.masks import MASKS
from verification.mutants.defects.merge import MERGE
from verification.mutants.defects.numerics import NUMERICS
from verification.mutants.defects.process_groups import PROCESS_GROUPS

DEFECTS: tuple[Defect, ...] = (
    *MERGE, *BACKWARD, *MASKS, *DILATION, *DIAGONAL, *COMMUNICATION, *PROCESS_GROUPS, *NUMERICS, *AGREEMENTS,
    *KEEPING, *CALLS,
)  # fmt: skip


@dataclass(frozen=True)
class NoPlace:
    """A defect class, or a part of one, for which this architecture has no place. listed: its number, 0 for none."""

    name: str
    provenance: str
    why: str
    listed: int = 0


NO_PLACE = (
    NoPlace(
        "autograd through logsumexp of all -inf gives NaN gradients",
        "seen in public ring-attention code",
        "Backward is written by hand from the global lse; nothing is differentiated by autograd, and the plan makes no "
        "tile for rows that see nothing.",
        3,
    ),
    NoPlace(
        "the merge of two sides that are both -inf gives NaN",
        "zhuzilin/ring-flash-attention; USP",
        "Tiles are trimmed to rows that see a key of theirs, so with finite scores the new side of a merge is finite. "
        "(The running side is -inf at first: that part of the class has its defects.)",
        2,
    ),
    NoPlace(
        "the masked_fill of -inf maxima or sums of 0 in kernel and merge left out",
        "own",
        "Equivalent, for the same reason: the guards are for scores of -inf, which finite inputs do not give.",
    ),
    NoPlace(
        "the last head group longer or shorter than it should be",
        "fkodom/dilated-attention-pytorch",
        "Head ranges are made by `Pattern.head_groups` on the caller's side, before a call; ranks are given them. "
        "(Ranges misread by the ranks have their defects.)",
        31,
    ),
    NoPlace(
        "sends and receives of one NCCL group issued one after the other",
        "NVIDIA/nccl#479",
        "The branch for GPUs is not run by the backends there are; the same mistake on gloo and in the walk has its "
        "defects.",
        39,
    ),
)

_BY_NAME = {defect.name: defect for defect in DEFECTS}


def by_name(name: str) -> Defect:
    """Raises ValueError, with the names that are close to it, for one that there is not."""
    if name not in _BY_NAME:
        close = get_close_matches(name, _BY_NAME)
        nearest = f", close to it: {', '.join(close)}" if close else ""
        raise ValueError(f"{name!r} is no defect; it must be one of the {len(_BY_NAME)} of --list{nearest}")
    return _BY_NAME[name]
