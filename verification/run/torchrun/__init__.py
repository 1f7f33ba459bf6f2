"""Ranks on the processes that torchrun started."""
