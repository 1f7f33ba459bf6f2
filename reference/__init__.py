"""What ring dilated attention must compute: the definition, and nothing about how to distribute it.

`pattern` says which pairs of positions see each other, `oracle` computes attention and its gradients over
such patterns densely in fp64. They know nothing of ranks: implementations are judged against this package.
"""

from reference.oracle import attention, gradients
from reference.pattern import Branch, Pattern

__all__ = ["Branch", "Pattern", "attention", "gradients"]
