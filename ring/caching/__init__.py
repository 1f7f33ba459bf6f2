"""Caches, and tensors that CUDA graphs keep alive."""
