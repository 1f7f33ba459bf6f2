"""Property-based verification of ring attention on real ranks against the dense fp64 oracle."""
