"""Other implementations of attention under the same Cases: `python -m verification peers`.

A peer is a function that somebody else wrote. It is drawn Cases, run on real ranks, and held against the same exact
values and derived bounds as this project's own; what fails is shrunk to a minimal Case that one line replays. What
concerns any implementation is checked: types and shapes, rows and keys without a partner, NaN and infinity, values of
output, lse and gradients, inputs left alone, the same bits again. What it sends and holds is its own business.

    python -m verification peers                            all that this package has an adapter for
    python -m verification peers ring-flash-attn yunchang   these only
    python -m verification peers my_attention:adapter       your own, from the working directory or installed

Your own takes one module. This one, `my_attention.py`, gathers all keys and values, by DTensor, which sums
their gradients on the way back, and has torch compute each rank's rows:

    import dataclasses
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Shard
    from reference import Pattern
    from verification.peers import Peer

    def claims(case):  # any drawn Case -> the nearest that is supported, or None
        p = case.world
        return dataclasses.replace(case, tokens=-(-case.tokens // p) * p, order="contiguous", cuts=None, group=None,
                                   pattern=Pattern.dense(True), kv_heads=case.heads, dtype="float32", scale=None,
                                   lse="unused", exchange="ring", bucket=None, kernel="math")

    def attend(q, k, v, case, group):  # this rank's (B, tokens, H, D); group: the torch.distributed process group
        mesh, start = DeviceMesh.from_group(group, "cpu"), group.rank() * q.shape[1]
        k, v = (DTensor.from_local(x, mesh, [Shard(1)]).full_tensor(grad_placements=[Partial()]) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = torch.ones(q.shape[2], case.tokens, dtype=torch.bool).tril(start)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)

    adapter = Peer("my attention", "dense causal, fp32, even contiguous shards", claims, attend)

With `torch.distributed.nn.functional.all_gather` instead it is reported within seconds: the backward of that
function, over gloo in torch 2.13, loses the order of the axes of a gradient that is not contiguous.

A Peer with `worlds=(1,)` runs in one process, and its group is None. `attend` may return (out, lse), with lse (B, H,
tokens); the claim then has lse "returned" too, or leaves lse as it is if gradients flow through it. `peer.Peer` has the
rest. A counter-example of a module in the working directory is replayed from there.
"""

from verification.peers.peer import Peer, Refused

__all__ = ["Peer", "Refused"]
