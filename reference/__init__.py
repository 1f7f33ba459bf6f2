"""What ring dilated attention must compute, within what error, and at what cost. Nothing here uses code of the ring.

    pattern             who sees whom: branches of dilated attention, and how many of them see a pair of positions
    documents           a sequence packed from several: their lengths, from what trainers have
    oracle              the definition in fp64: output, log-sum-exp and gradients, by formula, on one screen
    exact               its fast twin, by which every example is judged; it gives the rounding bounds, too
    bounds, arithmetic  how far an implementation may be from the exact results, and what that follows from
    shards              which rank holds which positions
    cost, closed_forms  bytes, buffers and FLOPs of an exchange among ranks: exact counts, formulas for regular cases
    limits              what one kernel call takes at most
    fields              validators of fields

`pattern`, `oracle`, `exact` and `bounds` know nothing of ranks. README.md has more.
"""

from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.fast_oracle import Expectation, Inputs, evaluate
from reference.oracle import attention, gradients
from reference.pattern import Branch, Pattern

__all__ = [
    "Branch", "Expectation", "Inputs", "Pattern", "attention", "documents_from_cu_seqlens", "documents_from_positions",
    "evaluate", "gradients",
]  # fmt: skip
