"""The conformance table: one row an implementation, one column a feature, each cell a search of its own."""
