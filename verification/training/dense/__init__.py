"""What a training run must give: one process, fp64, the whole batch. Nothing here uses code of the ring."""
