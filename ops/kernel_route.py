# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The per-token maps of one step: true clauses of a token and its work at each boundary."""

import triton
import triton.language as tl

from eyesplice.ops.layout import (
    CLAUSE_WORDS,
    MAX_CLAUSES,
    RANGE_START_FROM_PROMPT_END,
    RANGE_STOP_FROM_PROMPT_END,
    SLOT_WORDS,
    WORDS,
    ClauseKind,
    Header,
    LogHead,
    PerRequest,
    Slot,
    Word,
)
from eyesplice.ops.token_map import ADDS_SHIFT, ROW_BITS, VECTOR_MASK

_CLAUSE_WORDS = tl.constexpr(CLAUSE_WORDS)
_MAX_CLAUSES = tl.constexpr(MAX_CLAUSES)
_START_FROM_END = tl.constexpr(RANGE_START_FROM_PROMPT_END)
_STOP_FROM_END = tl.constexpr(RANGE_STOP_FROM_PROMPT_END)

_FALSE = tl.constexpr(int(ClauseKind.FALSE))
_ALL = tl.constexpr(int(ClauseKind.ALL))
_PROMPT = tl.constexpr(int(ClauseKind.PROMPT))
_GENERATED = tl.constexpr(int(ClauseKind.GENERATED))
_LAST = tl.constexpr(int(ClauseKind.LAST))
_RANGE = tl.constexpr(int(ClauseKind.RANGE))
_AND = tl.constexpr(int(ClauseKind.AND))
_OR = tl.constexpr(int(ClauseKind.OR))
_NOR = tl.constexpr(int(ClauseKind.NOR))
_TOKEN_LIST = tl.constexpr(int(ClauseKind.TOKEN_LIST))
_TOKEN_SET = tl.constexpr(int(ClauseKind.TOKEN_SET))
_AFTER = tl.constexpr(int(ClauseKind.AFTER))

_ROW = tl.constexpr(int(PerRequest.ROW))
_PROMPT_LEN = tl.constexpr(int(PerRequest.PROMPT_LEN))
_SLOT = tl.constexpr(int(PerRequest.SLOT))
_SCORES = tl.constexpr(int(PerRequest.SCORES))

_SLOT_WORDS = tl.constexpr(SLOT_WORDS)
_SLOT_FIRST_TOKEN = tl.constexpr(int(Slot.FIRST_TOKEN))
_SLOT_FIRST_POSITION = tl.constexpr(int(Slot.FIRST_POSITION))
_SLOT_PROMPT_LEN = tl.constexpr(int(Slot.PROMPT_LEN))
_SLOT_SEEN = tl.constexpr(int(Slot.SEEN))

_END = tl.constexpr(int(Header.END_NORMED))
_ADDS = tl.constexpr(int(Header.ADDS))
_CLAUSES = tl.constexpr(int(Header.CLAUSES))
_FIRST_U = tl.constexpr(WORDS + int(Word.U))
_ROW_BITS = tl.constexpr(ROW_BITS)
_VECTOR_MASK = tl.constexpr(VECTOR_MASK)
_ADDS_SHIFT = tl.constexpr(ADDS_SHIFT)

_LOG_COUNT = tl.constexpr(int(LogHead.COUNT))
_LOG_START = tl.constexpr(int(LogHead.START))
_LOG_LIMIT = tl.constexpr(int(LogHead.LIMIT))


@triton.jit
def bits_or(a, b):
    """The combination of a reduction."""
    return a | b


@triton.jit
def _by_token(kind, a, b, b_id, p_ids, p_sets, sets_stride, set_words):
    """TOKEN_LIST and TOKEN_SET: whether each token's id is one of those named."""
    b_true = b_id != b_id
    if kind == _TOKEN_LIST:
        for i in range(a, b):
            b_true |= b_id == tl.load(p_ids + i)
    if kind == _TOKEN_SET:
        m_id = (b_id >= 0) & (b_id < 32 * set_words)
        p_word = p_sets + a.to(tl.int64) * sets_stride + (b_id >> 5)
        b_word = tl.load(p_word, mask=m_id, other=0)
        b_true = ((b_word >> (b_id & 31)) & 1) != 0
    return b_true


