"""Attention and wrappers of other packages in the training steps of `verification.training`:
`python -m verification training --peer`.

An attention, any `verification.peers.Peer`, replaces `ring.nn.RingAttention` in a model of kind "sdpa". A wrapper
replaces DDP or FSDP. The rest of the step and its checks are unchanged, except the check of this project's messages.
"""
