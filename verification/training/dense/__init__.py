"""Expected results of a training run: one process, fp64, the whole batch. Nothing here uses code of `ring/`."""
