"""The kernels, a file and a row each. FUSED come in the order in which GPUs that were not measured prefer them."""

from __future__ import annotations

from ring.compute.kernels.cudnn import CUDNN
from ring.compute.kernels.fa4 import FA4
from ring.compute.kernels.flash import FLASH
from ring.compute.kernels.flash_cpu import FLASH_CPU
from ring.compute.kernels.kernel import Kernel
from ring.compute.kernels.math import MATH

FUSED = (FLASH_CPU, CUDNN, FLASH, FA4)
KERNELS = (MATH, *FUSED)
MEASURED = tuple(kernel for kernel in FUSED if kernel.measured)
NAMES = ("auto", *dict.fromkeys(kernel.name for kernel in KERNELS))


def candidates(name: str) -> tuple[Kernel, ...]:
    """Return the fused kernels that a call may use, by its argument: one of NAMES."""
    return tuple(kernel for kernel in FUSED if name in ("auto", kernel.name))
