"""`scripts/bench_model.py` with all-to-all over heads spoilt in every rank: torchrun starts this."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from verification.benchmarks import baselines  # noqa: E402
from verification.benchmarks.contender import Attend  # noqa: E402
from verification.benchmarks.workload import Workload  # noqa: E402

right = baselines.all_to_all_attend


def without_the_first_token(workload: Workload) -> Attend:
    """What the first token of each rank sees is left out."""
    attend = right(workload)

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        return out * (out.new_ones(out.shape[1]).cumsum(0) > 1).view(1, -1, 1, 1)

    return wrong


if __name__ == "__main__":
    baselines.all_to_all_attend = without_the_first_token
    runpy.run_path(str(ROOT / "scripts" / "bench_model.py"), run_name="__main__")
