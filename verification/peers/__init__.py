"""Other people's implementations of attention under the same Cases: `python -m verification peers`.

Cases are drawn, run on real ranks, and compared with the same exact values and derived bounds as this project's own
implementation; a failure is shrunk to a minimal Case that one line replays. The checks are those that concern any
implementation: types and shapes, rows and keys without a partner, NaN and infinity, values of output, lse and
gradients, inputs left unchanged, the same bits in a second run. Messages and buffers of a peer are not checked.

    python -m verification peers                            all that this package has an adapter for
    python -m verification peers ring-flash-attn yunchang   these only
    python -m verification peers my_attention:adapter       your own, from the working directory or installed

verification/README.md shows a complete adapter; `peer.Peer` describes its fields.

peer                what an adapter declares
claims              steps of which a claim is made
adapters/           one file for each package, and stand-ins for kernels that need a GPU
interpolation       what a merge by interpolation loses beyond the bounds of a weighted one
known_peers         finds a peer by its name
probe               finds out in a separate process whether a peer can be run
peer_rank           one rank's part in an example
peer_experiment     an example: draw, run, compare
saved               reads saved counter-examples of peers, for a replay
training/           peers as a part of a training step
"""

from verification.peers.peer import Peer, Refused

__all__ = ["Peer", "Refused"]
