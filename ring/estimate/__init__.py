"""Predictions for a call of `ring_attention`: `estimate`, and the command `python -m ring.estimate`."""

from ring.estimate.estimates import Estimate, Estimates, estimate
from ring.estimate.stages import Rates

__all__ = ["Estimate", "Estimates", "Rates", "estimate"]
