# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""How strongly a user's own op acts on each token."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_words import BIT, CLAUSE_MASK, COUNTER, GAIN, OPCODE
from eyesplice.ops.layout import MAX_FUNCTIONS, WORDS, Header, Opcode
from eyesplice.ops.token_map import ROW_MASK

_ROW_MASK = tl.constexpr(ROW_MASK)
_WORDS = tl.constexpr(WORDS)
_MAX_FUNCTIONS = tl.constexpr(MAX_FUNCTIONS)
_END = tl.constexpr(int(Header.END_NORMED))
_CUSTOM = tl.constexpr(int(Opcode.CUSTOM))


@triton.jit(do_not_specialize=["num_tokens"])
def custom_gain_kernel(
    p_gain,
    p_token_map,
    p_select,
    p_program,
    work,
    num_tokens,
    program_stride,
    BLOCK: tl.constexpr,
):
    """gain[t] = the gain of token t's CUSTOM entry where its clauses hold, else 0.

    gain `[num_tokens]` fp32, BLOCK tokens an instance; a row has one entry or none. An
    idle token costs the load of its word.
    """
    b_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_t = b_t < num_tokens
    b_row = tl.load(p_token_map + b_t, mask=m_t, other=0) & _ROW_MASK
    p_row = p_program + b_row.to(tl.int64) * program_stride
    m_t &= b_row != 0
    m_t &= tl.load(p_row + _END, mask=m_t, other=0) > 0
    p_entry = p_row + _WORDS
    m_t &= tl.load(p_entry + OPCODE, mask=m_t, other=0) == _CUSTOM
    b_select = tl.load(p_select + b_t, mask=m_t, other=0)
    acts = m_t & ((b_select & tl.load(p_entry + CLAUSE_MASK, mask=m_t, other=0)) != 0)
    b_gain = tl.load(p_entry + GAIN, mask=acts, other=0).to(tl.float32, bitcast=True)
    tl.store(p_gain + b_t, b_gain, mask=b_t < num_tokens)
    b_counter = tl.load(p_entry + COUNTER, mask=m_t, other=0)
    m_t &= b_counter > 0
    b_slot = tl.load(work.slot_of_token + b_t, mask=m_t, other=0)
    p_count = work.counts + b_slot * (2 * _MAX_FUNCTIONS) + b_counter - 1
    tl.atomic_add(p_count, 1, mask=acts & m_t, sem="relaxed")
    would = m_t & ((b_select & tl.load(p_entry + BIT, mask=m_t, other=0)) != 0)
    tl.atomic_add(p_count + _MAX_FUNCTIONS, 1, mask=would, sem="relaxed")
