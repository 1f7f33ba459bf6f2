"""Faults, struck into ranks on purpose: each must be named with its rank, and leave nothing behind.

`fault` says what faults there are, `struck` is what a rank does with one, `fault_experiment` draws them and judges
what the pool makes of them, `saved_fault` reads those that were mishandled, `fault_run` is a whole run.
"""
