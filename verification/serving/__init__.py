"""Checks of serving with a cache of keys and values that is sharded over ranks: `python -m verification serving`.

Cases (serving_case, call, strategies), servers (server, known_servers), one rank's part (serving_rank), exact results
(expected), checks (serving_checks), causes (stores, causes), and the experiment (serving_experiment). Ranks, search,
report and replay are shared with the rest of `verification/`.
"""

from verification.serving.call import Call
from verification.serving.server import Server
from verification.serving.serving_case import ServingCase

__all__ = ["Call", "Server", "ServingCase"]
