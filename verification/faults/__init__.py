"""Faults injected into ranks: each must be reported with its rank, and leave nothing behind.

`inject` has the faults and strikes them in a rank. `fault_experiment` draws them and judges the pool's failures.
`fault_run` is a whole run.
"""
