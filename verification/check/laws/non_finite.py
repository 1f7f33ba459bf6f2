"""NaN and infinities reach every row that sees them, forward and backward, and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import validators
from reference.fast_oracle import multiplicity
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import Array, assemble
from verification.check.laws.law import How, Law, anything, flag, same_numbers
from verification.failures import WrongResult
from verification.run.rank import InputEdit
from verification.strategies.cases import cases


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = draw(cases(world))
    if case.values == "flat":  # a NaN in one component changes the strides, and with them the order of sums
        case = replace(case, values="normal")
    if draw(st.booleans()):  # let fused kernels take all calls: vector code may hide what matrix code passes on
        case = replace(case, kernel="auto", scale=None, lse="unused", value_dim=None, softcap=None)
    if case.scale == 0.0 and claims is not any_case:
        case = replace(case, scale=None)
    case = claimed(claims, case)
    name = draw(st.sampled_from(("v", "q", "k")))
    # An inf in q or k may make all scores -inf, which is a row that sees nothing: put inf only into v.
    infinite = name == "v" and draw(st.booleans())
    tokens = case.tokens if name == "q" else case.key_tokens
    return case, {"token": draw(st.integers(0, tokens - 1)), "tensor": name, "infinite": infinite}


def check_poisoned(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """A NaN in q, k or v, or an inf in v, reaches every output that sees it, and all gradients through these. It
    changes no other batch or head, and no rank hangs.
    """
    token, share = how["token"], case.heads // case.kv_heads
    before = ranks.observe(case)
    edit = InputEdit("poison", int(how["infinite"]), positions=(token,), name=how["tensor"])
    after = ranks.observe(case, edit)
    clean, out = assemble(case, before, "out"), assemble(case, after, "out")
    visible = multiplicity(case.pattern, case.heads, case.tokens, case.key_tokens)[:share] > 0
    if how["tensor"] == "q":  # reaches one row of query head 0, if that row sees anything
        sees = np.zeros(visible.shape[:2], bool)
        sees[0, token] = visible[0, token].any()
    else:
        sees = visible[:, :, token]  # (query heads of kv head 0, N)
    missed = sees.T & np.isfinite(out[0, :, :share, 0])
    if missed.any():
        row, head = np.argwhere(missed)[0]
        raise WrongResult(
            f"out is {out[0, row, head, 0]} at batch 0, token {row}, head {head}, dim 0, which sees "
            f"{'inf' if how['infinite'] else 'NaN'} in {how['tensor']} at token {token}"
        )
    same_numbers("out", clean[1:], out[1:], "of other batches, once batch 0 is not finite")
    same_numbers("out", clean[:, :, share:], out[:, :, share:], "of other heads, once head 0 is not finite")
    if case.device == "cpu" and case.backward:  # fused kernels on GPUs do not promise it
        for name in ("dq", "dk", "dv"):
            _check_gradient(name, assemble(case, before, name), assemble(case, after, name), case, how, visible, sees.T)
    return 0.0


def _check_gradient(
    name: str, clean: Array, grads: Array, case: Case, how: How, visible: NDArray[np.bool_], spoiled: NDArray[np.bool_]
) -> None:
    """Gradients of non-finite rows, and of all keys that these rows see, are not finite, since weights or their
    derivatives are not. visible: (query heads of kv head 0, N, keys); spoiled: (N, the same heads).

    The values' gradients are weights times dout: they depend on scores, not on values.
    """
    share = visible.shape[0] if name == "dq" else 1
    when = "once head 0 of batch 0 is not finite"
    same_numbers(name, clean[1:], grads[1:], f"of other batches, {when}")
    same_numbers(name, clean[:, :, share:], grads[:, :, share:], f"of other heads, {when}")
    through = case.lse in ("unused", "returned", "differentiated")  # on every rank, by the output
    if not through or (name, how["tensor"]) == ("dv", "v"):
        return
    reached = spoiled if name == "dq" else np.einsum("nh,hnk->k", spoiled, visible)[:, None]  # (N, query heads or 1)
    missed = reached[..., None] & np.isfinite(grads[0, :, :share])  # (N, heads, D)
    if missed.any():
        token, head, dim = (int(i) for i in np.argwhere(missed)[0])
        raise WrongResult(
            f"{name} is {grads[0, token, head, dim]} at batch 0, token {token}, head {head}, dim {dim}; it comes "
            f"through an output that is not finite by {how['tensor']} at token {how['token']}"
        )


def _precondition(case: Case, how: How) -> None:
    tokens = case.tokens if how["tensor"] == "q" else case.key_tokens
    validators.integer("token of how", how["token"], 0, tokens - 1)
    if how["infinite"] and how["tensor"] != "v":
        raise ValueError("infinite of how is True; it must be False for tensors other than 'v'")


def _scaled(claims: Claims, case: Case, how: How) -> None:
    if case.scale == 0.0:
        raise ValueError("scale is 0; it must be another number: products with a factor of 0 may be 0 by definition")


NON_FINITE_PROPAGATES = Law(
    "NaN and inf propagate", _draw, check_poisoned, _precondition, share=0.05,
    how={"token": anything, "infinite": flag,
         "tensor": lambda case, name, value: validators.choice(name, value, ("q", "k", "v"))},
    cases={
        "values other than 'flat', or not strided: a change of one component would change the strides":
            lambda case: case.values != "flat" or not case.strided
    },
    of_any="the claim has no scale but 0", of_others=_scaled,
)  # fmt: skip
