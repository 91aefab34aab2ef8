"""The layout of the tables that the ops read: one place, shared by every writer.

A **program** is what one request does to the model. It occupies one **row** of every
table; row 0 is the empty program of idle and padding tokens. A request with a program
has a **slot**, where its own state lies; slot 0 belongs to nobody.

    program  int32 [tables, rows, 1 + max_entries, WORDS]
             entry 0 of a row is its header, the rest are its entries, sorted by stage
    bank     model dtype [bank_rows, width]; row 0 is all zeros
    clauses  int32 [rows, MAX_CLAUSES, CLAUSE_WORDS]
    token_ids   int32 [rows, MAX_TOKEN_IDS], the ids that TOKEN_LIST clauses name
    token_sets  int32 [sets, ceil(vocabulary / 32)], a bit per token id, for TOKEN_SET
    reads    int32 [rows, max_scores + 1]: the `Scope` of each score of the program, and
             last the bits of `select` that its latches set

There is one program table per residual-stream boundary (three stages: the branch `x`
that is added, the stream `h`, the normed `y`), one per other armed value, and one per
user's own op at a site.

What the ops write for one another and for the host, the `WORK` tensors:

    slot_of_token  int32 [max_tokens], the slot of each token's request
    slots        int32 [slots, SLOT_WORDS], see `Slot`
    counts       int32 [slots, 2, MAX_FUNCTIONS]: tokens on which a function acted, and
                 tokens on which it would have acted but for its gate
    score        fp32 [max_tokens, max_scores]; NaN where nothing was read
    carry        int64 [slots, max_scores, CARRY_WORDS], see `Carry`
    capture      model dtype [capture_rows, width]
    capture_log  int32 [1 + capture_rows, LOG_WORDS], see `LogHead`, `LogRow`
"""

from enum import IntEnum, IntFlag
from typing import Final

WORDS: Final = 16
"""int32 words per header or entry: 64 bytes, one aligned vector load."""

MAX_CLAUSES: Final = 32
"""Conditions and gates per program: one bit of the int32 `select` word each."""

CLAUSE_WORDS: Final = 4
MAX_TOKEN_IDS: Final = 64
MAX_FUNCTIONS: Final = 256
SLOT_WORDS: Final = 8
CARRY_WORDS: Final = 4
LOG_WORDS: Final = 4

SCORE_FRACTION_BITS: Final = 20
"""Sums of scores are integers in units of 2**-20: no order of adding changes them."""

SCORE_LIMIT: Final = float(2**22)
"""Scores are cut off here, either way, before they are added to a sum."""

WORK: Final = (
    "slot_of_token",
    "slots",
    "counts",
    "score",
    "carry",
    "capture",
    "capture_log",
)
"""The tensors of an op's `work` argument, in order."""


class Family(IntFlag):
    """Groups of opcodes that a deployment compiles into its kernels, or leaves out."""

    ADD = 1
    RANK1 = 2
    AFFINE = 4
    REPLACE = 8
    MASK = 16
    ROUTER = 32
    READ = 64
    GATE = 128
    CAPTURE = 256
    PRESERVE_NORM = 512


ALL_FAMILIES: Final = Family(1023)


class Stage(IntEnum):
    """Which value of a boundary an entry acts on; entries are sorted by it."""

    BRANCH = 0
    STREAM = 1
    NORMED = 2


