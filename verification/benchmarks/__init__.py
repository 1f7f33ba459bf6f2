"""How fast the ring is, beside what the kernels allow and beside what a user could pick instead: scripts/bench_ring.py.

settings    sizes, heads and patterns of what is measured; floating-point operations, bytes and memory by `reference`
ranks       what the ranks of a run tell each other: results, failures, the slowest time
timing      CUDA events or the processor's clock, warm-up, medians, graphs, peak memory
fused       attention of one call by torch's own kernels, with lse, forward and backward
contender   something to be timed, forward and forward + backward
ours        ring_attention, and the same call without its messages
baselines   one GPU with the whole sequence, a zigzag ring's kernels alone, all-to-all over heads
published   LongNet's method as published: gathered copies, scattered to full size, weighted by stacked lse
peers       ring-flash-attn and torch's context_parallel
reach       the longest sequence, by doubling until memory runs out, in processes of its own
records     one run as JSON: device, versions, commit, command, rows
sections    what is measured beside what
"""
