"""Adapters for other packages, one per file, and stand-ins for kernels that need a GPU."""