@triton.jit
def _clause_bits(
    p_clauses,
    row,
    clauses_stride,
    b_pos,
    b_id,
    m_t,
    b_seen,
    prompt_len,
    p_ids,
    ids_stride,
    p_sets,
    sets_stride,
    set_words,
):
    """`[BLOCK]` int32, bit j = clause j of a row, 0 outside `m_t`.

    `b_seen` holds in any of its words the bits of the tokens before this block.
    """
    p_clauses += row.to(tl.int64) * clauses_stride
    p_ids += row.to(tl.int64) * ids_stride
    n = prompt_len.to(tl.int64)
    b_bits = tl.zeros_like(b_id)
    # Most programs have one or two: each would wait for its load, after the last as well.
    o_j = tl.arange(0, _MAX_CLAUSES)
    b_kind = tl.load(p_clauses + o_j * _CLAUSE_WORDS)
    for j in range(tl.max(tl.where(b_kind != _FALSE, o_j + 1, 0), axis=0)):
        p_clause = p_clauses + j * _CLAUSE_WORDS
        kind = tl.load(p_clause)
        a = tl.load(p_clause + 1)
        b = tl.load(p_clause + 2)
        flags = tl.load(p_clause + 3)
        # int64: an open range ends at INT32_MAX, which may count from the prompt's end.
        start = a.to(tl.int64) + tl.where((flags & _START_FROM_END) != 0, n, 0)
        stop = b.to(tl.int64) + tl.where((flags & _STOP_FROM_END) != 0, n, 0)
        b_true = m_t & (kind == _ALL)
        b_true |= (b_pos < n) & (kind == _PROMPT)
        b_true |= (b_pos >= n) & (kind == _GENERATED)
        b_true |= (b_pos == n - 1) & (kind == _LAST)
        b_true |= (b_pos >= start) & (b_pos < stop) & (kind == _RANGE)
        b_true |= ((b_bits & a) == a) & (kind == _AND)
        b_true |= ((b_bits & a) != 0) & (kind == _OR)
        b_true |= ((b_bits & a) == 0) & (kind == _NOR)
        if (kind == _TOKEN_LIST) | (kind == _TOKEN_SET):
            b_true = _by_token(kind, a, b, b_id, p_ids, p_sets, sets_stride, set_words)
        if kind == _AFTER:
            seen = tl.max(((b_seen & a) != 0).to(tl.int32), axis=0)
            b_hit = ((b_bits & a) != 0).to(tl.int32)
            b_true = (seen + tl.cumsum(b_hit, axis=0) - b_hit) > 0
        b_bits |= (b_true & m_t).to(tl.int32) << j
    return b_bits


@triton.jit
def _begin_request(p_slots, p_positions, first, slot, prompt_len):
    """Where the request's step begins."""
    p_slot = p_slots + slot * _SLOT_WORDS
    position = tl.load(p_positions + first).to(tl.int32)
    tl.store(p_slot + _SLOT_FIRST_TOKEN, first)
    tl.store(p_slot + _SLOT_FIRST_POSITION, position)
    tl.store(p_slot + _SLOT_PROMPT_LEN, prompt_len)


@triton.jit
def _begin_log(p_log, start, limit):
    """The head of this step's captures."""
    tl.store(p_log + _LOG_COUNT, 0)
    tl.store(p_log + _LOG_START, start)
    tl.store(p_log + _LOG_LIMIT, limit)


@triton.jit
def _row_words(row, o_k, m_k, p_program, table_stride, row_stride):
    """Of a row in tables k: its words, `Header.CLAUSES`, and its words under no clause."""
    b_row = tl.zeros_like(o_k) + row
    m_row = m_k & (b_row != 0)
    p_row = p_program + o_k.to(tl.int64) * table_stride
    p_row += b_row.to(tl.int64) * row_stride
    b_end = tl.load(p_row + _END, mask=m_row, other=0)
    b_adds = tl.load(p_row + _ADDS, mask=m_row, other=0)
    b_u = tl.load(p_row + _FIRST_U, mask=m_row, other=0)
    b_clauses = tl.load(p_row + _CLAUSES, mask=m_row, other=0)
    b_adds = tl.where((b_u > 0) & (b_u <= _VECTOR_MASK), b_adds, 0)
    b_u = tl.where(b_adds > 0, b_u, 0)
    b_word = (b_u << _ROW_BITS) | (b_adds << _ADDS_SHIFT) | b_row
    b_word = tl.where(b_end > 0, b_word, 0)
    return b_word, b_clauses, tl.where(b_clauses == 0, b_word, 0)


