"""Faults, struck into ranks on purpose: each must be named with its rank, and leave nothing behind.

`struck` has the faults, and what a rank does with one; `fault_experiment` draws them and judges what the pool makes of
them; `fault_run` is a whole run, and reads those that were mishandled.
"""
