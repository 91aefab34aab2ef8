# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The per-token maps of one step: program row and true clauses of every token."""

import triton
import triton.language as tl

from eyesplice.ops.layout import (
    CLAUSE_WORDS,
    MAX_CLAUSES,
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    ClauseKind,
)

_CLAUSE_WORDS = tl.constexpr(CLAUSE_WORDS)
_MAX_CLAUSES = tl.constexpr(MAX_CLAUSES)
_START_FROM_END = tl.constexpr(RANGE_START_FROM_PROMPT_END)
_STOP_FROM_END = tl.constexpr(RANGE_STOP_FROM_PROMPT_END)

_ALL = tl.constexpr(int(ClauseKind.ALL))
_PROMPT = tl.constexpr(int(ClauseKind.PROMPT))
_GENERATED = tl.constexpr(int(ClauseKind.GENERATED))
_LAST = tl.constexpr(int(ClauseKind.LAST))
_RANGE = tl.constexpr(int(ClauseKind.RANGE))
_AND = tl.constexpr(int(ClauseKind.AND))
_OR = tl.constexpr(int(ClauseKind.OR))
_NOR = tl.constexpr(int(ClauseKind.NOR))


@triton.jit
def _clause_bits(p_clauses, clauses_stride, row, b_pos, prompt_len):
    """`[BLOCK]` int32, bit j = clause j of a row at positions `b_pos`."""
    p_clauses += row.to(tl.int64) * clauses_stride
    n = prompt_len.to(tl.int64)
    b_bits = tl.zeros_like(b_pos).to(tl.int32)
    for j in range(_MAX_CLAUSES):
        p_clause = p_clauses + j * _CLAUSE_WORDS
        kind = tl.load(p_clause)
        a = tl.load(p_clause + 1)
        b = tl.load(p_clause + 2)
        flags = tl.load(p_clause + 3)
        # int64: an open range ends at INT32_MAX, which may count from the prompt's end.
        start = a.to(tl.int64) + tl.where((flags & _START_FROM_END) != 0, n, 0)
        stop = b.to(tl.int64) + tl.where((flags & _STOP_FROM_END) != 0, n, 0)
        b_true = (tl.zeros_like(b_bits) == 0) & (kind == _ALL)
        b_true |= (b_pos < n) & (kind == _PROMPT)
        b_true |= (b_pos >= n) & (kind == _GENERATED)
        b_true |= (b_pos == n - 1) & (kind == _LAST)
        b_true |= (b_pos >= start) & (b_pos < stop) & (kind == _RANGE)
        b_true |= ((b_bits & a) == a) & (kind == _AND)
        b_true |= ((b_bits & a) != 0) & (kind == _OR)
        b_true |= ((b_bits & a) == 0) & (kind == _NOR)
        b_bits |= b_true.to(tl.int32) << j
    return b_bits


@triton.jit(do_not_specialize=["num_requests", "extent"])
def route_kernel(
    p_row_of_token,
    p_select,
    p_request_row,
    p_prompt_len,
    p_query_start_loc,
    p_positions,
    p_clauses,
    num_requests,
    extent,
    clauses_stride,
    BLOCK: tl.constexpr,
):
    """row_of_token[t] = request_row[i], select[t] = its clauses, for tokens t of i.

    Instance i < num_requests does request i; the last one makes tokens idle from the
    last request's end up to `extent`.
    """
    i = tl.program_id(0)
    o_t = tl.arange(0, BLOCK)
    first = 0
    last = extent
    row = 0
    prompt_len = 0
    if i < num_requests:
        first = tl.load(p_query_start_loc + i)
        last = tl.load(p_query_start_loc + i + 1)
        row = tl.load(p_request_row + i)
        prompt_len = tl.load(p_prompt_len + i)
    elif num_requests > 0:
        first = tl.load(p_query_start_loc + num_requests)
    for start in range(first, last, BLOCK):
        b_t = start + o_t
        m_t = b_t < last
        b_bits = tl.zeros([BLOCK], dtype=tl.int32)
        if row != 0:
            b_pos = tl.load(p_positions + b_t, mask=m_t, other=0).to(tl.int64)
            b_bits = _clause_bits(p_clauses, clauses_stride, row, b_pos, prompt_len)
        tl.store(p_row_of_token + b_t, tl.zeros_like(b_bits) + row, mask=m_t)
        tl.store(p_select + b_t, b_bits, mask=m_t)
