# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Conditions on FAMILIES stand alone: what they guard is then not compiled.
# ruff: noqa: SIM102
"""Residual add and RMSNorm of a token with its program run in registers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from eyesplice.ops.kernel_program import prefetch, run_entries
from eyesplice.ops.kernel_simple import first_simple, run_simple
from eyesplice.ops.kernel_words import constant
from eyesplice.ops.layout import Family, Header, Stage

_END_BRANCH = tl.constexpr(int(Header.END_BRANCH))
_WRITES_BRANCH = tl.constexpr(int(Header.WRITES_BRANCH))
_WRITES_STREAM = tl.constexpr(int(Header.WRITES_STREAM))
_STREAM = tl.constexpr(int(Stage.STREAM))
_NORMED = tl.constexpr(int(Stage.NORMED))
_FAMILY_GATE = tl.constexpr(int(Family.GATE))


@triton.jit
def _norm(b_h, b_w, eps, H: tl.constexpr, OFFSET: tl.constexpr, ROUNDED: tl.constexpr):
    """h / sqrt(mean(h^2) + eps) * (w + OFFSET), h fp32, w as loaded."""
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, axis=0) / H + eps)
    if ROUNDED:
        b_y = b_y.to(b_w.dtype).to(tl.float32)
    b_w = b_w.to(tl.float32)
    if OFFSET != 0.0:
        b_w += OFFSET
    return b_y * b_w


@triton.jit
def _row(p, t, stride, o_h, H: tl.constexpr, DENSE: tl.constexpr):
    """Row t; a stride known when compiled saves a chain of integer products."""
    if DENSE:
        return p + t.to(tl.int64) * H + o_h
    return p + t.to(tl.int64) * stride + o_h


@triton.jit
def _values(p_h, p_p, p_x, m_h, HAS_BRANCH: tl.constexpr, HAS_PENDING: tl.constexpr):
    """(stream + pending, branch), fp32."""
    b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
    b_x = tl.zeros_like(b_h)
    if HAS_PENDING:
        b_h += tl.load(p_p, mask=m_h, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        b_x = tl.load(p_x, mask=m_h, other=0.0).to(tl.float32)
    return b_h, b_x


@triton.jit
def _hand_on(p_h, p_x, b_h, m_h, DEFER: tl.constexpr):
    """Store h; a deferred one is stored with a branch of zeros."""
    tl.store(p_h, b_h.to(p_h.dtype.element_ty), mask=m_h)
    if DEFER:
        b_zero = tl.zeros_like(b_h).to(p_x.dtype.element_ty)
        tl.store(p_x, b_zero, mask=m_h)


@triton.jit
def _header(p_row, p_bank, bank_stride, o_h, m_h, HAS_BRANCH: tl.constexpr):
    """(whether x or h is written, last entry, `prefetch` of the first one)."""
    writes = tl.load(p_row + _WRITES_BRANCH) | tl.load(p_row + _WRITES_STREAM)
    end = tl.load(p_row + _END_BRANCH + _NORMED)
    if HAS_BRANCH:
        ahead = prefetch(p_row, 0, end, p_bank, bank_stride, o_h, m_h)
    else:
        first = tl.load(p_row + _END_BRANCH)
        ahead = prefetch(p_row, first, end, p_bank, bank_stride, o_h, m_h)
    return writes, end, ahead


@triton.jit
def boundary_kernel(
    p_stream,
    p_branch,
    p_pending,
    p_weight,
    p_normed,
    p_token_map,
    p_select,
    p_program,
    p_bank,
    work,
    eps,
    stream_stride,
    branch_stride,
    pending_stride,
    program_stride,
    bank_stride,
    score_stride,
    capture_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_PENDING: tl.constexpr,
    DEFER: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    FAMILIES: tl.constexpr,
    OPCODES: tl.constexpr,
    EARLY: tl.constexpr,
    SIMPLE: tl.constexpr,
):
    """h = stream + pending + branch; y = h / sqrt(mean(h^2) + eps) * (weight + offset).

    stream, pending, branch, y `[tokens, H]`; strides in elements, ignored if DENSE: rows
    are H apart; one token an instance; `work` is a tuple of the work tensors.

    What is executed should be short and in one piece. Idle tokens, and with SIMPLE those
    whose programs only add, run straight through the first part of the code; the general
    part is behind it, and there once: a loop over x, h and y.

    EARLY: launched while the kernel before still runs (programmatic dependent launch);
    the row index and the weight are loaded meanwhile, and nothing else may be touched.
    Without SIMPLE, registers are short, and the general part loads its values again: a
    load that hits the cache, where keeping them would make the first part spill.
    """
    t = tl.program_id(0)
    row = constant(p_token_map + t)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    p_w = p_weight + o_h
    b_w = tl.load(p_w, mask=m_h, other=0.0, eviction_policy="evict_last")
    p_row = p_program + row.to(tl.int64) * program_stride
    p_h = _row(p_stream, t, stream_stride, o_h, H, DENSE)
    p_p = p_h
    if HAS_PENDING:
        p_p = _row(p_pending, t, pending_stride, o_h, H, DENSE)
    p_x = p_h
    if HAS_BRANCH:
        p_x = _row(p_branch, t, branch_stride, o_h, H, DENSE)
    p_y = p_normed + t.to(tl.int64) * H + o_h
    if EARLY:
        gdc_wait()
    b_h, b_x = _values(p_h, p_p, p_x, m_h, HAS_BRANCH, HAS_PENDING)
    count = row * 0
    u = row * 0
    b_u = tl.zeros([BLOCK], dtype=p_bank.dtype.element_ty)
    # An integer, not a condition: the compiler then leaves the general part behind.
    general = (row != 0).to(tl.int32)
    if SIMPLE:
        if row != 0:
            count, b_u, u = first_simple(p_row, p_bank, bank_stride, o_h, m_h)
            general = (count < 0).to(tl.int32)
    if general == 0:
        if HAS_BRANCH:
            b_h += b_x
        if SIMPLE:
            b_h = run_simple(
                b_h,
                count,
                b_u,
                u,
                o_h,
                m_h,
                t,
                p_row,
                p_select,
                p_bank,
                bank_stride,
                work,
                FAMILIES,
                OPCODES,
            )
        # A deferred h that a program writes is handed on in the stream.
        if (HAS_BRANCH and not DEFER) | (count > 0):
            _hand_on(p_h, p_x, b_h, m_h, DEFER)
        b_y = _norm(b_h, b_w, eps, H, WEIGHT_OFFSET, ROUND_BEFORE_WEIGHT)
        tl.store(p_y, b_y.to(p_normed.dtype.element_ty), mask=m_h)
    if general != 0:
        before = tl.load(p_select + t)
        writes, end, ahead = _header(p_row, p_bank, bank_stride, o_h, m_h, HAS_BRANCH)
        select = before
        if not SIMPLE:
            b_h, b_x = _values(p_h, p_p, p_x, m_h, HAS_BRANCH, HAS_PENDING)
        b_v = b_x
        if not HAS_BRANCH:
            # Nothing is added: 0 + h would take the sign of a zero of h.
            b_v = b_h
        for stage in tl.range(1 - HAS_BRANCH, 3, loop_unroll_factor=1):
            if HAS_BRANCH:
                if stage == _STREAM:
                    b_v += b_h
            if stage == _NORMED:
                if (writes != 0) | (HAS_BRANCH and not DEFER):
                    _hand_on(p_h, p_x, b_v, m_h, DEFER)
                if not SIMPLE:
                    b_w = tl.load(p_w, mask=m_h, other=0.0)
                b_v = _norm(b_v, b_w, eps, H, WEIGHT_OFFSET, ROUND_BEFORE_WEIGHT)
            # Loaded anew, not carried on: Triton 3.6 takes the bound of an inner loop
            # that an outer one carries for its first value.
            p_end = p_row + _END_BRANCH + stage
            first = tl.load(p_end - 1, mask=stage > 0, other=0)
            last = tl.load(p_end)
            b_v, select, ahead = run_entries(
                b_v,
                select,
                ahead,
                o_h,
                m_h,
                t,
                p_row,
                first,
                last,
                end,
                p_select,
                p_bank,
                bank_stride,
                work,
                score_stride,
                capture_stride,
                FAMILIES,
                OPCODES,
            )
        if _FAMILY_GATE & FAMILIES:
            if select != before:
                tl.store(p_select + t, select)
        tl.store(p_y, b_v.to(p_normed.dtype.element_ty), mask=m_h)
