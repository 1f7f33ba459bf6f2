"""Parameters, tokens and labels follow from the Case alone, and labels are left out where the Case says."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.training_cases import small_model, small_step
from verification.training.material import IGNORED, global_batch, initial_parameters


def test_no_parameter_is_special_and_float32_holds_those_of_lower_precisions() -> None:
    case = small_step(1, model=small_model(kind="llama", norm="layer", bias=True, positions="learned"))
    for name, x in initial_parameters(case).items():
        assert (x != 0).all() and (x != 1).all(), name
    for name, x in initial_parameters(small_step(1, dtype="bfloat16")).items():
        assert torch.equal(x, x.float().double()), name


def test_tokens_are_rebuilt_and_labels_are_the_next_tokens() -> None:
    case = small_step(2, data=2, batch=2, accumulation=3, steps=2)
    batch, later = (global_batch(case, step) for step in range(2))
    assert batch.tokens.shape == batch.labels.shape == (2, 3, 2, 8)
    assert torch.equal(batch.labels[..., :-1], batch.tokens[..., 1:])
    assert (batch.labels[..., -1] == IGNORED).all() and batch.labelled == 2 * 3 * 2 * 7
    assert torch.equal(global_batch(case, 0).tokens, batch.tokens) and not torch.equal(later.tokens, batch.tokens)


def test_labels_are_left_out_as_the_case_says() -> None:
    def labelled(labels: str, **changes: Any) -> torch.Tensor:
        """(data, accumulation, batch, n): what counts."""
        return global_batch(small_step(2, labels=labels, **changes), 0).labels != IGNORED

    assert 0.4 < labelled("some", tokens=24, batch=4).double().mean() < 0.9
    shards = labelled("shards", seed=1)
    assert shards[..., :4].all() and not shards[..., 4:].any()
    ranks = labelled("ranks", data=2, seed=1)
    assert ranks[0, ..., :-1].all() and not ranks[1].any()
    micro = labelled("ranks", accumulation=2, seed=1)
    assert micro[:, 0, ..., :-1].all() and not micro[:, 1].any()
    assert not labelled("none").any()
