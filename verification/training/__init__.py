"""The road of an example once more, for a whole training step: modules, batches, losses, wrappers, an optimiser.

    training_case, material   a TrainingCase; the parameters, tokens and labels that follow from it
    drawing                   Hypothesis strategies
    dense/                    what must come out: one process in fp64, the whole batch, attention by the oracle
    rank/                     one rank's part: the model of ring.nn's modules, its wrapper, the steps
    step_observation          what a rank saw
    step_checks, step_properties, training_coverage
    training_run, saved_training  the run, and the replay of its counter-examples

Ranks, search, report and replay are those of the other road.
"""
