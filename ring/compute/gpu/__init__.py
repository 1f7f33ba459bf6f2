"""The merge on GPUs: partial results are kept, and combined in one pass."""
