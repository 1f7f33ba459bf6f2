"""Ring attention: dense causal, contiguous shards of one length."""

from their_ring.attention import ring_attention

__all__ = ["ring_attention"]
