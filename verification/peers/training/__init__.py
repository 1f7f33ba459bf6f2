"""Other people's attention, and other people's wrappers, in the training steps of `verification.training`,
`python -m verification training --peer`.

An attention takes the place of `ring.nn.RingAttention` in a model of kind "sdpa"; any `verification.peers.Peer` will
do. A wrapper takes the place of DDP or FSDP. All else of the step is as it is, and so are its checks, but for the one
of this project's own messages.
"""