class Opcode(IntEnum):
    """What an entry does to the value `h` of one token, in fp32.

    Writes, run where `select & clause_mask` is not 0:

    ADD:      h += gain * bank[u]
    RANK1:    h += gain * f(in_scale * (bank[v] . h) + bias) * bank[u]
    AFFINE:   h += gain * sum_r f(in_scale * (bank[v+r] . h) + b_r) * bank[u+r], r < rank,
              every product with the h from before; b_r = bank[bias_row][r] (0 if
              bias_row is 0)
    REPLACE:  h += gain * (bank[u] - h)
    MASK:     h += gain * h * bank[u], elementwise
    ROUTER:   s = log_softmax(h); h = max(s) + gain where bank[u] > 0,
              min(s) - gain where bank[u] < 0, s elsewhere

    With flag PRESERVE_NORM, h is then scaled to the length that it had before.

    Reads, run where `select & clause_mask` is not 0:

    READ:     score[slot] = what `function`, a `Score`, makes of h
    CAPTURE:  appends h, in the model's dtype, to `capture`, and `(slot of the request,
              u, position)` to `capture_log`

    Gates, run on every token of the program; each sets or clears bit `bit` of `select`:

    COMPARE:  whether x is `function`, a `Comparison`, of lo, where x is the score `slot`
              or, by `u`, a `Reduce`, its reduction over the tokens of `v`, a `Scope`, up to
              this one. False where there is no such score
    LOGIC:    whether `select` has every (`function`, a `ClauseKind`, AND), any (OR) or
              none (NOR) of the bits u
    LATCH:    whether this token or an earlier one of the request has a bit of u

    For `custom_gain` alone, in a table that no other op sees:

    CUSTOM:   the gain of a user's own op is gain where `select & clause_mask` is not 0
    """

    NONE = 0
    ADD = 1
    RANK1 = 2
    AFFINE = 3
    REPLACE = 4
    MASK = 5
    ROUTER = 6
    READ = 7
    CAPTURE = 8
    COMPARE = 9
    LOGIC = 10
    LATCH = 11
    CUSTOM = 12


class Function(IntEnum):
    """The scalar function `f` of a RANK1 or AFFINE entry.

    CLIP is min(max(p, lo), hi); TOWARD_CLIP is CLIP(p) - p, the step that brings a
    projection into [lo, hi]; STEP is 1 where p >= 0; TOWARD_VALUE is lo - p where p > hi
    and lo elsewhere, the step that brings a feature of threshold hi to the value lo.
    """

    IDENTITY = 0
    RELU = 1
    SIGMOID = 2
    STEP = 3
    CLIP = 4
    TOWARD_CLIP = 5
    TOWARD_VALUE = 6


class Score(IntEnum):
    """What a READ entry makes of h, with v = bank[v].

    LINEAR        p = in_scale * (v . h) + bias
    SIGMOID       1 / (1 + exp(-p))
    RELU          max(p, 0)
    JUMP_RELU     p where p > hi, else 0
    COSINE        (v . h) / (|v| |h|)
    NORM          |h|
    DISTANCE      |h - v|
    TANH_COSINE   the cosine of h and tanh((v . h) / (v . v) * v), tanh elementwise

    A cosine's denominator is at least 1e-12.
    """

    LINEAR = 0
    SIGMOID = 1
    RELU = 2
    JUMP_RELU = 3
    COSINE = 4
    NORM = 5
    DISTANCE = 6
    TANH_COSINE = 7


class Comparison(IntEnum):
    """x < lo, x <= lo, x > lo, x >= lo."""

    LESS = 0
    LESS_EQUAL = 1
    GREATER = 2
    GREATER_EQUAL = 3


class Reduce(IntEnum):
    """Which number a COMPARE looks at: the token's own score or a reduction."""

    NONE = 0
    LAST = 1
    MEAN = 2
    MAX = 3


class Scope(IntEnum):
    """Over which tokens a score is reduced.

    A reduction over the prompt is known from the prompt's last token on, and not before:
    so it does not depend on how the prompt is cut into chunks. The others run along and
    include the token itself; GENERATED has no value on the prompt.
    """

    NONE = 0
    PROMPT = 1
    GENERATED = 2
    REQUEST = 3


class Word(IntEnum):
    """Index of each field in an entry.

    GAIN to HI are fp32 stored as int32 bits. COUNTER is 1 + the function's index, 0 for
    not counted. BIT is one bit of `select`: the one that a gate sets, and for a counted
    write its condition without its gate.
    """

    OPCODE = 0
    FUNCTION = 1
    U = 2
    V = 3
    CLAUSE_MASK = 4
    GAIN = 5
    IN_SCALE = 6
    BIAS = 7
    LO = 8
    HI = 9
    RANK = 10
    BIAS_ROW = 11
    FLAGS = 12
    COUNTER = 13
    SLOT = 14
    BIT = 15


