"""Moving keys, values and gradients between ranks: no attention."""
