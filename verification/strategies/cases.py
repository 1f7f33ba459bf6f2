"""Hypothesis strategies that draw Cases, from the small end up.

Two rules shape this file. *Shrinking*: the first entry of every `sampled_from` is the simplest one (dense, contiguous,
ring, float32, no bucket), and larger integers stand for larger things, so Hypothesis' ordinary shrinking ends at the
Case that a person would have written. *Cost*: a draw costs about 20 us, and an example on two ranks takes 5 ms, so a
Case is made of about twenty flat draws; permutations, ranges and per-head offsets are decoded from one integer each.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from reference.head_groups import ALL_TO_ALL, AUTO, BY_HOST, KEY_EXCHANGES
from reference.pattern import Branch, Pattern
from verification.case import CPU_KERNELS, EXCHANGES, ORDERS_BY_CHUNK, Case, Keys
from verification.case_line import read_case_line
from verification.strategies.corner_cases import MAX_TOKENS, rare, shifted
from verification.strategies.decoding import digits, head_range, permutation
from verification.strategies.documents import MAX_FUSED, fused_documents, packed, windowed
from verification.strategies.slices import clipped, sliced

Draw = st.DrawFn

MIN_FUSED = 16  # keys of a call; the math kernel takes calls with fewer

# Small sequences find most defects and cost least; blocks of rows and full vectors of keys need longer ones.
_ceilings = st.sampled_from((8, 16, 32, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS))
_tokens = {ceiling: st.integers(1, ceiling) for ceiling in (8, 16, 32, MAX_TOKENS)}
_least_tokens = st.integers(1, 8)
# (query heads, key/value heads): equal, one for all (MQA), groups (GQA), and counts that are no power of two.
HEADS = ((1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (3, 1), (4, 4), (4, 1), (6, 2), (6, 3), (5, 5), (8, 2), (6, 1), (9, 3))
_heads = st.sampled_from(HEADS)
# Dimensions of 32 and 64 are rare: they cost most and find little that 16 does not.
_head_dims = st.sampled_from((1, 2, 4, 8, 3, 5, 16, 7, 12, 1, 2, 4, 8, 16, 32, 64))
_value_dims = st.sampled_from((None,) * 12 + (1, 2, 8, 4, 3, 16))
_dtypes = st.sampled_from(("float32", "float64", "bfloat16", "float16"))
_orders = st.sampled_from(
    ("contiguous", "zigzag", "striped", "hilbert", "spliced", "paired", "shuffled", "permuted", "swapped", "stepped")
)
_exchanges = st.sampled_from(EXCHANGES)
_orders_by_chunk = st.sampled_from(ORDERS_BY_CHUNK)
_chunk_lengths = st.sampled_from((16, 16, 32))
_tokens_of_chunks = st.integers(1, 160)
_windows_of_chunks = st.integers(8, 72)
_by_host = st.sampled_from(BY_HOST)
_by_host_or_chosen = st.sampled_from((*BY_HOST, AUTO))
MAX_CHOOSING = 4  # ranks; choosing takes 0.1 s for so many, and seconds for 64
_kernels = st.sampled_from(CPU_KERNELS)
_lse = st.sampled_from(("unused", "returned", "differentiated", "alone", "apart"))
# Every Case has a second run, so the special ones come as often as the plain one. The most effective ones come twice;
# those with several variants (autocast, lse, documents, dtype) come more often.
_again = st.sampled_from((
    *("alike", "alike", "apart", "dtype", "graph", "unchecked", "group", "between", "q", "k", "v", "qk", "qv", "kv"),
    *("no_grad", "backward", "pipelined", "shared", "meta", "autocast", "backward", "pipelined", "shared", "meta"),
    *("graph", "graph", "graph", "written", "written", "written"),
))  # fmt: skip
# 0 and negative scales are valid: a falsy scale is not a missing one.
_scales = st.sampled_from((None, None, None, 1.0, 0.25, 2.0, 0.0, -0.5, -1.0))
# Far above most scores, below most, and the ones that models have.
_softcaps = st.sampled_from((None,) * 10 + (50.0, 1.0, 0.25, 30.0))
_sinks = st.sampled_from((None,) * 14 + ("normal", "normal", "large", "some"))
_score_scales = st.sampled_from((1.0, 1.0, 0.1, 4.0, 32.0, 32.0))
_values = st.sampled_from(("normal", "normal", "normal", "ties", "onehot", "constant", "flat", "tiny", "huge"))
_fused_tokens = st.integers(1, MAX_FUSED)  # few tokens too, so that a failure shrinks
_fused_segments = st.sampled_from((None, 16, 32, 48, 64))
_fused_windows = st.sampled_from((None, None, None, 15, 16, 20, 31, 40))
_fused_orders = st.sampled_from(("contiguous", "zigzag", "striped", "paired"))
_fused_scales = st.sampled_from((None, None, 1.0, 0.25, 2.0, 0.0))
_batches = st.sampled_from((1, 1, 2, 3))
_usual_tokens = st.one_of(st.just(0), st.integers(129, 520))
_usual_heads = st.sampled_from(((2, 2, 1), (2, 1, 8), (4, 2, 4), (16, 4, 1), (12, 12, 1), (32, 8, 1)))  # and batch
_usual_head_dims = st.sampled_from((64, 80, 96, 128))
_flags = st.booleans()
_quarters = st.integers(0, 3)
_eighths = st.integers(0, 7)
_sixteenths = st.integers(0, 15)
_of_32 = st.integers(0, 31)
_seeds = st.integers(0, 255)
_kinds = st.sampled_from(
    ("dense", "branch", "longnet", "mixture", "groups", "dense", "branch", "longnet", "mixture", "twins")
)
_rules = st.sampled_from(("zero", "constant", "paper", "torchscale", "per head", "per head"))
_named_rules = st.sampled_from(("paper", "torchscale", "fkodom"))
_dilations = st.sampled_from((1, 2, 3, 4, 1, 2, 3, 5, 6, 8, 12))
_branch_counts = st.sampled_from((2, 2, 3, 4))


def _segment(draw: Draw, tokens: int) -> int | None:
    """Draw a segment length: None (the whole sequence), then short ones, up to a bit longer than the sequence."""
    return draw(st.integers(0, tokens + 4)) or None


def _offset(draw: Draw, dilation: int, heads: int) -> int | tuple[int, ...]:
    """Draw the offset of a branch with that many query heads: one for all, or one for each."""
    if dilation == 1:
        return 0
    rule = draw(_rules)
    if rule == "zero":
        return 0
    if rule == "constant":
        return draw(st.integers(0, dilation - 1))
    if rule == "paper":
        return tuple(head % dilation for head in range(heads))
    if rule == "torchscale":
        return tuple(head // math.ceil(heads / dilation) for head in range(heads))
    return digits(draw(st.integers(0, dilation**heads - 1)), dilation, heads)


def _any_heads(draw: Draw, dilation: int, segment: int | None, heads: int) -> Branch:
    """Draw a branch for all heads or a range of them."""
    served = head_range(draw(st.integers(0, heads * (heads + 1) // 2)), heads)
    return Branch(segment, dilation, _offset(draw, dilation, heads if served is None else len(served)), served)


def _twins(draw: Draw, dilation: int, segment: int | None, heads: int) -> tuple[Branch, ...]:
    """Draw a branch for each query head, all with the same number of rows in a segment: branches of heads that share a
    key/value head read the same keys, or the keys between."""
    divisible = segment is not None and segment % dilation == 0
    branches = []
    for head in range(heads):
        if divisible and draw(_quarters) == 3:
            branches.append(Branch(segment // dilation if segment else None, 1, 0, range(head, head + 1)))
        else:
            branches.append(Branch(segment, dilation, draw(_quarters) % dilation, range(head, head + 1)))
    return tuple(branches)


def pattern_of(draw: Draw, tokens: int, heads: int) -> Pattern:
    """Draw a pattern. All kinds begin with the same draws, so that shrinking can step to a simpler kind."""
    kind = draw(_kinds)
    causal = draw(_flags)
    if kind == "dense":
        return Pattern.dense(causal)
    dilation, segment = draw(_dilations), _segment(draw, tokens)
    if kind == "branch" or (kind == "groups" and heads == 1):
        return Pattern((Branch(segment, dilation, _offset(draw, dilation, heads)),), causal)
    if kind == "mixture":  # of anything: overlapping, equal or missing heads, the same branch twice
        branches = [_any_heads(draw, dilation, segment, heads)]
        for _ in range(draw(_branch_counts) - 1):
            branches.append(_any_heads(draw, draw(_dilations), _segment(draw, tokens), heads))
        return Pattern(tuple(branches), causal)
    if kind == "twins":
        return Pattern(_twins(draw, dilation, segment, heads), causal)
    # The named constructors: segments and dilations grow together, as the paper has it.
    count = draw(_branch_counts)
    if kind == "groups":
        count = min(count, heads)
    growth, shortest = min(dilation, 4), min(segment or 1, max(1, tokens // 2))
    segments = tuple(shortest * growth**step for step in range(count))
    dilations = tuple((1, 2, 4, 6, 12)[step] if growth == 2 else growth**step for step in range(count))
    if kind == "groups":
        return Pattern.head_groups(segments, dilations, heads, causal)
    return Pattern.longnet(segments, dilations, heads, causal, offsets=draw(_named_rules))


def _members(draw: Draw, world: int) -> tuple[int, ...]:
    """Draw a non-empty subset of the ranks, as the bits of one number."""
    bits = draw(st.integers(1, 2**world - 1))
    return tuple(rank for rank in range(world) if bits >> rank & 1)


def cuts_of(draw: Draw, tokens: int, size: int) -> tuple[int, ...] | None:
    """Draw the cuts of the order into shards: even ones (None), or random ones, some of which leave shards empty."""
    if draw(_quarters) < 3:
        return None
    cut = st.integers(0, tokens)
    return (0, *sorted(draw(cut) for _ in range(size - 1)), tokens)


def bucket_of(draw: Draw, tokens: int) -> int | None:
    """Draw None, a small part of the sequence, or up to twice its length. Only short sequences get a bucket of one
    token: with long ones it takes ten times as long as any other Case, and finds nothing more."""
    choice = draw(_quarters)
    if choice < 2:
        return None
    if choice == 2:
        least = 1 + tokens // 16
        return draw(st.integers(least, least + 7))
    return draw(st.integers(1 + tokens // 16, 2 * tokens))


def with_keys(draw: Draw, case: Case) -> Case:
    """Give the keys a sequence of their own, of any length; or of the same one, in which documents may stay."""
    tokens = case.tokens
    if draw(_quarters) < 3:
        tokens, case = draw(_tokens[draw(_ceilings)]), replace(case, pattern=replace(case.pattern, documents=None))
    keys = Keys(tokens, draw(_orders), cuts_of(draw, tokens, len(case.ranks)))
    return replace(case, keys=keys, pattern=clipped(case.pattern, case.tokens, tokens))


def fused(draw: Draw, case: Case) -> Case:
    """Adapt a Case to the fused kernels, which take few tiles of other Cases: long ranges of keys, a mostly positive
    scale, no gradient through lse. Short segments, and documents of equal length, share a call as its folds. Windows
    span enough keys for a call. Some vectors repeat one component, whose stride of 0 such a kernel ignores. Sinks stay,
    since they take no part in a call; softcaps and other head dims of values are for the math kernel on CPUs.
    """
    tokens = max(draw(_fused_tokens), draw(_tokens[MAX_TOKENS]))
    segment = draw(_fused_segments)
    documents = fused_documents(draw, tokens, len(case.ranks))
    shortest = min((length for length in documents or () if length >= MIN_FUSED), default=MAX_TOKENS)
    dilation = min(1 + draw(_quarters), min(segment or MAX_TOKENS, shortest) // MIN_FUSED)
    window = draw(_fused_windows)
    window = None if window is None else dilation * window
    branches = [Branch(segment, dilation, draw(_quarters) % dilation, window=window)]
    if draw(_flags):
        branches.append(Branch())
    pattern = Pattern(tuple(branches), case.pattern.causal, documents)
    bucket = None if case.bucket is None else max(case.bucket, MIN_FUSED + draw(_sixteenths))
    tokens = tokens if documents is None else sum(documents)
    values, strided = ("flat", True) if draw(_eighths) == 7 else (case.values, case.strided)
    return replace(
        case, tokens=tokens, order=draw(_fused_orders), cuts=None, pattern=pattern, values=values, strided=strided,
        scale=draw(_fused_scales), lse=case.lse if case.lse in ("unused", "returned") else "unused", bucket=bucket,
        value_dim=None, softcap=None, keys=None,
    )  # fmt: skip


def exchange_of(draw: Draw, ranks: int) -> str:
    """Draw an exchange among so many ranks. Half of rings, and of those by heads, are in groups if some divide."""
    exchange, degrees = draw(_exchanges), [n for n in range(2, ranks) if ranks % n == 0]
    if exchange == "ring" and degrees and draw(_flags):
        return f"ring:{draw(st.sampled_from(degrees))}+direct"
    if exchange != ALL_TO_ALL or not degrees or draw(_flags):
        return exchange
    parts = [f"{ALL_TO_ALL}:{draw(st.sampled_from(degrees))}", draw(st.sampled_from(KEY_EXCHANGES))]
    return "+".join(parts if draw(_flags) else parts[::-1])


def hosts_of(draw: Draw, ranks: int) -> int:
    """Draw the number of hosts of so many ranks: mostly one."""
    several = [n for n in range(2, ranks + 1) if ranks % n == 0]
    return draw(st.sampled_from(several)) if several and draw(_quarters) == 3 else 1


def on_hosts(draw: Draw, case: Case) -> Case:
    """Draw the hosts of a Case's ranks; for one in eight also an exchange that depends on them."""
    ranks = len(case.ranks)
    if ranks == 1 or draw(_eighths) < 7:
        return replace(case, hosts=hosts_of(draw, ranks))
    chooses = ranks <= MAX_CHOOSING and case.again != "no_grad"
    exchange = draw(_by_host_or_chosen if chooses else _by_host)
    hosts = [1] if exchange == AUTO else [n for n in range(1, ranks + 1) if ranks % n == 0]
    return replace(case, exchange=exchange, hosts=draw(st.sampled_from(hosts)))


