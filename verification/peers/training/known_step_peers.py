"""Finds a peer of training steps: a wrapper, or an attention named as in `verification.peers.known_peers`."""

from __future__ import annotations

from functools import lru_cache

from verification.peers import known_peers
from verification.peers.training.step_peer import StepPeer, in_step
from verification.peers.training.wrapper_peers import WRAPPER_PEERS

# The part of a name before the first "/" selects all peers that begin with it.
KNOWN_STEP_PEERS = {name: in_step(peer) for name, peer in known_peers.KNOWN.items()}
KNOWN_STEP_PEERS |= {peer.name: peer for peer in WRAPPER_PEERS}


@lru_cache(maxsize=64)
def load_step_peer(name: str) -> StepPeer:
    """Return the known StepPeer of that name, or one of `package.module:attribute`. Raises Refused."""
    return KNOWN_STEP_PEERS[name] if name in KNOWN_STEP_PEERS else in_step(known_peers.load(name))


def ready_step_peer(name: str) -> StepPeer:
    """Return the StepPeer, with its imports done. Raises Refused."""
    peer = load_step_peer(name)
    known_peers.prepare(peer, name)
    return peer
