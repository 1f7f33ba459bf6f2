"""Figures, fits, records and simulated ranks that the notebooks share."""
