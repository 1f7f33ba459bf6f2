"""Adapters of training frameworks to sharded sequences. Import the modules that you use.

mesh             the ranks of a step: data x context, and the mesh over which gradients are averaged
ddp, fsdp        torch's DistributedDataParallel and fully_shard over that mesh
deepspeed        DeepSpeed's ZeRO 1, 2 and 3
fairscale        FairScale's OSS and ShardedDDP
lightning        strategies of Lightning's Trainer with either of these
transformers     the attention of Hugging Face's models
trainer          transformers' Trainer and its subclasses, with sharded sequences
parallel_style   an attention module in a plan of torch's parallelize_module
recompute        activation checkpointing, with the attention saved or recomputed
"""
