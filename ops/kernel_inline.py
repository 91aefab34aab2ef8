# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Conditions on FAMILIES stand alone: what they guard is then not compiled.
# ruff: noqa: SIM102
"""One stage of the tokens' programs, run in place on a value of any width."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_program import prefetch, run_entries
from eyesplice.ops.layout import Family, Header
from eyesplice.ops.token_map import ROW_MASK

_ROW_MASK = tl.constexpr(ROW_MASK)
_END = tl.constexpr(int(Header.END_BRANCH))
_WRITES = tl.constexpr(int(Header.WRITES_BRANCH))
_FAMILY_GATE = tl.constexpr(int(Family.GATE))


@triton.jit
def inline_kernel(
    p_value,
    p_token_map,
    p_select,
    p_program,
    p_bank,
    work,
    value_stride,
    program_stride,
    bank_stride,
    score_stride,
    capture_stride,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGE: tl.constexpr,
    FAMILIES: tl.constexpr,
    OPCODES: tl.constexpr,
):
    """value[t] = entries of STAGE of token t's program, run on value[t].

    value `[tokens, W]`; a token with no entry that writes it is not written, and an
    idle one costs the load of its word.
    """
    t = tl.program_id(0)
    row = tl.load(p_token_map + t) & _ROW_MASK
    if row != 0:
        p_row = p_program + row.to(tl.int64) * program_stride
        first = 0
        if STAGE > 0:
            first = tl.load(p_row + _END + STAGE - 1)
        last = tl.load(p_row + _END + STAGE)
        if first < last:
            before = tl.load(p_select + t)
            o_h = tl.arange(0, BLOCK)
            m_h = o_h < W
            ahead = prefetch(p_row, first, last, p_bank, bank_stride, o_h, m_h)
            p_h = p_value + t.to(tl.int64) * value_stride + o_h
            b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
            b_h, select, ahead = run_entries(
                b_h,
                before,
                ahead,
                o_h,
                m_h,
                t,
                p_row,
                first,
                last,
                last,
                p_select,
                p_bank,
                bank_stride,
                work,
                score_stride,
                capture_stride,
                FAMILIES,
                OPCODES,
            )
            if tl.load(p_row + _WRITES + STAGE) != 0:
                tl.store(p_h, b_h.to(p_value.dtype.element_ty), mask=m_h)
            if _FAMILY_GATE & FAMILIES:
                if select != before:
                    tl.store(p_select + t, select)
