"""How fast the ring is, compared with its kernels alone and with other methods: scripts/bench_ring.py, and in training
steps of whole models scripts/bench_model.py.

workload      sizes and pattern of what is measured; floating-point operations, bytes and memory by `reference`
contender     a method to be timed: its forward pass, and its forward and backward pass
fused         attention of one call by torch's own kernels, with lse, forward and backward
ours          ring_attention, and the same call without its messages
baselines     one GPU with the whole sequence, the kernels of a zigzag ring alone, all-to-all over heads
published     LongNet's method as published: gathered copies, scattered to full size, weighted by their lse
peer_rings    ring-flash-attn and torch's context_parallel
rank_group    how the ranks of a run share results, failures and times
timing        CUDA events or the processor's clock, warm-up, medians, graphs, peak memory
results       one run as JSON: device, versions, commit, command, rows
options       what the command line chose
longest_rank  one process of the search for the longest shards
longest       that search: shards are doubled until memory or time runs out
sections      which methods are timed for each workload, and what each row has

step_models     the models of the training steps, Llama-shaped and LongNet-shaped; their attention is given to forward
step_ways       the ways to attend in them: ours, other people's, one GPU with the whole sequence
step_check      whether a way computes the right losses and gradients, before it is timed
step_timing     steps of all ways by turns: CUDA events, wall clock, the host's part, peak memory
step_sections   which steps are made, and the rows that come of it
step_results    what a row has, and how it is printed
step_recompute  the Llama-shaped step under FSDP2, with and without recomputation
"""
