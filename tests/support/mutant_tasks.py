"""What tests of `verification.mutants` run in a process of its own: changed modules stay changed.

What a task looks at is imported inside it: the modules at the top of this file are those from before the change.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from reference.pattern import Pattern
from tests.support.unbound_names import unbound
from verification.mutants.catalogue import DEFECTS
from verification.mutants.defect import CannotPlant


def faults_of_the_catalogue() -> list[str]:
    """What is wrong with the source of a defect: it cannot be made, does not run, or uses a name that is bound nowhere.

    Each edited module is run in a namespace of its own.
    """
    found = []
    for defect in DEFECTS:
        try:
            sources = defect.sources()
        except CannotPlant as error:
            found.append(str(error))
            continue
        for module, source in sources.items():
            missing = unbound_names(module, source)
            if missing:
                found.append(f"{defect.name}: {module} uses what is bound nowhere: {', '.join(missing)}")
    return found


def unbound_names(module: str, source: str) -> list[str]:
    live = importlib.import_module(module)
    assert live.__file__ is not None
    namespace: dict[str, Any] = {"__name__": module, "__package__": live.__package__, "__file__": live.__file__}
    code = compile(source, live.__file__, "exec")
    exec(code, namespace)
    return unbound(source, code, namespace)


def seen_by_users() -> dict[str, object]:
    """What the users of some modules know of these."""
    from ring import agreement
    from ring.comm import exchange
    from ring.compute import accumulator
    from ring.plan import blocks, plan, schedule

    return {
        "function": (accumulator.accumulator_dtype(torch.float16), exchange.accumulator_dtype(torch.float16)),
        "constant": (plan.EXCHANGES, agreement.EXCHANGES),
        "field": schedule.Sizes(1, 1, 1).receive_buffers,
        "cached": len(blocks.blocks_of(Pattern.dense(), 8, 1, 1)),
    }


def types_of_failures() -> list[int]:
    """Where the types are by which the worker of a rank, and code that was imported anew, know a failure."""
    from verification import failures
    from verification.run.processes import worker
    from verification.run.simulation import simulation

    return [id(module.MismatchedMessages) for module in (failures, worker, simulation)]