FLOAT_WORDS: Final = range(Word.GAIN, Word.HI + 1)
PRESERVE_NORM: Final = 1
"""A bit of an entry's FLAGS."""


class Header(IntEnum):
    """Index of each field in a row's header.

    Entries of stage s occupy slots 1 + END[s-1] .. END[s], so `END_BRANCH` is also the
    number of branch entries, and `END_NORMED` the number of entries of the row. WRITES
    is 1 where a stage has an entry that changes its value.

    SIMPLE is how many entries a row has that only adds, and GENERAL for any other row;
    ADDS how many vectors a row adds that does nothing else, not even count, and 0 for any
    other row. See `eyesplice.ops.simple`.

    CLAUSES holds the bits of `select` of which one is true before the step wherever the
    row can do anything, 0 if it may do something at any token. See
    `eyesplice.ops.acting`.
    """

    END_BRANCH = 0
    END_STREAM = 1
    END_NORMED = 2
    WRITES_BRANCH = 3
    WRITES_STREAM = 4
    WRITES_NORMED = 5
    SIMPLE = 6
    ADDS = 7
    CLAUSES = 8


GENERAL: Final = -1
"""What `Header.SIMPLE` holds for a row that does more than add."""


class Slot(IntEnum):
    """Index of each field of a request's `slots` row.

    FIRST_TOKEN and FIRST_POSITION are those of its first token in this step. LATCHED holds
    the latches, SEEN the clauses, that were true at a token of an earlier step (bits of
    `select`). LOST counts rows that found no room in `capture`.
    """

    FIRST_TOKEN = 0
    FIRST_POSITION = 1
    PROMPT_LEN = 2
    LATCHED = 3
    SEEN = 4
    LOST = 5


class Carry(IntEnum):
    """Index of each field of a score's `carry`: its reductions over earlier steps.

    SUM in units of 2**-SCORE_FRACTION_BITS, COUNT in tokens; MAX and LAST hold fp32 bits.
    """

    SUM = 0
    COUNT = 1
    MAX = 2
    LAST = 3


class LogHead(IntEnum):
    """Index of each field of `capture_log[0]`, which is about this step.

    COUNT rows were asked for, to be stored in `capture` from row START on, LIMIT at most.
    """

    COUNT = 0
    START = 1
    LIMIT = 2


class LogRow(IntEnum):
    """Index of each field of `capture_log[1 + i]`, which is about row i of `capture`.

    The slot of the request, which of its captures it is, and the token's position.
    """

    SLOT = 0
    CAPTURE = 1
    POSITION = 2


class ClauseKind(IntEnum):
    """How one bit of a token's `select` word is computed (words: kind, a, b, flags).

    With p the token's position and n its request's prompt length in tokens:

    FALSE       0
    ALL         1
    PROMPT      p < n
    GENERATED   p >= n
    LAST        p == n - 1
    RANGE       a' <= p < b', where a' = a + n if flags & 1 else a, b' likewise (flags & 2)
    AND         every bit of mask a is set (a holds bits of earlier clauses)
    OR          any bit of mask a is set
    NOR         no bit of mask a is set
    TOKEN_LIST  the token's id is one of the row's token_ids[a:b]
    TOKEN_SET   the token's id is in token_sets[a]
    AFTER       an earlier token of the request has a bit of mask a
    """

    FALSE = 0
    ALL = 1
    PROMPT = 2
    GENERATED = 3
    LAST = 4
    RANGE = 5
    AND = 6
    OR = 7
    NOR = 8
    TOKEN_LIST = 9
    TOKEN_SET = 10
    AFTER = 11


class PerRequest(IntEnum):
    """Rows of the int32 `[4, requests]` table that `route_` reads."""

    ROW = 0
    PROMPT_LEN = 1
    SLOT = 2
    SCORES = 3


RANGE_START_FROM_PROMPT_END: Final = 1
RANGE_STOP_FROM_PROMPT_END: Final = 2
INT32_MAX: Final = 2**31 - 1
