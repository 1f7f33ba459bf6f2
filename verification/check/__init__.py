"""What every example must satisfy, and the laws between Cases."""
