"""What tests of `verification.mutants` run in a process of its own: planting cannot be undone."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from reference.pattern import Pattern
from ring import agreement
from ring.comm import exchange
from ring.compute import kernels
from ring.plan import blocks, schedule
from verification.mutants import DEFECTS, CannotPlant
from verification.mutants.plant import graft, plant


def plant_all() -> list[str]:
    """Names of defects that cannot be planted. Each replaces what the one before changed in the same module."""
    refused = []
    for defect in DEFECTS:
        try:
            plant(defect)
        except CannotPlant as error:
            refused.append(f"{defect.name}: {error}")
    return refused


def source(module: str) -> str:
    file = importlib.import_module(module).__file__
    assert file is not None
    return Path(file).read_text()


def edited(module: str, was: str, becomes: str) -> str:
    text = source(module)
    assert text.count(was) == 1, (module, was)
    return text.replace(was, becomes)


def refusal(module: str, text: str) -> str:
    """What `graft` says against a source; "" if it takes it."""
    try:
        graft(module, text)
    except CannotPlant as error:
        return str(error)
    return ""


def refusals(edits: list[tuple[str, str, str]]) -> list[str]:
    return [refusal(module, edited(module, was, becomes)) for module, was, becomes in edits]


def steps_kept() -> dict[str, object]:
    """What users of the code see once it was grafted."""
    before = len(blocks.blocks_of(Pattern.dense(), 8, 1, 1))
    graft("ring.precision", edited("ring.precision", "else torch.float32", "else torch.bfloat16"))
    graft("ring.plan.plan", edited("ring.plan.plan", '"direct", "gather")', '"direct", "gather", "other")'))
    graft(
        "ring.plan.schedule",
        edited("ring.plan.schedule", "    receive_buffers: int = 2\n", "    receive_buffers: int = 3\n"),
    )
    graft(
        "ring.plan.blocks", edited("ring.plan.blocks", "    return tuple(blocks)\n", "    return tuple(blocks * 2)\n")
    )
    return {
        "function": (kernels.accumulator_dtype(torch.float16), exchange.accumulator_dtype(torch.float16)),
        "constant": agreement.EXCHANGES,
        "field": schedule.Sizes(1, 1, 1).receive_buffers,
        "cached": (before, len(blocks.blocks_of(Pattern.dense(), 8, 1, 1))),
    }
