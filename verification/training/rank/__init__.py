"""One rank's part in a training run: what a user of `ring.nn` would write."""
