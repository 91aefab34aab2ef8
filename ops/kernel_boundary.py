# Parameters of a jit function have types only when it is compiled.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Conditions on FAMILIES stand alone: what they guard is then not compiled.
# ruff: noqa: SIM102
"""Residual add and RMSNorm of a token with its program run in registers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from eyesplice.ops.kernel_adds import first_adds, run_adds, run_adds_in_turn
from eyesplice.ops.kernel_program import prefetch, run_entries
from eyesplice.ops.kernel_simple import first_simple, run_simple
from eyesplice.ops.kernel_words import constant
from eyesplice.ops.layout import Family, Header, Stage
from eyesplice.ops.token_map import ADDS_SHIFT, ROW_MASK

_END_BRANCH = tl.constexpr(int(Header.END_BRANCH))
_WRITES_BRANCH = tl.constexpr(int(Header.WRITES_BRANCH))
_WRITES_STREAM = tl.constexpr(int(Header.WRITES_STREAM))
_STREAM = tl.constexpr(int(Stage.STREAM))
_NORMED = tl.constexpr(int(Stage.NORMED))
_ROW_MASK = tl.constexpr(ROW_MASK)
_ADDS_SHIFT = tl.constexpr(ADDS_SHIFT)
_FAMILY_ADD = tl.constexpr(int(Family.ADD))
_FAMILY_GATE = tl.constexpr(int(Family.GATE))


@triton.jit
def _norm(
    b_h,
    b_w,
    H: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """h / sqrt(mean(h^2) + EPS) * (w + OFFSET), h fp32, w as loaded."""
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, axis=0) / H + EPS)
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
def _rows(
    p_stream,
    p_branch,
    p_pending,
    t,
    stream_stride,
    branch_stride,
    pending_stride,
    o_h,
    H: tl.constexpr,
    DENSE: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_PENDING: tl.constexpr,
):
    """Row t of the stream, of pending and of the branch; the stream's for what is not."""
    p_h = _row(p_stream, t, stream_stride, o_h, H, DENSE)
    p_p = p_h
    if HAS_PENDING:
        p_p = _row(p_pending, t, pending_stride, o_h, H, DENSE)
    p_x = p_h
    if HAS_BRANCH:
        p_x = _row(p_branch, t, branch_stride, o_h, H, DENSE)
    return p_h, p_p, p_x


@triton.jit
def _load(p_h, p_p, p_x, m_h, HAS_BRANCH: tl.constexpr, HAS_PENDING: tl.constexpr):
    """(stream, pending, branch) as stored; what there is not is the stream."""
    b_s = tl.load(p_h, mask=m_h, other=0.0)
    b_p = b_s
    if HAS_PENDING:
        b_p = tl.load(p_p, mask=m_h, other=0.0)
    b_x = b_s
    if HAS_BRANCH:
        b_x = tl.load(p_x, mask=m_h, other=0.0)
    return b_s, b_p, b_x


@triton.jit
def _before(loaded, HAS_PENDING: tl.constexpr):
    """stream + pending, fp32."""
    b_h = loaded[0].to(tl.float32)
    if HAS_PENDING:
        b_h += loaded[1].to(tl.float32)
    return b_h


