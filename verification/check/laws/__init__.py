"""The laws between Cases, each in one place with what it draws, checks and takes for granted."""

from __future__ import annotations

from verification.check.laws.broken_off import BROKEN_OFF_CLOSES
from verification.check.laws.equal_values import EQUAL_VALUES_COME_OUT
from verification.check.laws.growth import ERROR_DOES_NOT_GROW
from verification.check.laws.isolation import NO_CALL_TAKES_ANOTHER, NOTHING_LEFT_BEHIND
from verification.check.laws.later_tokens import LATER_TOKENS_CHANGE_NOTHING
from verification.check.laws.law import How, Law
from verification.check.laws.memory import MEMORY_OF_LONGER_SHARDS
from verification.check.laws.mistakes import WRONG_CALLS_REFUSED
from verification.check.laws.no_weight import NO_SCORE_NO_WEIGHT
from verification.check.laws.non_finite import NON_FINITE_PROPAGATES
from verification.check.laws.order import BATCHES_AND_HEADS_PERMUTE
from verification.check.laws.orders import CALLS_ARE_NOT_CONFUSED
from verification.check.laws.ranks import SAME_ANYWHERE
from verification.check.laws.streams import STREAMS_DO_NOT_MATTER

__all__ = ["LAWS", "How", "Law"]

LAWS = (
    SAME_ANYWHERE, LATER_TOKENS_CHANGE_NOTHING, BATCHES_AND_HEADS_PERMUTE, EQUAL_VALUES_COME_OUT, NON_FINITE_PROPAGATES,
    NO_SCORE_NO_WEIGHT, WRONG_CALLS_REFUSED, CALLS_ARE_NOT_CONFUSED, BROKEN_OFF_CLOSES, NO_CALL_TAKES_ANOTHER,
    NOTHING_LEFT_BEHIND, MEMORY_OF_LONGER_SHARDS, ERROR_DOES_NOT_GROW, STREAMS_DO_NOT_MATTER,
)  # fmt: skip
