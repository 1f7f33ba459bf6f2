"""Setups of trainers that have a loop of their own, to be run, copied and changed. Each imports its trainer."""
