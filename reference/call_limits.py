"""What one kernel call takes at most, whatever the exchange: the statement that `ring.plan.tiling` is checked against.

A bucket of b key/value tokens bounds what is received and what is computed on at a time. A call that is *folded* takes
several segments of one shape at once. The rank's own keys need not be received: several segments of them may go by
another number of tokens, `own`, which is at least b. A call that takes a single segment goes by the bucket in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference import validators

LEAST_ROWS = 16  # query rows that a call may take, however small the bucket


@dataclass(frozen=True)
class CallLimits:
    """bucket: key/value tokens; own: those of several segments of own keys. Raises ValueError for others than integers
    of at least 1 and, for own, of at least the bucket.
    """

    bucket: int
    own: int
    kv_heads: int

    def __post_init__(self) -> None:
        validators.integer("bucket", self.bucket, 1)
        validators.integer("own", self.own, self.bucket)
        validators.integer("kv_heads", self.kv_heads, 1)

    def keys(self, own: bool, folds: int) -> int:
        """Key/value tokens of all folds, of however many ranks and ranges they are. own: of the rank's own shard."""
        return self.own if own and folds > 1 else self.bucket

    def rows(self, own: bool, folds: int) -> int:
        """Query rows of all folds: as many as keys, so that what a call returns is bounded as well."""
        return max(self.keys(own, folds), LEAST_ROWS)

    def key_vectors(self, own: bool, folds: int) -> int:
        """Tokens times key/value heads: a call for many query heads whose rows differ takes as much as one for all
        key/value heads of the same rows.
        """
        return self.keys(own, folds) * self.kv_heads
