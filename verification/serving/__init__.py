"""Checks of serving with a cache of keys and values that is sharded over ranks: `python -m verification serving`.

Cases (serving_case, strategies), servers (server), one rank's part (serving_rank), exact results (expected), checks
(serving_checks), causes (stores, causes), and the experiment (serving_experiment). The rest is `verification/`'s.
"""

from verification.serving.server import Server
from verification.serving.serving_case import Call, ServingCase

__all__ = ["Call", "Server", "ServingCase"]