@st.composite
def cases(draw: Draw, world: int) -> Case:
    """Draw a Case for a world of that many ranks.

    Cases cover every order of tokens, uneven cuts with empty shards, fewer tokens than ranks, subgroups; patterns of
    one branch or mixtures, segments and dilations beyond the sequence, offsets per query head; windows of any length;
    documents and slices that end at shards' ends or beside them; MQA and GQA; sinks, softcaps and head dims of values;
    cross-attention, with another length and layout of the keys; every dtype, exchange and kernel.
    """
    # The larger of two draws: Hypothesis prefers the ends of a range, and a fifth of all Cases would have one token.
    tokens = max(draw(_tokens[draw(_ceilings)]), draw(_least_tokens))
    heads, kv_heads = draw(_heads)
    # Nearly always all ranks take part.
    group = None if world == 1 or draw(_eighths) < 7 else _members(draw, world)
    kernel, again = draw(_kernels), draw(_again)
    measured = draw(_sixteenths) == 15  # rarely: it triples the time of the run
    case = Case(
        world=world, group=group, tokens=tokens, order=draw(_orders),
        cuts=cuts_of(draw, tokens, world if group is None else len(group)), pattern=pattern_of(draw, tokens, heads),
        batch=draw(_batches), heads=heads, kv_heads=kv_heads, head_dim=draw(_head_dims), dtype=draw(_dtypes),
        scale=draw(_scales), score_scale=draw(_score_scales), values=draw(_values), seed=draw(_seeds),
        exchange=exchange_of(draw, world if group is None else len(group)), bucket=bucket_of(draw, tokens),
        kernel=kernel, lse=draw(_lse), strided=draw(_flags), again=again, measured=measured,
        sinks=draw(_sinks),
    )  # fmt: skip
    if kernel != "flash":  # which has neither of them
        case = replace(case, value_dim=draw(_value_dims), softcap=draw(_softcaps))
    pattern = windowed(draw, case.pattern, tokens, len(case.ranks))
    case = replace(case, pattern=replace(pattern, documents=packed(draw, case)))
    if again == "meta" and draw(_flags):  # such calls create tensors that other calls do not
        case = shifted(draw, case)
    elif kernel != "math" and draw(_quarters) == 3:
        case = fused(draw, case)
    else:
        case = rare(draw, case)
    case = case if draw(_quarters) < 3 else sliced(draw, case)
    case = case if draw(_eighths) < 7 else with_keys(draw, case)
    return on_hosts(draw, case)


