"""The execution of an example: one rank's part, and the backends that run ranks."""
