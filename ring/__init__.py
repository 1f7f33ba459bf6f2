"""Ring (context-parallel) dilated attention: a sequence sharded over ranks, exact outputs and gradients.

The road that the data takes, one module a stop:

    layout, blocks -> pieces -> meetings -> schedule -> rows -> plan    integers: who sees whom, what moves when
    transport -> exchange -> store -> kernels -> accumulator            tensors: messages, tiles, partial results
    budget, agreement, attention                                        the public function, and what it refuses
"""

from ring.attention import ring_attention
from ring.comm.transport import Transport
from ring.layout import Layout

__version__ = "0.2.0"  # the one place: pyproject.toml and the reports read it here

__all__ = ["Layout", "Transport", "ring_attention"]
