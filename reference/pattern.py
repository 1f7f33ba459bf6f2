"""The mask: branches of dilated attention, and how many of them see a pair of positions.

Tokens have global positions. A branch cuts the positions into segments of length w; inside each segment a
query head with offset o selects every r-th position, beginning at o (the phase restarts in every segment):

    selected(p)    = (p mod w) >= o  and  ((p mod w) - o) mod r == 0
    M_b[h, i, j]   = same segment(i, j)  and  selected(i)  and  selected(j)  and  one of the branch's slices sees (i, j)
                     and  |i - j| <= window, if the branch has one
    c[h, i, j]     = sum_b M_b[h, i, j]

Slices (`reference.slices`) are masks as data. A branch without slices has one: everything, or j <= i if the pattern is
causal.

No number has to divide another: r may exceed w or not divide it, the last segment may be short, an offset
may lie beyond its end (then it selects nothing there). Source: LongNet, arXiv 2307.02486, section 2.2.

The sequence may be packed from documents, whose lengths the pattern then holds. Segments and phases restart in each
document: p above is the position within the document, and both positions of a pair lie in the same one.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from reference.documents import Documents, begins, check_tokens, checked_documents
from reference.mask_picture import Grid, mask_picture
from reference.slices import (
    CAUSAL,
    EVERYTHING,
    Slice,
    check_slices_fit,
    checked_slice,
    checked_slices,
    first_token_slices,
    frame_slices,
    holds_a_pair,
    keys_seen,
    looks_ahead,
    meet,
    of_kind,
    prefix_slices,
    sees_at,
    sees_paths,
    span_slices,
    tree_slices,
)  # fmt: skip
from reference.svg import Picture
from reference.validators import is_integer, plain


def _integer(name: str, value: object, at_least: int) -> int:
    """Return `value` if it is an int (not a bool) >= `at_least`; ValueError otherwise."""
    if not is_integer(value) or value < at_least:
        raise ValueError(f"{name} must be an integer >= {at_least}, got {value!r}")
    return value


def _window(value: object) -> None:
    if not is_integer(value) or value < 0:
        raise ValueError(
            f"window must be an integer >= 0 or None, got {value!r}; for flash attention's window_size write "
            "window=None for -1 or (-1, -1), window=w for (w, w), and with causal=True window=w for (w, 0)"
        )


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _fields(what: str, data: object, names: set[str]) -> Mapping[str, Any]:
    """Return `data` if it is a mapping with exactly these names; ValueError otherwise."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} must be a mapping with the fields {sorted(names)}, got {data!r}")
    if set(data) != names:
        unknown, missing = sorted(map(str, set(data) - names)), sorted(names - set(data))
        raise ValueError(f"{what}: unknown fields {unknown}, missing fields {missing}")
    return data


