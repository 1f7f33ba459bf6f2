"""The laws between Cases, each in one place with what it draws, checks and takes for granted."""

from __future__ import annotations

from verification.check.laws.broken_off import BROKEN_OFF_CLOSES
from verification.check.laws.call_limits import CALLS_KEEP_TO_THE_BUCKET
from verification.check.laws.compiled_calls import COMPILED_CALLS_ARE_CALLS
from verification.check.laws.default_arguments import DEFAULTS_ARE_AS_DOCUMENTED
from verification.check.laws.definition import PATTERNS_ARE_AS_PUBLISHED
from verification.check.laws.equal_values import EQUAL_VALUES_COME_OUT
from verification.check.laws.growth import ERROR_DOES_NOT_GROW
from verification.check.laws.isolation import NO_CALL_TAKES_ANOTHER, NOTHING_LEFT_BEHIND
from verification.check.laws.later_tokens import LATER_TOKENS_CHANGE_NOTHING
from verification.check.laws.law import How, Law
from verification.check.laws.made_layouts import LAYOUTS_ARE_AS_DEFINED
from verification.check.laws.memory import MEMORY_OF_LONGER_SHARDS
from verification.check.laws.mistakes import WRONG_CALLS_REFUSED
from verification.check.laws.no_weight import NO_SCORE_NO_WEIGHT
from verification.check.laws.non_finite import NON_FINITE_PROPAGATES
from verification.check.laws.order import BATCHES_AND_HEADS_PERMUTE
from verification.check.laws.orders import CALLS_ARE_NOT_CONFUSED
from verification.check.laws.plans import PLANS_COMPUTE_THE_PATTERN
from verification.check.laws.ranks import SAME_ANYWHERE
from verification.check.laws.sizes import LONG_PLANS
from verification.check.laws.streams import STREAMS_DO_NOT_MATTER
from verification.check.laws.values import PATTERNS_AND_LAYOUTS_ARE_VALUES
from verification.check.laws.what_is_kept import WHAT_IS_KEPT_IS_BOUNDED

__all__ = ["LAWS", "How", "Law"]

LAWS = (
    SAME_ANYWHERE,
    LATER_TOKENS_CHANGE_NOTHING,
    BATCHES_AND_HEADS_PERMUTE,
    EQUAL_VALUES_COME_OUT,
    NON_FINITE_PROPAGATES,
    NO_SCORE_NO_WEIGHT,
    WRONG_CALLS_REFUSED,
    CALLS_ARE_NOT_CONFUSED,
    BROKEN_OFF_CLOSES,
    NO_CALL_TAKES_ANOTHER,
    NOTHING_LEFT_BEHIND,
    WHAT_IS_KEPT_IS_BOUNDED,
    MEMORY_OF_LONGER_SHARDS,
    ERROR_DOES_NOT_GROW,
    PATTERNS_ARE_AS_PUBLISHED,
    PATTERNS_AND_LAYOUTS_ARE_VALUES,
    LAYOUTS_ARE_AS_DEFINED,
    PLANS_COMPUTE_THE_PATTERN,
    LONG_PLANS,
    CALLS_KEEP_TO_THE_BUCKET,
    DEFAULTS_ARE_AS_DOCUMENTED,
    COMPILED_CALLS_ARE_CALLS,
    STREAMS_DO_NOT_MATTER,
)
