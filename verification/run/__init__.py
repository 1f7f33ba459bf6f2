"""What runs an example: one rank's part, and the places where ranks run."""