@dataclass(frozen=True)
class Branch:
    """One dilated branch.

    Args:
        segment_length: w >= 1 in tokens, or None for one segment that holds every position.
        dilation_rate: r >= 1.
        offset: 0 <= o < r; one int for all heads that the branch serves, or one per such head, in order.
        heads: contiguous range of query heads that the branch serves; None for all of them.
        window: >= 0: largest distance of a key before its query or, unless the pattern is causal, behind it; None: no
            limit. (A model's sliding window of s keys is window s - 1.)
        slices: the pairs that the branch sees, each (q0, q1, k0, k1, low, high) as in `reference.slices`; disjoint, and
            in positions of the whole sequence. The pattern's causality then says nothing about this branch. None:
            everything, or all keys up to the query's if the pattern is causal.

    Raises:
        ValueError: a field has any other value.
    """

    segment_length: int | None = None
    dilation_rate: int = 1
    offset: int | tuple[int, ...] = 0
    heads: range | None = None
    window: int | None = None
    slices: tuple[Slice, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", checked_slices(self.slices))
        if self.segment_length is not None and (not is_integer(self.segment_length) or self.segment_length < 1):
            raise ValueError(f"segment_length must be an integer >= 1 or None, got {self.segment_length!r}")
        if self.window is not None:
            _window(self.window)
        rate = _integer("dilation_rate", self.dilation_rate, 1)
        if isinstance(self.offset, (list, tuple)):
            object.__setattr__(self, "offset", tuple(self.offset))  # so that the branch hashes
        for offset in self.offset if isinstance(self.offset, tuple) else (self.offset,):
            if _integer("offset", offset, 0) >= rate:
                raise ValueError(f"offset must be less than the dilation rate {rate}, got {self.offset!r}")
        if self.heads is not None:
            if not isinstance(self.heads, range):
                raise ValueError(f"heads must be a range or None, got {self.heads!r}")
            if self.heads.step != 1 or self.heads.start < 0 or not self.heads:
                raise ValueError(f"heads must be a nonempty range of step 1 from >= 0, got {self.heads!r}")
        if isinstance(self.offset, tuple):
            if not self.offset or (self.heads is not None and len(self.heads) != len(self.offset)):
                required = "every query head" if self.heads is None else f"every head of {self.heads!r}"
                raise ValueError(f"offset must be one int or one for {required}, got {self.offset!r}")

    def offsets(self, num_heads: int) -> tuple[int | None, ...]:
        """Return the offset of each query head; None for a head that the branch does not serve.

        Args:
            num_heads: number of query heads.

        Raises:
            ValueError: the branch's heads or offsets do not fit that many query heads.
        """
        _integer("num_heads", num_heads, 1)
        served = self.heads if self.heads is not None else range(num_heads)
        if served.stop > num_heads:
            raise ValueError(
                f"pattern must be one for the {num_heads} query heads, got one with a branch for heads {self.heads!r}: "
                f"make it with heads={num_heads}"
            )
        offset = self.offset if isinstance(self.offset, tuple) else (self.offset,) * len(served)
        if len(offset) != len(served):
            raise ValueError(
                f"pattern must be one for the {num_heads} query heads, got one that was made for {len(offset)}, with "
                f"offset {self.offset!r}: make it with heads={num_heads}"
            )
        return (None,) * served.start + offset + (None,) * (num_heads - served.stop)


def slices_seen(branch: Branch, causal: bool) -> tuple[Slice, ...]:
    """Return the slices that say which pairs of its grid a branch sees, those of causality and its window included."""
    slices = branch.slices if branch.slices is not None else (CAUSAL if causal else EVERYTHING,)
    if branch.window is None:
        return slices
    band = Slice(low=-branch.window, high=branch.window)
    return tuple(both for one in slices if (both := meet(one, band)) is not None)


# Published rules for offsets: index i of the branch, its rate r, number of heads -> `offset` of the branch.
_OFFSET_RULES: dict[str, Callable[[int, int, int], int | tuple[int, ...]]] = {
    "paper": lambda i, r, heads: tuple(h % r for h in range(heads)),  # LongNet, section 2.2
    "torchscale": lambda i, r, heads: tuple(h // -(-heads // r) for h in range(heads)),  # -(-a // b): ceil
    "fkodom": lambda i, r, heads: i % r,  # dilated-attention-pytorch: one constant per branch
}


def _check_depths(pattern: "Pattern") -> None:
    """Raise ValueError unless a token's keys are its path, which its depth counts."""
    grids = [(b.segment_length, b.dilation_rate, b.window) for b in pattern.branches]
    if grids != [(None, 1, None)] or pattern.branches[0].slices is None:
        raise ValueError(
            "depths need one branch with slices, without a window, segments or rates, which would count places, got "
            f"{len(grids)} with (segment_length, dilation_rate, window) {grids}"
        )
    if pattern.documents is not None and len(pattern.documents) > 1:
        raise ValueError(
            f"documents must be left out where positions are depths, as in a tree, got {len(pattern.documents)}: a "
            "tree of several roots is a batch of documents"
        )
    if pattern.packed is not None:
        _check_paths(pattern, pattern.packed.tokens)


def _check_paths(pattern: "Pattern", tokens: int) -> None:
    """Raise ValueError unless the slices are those of a tree."""
    if not sees_paths(slices_seen(pattern.branches[0], pattern.causal), tokens):
        raise ValueError(
            "depths need the slices of a tree, where a token sees all that the one before it on its path sees, and no "
            "later one, got others: leave depths out, or write Pattern.tree(parents, lengths)"
        )


# Segments of one position never have phase 1.
_NOTHING = Branch(segment_length=1, dilation_rate=2, offset=1)


@dataclass(frozen=True)
class Pattern:
    """One or more branches whose pairs are counted with multiplicity under one softmax; optionally causal.

    Args:
        branches: at least one `Branch` (a list is turned into a tuple, so that every pattern hashes).
        causal: True keeps only the pairs whose key position is <= the query position.
        documents: lengths >= 0 of the consecutive documents that a sequence is packed from; their sum must be its
            number of tokens. None: the sequence is one document, of any length. (`reference.documents` converts
            cu_seqlens and position ids.)
        depths: True if the rotary position of a token is its depth, as in a tree: the number of other keys that it
            sees by the slices of the one branch, without documents. False: its place in its document.
        copies: True if the second half of each document has the rotary positions of the first, as noisy frames.

    Raises:
        ValueError: a field has any other value.
    """

    branches: tuple[Branch, ...]
    causal: bool = False
    documents: tuple[int, ...] | None = None
    depths: bool = False
    copies: bool = False
    number: int = field(init=False, repr=False, compare=False, default=0)  # of this object, if a batch made it
    has_slices: bool = field(init=False, repr=False, compare=False)  # of a branch's own
    text: str = field(init=False, repr=False, compare=False)  # JSON without documents, slices and depths

    def __post_init__(self) -> None:
        if not isinstance(self.branches, (tuple, list)) or not self.branches:
            raise ValueError(f"branches must be a tuple of at least one Branch, got {self.branches!r}")
        for branch in self.branches:
            if not isinstance(branch, Branch):
                raise ValueError(f"branches must hold Branch objects only, got {branch!r}")
        object.__setattr__(self, "branches", tuple(self.branches))
        _flag("causal", self.causal)
        object.__setattr__(self, "documents", checked_documents(self.documents))
        _flag("depths", self.depths)
        if _flag("copies", self.copies) and (self.depths or any(length % 2 for length in self.documents or ())):
            raise ValueError("copies need documents of two equal halves, and no depths, got others")
        if self.depths:
            _check_depths(self)
        object.__setattr__(self, "has_slices", any(branch.slices is not None for branch in self.branches))
        # Not lazily: a graph that is traced can read an attribute, but not format integers that change between calls.
        branches, causal = ", ".join([_json(branch) for branch in self.branches]), "true" if self.causal else "false"
        object.__setattr__(self, "text", f'{{"branches": [{branches}], "causal": {causal}}}')
        if self.documents is not None or self.has_slices:
            object.__setattr__(self, "number", next(_next_numbers))
            _by_number[self.number] = self

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.branches, self.causal, self.documents, self.depths, self.copies)  # an own number

    @property
    def packed(self) -> Documents | None:
        """The documents, typed as `Documents`."""
        assert self.documents is None or isinstance(self.documents, Documents)
        return self.documents

    @classmethod
    def dense(
        cls, causal: bool = False, documents: tuple[int, ...] | None = None, window: int | None = None
    ) -> "Pattern":
        """Plain attention: one branch, one segment, every position, every head.

        Args:
            causal: True keeps only the pairs whose key position is <= the query position.
            documents: lengths of the documents that the sequence is packed from; None: one document.
            window: largest distance in tokens of a key before its query or, unless causal, behind it; None: no limit.

        Raises:
            ValueError: an argument has any other value.
        """
        return cls((Branch(window=window),), causal, documents)

    @classmethod
    def longnet(
        cls,
        segment_lengths: Sequence[int | None],
        dilation_rates: Sequence[int],
        heads: int,
        causal: bool = False,
        offsets: str = "paper",
        documents: tuple[int, ...] | None = None,
    ) -> "Pattern":
        """LongNet: every branch (segment_lengths[i], dilation_rates[i]) serves all query heads (arXiv 2307.02486, 2.2).

        Args:
            segment_lengths: w of each branch, in tokens; None for one segment that holds every position.
            dilation_rates: r of each branch.
            heads: number of query heads.
            causal: True keeps only the pairs whose key position is <= the query position.
            offsets: rule for the offset of head h: "paper" h mod r; "torchscale" h // ceil(heads / r); "fkodom" i mod r
                for all heads of branch i, as in dilated-attention-pytorch.
            documents: lengths of the documents that the sequence is packed from; None: one document.

        Raises:
            ValueError: the lists have unequal lengths, the rule is unknown, or an entry is out of range.
        """
        _integer("heads", heads, 1)
        if offsets not in _OFFSET_RULES:
            raise ValueError(f"offsets must be one of {sorted(_OFFSET_RULES)}, got {offsets!r}")
        pairs = _branch_sizes(segment_lengths, dilation_rates)
        rule = _OFFSET_RULES[offsets]
        return cls(tuple(Branch(w, r, rule(i, r, heads)) for i, (w, r) in enumerate(pairs)), causal, documents)

    @classmethod
    def head_groups(
        cls,
        segment_lengths: Sequence[int | None],
        dilation_rates: Sequence[int],
        heads: int,
        causal: bool = False,
        documents: tuple[int, ...] | None = None,
    ) -> "Pattern":
        """Each head belongs to one branch: branch i serves the i-th group of heads, all with offset i mod r.

        With G groups the first `heads` mod G of them get one head more, as in dilated-attention-pytorch.

        Args:
            segment_lengths: w of each branch, in tokens; None for one segment that holds every position.
            dilation_rates: r of each branch.
            heads: number of query heads, at least one for each branch.
            causal: True keeps only the pairs whose key position is <= the query position.
            documents: lengths of the documents that the sequence is packed from; None: one document.

        Raises:
            ValueError: the lists have unequal lengths, there are fewer heads than groups, or an entry is out of range.
        """
        _integer("heads", heads, 1)
        pairs = _branch_sizes(segment_lengths, dilation_rates)
        if heads < len(pairs):
            raise ValueError(f"heads must be at least the number of groups, {len(pairs)}, got {heads}")
        size, larger = divmod(heads, len(pairs))
        starts = [i * size + min(i, larger) for i in range(len(pairs) + 1)]
        groups = [range(a, b) for a, b in pairwise(starts)]
        branches = (Branch(w, r, i % r, groups[i]) for i, (w, r) in enumerate(pairs))
        return cls(tuple(branches), causal, documents)

    @classmethod
    def slices(
        cls,
        slices: Sequence[tuple[Any, ...]],
        documents: tuple[int, ...] | None = None,
        window: int | None = None,
        counted: bool = False,
    ) -> "Pattern":
        """Slices of the caller's own: `[((q0, q1), (k0, k1), kind), ...]`, in half-open ranges.

        Args:
            slices: each with the kind "full"; "causal": j - k1 <= i - q1 (ends aligned); "anticausal": j - k0 >= i - q0
                (begins aligned); "both"; or a band (low, high) in place of the kind, with low <= j - i <= high. Or the
                six numbers of `reference.slices`, as converters return them (`reference.mask_converters`).
            documents: lengths of the documents that the sequence is packed from; no pair of two documents is seen.
            window: largest distance in tokens of a key before its query or behind it; None: no limit.
            counted: True if a pair of several slices counts as often; False refuses it.

        Raises:
            ValueError: a range is out of order, a kind is unknown, a slice sees no pair, or slices overlap.
        """
        slices, window = plain(slices), plain(window)
        if not isinstance(slices, (list, tuple)) or not all(
            isinstance(x, (list, tuple)) and len(x) in (3, 6) for x in slices
        ):
            raise ValueError(f"slices must be a list of ((q0, q1), (k0, k1), kind), got {slices!r}")
        _flag("counted", counted)
        layers: list[list[Slice]] = [[]]
        for given in slices:
            one = of_kind(*given) if len(given) == 3 else checked_slice(given)
            if not holds_a_pair(one) and one.q0 != one.q1 and one.k0 != one.k1:
                raise ValueError(
                    f"slices must see a pair each, got {given!r}, which sees none: a band needs low <= high within the "
                    'ranges, "both" at least as many keys as queries'
                )
            free = (x for x in layers if not counted or not any(meet(one, other) for other in x))
            layer = next(free, None)
            if layer is None:
                layers.append(layer := [])
            layer.append(one)
        return cls(tuple(Branch(window=window, slices=tuple(x)) for x in layers), documents=documents)

    @classmethod
    def prefix(cls, prefix: int | Sequence[int], documents: tuple[int, ...] | None = None) -> "Pattern":
        """Prefix-LM: causal, but the first tokens of each document see each other both ways.

        Args:
            prefix: first tokens, >= 0: of every document, or a list with a number for each.
            documents: lengths of the documents that the sequence is packed from; None: one document.

        Raises:
            ValueError: a prefix is no integer >= 0, is longer than its document, or the lists have unequal lengths.
        """
        prefix, begins = plain(prefix), _begins(documents)
        each: object = [prefix] * len(begins) if is_integer(prefix) else prefix
        if not isinstance(each, (list, tuple)) or len(each) != len(begins):
            raise ValueError(
                f"prefix must be an integer >= 0, or a list of one for each of {len(begins)} documents, got {prefix!r}"
            )
        if documents is not None:
            for length, own in zip(documents, each, strict=True):
                if _integer("prefix", own, 0) > length and (length or not is_integer(prefix)):
                    raise ValueError(f"prefix must be at most its document's {length} tokens, got {own}")
            each = [min(own, length) for length, own in zip(documents, each, strict=True)]  # an empty document has none
        return cls((Branch(slices=tuple(prefix_slices(each, begins))),), documents=documents)

    @classmethod
    def spans(
        cls, spans: Sequence[tuple[int, int]], documents: tuple[int, ...] | None = None, window: int | None = None
    ) -> "Pattern":
        """Causal, with spans that see themselves both ways, such as the images of Gemma 3.

        Args:
            spans: (begin, end) of each, half-open positions of the whole sequence, in order and disjoint.
            documents: lengths of the documents that the sequence is packed from; None: one document.
            window: of the causal part, in tokens. A span that is longer still sees itself whole. None: no limit.

        Raises:
            ValueError: a span is out of order, overlaps another or crosses the end of a document, or the window is no
                integer >= 0.
        """
        spans, window = plain(spans), plain(window)
        if window is not None:
            _window(window)
        slices = tuple(span_slices(spans, window))
        _check_whole("spans", spans, documents)
        return cls((Branch(slices=slices),), documents=documents)

    @classmethod
    def frames(cls, lengths: Sequence[int], documents: tuple[int, ...] | None = None, noisy: bool = False) -> "Pattern":
        """Block-causal, as in video: a token sees its own frame and all frames before it.

        Args:
            lengths: tokens of each frame, in order. They add up to the sequence or, noisy, to half of it.
            documents: lengths of the documents that the sequence is packed from, with noisy copies; None: one document.
            noisy: True for documents of clean frames and, after them, their noisy copies, as clean 0, clean 1, noisy
                0, noisy 1. A noisy frame sees itself and the clean frames of its document before its own. It has the
                rotary positions of its clean frame.

        Raises:
            ValueError: a length is no integer >= 0, frames and documents differ in tokens, or a document, or its clean
                half, does not end with a frame.
        """
        _flag("noisy", noisy)
        lengths = plain(lengths)
        frame_slices(lengths)
        tokens = sum(lengths) * (1 + noisy)
        packed = Documents((tokens,)) if documents is None else checked_documents(documents)
        if packed is not None and packed.tokens != tokens:
            raise ValueError(f"frames must have the {packed.tokens} tokens of the documents, got {tokens}")
        if not noisy:
            _check_whole("frames", list(pairwise(accumulate(lengths, initial=0))), packed)
        return cls((Branch(slices=tuple(frame_slices(lengths, noisy, packed))),), documents=packed, copies=noisy)

    @classmethod
    def first_tokens(cls, count: int, window: int, documents: tuple[int, ...] | None = None) -> "Pattern":
        """A causal window, and first tokens of each document that all later ones see.

        Args:
            count: first tokens, >= 0.
            window: largest distance of another key before its query, >= 0.
            documents: lengths of the documents that the sequence is packed from; None: one document.

        Raises:
            ValueError: count or window is no integer >= 0.
        """
        return cls(
            (Branch(slices=tuple(first_token_slices(plain(count), plain(window), _begins(documents)))),),
            documents=documents,
        )

    @classmethod
    def tree(cls, parents: Sequence[int | None], lengths: Sequence[int]) -> "Pattern":
        """A tree of shared prefixes, such as many answers of one prompt: a token sees the tokens before it in its node
        and all tokens of the node's ancestors. Rotary positions are `positions`, the depths.

        Args:
            parents: of each node, the number of an earlier node; None or -1 for a root.
            lengths: tokens of each node, which follow each other and add up to the sequence.

        Raises:
            ValueError: the lists have unequal lengths, a parent is no earlier node, or a length is no integer >= 0.
        """
        parents, lengths = plain(parents), plain(lengths)
        slices = tree_slices(parents, lengths)
        return cls((Branch(slices=tuple(slices)),), documents=(sum(lengths),), depths=True)

    def positions(self, tokens: int) -> torch.Tensor:
        """Return the rotary position of each token, (tokens,) int64: its place in its document, in a tree its depth,
        in noisy frames that in the clean ones.

        Args:
            tokens: of the whole sequence.

        Raises:
            ValueError: the documents or slices do not fit that many tokens.
        """
        self.validate_tokens(_integer("tokens", tokens, 0))
        if self.depths:
            if self.documents is None:
                _check_paths(self, tokens)
            ends = np.zeros(tokens, np.int64), np.full(tokens, tokens)
            seen = keys_seen(slices_seen(self.branches[0], self.causal), *ends)
            return torch.from_numpy(np.maximum(seen - 1, 0))
        places = torch.arange(tokens)
        lengths = torch.tensor(self.documents or (tokens,), dtype=torch.int64)
        places = places if self.packed is None else places - begins(self.packed, places)
        return places % (lengths // 2 if self.copies else lengths).repeat_interleave(lengths)

    def sees_ahead(self, tokens: int, ahead: int) -> torch.Tensor:
        """Return True for each token that sees the one so far ahead in some head, (tokens,) bool: no label for it.

        Args:
            tokens: of the whole sequence, which the pattern fits.
            ahead: distance, >= 1.
        """
        places, sees = torch.arange(tokens), torch.zeros(tokens, dtype=torch.bool)
        here, there = places[: max(tokens - ahead, 0)], places[ahead:]
        for branch in self.branches:
            (segment, phase), (other, other_phase) = (_cells(branch, x, self.packed) for x in (here, there))
            seen = torch.from_numpy(sees_at(slices_seen(branch, self.causal), tokens, ahead))[: len(here)]
            served = torch.isin(phase, torch.tensor(branch.offset))
            sees[: len(here)] |= seen & served & (segment == other) & (phase == other_phase)
        return sees

    def validate(self, num_heads: int) -> None:
        """Validate the number of query heads.

        Args:
            num_heads: number of query heads.

        Raises:
            ValueError: the heads or offsets of a branch do not fit it.
        """
        for branch in self.branches:
            branch.offsets(num_heads)

    def validate_tokens(self, tokens: int | None, key_tokens: int | None = None) -> None:
        """Validate the number of tokens.

        Args:
            tokens: of the whole sequence; None: any number, with key_tokens.
            key_tokens: of the keys in cross-attention; None: `tokens`.

        Raises:
            ValueError: the documents do not add up to it, or a slice reaches beyond it.
        """
        of_keys = tokens if key_tokens is None else key_tokens
        assert of_keys is not None
        for number in (of_keys if tokens is None else tokens, of_keys):
            own = self.documents if self.has_slices else None
            if own is not None and len(own) == 1 and own[0] != number:
                raise ValueError(
                    f"pattern must be for the {number} tokens of the sequence, got one for {own[0]}: its "
                    f"frames, nodes of a tree or documents must add up to {number}, noisy frames with their copies"
                )
            check_tokens(self.packed, number)
        for branch in self.branches:
            check_slices_fit(branch.slices or (), tokens, of_keys)

    @property
    def fewest_heads(self) -> int:
        """Least number of query heads that the pattern fits."""
        return max(
            b.heads.stop if b.heads is not None else len(b.offset) if isinstance(b.offset, tuple) else 1
            for b in self.branches
        )

    def picture(self, tokens: int | None = None, heads: int | None = None) -> Picture:
        """Draw the mask: queries down, keys across, in cells of several tokens if it is large.

        Args:
            tokens: of the sequence, 0 to 2^40; None: those of the documents, else twice the longest segment
                or, without one, four windows or 16 dilation rates.
            heads: number of query heads; None: the fewest that the pattern fits.

        Returns:
            The mean over all heads and, if heads differ, the first three that do.

        Raises:
            ValueError: tokens or heads are out of range, or do not fit the pattern.
        """
        if tokens is None:
            reaches = [b.segment_length or max(2 * (b.window or 0) + 2, 8 * b.dilation_rate) for b in self.branches]
            reaches += [-(-max(one.q1 or 0, one.k1 or 0) // 2) for b in self.branches for one in b.slices or ()]
            tokens = self.packed.tokens if self.packed is not None else min(2 * max(*reaches, 16), 2**40)
        if _integer("tokens", tokens, 0) > 2**40:
            raise ValueError(f"tokens must be at most 2**40, got {tokens!r}")
        self.validate_tokens(tokens)
        heads = self.fewest_heads if heads is None else heads
        offsets = [(b, b.offsets(heads)) for b in self.branches]
        grids = [
            tuple(
                Grid(b.segment_length, b.dilation_rate, offset, slices_seen(b, self.causal))
                for b, of_head in offsets
                if (offset := of_head[head]) is not None
            )
            for head in range(heads)
        ]
        causal = (self.causal or self.has_slices) and not any(
            looks_ahead(one) for b in self.branches for one in slices_seen(b, self.causal)
        )
        return mask_picture(grids, tokens, causal, self.packed)

    def _repr_html_(self) -> str:
        return self.picture().svg

    def of_heads(self, heads: range) -> "Pattern":
        """Return the pattern of some query heads, numbered from 0. One that serves none of them selects nothing.

        Args:
            heads: consecutive query heads, at least one.
        """
        branches = []
        for branch in self.branches:
            served = heads if branch.heads is None else branch.heads
            low, high = max(served.start, heads.start), min(served.stop, heads.stop)
            if low < high:
                first = 0 if branch.heads is None else served.start
                offset = branch.offset if isinstance(branch.offset, int) else branch.offset[low - first : high - first]
                branches.append(replace(branch, offset=offset, heads=range(low - heads.start, high - heads.start)))
        return replace(self, branches=tuple(branches) or (_NOTHING,), depths=self.depths and bool(branches))

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern as JSON data, from which `from_dict` makes an equal pattern."""
        return {
            "branches": [
                {
                    "segment_length": b.segment_length,
                    "dilation_rate": b.dilation_rate,
                    "offset": list(b.offset) if isinstance(b.offset, tuple) else b.offset,
                    "heads": None if b.heads is None else [b.heads.start, b.heads.stop],
                    "window": b.window,
                    **({} if b.slices is None else {"slices": [list(one) for one in b.slices]}),
                }
                for b in self.branches
            ],
            "causal": self.causal,
            "documents": None if self.documents is None else list(self.documents),
            **{name: True for name in ("depths", "copies") if getattr(self, name)},
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "Pattern":
        """Make the pattern of `to_dict`, also from older data without documents, windows or slices.

        Args:
            d: JSON data.

        Raises:
            ValueError: a field is unknown or missing, or has a wrong value.
        """
        complete = {"documents": None, "depths": False, "copies": False, **d} if isinstance(d, Mapping) else d
        data = _fields("pattern", complete, {"branches", "causal", "documents", "depths", "copies"})
        if not isinstance(data["branches"], (list, tuple)):
            raise ValueError(f"branches must be a list, got {data['branches']!r}")
        branches = tuple(_branch_from_dict(b) for b in data["branches"])
        return cls(branches, data["causal"], data["documents"], data["depths"], data["copies"])


def check_pattern(pattern: object) -> None:
    """Raise ValueError unless `pattern` is a Pattern."""
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern, got {pattern!r}: write Pattern.dense(), or one with causal=True, "
                         "Pattern.longnet(...) or Pattern.head_groups(...)")  # fmt: skip


# Compiled graphs take documents by the pattern's number, since they change at every step. Begin at 2: 0 and 1 become
# constants.
_next_numbers = count(2)
_by_number: WeakValueDictionary[int, Pattern] = WeakValueDictionary()


def numbered_pattern(number: int) -> Pattern:
    """Look up a pattern with documents by its number. Raises ValueError if it no longer exists."""
    pattern = _by_number.get(number)
    if pattern is None:
        raise ValueError(f"pattern must be the number of an existing one, got {number}")
    return pattern


def _json(branch: Branch) -> str:
    """Return a branch as JSON. Written so that torch can trace it, for patterns that a graph makes."""
    w, offset, heads, window = branch.segment_length, branch.offset, branch.heads, branch.window
    offsets = f"[{', '.join([f'{o}' for o in offset])}]" if isinstance(offset, tuple) else f"{offset}"
    served = "null" if heads is None else f"[{heads.start}, {heads.stop}]"
    return (
        f'{{"segment_length": {"null" if w is None else f"{w}"}, "dilation_rate": {branch.dilation_rate}, '
        f'"offset": {offsets}, "heads": {served}, "window": {"null" if window is None else f"{window}"}}}'
    )


def _branch_from_dict(d: object) -> Branch:
    complete = {"window": None, "slices": None, **d} if isinstance(d, Mapping) else d
    data = _fields("branch", complete, {"segment_length", "dilation_rate", "offset", "heads", "window", "slices"})
    heads = data["heads"]
    if heads is not None:
        if not isinstance(heads, (list, tuple)) or len(heads) != 2:
            raise ValueError(f"heads must be [start, stop] or null, got {heads!r}")
        heads = range(*(_integer("heads", bound, 0) for bound in heads))
    return Branch(data["segment_length"], data["dilation_rate"], data["offset"], heads, data["window"], data["slices"])


def _begins(documents: tuple[int, ...] | None) -> list[int]:
    """Return the first position of each document."""
    checked = checked_documents(documents)
    return [0] if checked is None else list(accumulate(checked, initial=0))[:-1]


def _check_whole(name: str, spans: Sequence[tuple[int, int]], documents: tuple[int, ...] | None) -> None:
    """Raise ValueError if the end of a document cuts a span."""
    edges = list(accumulate(checked_documents(documents) or ()))
    for begin, end in spans:
        at = bisect_right(edges, begin)
        if at < len(edges) and begin < edges[at] < end:
            raise ValueError(f"{name} must lie within a document, got {(begin, end)} and one that ends at {edges[at]}: "
                             "cut it there")  # fmt: skip


def _branch_sizes(segment_lengths: Sequence[int | None], dilation_rates: Sequence[int]) -> list[tuple[int | None, int]]:
    """Return (w, r) of each branch. Validates the rates, since the rules for offsets divide by them."""
    lists: dict[str, object] = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    for name, entries in lists.items():
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise ValueError(f"{name} must be a list with an entry for each branch, as [{entries!r}], got {entries!r}")
    if not segment_lengths or len(segment_lengths) != len(dilation_rates):
        raise ValueError(
            "segment_lengths and dilation_rates must be equally long and not empty, "
            f"got {len(segment_lengths)} and {len(dilation_rates)}"
        )
    rates = [_integer("dilation_rates", r, 1) for r in dilation_rates]
    return list(zip(segment_lengths, rates, strict=True))


def _cells(branch: Branch, positions: torch.Tensor, documents: Documents | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The first position of each position's segment, and its phase, (p mod w) mod r.

    Because 0 <= o < r, "(p mod w) >= o and ((p mod w) - o) mod r == 0" means that the phase of p is o. So an
    offset o sees a pair of positions exactly if they lie in one segment and both have phase o."""
    begin = torch.zeros_like(positions) if documents is None else begins(documents, positions)
    w, p = branch.segment_length, positions - begin
    if w is not None:
        begin, p = begin + p // w * w, p % w
    return begin, p % branch.dilation_rate


def selected(
    branch: Branch, positions: torch.Tensor, offset: int, documents: tuple[int, ...] | None = None
) -> torch.Tensor:
    """True for positions on the dilated grid of their own segment: int64 (N,), >= 0 -> bool (N,).

    `offset`, 0 <= offset < r, replaces the offsets of the branch."""
    return _cells(branch, positions, checked_documents(documents))[1] == offset


def _any_sees(slices: Sequence[Slice], queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """True for each pair that a slice sees: (Nq, 1) and (1, Nk) -> (Nq, Nk)."""
    seen = torch.zeros(torch.broadcast_shapes(queries.shape, keys.shape), dtype=torch.bool, device=queries.device)
    for one in slices:
        seen |= one.sees(queries, keys)
    return seen


def multiplicity(
    pattern: Pattern, q_positions: torch.Tensor, k_positions: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """c[h, i, j]: number of branches that see the pair of query i and key j for query head h.

    q_positions int64 (Nq,), k_positions int64 (Nk,), global, >= 0, on one device -> int32 (num_heads, Nq, Nk)
    on it. Raises ValueError if the pattern does not fit `num_heads`, or a position lies beyond the documents."""
    q_positions, k_positions = q_positions.unsqueeze(1), k_positions.unsqueeze(0)  # (Nq, 1), (1, Nk)
    shape = (num_heads, q_positions.shape[0], k_positions.shape[1])
    c = torch.zeros(shape, dtype=torch.int32, device=q_positions.device)
    for branch in pattern.branches:
        offset = [o for o in branch.offsets(num_heads) if o is not None]
        first = branch.heads.start if branch.heads is not None else 0
        segment, phase = _cells(branch, q_positions, pattern.packed)
        k_segment, k_phase = _cells(branch, k_positions, pattern.packed)
        same = (segment == k_segment) & (phase == k_phase)  # (Nq, Nk)
        same &= _any_sees(slices_seen(branch, pattern.causal), q_positions, k_positions)
        # Heads of one offset see the same pairs: if all have one, compute them once.
        distinct = offset[:1] if len(set(offset)) == 1 else offset
        o = torch.tensor(distinct, device=c.device).view(-1, 1, 1)
        c[first : first + len(offset)] += same & (phase == o)  # (heads or 1, Nq, Nk)
    return c
