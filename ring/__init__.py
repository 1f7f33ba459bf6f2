"""Ring (context-parallel) dilated attention: a sequence sharded over ranks, exact outputs and gradients.

README.md beside this file shows the modules in the order in which the data goes through them.
"""

from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.pattern import Branch, Pattern
from ring.attention import ring_attention
from ring.comm.transport import Transport
from ring.compute.kernel_counts import count_kernels
from ring.layout import Layout

picked_kernels = count_kernels  # an earlier name, which programs may use

__version__ = "0.2.0"  # the one place: pyproject.toml and the reports read it here

__all__ = [
    "Branch", "Layout", "Pattern", "Transport", "count_kernels", "documents_from_cu_seqlens",
    "documents_from_positions", "picked_kernels", "ring_attention",
]  # fmt: skip
