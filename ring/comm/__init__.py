"""Moves keys, values and gradients between ranks. It knows nothing of attention."""
