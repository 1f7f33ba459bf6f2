"""Causes of counter-examples: usual mistakes of ring attention that reproduce the wrong numbers to rounding."""

from verification.causes.explain import Cause, agree, explain

__all__ = ["Cause", "agree", "explain"]
