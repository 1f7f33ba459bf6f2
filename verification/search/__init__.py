"""The search for counter-examples, and their shrinking."""
