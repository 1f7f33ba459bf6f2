"""What is settled once for a setting, and kept."""
