"""The Triton kernels of paged attention. Imported only where Triton is: see `triton_paged`."""

# A kernel takes addresses and sizes, of types that Triton derives at each call.
# ruff: noqa: PLR0913
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

# Below every score, and finite: the difference of two of them is a number.
_NOTHING = tl.constexpr(-1e30)


# Widths of tables differ from step to step, and are not worth a kernel of their own.
@triton.jit(do_not_specialize=["table_stride"])
def attend(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    query_start,
    lengths,
    output,
    partial_sums,
    partial_stats,
    scale,
    softcap,
    query_token_stride,
    query_head_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    window,  # positions that a token sees
    HAS_SOFTCAP: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of a key-value head
    NUM_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # at least TOKENS * SHARE, a power of two
    KEYS: tl.constexpr,  # positions that are read at once
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # at least HEAD_DIM, a power of two
    SPLITS: tl.constexpr,
):
    """A tile of one sequence's new tokens, with all query heads of one key-value head, over a part of the positions.

    Grid: tiles of the sequence with most new tokens times SPLITS, sequences, key-value heads. Where SPLITS is above 1,
    parts are left in `partial_sums` [tokens, heads, SPLITS, HEAD_DIM] and `partial_stats` [tokens, heads, SPLITS, 2].
    """
    split = tl.program_id(0) % SPLITS
    first = tl.program_id(0) // SPLITS * TOKENS
    sequence = tl.program_id(1)
    kv_head = tl.program_id(2)
    start = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - start
    if first >= num_new:
        return
    num_computed = tl.load(lengths + sequence) - num_new

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    tokens = first + rows // SHARE
    heads = kv_head * SHARE + rows % SHARE
    is_row = (rows < TOKENS * SHARE) & (tokens < num_new)
    is_dim = dims < HEAD_DIM
    places = num_computed + tokens
    rows_of_query = (start + tokens).to(tl.int64) * query_token_stride + heads * query_head_stride
    q = tl.load(query + rows_of_query[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)

    # The positions that any token of the tile sees, of which this program takes its part in whole runs of KEYS.
    end = num_computed + tl.minimum(first + TOKENS, num_new)
    begin = tl.maximum(num_computed + first + 1 - window, 0) // KEYS * KEYS
    span = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
    begin += split * span
    stop = tl.minimum(begin + span, end)

    highest = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    for at in range(begin, stop, KEYS):
        where = at + tl.arange(0, KEYS)
        is_there = where < stop
        block = tl.load(tables + sequence * table_stride + where // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        offset = block * block_stride + kv_head * head_stride + (where % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(keys + offset[None, :] + dims[:, None], mask=is_there[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(values + offset[:, None] + dims[None, :], mask=is_there[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if IS_ROUNDED:
            # Codes are exact in every type that q has; their scales are applied to what is float32 anyway.
            scale_offset = block * scale_block_stride + kv_head * scale_head_stride + where % BLOCK_SIZE
            scores *= tl.load(key_scales + scale_offset, mask=is_there, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        is_seen = is_there[None, :] & (where[None, :] <= places[:, None])
        is_seen &= where[None, :] > places[:, None] - window
        scores = tl.where(is_seen, scores, _NOTHING)
        now = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - now)
        weights = tl.where(is_seen, tl.exp(scores - now[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        if IS_ROUNDED:
            weights *= tl.load(value_scales + scale_offset, mask=is_there, other=0.0)[None, :]
        sums = sums * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        highest = now

    row = (start + tokens).to(tl.int64) * NUM_HEADS + heads
    if SPLITS == 1:
        result = sums / total[:, None]
        to = output + row[:, None] * HEAD_DIM + dims[None, :]
        tl.store(to, result.to(output.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
    else:
        part = row * SPLITS + split
        to = partial_sums + part[:, None] * HEAD_DIM + dims[None, :]
        tl.store(to, sums, mask=is_row[:, None] & is_dim[None, :])
        tl.store(partial_stats + part * 2, highest, mask=is_row)
        tl.store(partial_stats + part * 2 + 1, total, mask=is_row)


@triton.jit
def combine(
    partial_sums,
    partial_stats,
    output,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Joins the parts of one token and head. Grid: tokens times heads."""
    row = tl.program_id(0).to(tl.int64)
    splits = row * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    highest = tl.load(partial_stats + splits * 2)
    # A part without positions has a total of 0, and weighs nothing.
    weights = tl.exp(highest - tl.max(highest, 0))
    total = tl.sum(tl.load(partial_stats + splits * 2 + 1) * weights, 0)
    sums = tl.load(partial_sums + splits[:, None] * HEAD_DIM + dims[None, :], mask=is_dim[None, :], other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / total
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=is_dim)


@triton.jit
def store(
    key,
    value,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    LARGEST: tl.constexpr,  # code; 0 where values are stored as they are
    IS_INTEGER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Stores one token's key and value of one head. Grid: tokens, key-value heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    block = slot // BLOCK_SIZE
    offset = block * block_stride + head * head_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    scale_offset = block * scale_block_stride + head * scale_head_stride + slot % BLOCK_SIZE
    k_from = key + token * key_token_stride + head * key_head_stride
    v_from = value + token * value_token_stride + head * value_head_stride
    _store_head(k_from, keys + offset, key_scales + scale_offset, LARGEST, IS_INTEGER, HEAD_DIM, DIMS)
    _store_head(v_from, values + offset, value_scales + scale_offset, LARGEST, IS_INTEGER, HEAD_DIM, DIMS)


@triton.jit
def _store_head(
    source,
    target,
    target_scale,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    x = tl.load(source + dims, mask=is_dim, other=0.0)
    if LARGEST > 0:
        x = x.to(tl.float32)
        scale = tl.max(tl.abs(x), 0) / LARGEST
        tl.store(target_scale, scale)
        x = x / tl.where(scale > 0, scale, 1.0)
        if IS_INTEGER:
            # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
            x = (x + 12582912.0) - 12582912.0
    tl.store(target + dims, x.to(target.dtype.element_ty), mask=is_dim)
