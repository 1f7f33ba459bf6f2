"""GPU code: the merge of partial results in one pass, the variable-length kernel, and replays of calls."""
