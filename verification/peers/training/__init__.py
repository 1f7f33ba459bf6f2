"""Other people's attention, and other people's wrappers, in the training steps of `verification.training`:

    python -m verification training --peer                                   all that there is an adapter for
    python -m verification training --peer ring-flash-attn fairscale/as-written     these only

An attention takes the place of `ring.nn.RingAttention` in a model of kind "sdpa"; any `verification.peers.Peer` will
do. A wrapper takes the place of DDP or FSDP. All else of the step is as it is, and so are its checks, but for the one
of this project's own messages.

step_peer               what is declared of such a peer, and an attention as one
wrapper_peers           DeepSpeed and FairScale; zero_engine, oss_model: their part on a rank
known_step_peers        finds a peer by its name
step_peer_experiment    an example: draw, train, compare
saved_step_peer         reads saved counter-examples, for a replay
"""
