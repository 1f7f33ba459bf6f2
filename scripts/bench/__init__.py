"""Speed of the ring, beside its kernels alone and beside other methods: `python scripts/bench --help`.

attention     subcommand: calls of attention, by `sections`; its options and columns
model         subcommand: training steps of whole models; its options and columns
patterns      subcommand: one model trained with dense and with LongNet's attention
suite         subcommands verification and simulation: how fast the verification checks examples
command       what the subcommands share: options, joining the ranks, records

workload      sizes and pattern of what is measured, costs by `reference`; a method to be timed
fused         attention of one call by torch's own kernels, with lse, forward and backward
ours          ring_attention, and the same call without its messages
baselines     one GPU with the whole sequence, the kernels of a zigzag ring alone, all-to-all over heads
published     LongNet's method as published: gathered copies, scattered to full size, weighted by their lse
peers         ring-flash-attn and torch's context_parallel
rank_group    how the ranks of a run share results, failures and times
timing        CUDA events or the processor's clock, warm-up, medians, graphs, peak memory
longest       the search for the longest shards: they are doubled until memory or time runs out
sections      which methods are timed for each workload, and what each row has
step_models   models shaped like Llama and LongNet; their attention is given to forward
step_ways     ways to attend in them: ours, other people's, one GPU with the whole sequence
step_run      a step checked against exact losses and gradients; steps of all ways timed by turns
"""
