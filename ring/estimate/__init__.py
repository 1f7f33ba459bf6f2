"""Predictions for a call of `ring_attention`: `estimate`, `timeline`, and the command `python -m ring.estimate`."""

from ring.estimate.choice import choose, default_rates
from ring.estimate.estimates import Estimate, Estimates, estimate
from ring.estimate.rates import Kernels, Rates
from ring.estimate.timeline import timeline

__all__ = ["Estimate", "Estimates", "Kernels", "Rates", "choose", "default_rates", "estimate", "timeline"]
