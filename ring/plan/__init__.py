"""The computations and messages of a rank as integers: no tensors of data, no communication.

The modules, in order; each imports only those before it:

    layout        the positions that each rank holds
    blocks        the pattern as grids: a branch and an offset, with the heads that select the same rows
    pieces        packed documents: runs cut at their ends
    ranges        the rows of a rank on a grid, segment by segment, as arithmetic progressions
    range_pairs   pairs of ranges with a visible key: the join of the table of ranges with itself
    slice_pairs   pairs of ranges that see each other by a slice
    remote_rows   the elements of a range that other ranks need
    chunks        messages cut into chunks: the slots of every row
    schedule      the messages of every stage and their slots in the buffers
    exchanges     the schedules of the exchanges of keys, a file each
    exchange      an exchange parsed from its name
    head_shares   the heads of each rank that divides them with others
    head_rows     the order of rows that several ranks send
    rows          rows or slots as strided views, folded over segments
    tile          one kernel call
    cover         tiles whose results need no merge
    diagonal      fewer calls for heads whose grids are shifted against each other
    tiling        the kernel calls that compute all range pairs of a rank
    timeline      pictures of the kernels and messages of each step
    plan          all of it for one rank, step by step, ready to execute

The docstrings of all these modules share one example. 16 tokens are sharded over 2 ranks in zigzag order. 2 heads, with
a key/value head each, attend causally within segments of 8 tokens to every second token. Head h begins at token h of a
segment:

    pattern = Pattern.longnet(segment_lengths=(8,), dilation_rates=(2,), heads=2, causal=True)
    layout = Layout.zigzag(16, 2)
    plan_of(pattern, layout, rank, heads=2, kv_heads=2, exchange=DIRECT, bucket=8)

    rank  positions
    0     0 1 2 3 12 13 14 15
    1     4 5 6 7 8 9 10 11

Segment 0 has the positions 0 to 7, segment 1 the positions 8 to 15, so each segment lies on both ranks. Head 0 selects
the even positions, head 1 the odd ones. In segment 0 rank 1 must see keys of rank 0; in segment 1, where rank 0 holds
the later positions, rank 0 must see keys of rank 1.
"""
