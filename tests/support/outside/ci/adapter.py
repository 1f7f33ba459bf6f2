"""The ring as the verification calls it, and the Cases that it supports."""

from their_ring import ring_attention
from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import Peer, claims


def nearest(case: Case) -> Case:
    """Return the nearest Case that the ring supports."""
    case = claims.dense(claims.all_ranks(claims.without_own_settings(case)), causal=True)
    case = claims.in_dtypes(claims.even_shards(case, "contiguous"), "float32", "float64")
    return claims.equal_heads(claims.default_scale(claims.without_lse(case)))


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup) -> Tensor:
    """Return the output of this rank's tokens."""
    return ring_attention(q, k, v, group)


adapter = Peer("their ring", "dense causal, contiguous, fp32, fp64", nearest, attend, (2, 3), heads_first=True)
