"""Verdicts of the sweep over transformers' architectures, one of each kind."""

from __future__ import annotations

from unittest import mock

import pytest
from sweep_transformers import REFUSED, RIGHT, WRONG, Verdict, cause, joint, judge

from ring.integrations import transformers
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize(
    ("architecture", "kind", "verdict", "by"),
    [
        ("llama", "LlamaForCausalLM", RIGHT, ""),
        ("gemma2", "Gemma2Model", RIGHT, ""),
        ("qwen3_moe", "Qwen3MoeForTokenClassification", RIGHT, ""),
        ("roberta", "RobertaForMaskedLM", RIGHT, ""),
        ("bert", "BertModel", REFUSED, "`BertPooler`"),
        ("llama", "LlamaForSequenceClassification", REFUSED, "`LlamaForSequenceClassification`"),
        ("bloom", "BloomForCausalLM", REFUSED, "an attention of its own"),
        ("mamba", "MambaForCausalLM", REFUSED, "`MambaMixer`"),
        ("falcon_h1", "FalconH1ForCausalLM", REFUSED, "`FalconH1Mixer`"),
        ("t5", "T5ForConditionalGeneration", REFUSED, "encoder and decoder"),
    ],
)
def test_the_verdict(ranks: Ranks, architecture: str, kind: str, verdict: str, by: str) -> None:
    got = joint(ranks(2).run(judge, architecture, kind))
    assert got.kind == verdict, got
    assert verdict != REFUSED or cause(got.reason) == by, got


def _judge_unchecked(architecture: str, kind: str) -> Verdict:
    prepare = transformers.prepare
    with mock.patch.object(transformers, "prepare", lambda model, _: prepare(model, compare=False)):
        return judge(architecture, kind)


@pytest.mark.parametrize(("architecture", "kind"), [("mamba", "MambaForCausalLM"), ("bert", "BertModel")])
def test_without_the_comparison_they_are_wrong(ranks: Ranks, architecture: str, kind: str) -> None:
    assert joint(ranks(2).run(_judge_unchecked, architecture, kind)).kind == WRONG
