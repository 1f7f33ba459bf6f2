"""Each class of numerical defect exceeds the bounds: planted in the ranks, an ordinary property or law finds it.

The fused kernels given what they cannot take are left to `python -m verification mutants`: that takes longer to draw.
"""

from __future__ import annotations

import pytest

from verification.mutants.catalogue import of_topic
from verification.mutants.defect import Defect
from verification.mutants.trials import try_defect

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PRECISION = [defect for defect in of_topic("numerics") if not defect.name.startswith("fused-kernel")]


@pytest.mark.parametrize("defect", PRECISION, ids=lambda defect: defect.name)
def test_a_numerical_defect_is_found(defect: Defect) -> None:
    outcome = try_defect(defect.name, seed=1, limit=600)
    assert outcome.killed, f"{outcome.examples} examples held"
    print(f"{outcome.check}: after {outcome.examples} examples")
