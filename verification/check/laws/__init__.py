"""The laws between Cases, each in a module with its strategy, its check and its precondition."""

from __future__ import annotations

from verification.check.laws.any_sharding import SAME_ANYWHERE
from verification.check.laws.cache_isolation import NO_CALL_TAKES_ANOTHER, NOTHING_LEFT_BEHIND
from verification.check.laws.constant_values import EQUAL_VALUES_COME_OUT
from verification.check.laws.equal_masks import SAME_MASK_SAME_RESULTS
from verification.check.laws.error_growth import ERROR_DOES_NOT_GROW
from verification.check.laws.interleaved_calls import CALLS_ARE_NOT_CONFUSED
from verification.check.laws.interrupted_call import BROKEN_OFF_CLOSES
from verification.check.laws.later_tokens import LATER_TOKENS_CHANGE_NOTHING
from verification.check.laws.law import How, Law
from verification.check.laws.long_shards import MEMORY_OF_LONGER_SHARDS
from verification.check.laws.minus_inf_scores import NO_SCORE_NO_WEIGHT
from verification.check.laws.non_finite import NON_FINITE_PROPAGATES
from verification.check.laws.permutation import BATCHES_AND_HEADS_PERMUTE
from verification.check.laws.refusals import WRONG_CALLS_REFUSED
from verification.check.laws.same_bits import SAME_BITS
from verification.check.laws.streams import STREAMS_DO_NOT_MATTER
from verification.check.laws.trees import TREES_EQUAL_THEIR_LEAVES

__all__ = ["LAWS", "How", "Law"]

LAWS = (
    SAME_ANYWHERE, SAME_BITS, LATER_TOKENS_CHANGE_NOTHING, SAME_MASK_SAME_RESULTS, TREES_EQUAL_THEIR_LEAVES,
    BATCHES_AND_HEADS_PERMUTE, EQUAL_VALUES_COME_OUT, NON_FINITE_PROPAGATES,
    NO_SCORE_NO_WEIGHT, WRONG_CALLS_REFUSED, CALLS_ARE_NOT_CONFUSED, BROKEN_OFF_CLOSES, NO_CALL_TAKES_ANOTHER,
    NOTHING_LEFT_BEHIND, MEMORY_OF_LONGER_SHARDS, ERROR_DOES_NOT_GROW, STREAMS_DO_NOT_MATTER,
)  # fmt: skip
