"""Property-based checks of whole training steps: modules, batches, losses, wrappers, an optimiser.

    training_case, inputs         a TrainingCase; the parameters, tokens and labels that follow from it
    strategies                    Hypothesis strategies
    dense/                        expected results: one process in fp64, the whole batch, attention by the oracle
    rank/                         one rank's part: the model of ring.nn's modules, its wrapper, the steps
    step_observation              results of a rank
    step_checks, training_coverage
    training_run                  the run

Ranks, search, report and replay are shared with the rest of `verification/`.
"""
