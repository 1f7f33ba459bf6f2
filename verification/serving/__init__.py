"""Checks of serving with a cache of keys and values that is sharded over ranks: `python -m verification serving`.

    serving_case, call      a ServingCase; what a server is told of one call
    server, known_servers   the declaration of a server; how it is found by its name
    serving_rank            one rank's part: the calls in order
    expected                exact results of every call, with bounds
    serving_checks          properties
    stores, causes          usual mistakes, recomputed
    strategies              Hypothesis strategies, and their coverage
    serving_experiment      the experiment

Ranks, search, report and replay are shared with the rest of `verification/`.
"""

from verification.serving.call import Call
from verification.serving.server import Server
from verification.serving.serving_case import ServingCase

__all__ = ["Call", "Server", "ServingCase"]