@triton.jit
def _total(loaded, HAS_BRANCH: tl.constexpr, HAS_PENDING: tl.constexpr):
    """stream + pending + branch, fp32."""
    b_h = _before(loaded, HAS_PENDING)
    if HAS_BRANCH:
        b_h += loaded[2].to(tl.float32)
    return b_h


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
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    FAMILIES: tl.constexpr,
    OPCODES: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    SIMPLE: tl.constexpr,
):
    """h = stream + pending + branch; y = h / sqrt(mean(h^2) + EPS) * (weight + offset).

    stream, pending, branch, y `[tokens, H]`; strides in elements, ignored if DENSE: rows
    are H apart; one token an instance; `work` is a tuple of the work tensors.

    What idle tokens need of the arguments are the first pointers, 48 bytes: an argument
    further behind is in another line of the constant cache, and is waited for.

    What is executed should be short and in one piece. Idle tokens run straight through
    the first part of the code and nothing else; behind it are, each with its norm, the
    programs that only add vectors, with SIMPLE those of simple entries, and the general
    part, there once: a loop over x, h and y.

    EARLY: launched while the kernel before still runs (programmatic dependent launch);
    the token's word and the weight are loaded meanwhile, and nothing else may be touched.
    AHEAD: vectors that are added are loaded together, not one after another.
    Without SIMPLE, registers are short, and the general part loads its values again: a
    load that hits the cache, where keeping them would make the first part spill.
    """
    t = tl.program_id(0)
    word = constant(p_token_map + t)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    p_w = p_weight + o_h
    b_w = tl.load(p_w, mask=m_h, other=0.0, eviction_policy="evict_last")
    p_h, p_p, p_x = _rows(
        p_stream,
        p_branch,
        p_pending,
        t,
        stream_stride,
        branch_stride,
        pending_stride,
        o_h,
        H,
        DENSE,
        HAS_BRANCH,
        HAS_PENDING,
    )
    p_y = p_normed + t.to(tl.int64) * H + o_h
    if EARLY:
        gdc_wait()
    # As stored: a conversion waits for its value, and what an active token has to
    # load should be on its way by then.
    loaded = _load(p_h, p_p, p_x, m_h, HAS_BRANCH, HAS_PENDING)
    if word == 0:
        b_h = _total(loaded, HAS_BRANCH, HAS_PENDING)
        if HAS_BRANCH and not DEFER:
            _hand_on(p_h, p_x, b_h, m_h, DEFER)
        b_y = _norm(b_h, b_w, H, EPS, WEIGHT_OFFSET, ROUND_BEFORE_WEIGHT)
        tl.store(p_y, b_y.to(p_normed.dtype.element_ty), mask=m_h)
    else:
        if not SIMPLE:
            # The same token, in words that the compiler cannot see through: a word is
            # never negative. It would keep addresses and values in registers through
            # the idle part otherwise, where there are none to spare.
            t += word >> 31
            p_h, p_p, p_x = _rows(
                p_stream,
                p_branch,
                p_pending,
                t,
                stream_stride,
                branch_stride,
                pending_stride,
                o_h,
                H,
                DENSE,
                HAS_BRANCH,
                HAS_PENDING,
            )
            p_y = p_normed + t.to(tl.int64) * H + o_h
        row = word & _ROW_MASK
        p_row = p_program + row.to(tl.int64) * program_stride
        adds = row * 0
        if _FAMILY_ADD & FAMILIES:
            adds = word >> _ADDS_SHIFT
        count = row * 0
        # An integer, not a condition: the compiler then leaves the general part behind.
        general = (adds == 0).to(tl.int32)
        b_h = tl.zeros([BLOCK], dtype=tl.float32)
        if adds != 0:
            if AHEAD:
                begun = first_adds(
                    word, adds, p_row, p_select + t, p_bank, bank_stride, o_h, m_h
                )
                b_h = _total(loaded, HAS_BRANCH, HAS_PENDING)
                b_h = run_adds(b_h, adds, begun, p_row, p_bank, bank_stride, o_h, m_h)
            else:
                b_h = _total(loaded, HAS_BRANCH, HAS_PENDING)
                b_h = run_adds_in_turn(
                    b_h, adds, p_row, p_select + t, p_bank, bank_stride, o_h, m_h
                )
        if SIMPLE:
            if adds == 0:
                count, b_u, u = first_simple(p_row, p_bank, bank_stride, o_h, m_h)
                general = (count < 0).to(tl.int32)
                if general == 0:
                    b_h = _total(loaded, HAS_BRANCH, HAS_PENDING)
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
        if general == 0:
            # A deferred h that a program writes is handed on in the stream.
            if (HAS_BRANCH and not DEFER) | (adds + count > 0):
                _hand_on(p_h, p_x, b_h, m_h, DEFER)
            b_y = _norm(b_h, b_w, H, EPS, WEIGHT_OFFSET, ROUND_BEFORE_WEIGHT)
            tl.store(p_y, b_y.to(p_normed.dtype.element_ty), mask=m_h)
        if general != 0:
            before = tl.load(p_select + t)
            writes, end, ahead = _header(
                p_row, p_bank, bank_stride, o_h, m_h, HAS_BRANCH
            )
            select = before
            if not SIMPLE:
                loaded = _load(p_h, p_p, p_x, m_h, HAS_BRANCH, HAS_PENDING)
            b_h = _before(loaded, HAS_PENDING)
            # Without a branch nothing is added: 0 + h would take the sign of a zero of h.
            b_v = b_h
            if HAS_BRANCH:
                b_v = loaded[2].to(tl.float32)
            for stage in tl.range(1 - HAS_BRANCH, 3, loop_unroll_factor=1):
                if HAS_BRANCH:
                    if stage == _STREAM:
                        b_v += b_h
                if stage == _NORMED:
                    if (writes != 0) | (HAS_BRANCH and not DEFER):
                        _hand_on(p_h, p_x, b_v, m_h, DEFER)
                    if not SIMPLE:
                        b_w = tl.load(p_w, mask=m_h, other=0.0)
                    b_v = _norm(b_v, b_w, H, EPS, WEIGHT_OFFSET, ROUND_BEFORE_WEIGHT)
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
