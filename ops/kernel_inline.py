# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One stage of the tokens' programs, run in place on a value of any width."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_program import run_entries


@triton.jit
def inline_kernel(
    p_value,
    p_row_of_token,
    p_select,
    p_program,
    p_bank,
    value_stride,
    program_stride,
    bank_stride,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGE: tl.constexpr,
):
    """value[t] = entries of STAGE of token t's program, run on value[t].

    value `[tokens, W]`; a token with no such entry is not written, and an idle one
    costs the load of its row index.
    """
    t = tl.program_id(0)
    row = tl.load(p_row_of_token + t)
    if row != 0:
        p_row = p_program + row.to(tl.int64) * program_stride
        first = 0
        # Header field s is the end of stage s, and so the start of stage s + 1.
        if STAGE > 0:
            first = tl.load(p_row + STAGE - 1)
        last = tl.load(p_row + STAGE)
        if first < last:
            select = tl.load(p_select + t)
            o_h = tl.arange(0, BLOCK)
            m_h = o_h < W
            p_h = p_value + t.to(tl.int64) * value_stride + o_h
            b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
            b_h = run_entries(
                b_h, o_h, m_h, p_row, select, first, last, p_bank, bank_stride
            )
            tl.store(p_h, b_h.to(p_value.dtype.element_ty), mask=m_h)
