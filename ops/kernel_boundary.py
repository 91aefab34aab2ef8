# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Residual add and RMSNorm of a token with its program run in registers."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_program import run_entries
from eyesplice.ops.layout import Header

_END_BRANCH = tl.constexpr(int(Header.END_BRANCH))
_END_STREAM = tl.constexpr(int(Header.END_STREAM))
_END_NORMED = tl.constexpr(int(Header.END_NORMED))


@triton.jit
def _boundary_token(
    t,
    b_w,
    o_h,
    m_h,
    p_stream,
    p_branch,
    p_weight,
    p_normed,
    p_row_of_token,
    p_select,
    p_program,
    p_bank,
    eps,
    stream_stride,
    branch_stride,
    program_stride,
    bank_stride,
    H: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
):
    """One token of `boundary_kernel`; an idle one pays the load of its row index."""
    row = tl.load(p_row_of_token + t)
    p_h = p_stream + t.to(tl.int64) * stream_stride + o_h
    b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        p_x = p_branch + t.to(tl.int64) * branch_stride + o_h
        b_x = tl.load(p_x, mask=m_h, other=0.0).to(tl.float32)

    p_row = p_program + row.to(tl.int64) * program_stride
    end_branch = 0
    end_stream = 0
    end_normed = 0
    select = 0
    if row != 0:
        end_branch = tl.load(p_row + _END_BRANCH)
        end_stream = tl.load(p_row + _END_STREAM)
        end_normed = tl.load(p_row + _END_NORMED)
        select = tl.load(p_select + t)
        if HAS_BRANCH:
            b_x = run_entries(
                b_x, o_h, m_h, p_row, select, 0, end_branch, p_bank, bank_stride
            )
    if HAS_BRANCH:
        b_h += b_x
    if row != 0:
        b_h = run_entries(
            b_h, o_h, m_h, p_row, select, end_branch, end_stream, p_bank, bank_stride
        )
    if (row != 0) | HAS_BRANCH:
        tl.store(p_h, b_h.to(p_stream.dtype.element_ty), mask=m_h)

    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, axis=0) / H + eps)
    if ROUND_BEFORE_WEIGHT:
        b_y = b_y.to(p_weight.dtype.element_ty).to(tl.float32)
    b_y *= b_w
    if row != 0:
        b_y = run_entries(
            b_y, o_h, m_h, p_row, select, end_stream, end_normed, p_bank, bank_stride
        )
    p_y = p_normed + t.to(tl.int64) * H + o_h
    tl.store(p_y, b_y.to(p_normed.dtype.element_ty), mask=m_h)


@triton.jit(do_not_specialize=["num_tokens"])
def boundary_kernel(
    p_stream,
    p_branch,
    p_weight,
    p_normed,
    p_row_of_token,
    p_select,
    p_program,
    p_bank,
    weight_offset,
    eps,
    num_tokens,
    stream_stride,
    branch_stride,
    program_stride,
    bank_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
):
    """h = stream + branch; y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset).

    stream, branch, y `[tokens, H]`; strides in elements; TOKENS tokens per instance.
    """
    i = tl.program_id(0)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    # Before the row index: its latency hides behind the one that decides the branch.
    b_w = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32) + weight_offset
    for k in range(TOKENS):
        t = i * TOKENS + k
        if t < num_tokens:
            _boundary_token(
                t,
                b_w,
                o_h,
                m_h,
                p_stream,
                p_branch,
                p_weight,
                p_normed,
                p_row_of_token,
                p_select,
                p_program,
                p_bank,
                eps,
                stream_stride,
                branch_stride,
                program_stride,
                bank_stride,
                H,
                HAS_BRANCH,
                ROUND_BEFORE_WEIGHT,
            )
