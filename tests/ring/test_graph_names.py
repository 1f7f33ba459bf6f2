"""What stands in place of objects: a pattern's text, a transport's methods, the number of a call's forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from reference.pattern import Pattern
from ring import Layout, compiled, ring_attention
from ring.comm.transport import SoloTransport
from tests.support.drawn_patterns import patterns

X = torch.ones(1, 2, 1, 1)


@given(patterns(3), patterns(3))
def test_a_text_stands_for_one_pattern(one: Pattern, other: Pattern) -> None:
    for pattern in (one, other):
        again = compiled.pattern_of(compiled.text_of(pattern))
        assert again == pattern and repr(again) == repr(pattern)
        for at, branch in enumerate(pattern.branches):
            window = 0 if branch.window is None else branch.window + 1
            changed = replace(branch, window=window), replace(branch, segment_length=(branch.segment_length or 0) + 1)
            for new in changed:
                unlike = replace(pattern, branches=(*pattern.branches[:at], new, *pattern.branches[at + 1 :]))
                assert compiled.text_of(unlike) != compiled.text_of(pattern)
    assert (compiled.text_of(one) == compiled.text_of(other)) == (one == other)


@pytest.mark.parametrize("number", (0, -1, 2**62))
def test_the_operator_is_no_way_to_call(number: int) -> None:
    ring_attention(X, X, X, Pattern.dense(), Layout.contiguous(2, 1), group=SoloTransport())
    with pytest.raises(ValueError, match=f"prepared must be the number of a forward .* got {number}"):
        torch.ops.ring.attention(X, X, X, number)


class Stranger:
    """What a transport of one rank has, in a class of its own."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        inner = SoloTransport()
        self.calls, self.post, self.prepare, self.empty = inner.calls, inner.post, inner.prepare, inner.empty
        self.all_equal, self.all_gather = inner.all_equal, inner.all_gather


def test_whatever_has_the_methods_of_a_transport_is_one() -> None:
    out = ring_attention(X, X, X, Pattern.dense(), Layout.contiguous(2, 1), group=Stranger())
    assert isinstance(out, torch.Tensor) and out.equal(X)
