# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Conditions on FAMILIES stand alone: what they guard is then not compiled.
# ruff: noqa: SIM102
"""Residual add and RMSNorm of a token with its program run in registers."""

import triton
import triton.language as tl

from eyesplice.ops.kernel_program import run_entries
from eyesplice.ops.layout import Family, Header, Stage

_END_BRANCH = tl.constexpr(int(Header.END_BRANCH))
_WRITES_BRANCH = tl.constexpr(int(Header.WRITES_BRANCH))
_WRITES_STREAM = tl.constexpr(int(Header.WRITES_STREAM))
_STREAM = tl.constexpr(int(Stage.STREAM))
_NORMED = tl.constexpr(int(Stage.NORMED))
_FAMILY_GATE = tl.constexpr(int(Family.GATE))


@triton.jit
def _norm(b_h, b_w, weight_offset, eps, H: tl.constexpr, ROUNDED: tl.constexpr):
    """h / sqrt(mean(h^2) + eps) * (w + weight_offset), h fp32, w as loaded."""
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, axis=0) / H + eps)
    if ROUNDED:
        b_y = b_y.to(b_w.dtype).to(tl.float32)
    return b_y * (b_w.to(tl.float32) + weight_offset)


@triton.jit(do_not_specialize=["num_tokens"])
def boundary_kernel(
    p_stream,
    p_branch,
    p_pending,
    p_weight,
    p_normed,
    p_row_of_token,
    p_select,
    p_program,
    p_bank,
    work,
    weight_offset,
    eps,
    num_tokens,
    stream_stride,
    branch_stride,
    pending_stride,
    program_stride,
    bank_stride,
    score_stride,
    capture_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_PENDING: tl.constexpr,
    DEFER: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    FAMILIES: tl.constexpr,
    OPCODES: tl.constexpr,
):
    """h = stream + pending + branch; y = h / sqrt(mean(h^2) + eps) * (weight + offset).

    stream, pending, branch, y `[tokens, H]`; strides in elements; TOKENS tokens an
    instance; `work` is a tuple of the work tensors.
    The idle token's path is a straight line but for the branch on its row index.
    """
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    p_w = p_weight + o_h
    # First, and used on both paths: then it is in flight before the branch is decided.
    b_w = tl.load(p_w, mask=m_h, other=0.0)
    for k in range(TOKENS):
        t = tl.program_id(0) * TOKENS + k
        if t < num_tokens:
            row = tl.load(p_row_of_token + t)
            p_h = p_stream + t.to(tl.int64) * stream_stride + o_h
            b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
            b_x = tl.zeros_like(b_h)
            if HAS_PENDING:
                p_p = p_pending + t.to(tl.int64) * pending_stride + o_h
                b_h += tl.load(p_p, mask=m_h, other=0.0).to(tl.float32)
            if HAS_BRANCH:
                p_x = p_branch + t.to(tl.int64) * branch_stride + o_h
                b_x = tl.load(p_x, mask=m_h, other=0.0).to(tl.float32)
            p_y = p_normed + t.to(tl.int64) * H + o_h
            if row == 0:
                if HAS_BRANCH:
                    b_h += b_x
                if HAS_BRANCH and not DEFER:
                    tl.store(p_h, b_h.to(p_stream.dtype.element_ty), mask=m_h)
                b_y = _norm(b_h, b_w, weight_offset, eps, H, ROUND_BEFORE_WEIGHT)
                tl.store(p_y, b_y.to(p_normed.dtype.element_ty), mask=m_h)
            else:
                p_row = p_program + row.to(tl.int64) * program_stride
                writes = tl.load(p_row + _WRITES_BRANCH)
                writes |= tl.load(p_row + _WRITES_STREAM)
                before = tl.load(p_select + t)
                select = before
                b_v = b_x
                first = row * 0
                if not HAS_BRANCH:
                    first = tl.load(p_row + _END_BRANCH)
                # One loop for x, h and y: the code of the entries is there once. A kernel
                # that fills the instruction cache is slow on its idle path too.
                for stage in tl.range(1 - HAS_BRANCH, 3, loop_unroll_factor=1):
                    if stage == _STREAM:
                        b_v += b_h
                    if stage == _NORMED:
                        # A deferred h that a program writes is handed on in the stream.
                        if (writes != 0) | (HAS_BRANCH and not DEFER):
                            tl.store(p_h, b_v.to(p_stream.dtype.element_ty), mask=m_h)
                            if DEFER:
                                b_zero = tl.zeros_like(b_v)
                                b_zero = b_zero.to(p_branch.dtype.element_ty)
                                tl.store(p_x, b_zero, mask=m_h)
                        b_v = _norm(
                            b_v, b_w, weight_offset, eps, H, ROUND_BEFORE_WEIGHT
                        )
                    last = tl.load(p_row + _END_BRANCH + stage)
                    b_v, select = run_entries(
                        b_v,
                        select,
                        o_h,
                        m_h,
                        t,
                        p_row,
                        first,
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
                    first = last
                if _FAMILY_GATE & FAMILIES:
                    if select != before:
                        tl.store(p_select + t, select)
                tl.store(p_y, b_v.to(p_normed.dtype.element_ty), mask=m_h)
