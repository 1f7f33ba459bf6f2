"""Adapters for other people's packages, one a file, and stand-ins for kernels that need a GPU."""
