"""Hypothesis strategies that draw Cases."""
