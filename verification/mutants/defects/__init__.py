"""The seeded defects, by what they break."""
