"""What ring dilated attention must compute, and what it may cost: everything here is written without any ring code.

`pattern` says which pairs of positions see each other; `oracle` computes attention and its gradients over such patterns
densely in fp64. Both know nothing of ranks. `cost` counts what an exchange among ranks must move and hold, from the
positions that each rank has; `closed_forms` says the same of regular cases in one line.
"""

from reference.oracle import attention, gradients
from reference.pattern import Branch, Pattern

__all__ = ["Branch", "Pattern", "attention", "gradients"]
