"""Checks of other implementations of attention with the same Cases: `python -m verification peers`.

Cases are drawn, run on real ranks, and compared with the same exact values and derived bounds as this project's
implementation. A failure is shrunk to a minimal Case that one command replays. Messages and buffers of a peer are not
checked. verification/README.md shows a complete adapter; `peer.Peer` describes its fields.
"""

from verification.failures import Refused
from verification.peers.peer import Peer

__all__ = ["Peer", "Refused"]
