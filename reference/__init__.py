"""Expected results, error bounds and costs of ring dilated attention. Nothing here uses code of the ring.

    pattern             the mask: branches of dilated attention, and how many of them see a pair of positions
    mask_converters     slices from MagiAttention's masks, FlashMask's and functions, and back
    documents           lengths of the documents that a sequence is packed from, converted from other forms
    oracle              the definition in fp64: output, log-sum-exp and gradients, by formula, on one screen
    fast_oracle         an independent, fast implementation with rounding bounds; every example is compared with it
    bounds, roundoff    the rounding bounds, and the unit roundoffs and counts that they follow from
    shards              positions of each rank
    remote_rows         rows that each rank needs from the others
    cost, closed_forms  bytes, buffers and FLOPs of an exchange among ranks: exact counts, formulas for regular cases
    call_limits         the most keys and rows of one kernel call
    svg, mask_picture   pictures as SVG text; that of a mask, which Jupyter shows for a pattern
    validators          validators of fields

`pattern`, `oracle`, `fast_oracle` and `bounds` are independent of ranks. README.md has more.
"""

from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.fast_oracle import Expectation, Inputs, evaluate
from reference.mask_converters import (
    flashmask_from_slices,
    magi_from_slices,
    slices_from_flashmask,
    slices_from_function,
    slices_from_magi,
    spans_from_token_types,
)
from reference.oracle import attention, gradients
from reference.pattern import Branch, Pattern

__all__ = [
    "Branch", "Expectation", "Inputs", "Pattern", "attention", "documents_from_cu_seqlens", "documents_from_positions",
    "evaluate", "flashmask_from_slices", "gradients", "magi_from_slices", "slices_from_flashmask",
    "slices_from_function", "slices_from_magi", "spans_from_token_types",
]  # fmt: skip
