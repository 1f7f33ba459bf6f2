"""What GPUs have of their own: the merge, in which partial results are combined in one pass, and replays of calls."""
