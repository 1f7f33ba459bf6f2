"""Fixed problems, larger than drawn Cases."""
