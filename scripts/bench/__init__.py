"""Benchmarks of the ring, its kernels alone and other methods: `python scripts/bench --help`.

attention     subcommand: calls of attention; options and columns
model         subcommand: training steps of whole models; options and columns
kernel_rates  subcommand rates: the fused kernels by length, and with sums in a fixed order
patterns      subcommand: one model, trained with dense and with LongNet's attention
command       shared code: options, joining the ranks, records

workload      sizes and patterns, with costs by `reference`; a method to be timed
fused         one attention call on torch's kernels, with lse, forward and backward
kernels       subcommand kernels: times for the choice of "auto"; a call of each of ring's kernels
ours          ring_attention, and the same call without its messages
baselines     one GPU with the whole sequence, the kernels of a zigzag ring alone, all-to-all over heads
published     LongNet's published method: gathered copies, scattered to full size, weighted by their lse
peers         ring-flash-attn and torch's context_parallel
rank_group    exchange of results, failures and times between ranks
timing        CUDA events or the CPU clock, warm-up, medians, graphs, peak memory
longest       search for the longest shards, doubled until memory or time runs out
sections      methods and row of each workload
step_models   models shaped like Llama and LongNet; attention is an argument of forward
step_ways     attention methods in them: ours, peers, one GPU with the whole sequence
step_run      a step compared with exact losses and gradients; interleaved timing of all methods
"""
