"""Adapters of training frameworks to sharded sequences. Import the modules that you use: each needs its framework only.

wrappers         ddp, fsdp: torch's DistributedDataParallel and fully_shard over data x context
                 mesh: the ranks of a step, and the mesh over which gradients are averaged
                 recompute: activation checkpointing, with the attention saved or recomputed
transformers     the attention of Hugging Face's models
trainers         trainer: transformers' Trainer and its subclasses, with sharded sequences
                 lightning: strategies of Lightning's Trainer for DDP and FSDP2
deepspeed        DeepSpeed's ZeRO 1, 2 and 3
fairscale        FairScale's OSS and ShardedDDP
parallel_style   an attention module in a plan of torch's parallelize_module
"""