@triton.jit
def _map_tokens(
    p_map,
    map_stride,
    p_select,
    first,
    last,
    row,
    p_program,
    table_stride,
    row_stride,
    num_tables,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """map[k, t] = the word of a row in table k, for tokens t from first to last.

    A few tables at a time: their words stay in registers while the tokens go by.
    """
    o_t = tl.arange(0, BLOCK)
    for start_k in range(0, num_tables, TABLES):
        o_k = start_k + tl.arange(0, TABLES)
        m_k = o_k < num_tables
        b_word, b_clauses, b_else = _row_words(
            row, o_k, m_k, p_program, table_stride, row_stride
        )
        p_k = p_map + o_k.to(tl.int64)[:, None] * map_stride
        for start in range(first, last, BLOCK):
            b_t = start + o_t
            m_t = b_t < last
            b_bits = tl.load(p_select + b_t, mask=m_t, other=0)
            b_acts = (b_bits[None, :] & b_clauses[:, None]) != 0
            b_words = tl.where(b_acts, b_word[:, None], b_else[:, None])
            tl.store(p_k + b_t[None, :], b_words, mask=m_k[:, None] & m_t[None, :])


@triton.jit(
    do_not_specialize=["num_requests", "extent", "capture_start", "capture_limit"]
)
def route_kernel(
    p_token_map,
    p_program,
    p_select,
    work,
    p_per_request,
    p_query_start_loc,
    p_positions,
    p_token_ids_of_step,
    p_clauses,
    p_token_ids,
    p_token_sets,
    num_requests,
    extent,
    capture_start,
    capture_limit,
    per_request_stride,
    clauses_stride,
    token_ids_stride,
    sets_stride,
    set_words,
    score_stride,
    map_stride,
    table_stride,
    row_stride,
    num_tables,
    TABLES: tl.constexpr,
    MAP_TABLES: tl.constexpr,
    MAP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """select[t] = clauses of request i, token_map[:, t] = its words, for tokens t of i.

    Instance i < num_requests does request i; the last one makes tokens idle from the
    last request's end up to `extent`, and begins the captures.
    """
    i = tl.program_id(0)
    o_t = tl.arange(0, BLOCK)
    first = 0
    last = extent
    row = 0
    prompt_len = 0
    slot = 0
    num_scores = 0
    seen = 0
    if i < num_requests:
        first = tl.load(p_query_start_loc + i)
        last = tl.load(p_query_start_loc + i + 1)
        p_request = p_per_request + i
        row = tl.load(p_request + _ROW * per_request_stride)
        prompt_len = tl.load(p_request + _PROMPT_LEN * per_request_stride)
        slot = tl.load(p_request + _SLOT * per_request_stride)
        num_scores = tl.load(p_request + _SCORES * per_request_stride)
    else:
        _begin_log(work.capture_log, capture_start, capture_limit)
        if num_requests > 0:
            first = tl.load(p_query_start_loc + num_requests)
    # For several tokens this only brings near what `_map_tokens` loads.
    o_k = tl.arange(0, TABLES)
    m_k = o_k < num_tables
    b_word, b_clauses, b_else = _row_words(
        row, o_k, m_k, p_program, table_stride, row_stride
    )
    begins = (slot != 0) & (first < last)
    if begins:
        _begin_request(work.slots, p_positions, first, slot, prompt_len)
        seen = tl.load(work.slots + slot * _SLOT_WORDS + _SLOT_SEEN)
    b_seen = tl.zeros([BLOCK], dtype=tl.int32) + seen
    for start in range(first, last, BLOCK):
        b_t = start + o_t
        m_t = b_t < last
        b_bits = tl.zeros([BLOCK], dtype=tl.int32)
        if row != 0:
            b_pos = tl.load(p_positions + b_t, mask=m_t, other=0).to(tl.int64)
            b_id = tl.load(p_token_ids_of_step + b_t, mask=m_t, other=-1).to(tl.int32)
            b_bits = _clause_bits(
                p_clauses,
                row,
                clauses_stride,
                b_pos,
                b_id,
                m_t,
                b_seen,
                prompt_len,
                p_token_ids,
                token_ids_stride,
                p_token_sets,
                sets_stride,
                set_words,
            )
            b_seen |= b_bits
        tl.store(p_select + b_t, b_bits, mask=m_t)
        tl.store(work.slot_of_token + b_t, tl.zeros_like(b_bits) + slot, mask=m_t)
        p_score = work.score + b_t.to(tl.int64) * score_stride
        for k in range(num_scores):
            b_none = tl.full([BLOCK], float("nan"), dtype=tl.float32)
            tl.store(p_score + k, b_none, mask=m_t)
    # The clauses that other threads have stored.
    tl.debug_barrier()
    if last - first == 1:
        b_acts = (tl.load(p_select + first) & b_clauses) != 0
        p_word = p_token_map + o_k.to(tl.int64) * map_stride + first
        tl.store(p_word, tl.where(b_acts, b_word, b_else), mask=m_k)
    else:
        _map_tokens(
            p_token_map,
            map_stride,
            p_select,
            first,
            last,
            row,
            p_program,
            table_stride,
            row_stride,
            num_tables,
            MAP_TABLES,
            MAP_BLOCK,
        )
    if begins & (row != 0):
        seen = tl.reduce(b_seen, 0, bits_or)
        tl.store(work.slots + slot * _SLOT_WORDS + _SLOT_SEEN, seen)
