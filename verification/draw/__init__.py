"""What is drawn: Cases."""