def in_chunks(draw: Draw, case: Case) -> Case:
    """Give a Case chunks, for results of the same bits on any ranks: orders of whole chunks, and more tokens. A quarter
    has a causal window that ends within a chunk: the ranks of a ring may need different parts of it."""
    if draw(_quarters) == 3:
        pattern = Pattern.dense(True, case.pattern.documents, window=draw(_windows_of_chunks))
        case = replace(case, pattern=pattern, exchange="ring" if draw(_flags) else case.exchange)
    tokens = max(case.tokens, draw(_tokens_of_chunks), draw(_tokens_of_chunks))
    order, keys = draw(_orders_by_chunk), case.keys
    if keys is not None:
        keys = Keys(keys.tokens if case.pattern.documents is None else tokens, draw(_orders_by_chunk))
    chunk = draw(_chunk_lengths)
    return case.lengthened(tokens, order=order, cuts=None, keys=keys, same_bits=chunk).for_same_bits()


@st.composite
def cases_and_chunks(draw: Draw, world: int) -> Case:
    """Draw a Case, one of 32 in chunks. Laws draw without: chunks bind the layout, which laws change."""
    case: Case = draw(cases(world))
    return in_chunks(draw, case) if draw(_of_32) == 31 else case


@st.composite
def cases_of_others(draw: Draw, world: int) -> Case:
    """Draw a Case for another implementation: one in eight has some sizes as models have them, on which the
    implementation may depend in ways that this project's does not."""
    case: Case = draw(cases(world))
    if draw(_eighths) < 7:
        return case
    tokens, head_dim = draw(_usual_tokens), draw(_usual_head_dims)
    heads, kv_heads, batch = draw(_usual_heads)
    if any(branch.heads is not None or isinstance(branch.offset, tuple) for branch in case.pattern.branches):
        heads, kv_heads = case.heads, case.kv_heads
    case = replace(case, heads=heads, kv_heads=kv_heads, batch=batch, head_dim=head_dim)
    return case.lengthened(tokens, cuts=None) if tokens > case.tokens else case


