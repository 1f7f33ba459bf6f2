"""Limits on the memory of a call: O(n / p) memory, and kernel calls bounded by a bucket."""

from dataclasses import dataclass

from reference.call_limits import MIN_ROWS
from verification.case import Case

MIN_BLOCK = 8  # query rows whose scores may exist at a time, whatever their size


@dataclass(frozen=True)
class WorkspaceLimits:
    """Limits of one rank: vectors in a kernel call, and bytes of any tensor."""

    query_vectors: int
    key_vectors: int
    forward: int
    backward: int


def limits(case: Case, index: int, buffer_forward: int, buffer_backward: int) -> WorkspaceLimits:
    """Limits of the rank at `index` of the group. buffer_forward, buffer_backward: bytes of all communication buffers.

    With b the bucket, n_r the rank's tokens, m_r its keys, n all keys, w bytes of the accumulator's type:

    A kernel call takes at most b key tokens, so B Hk b key vectors, and max(b, 16) query rows, so B H max(b, 16)
    query vectors: folds and joined ranges of keys count in full. The largest tensors may be

        the rank's queries, their output or gradient, or a part of them          B n_r H D w
        the rank's keys or values, or their gradients                            B m_r Hk D w
        the keys or values of a call, copied or as gradients                     B min(b, n) Hk D w
        scores of a call: no larger than its queries, or of 8 rows               B 8 H min(b, n) w
        a communication buffer                                                   at most all of them together

    D is the larger one of the head dims of keys and of values.
    Softmax weights are as large as scores, masks no larger. No tensor
    of n_r n, or of n_r n_r, numbers fits in this once a shard is long.
    """
    b, n, own, own_keys = (
        case.tokens_per_call, case.key_tokens, case.shards().counts[index], case.key_shards().counts[index]
    )  # fmt: skip
    call = case.batch * min(b, n)  # key tokens
    most = case.accumulator_dtype.itemsize * max(
        case.batch * own * case.heads * max(case.dims),
        case.batch * own_keys * case.kv_heads * max(case.dims),
        call * case.kv_heads * max(case.dims),
        call * case.heads * MIN_BLOCK,
    )
    queries, keys = case.batch * case.heads * max(b, MIN_ROWS), case.batch * case.kv_heads * b
    return WorkspaceLimits(queries, keys, max(most, buffer_forward), max(most, buffer_backward))
