"""For your own pytest: drawn Cases, an assertion with derived bounds, and ranks that live as long as the session.

    from hypothesis import given
    from verification.testing import assert_attention, cases, claims

    @given(case=cases(world=1, claims=claims.plain_process))
    def test_my_kernel(case):
        q, k, v, dout, _ = case.tensors()
        out = my_kernel(q, k, v, case.pattern)
        assert_attention(out, q, k, v, case.pattern, scale=case.scale)

The fixture `attention_ranks` comes with the plugin of this package, and so does a suite for a whole ring:
`pytest --attention my_module:adapter` (`verification.pytest_plugin`).
"""

from verification.peers import Peer, claims
from verification.testing.assertion import assert_attention
from verification.testing.case_strategy import cases
from verification.testing.ranks import Ranks

__all__ = ["Peer", "Ranks", "assert_attention", "cases", "claims"]
