"""Torch's wrappers of a model over data x context, and what keeps its ranks together.

mesh, ddp, fsdp, recompute                 the public modules
missing_gradients, unit_order, same_ranks  ranks that differ: filled in, or the same error on each
modules                                    modules of a model by class, and their tensors
former_name                                alike, which is now same_tokens
"""
