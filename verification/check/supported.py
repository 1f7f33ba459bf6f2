"""Limits of `ring_attention` and of the oracle: a Case of valid fields may be unsupported or too large."""

from __future__ import annotations

from verification.case import Case

_MAX_NUMBERS = 2**28  # of a tensor
_MAX_SCORES = 2**31  # of the oracle: the problem of real size has less than half as many


def fused_on_gpus(case: Case) -> bool:
    """Return True if fused kernels on GPUs take tensors of the Case's dtype and head dim."""
    return case.dtype in ("bfloat16", "float16") and case.head_dim % 8 == 0 and case.head_dim <= 128


def check_supported(case: Case) -> None:
    """Raise ValueError for a Case that is too large, or that ring_attention refuses although each field is valid."""
    numbers = case.batch * case.tokens * case.heads * case.head_dim
    scores = case.batch * case.heads * case.tokens**2
    if numbers > _MAX_NUMBERS or scores > _MAX_SCORES:
        raise ValueError(
            f"batch, tokens, heads, head_dim are {case.batch}, {case.tokens}, {case.heads}, {case.head_dim}: {numbers} "
            f"numbers, {scores} scores; at most {_MAX_NUMBERS} and {_MAX_SCORES} can be checked"
        )
    if case.kernel not in ("flash", "cudnn"):  # the others exist on every device
        return
    if case.kernel == "cudnn" and case.device == "cpu":
        raise ValueError("kernel is 'cudnn' and device is 'cpu'; device must be 'cuda' then: that kernel is of GPUs")
    if case.device == "cuda" and not fused_on_gpus(case):
        raise ValueError(
            f"kernel is {case.kernel!r} on device 'cuda', dtype is {case.dtype!r}, head_dim is {case.head_dim}; dtype "
            "must be 'float16' or 'bfloat16' then, head_dim a multiple of 8 up to 128"
        )
    if case.lse != "unused":
        raise ValueError(
            f"kernel is {case.kernel!r} and lse is {case.lse!r}; lse must be 'unused' then: that kernel has no "
            "gradient through lse"
        )
