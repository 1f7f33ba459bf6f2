"""Limits of `ring_attention` and of the oracle: a Case of valid fields may be unsupported or too large."""

from __future__ import annotations

from verification.case import GPU_KERNELS, Case

_MAX_NUMBERS = 2**28  # of a tensor
_MAX_SCORES = 2**31  # of the oracle: the problem of real size has less than half as many

# Head dims, of keys and of values, on Hopper GPUs: independent of `ring.compute.kernels`.
_FA4 = (32, 64, 96, 128, 160, 192, 256)
FUSED = {
    "flash": "equal head dims, multiples of 8 up to 256, and no softcap",
    "cudnn": "head dims as of 'flash', or two of them up to 128, or 192 with values of 128, and no softcap",
    "fa4": f"equal head dims, one of {_FA4}, or 192 with values of 128 and equal heads",
}


def fused(case: Case, kernel: str) -> bool:
    """Return True if that fused kernel takes some calls of the Case on its device, a CPU or a Hopper GPU."""
    equal, capped = case.value_dim is None, case.softcap is not None
    if case.device == "cpu":
        return kernel == "flash" and equal and not capped
    if case.dtype not in ("bfloat16", "float16") or (capped and kernel != "fa4"):
        return False
    if case.dims == (192, 128):
        return kernel == "cudnn" or (kernel == "fa4" and case.heads == case.kv_heads)
    if kernel == "fa4":
        return equal and case.head_dim in _FA4
    most = 256 if equal else 128 if kernel == "cudnn" else 0
    return all(dim % 8 == 0 and dim <= most for dim in case.dims)


def check_supported(case: Case) -> None:
    """Raise ValueError for a Case that is too large, or that ring_attention refuses although each field is valid."""
    numbers = case.batch * max(case.tokens, case.key_tokens) * case.heads * max(case.dims)
    scores = case.batch * case.heads * case.tokens * case.key_tokens
    if numbers > _MAX_NUMBERS or scores > _MAX_SCORES:
        raise ValueError(
            f"batch, tokens, heads, head_dim are {case.batch}, {case.tokens}, {case.heads}, {case.head_dim}: {numbers} "
            f"numbers, {scores} scores; at most {_MAX_NUMBERS} and {_MAX_SCORES} can be checked"
        )
    if case.same_bits is not None and case != case.for_same_bits():
        raise ValueError(
            f"same_bits is {case.same_bits}, bucket is {case.bucket}, kernel is {case.kernel!r}, exchange is "
            f"{case.exchange!r}, heads are {case.heads}, {case.kv_heads}; a bucket must hold a chunk, the kernel have "
            "fixed bits, each key/value head lie on one rank"
        )
    if case.kernel not in FUSED:  # the others exist on every device
        return
    if case.kernel in GPU_KERNELS and case.device == "cpu":
        raise ValueError(
            f"kernel is {case.kernel!r} and device is 'cpu'; device must be 'cuda' then: that kernel is of GPUs"
        )
    if not fused(case, case.kernel):
        gpu = case.device == "cuda"
        limits = f"dtype 'float16' or 'bfloat16', {FUSED[case.kernel]}" if gpu else "no value_dim and no softcap"
        raise ValueError(
            f"kernel is {case.kernel!r} on device {case.device!r}, dtype is {case.dtype!r}, head dims are {case.dims}, "
            f"softcap is {case.softcap}; that kernel takes {limits}"
        )