# Sizes that `cases` hardly draws, from cheap to costly: where an implementation may take another way.
LARGE = (
    "tokens=40 batch=3 heads=32 kv_heads=8 head_dim=192 causal=true lse=returned",
    "tokens=48 batch=2 heads=16 head_dim=256 dtype=bfloat16",
    "tokens=1060 segment_length=600 dilation_rate=3 head_dim=8",
    "tokens=1100 batch=3 head_dim=16 causal=true documents=1050,0,50 dtype=float16",
    "tokens=1028 heads=2 kv_heads=1 head_dim=72 causal=true order=zigzag",
    "tokens=2100 head_dim=8 lse=returned order=striped",
)


def large_cases(world: int) -> st.SearchStrategy[Case]:
    """Return a strategy of the large Cases. They are fixed, so that none is missed."""
    return st.sampled_from([read_case_line(f"world={world} seed=1 {line}") for line in LARGE])


@st.composite
def long_cases(draw: Draw, world: int) -> Case:
    """Draw a measured Case with over a hundred scores a row, in which memory shows: one rank holds most of the tokens,
    heads are narrow, and many query heads share a key/value head."""
    tokens = draw(st.integers(128, 160))
    others = draw(st.integers(0, tokens // 4))  # tokens of all other ranks together
    inner = sorted(draw(st.integers(0, others)) for _ in range(world - 1))
    before = draw(st.integers(0, world - 1))  # ranks before the one that holds most
    cuts = (0, *inner[:before], *(tokens - others + cut for cut in inner[before:]), tokens)
    heads, kv_heads = draw(st.sampled_from(((16, 1), (12, 1), (16, 2))))
    return Case(
        world=world, group=None, tokens=tokens, order=draw(_orders), cuts=cuts, pattern=Pattern.dense(draw(_flags)),
        batch=1, heads=heads, kv_heads=kv_heads, head_dim=draw(st.sampled_from((1, 2, 4))), dtype=draw(_dtypes),
        scale=None, score_scale=1.0, values="normal", seed=draw(_seeds), exchange=exchange_of(draw, world),
        bucket=draw(st.sampled_from((2 * MAX_TOKENS, 40, 3 * MAX_TOKENS))), kernel="math", lse="unused",
        strided=False, measured=True,
    )  # fmt: skip


def other_sharding(draw: Draw, case: Case) -> dict[str, object]:
    """Draw another group, layout, exchange and bucket, which must not change the results of a Case."""
    group = _members(draw, case.world) if case.world > 1 else None
    ranks = case.world if group is None else len(group)
    return {
        "group": group, "order": draw(_orders), "cuts": cuts_of(draw, case.tokens, ranks),
        "exchange": exchange_of(draw, ranks), "bucket": bucket_of(draw, case.tokens),
    }  # fmt: skip


def permutation_of(draw: Draw, size: int) -> tuple[int, ...]:
    """Draw a permutation of range(size)."""
    return permutation(draw(st.integers(0, math.factorial(size) - 1)), range(size), size)
