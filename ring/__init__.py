"""Ring (context-parallel) dilated attention: a sequence sharded over ranks, exact outputs and gradients.

README.md beside this file shows the modules in the order in which the data goes through them.
"""

from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.mask_converters import (
    flashmask_from_slices,
    magi_from_slices,
    slices_from_flashmask,
    slices_from_function,
    slices_from_magi,
    spans_from_token_types,
)
from reference.pattern import Branch, Pattern
from ring.attention import ring_attention
from ring.comm.transport import Transport
from ring.compute.kernel_counts import count_kernels
from ring.layout import Layout

picked_kernels = count_kernels  # an earlier name, which programs may use

__version__ = "0.2.0"  # the one place: pyproject.toml and the reports read it here

__all__ = [
    "Branch", "Layout", "Pattern", "Transport", "count_kernels", "documents_from_cu_seqlens",
    "documents_from_positions", "flashmask_from_slices", "magi_from_slices", "picked_kernels", "ring_attention",
    "slices_from_flashmask", "slices_from_function", "slices_from_magi", "spans_from_token_types",
]  # fmt: skip
