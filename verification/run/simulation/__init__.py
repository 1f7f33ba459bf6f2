"""All ranks in one process, over a simulated transport."""
