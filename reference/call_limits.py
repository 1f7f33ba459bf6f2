"""Limits of one kernel call, the same for every exchange. `ring.plan.tiling` is checked against them.

A bucket of b key/value tokens bounds the keys that are received, and computed on, at a time. A *folded* call takes
several segments of one shape at once. The rank's own keys are not received, so a folded call on them has a limit of its
own: `own` tokens, at least b. A call on a single segment is always limited by the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference import validators

MIN_ROWS = 16  # query rows that a call may take, however small the bucket


@dataclass(frozen=True)
class CallLimits:
    """Limits of one kernel call, in key/value tokens.

    Args:
        bucket: tokens of a call on received keys, or on a single segment; >= 1.
        own: tokens of a folded call on the rank's own keys; at least the bucket.
        kv_heads: number of key/value heads, >= 1.

    Raises:
        ValueError: a field has any other value.
    """

    bucket: int
    own: int
    kv_heads: int

    def __post_init__(self) -> None:
        validators.integer("bucket", self.bucket, 1)
        validators.integer("own", self.own, self.bucket)
        validators.integer("kv_heads", self.kv_heads, 1)

    def keys(self, own: bool, folds: int) -> int:
        """Return the most key/value tokens of all folds together.

        Args:
            own: True for keys of the rank's own shard.
            folds: number of segments in the call.
        """
        return self.own if own and folds > 1 else self.bucket

    def rows(self, own: bool, folds: int) -> int:
        """Return the most query rows of all folds together: as many as keys, which bounds the output of a call as well.

        Args:
            own: True for keys of the rank's own shard.
            folds: number of segments in the call.
        """
        return max(self.keys(own, folds), MIN_ROWS)

    def key_vectors(self, own: bool, folds: int) -> int:
        """Return the most tokens times key/value heads: the same for a call on query heads with different rows as for
        one on all key/value heads of the same rows.

        Args:
            own: True for keys of the rank's own shard.
            folds: number of segments in the call.
        """
        return self.keys(own, folds) * self.kv_heads
