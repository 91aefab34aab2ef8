"""Requests that go through steps: `route_`, their programs table by table, `collect_`.

What is seen of a token is kept by (request, position), so that ways of cutting the same
requests into steps can be compared.
"""

from dataclasses import dataclass

import torch

from eyesplice.ops.acting import acting_clauses
from eyesplice.ops.inputs import Entry, pack_programs, poisoned
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    CLAUSE_WORDS,
    MAX_CLAUSES,
    MAX_TOKEN_IDS,
    ClauseKind,
    Header,
    LogHead,
    Stage,
)
from eyesplice.ops.work import empty_work

ALL = (ClauseKind.ALL, 0, 0, 0)
MAX_TOKENS, SLOTS, MAX_SCORES, CAPTURE_ROWS = 64, 5, 4, 9


@dataclass
class Plan:
    """A program: its inline tables in the order of the forward pass, and the rest."""

    tables: list[list[Entry]]
    clauses: list[tuple] = ()
    scopes: list[int] = ()
    latches: int = 0
    token_ids: list[int] = ()

    @property
    def num_scores(self):
        return len(self.scopes)


@dataclass
class Request:
    """Its values, one row a position, and which plan it has (None: idle)."""

    values: torch.Tensor
    prompt_len: int
    plan: Plan | None
    ids: list[int] | None = None
    done: int = 0


class World:
    def __init__(
        self,
        ops,
        device,
        requests,
        bank,
        families=ALL_FAMILIES,
        may_idle=True,
        capture_rows=CAPTURE_ROWS,
    ):
        """Without `may_idle`, a token is looked at wherever its plan has an entry."""
        self.may_idle = may_idle
        self.ops, self.device, self.requests = ops, device, requests
        self.plans = [r.plan for r in requests.values() if r.plan is not None]
        self.families, self.bank = families, bank.to(device)
        self.work = empty_work(
            MAX_TOKENS,
            SLOTS,
            MAX_SCORES,
            capture_rows,
            bank.shape[1],
            bank.dtype,
            device,
        )
        # A score that nobody reset must show.
        self.work.score.fill_(1e6)
        self.work.capture.fill_(torch.nan)
        self.select = poisoned((MAX_TOKENS,), torch.int32, device)
        self.seen, self.scores, self.written, self.words = {}, {}, {}, {}
        self._pack()

    def _pack(self):
        count = 1 + len(self.plans)
        clauses = torch.zeros(count, MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
        ids = poisoned((count, MAX_TOKEN_IDS), torch.int32, "cpu")
        reads = poisoned((count, MAX_SCORES + 1), torch.int32, "cpu")
        for row, plan in enumerate(self.plans, start=1):
            for j, clause in enumerate(plan.clauses):
                clauses[row, j] = torch.tensor(clause)
            ids[row, : len(plan.token_ids)] = torch.tensor(plan.token_ids)
            reads[row, : plan.num_scores] = torch.tensor(plan.scopes)
            reads[row, -1] = plan.latches
        sets = torch.zeros(2, 4, dtype=torch.int32)
        sets[1, 0], sets[1, 2] = -(2**31), 1 << 3
        self.clauses, self.ids, self.reads, self.sets = (
            tensor.to(self.device) for tensor in (clauses, ids, reads, sets)
        )
        number = max((len(plan.tables) for plan in self.plans), default=0)
        tables = [
            pack_programs([plan.tables[i] for plan in self.plans], 12)
            for i in range(number)
        ]
        # One more, in which nobody has anything to do.
        tables.append(pack_programs([[] for _ in self.plans], 12))
        for row, plan in enumerate(self.plans, start=1):
            for i, clauses in enumerate(acting_clauses(plan.tables)):
                signed = clauses - 2**32 * (clauses >= 2**31)
                tables[i][row, 0, Header.CLAUSES] = self.may_idle * signed
        self.tables = torch.stack(tables).to(self.device)
        self.token_map = poisoned((number + 1, MAX_TOKENS), torch.int32, self.device)

    def step(self, *spans, limit=None, start=0):
        """One step; spans are (name of the request, tokens), in the batch's order.

        At most `limit` rows are captured, by default all that there is room for.
        """
        where = [
            (name, self.requests[name].done + i)
            for name, count in spans
            for i in range(count)
        ]
        batch = self._batch(spans, where)
        spares = len(where) + 3
        work = list(self.work)
        self.ops.route_(
            self.token_map,
            self.tables,
            self.select,
            work,
            *batch,
            self.clauses,
            self.ids,
            self.sets,
            len(spans),
            spares,
            start,
            len(self.work.capture) if limit is None else limit,
        )
        value = torch.full((spares, self.bank.shape[1]), torch.nan).to(self.bank)
        for token, (name, position) in enumerate(where):
            value[token] = self.requests[name].values[position].to(value)
        for token_map, table in zip(self.token_map, self.tables, strict=True):
            self.ops.inline_(
                value,
                int(Stage.STREAM),
                token_map,
                self.select,
                table,
                self.bank,
                work,
                int(self.families),
            )
        self.ops.collect_(
            work, self.select, self.reads, *batch[:2], batch[2], len(spans)
        )
        for token, key in enumerate(where):
            self.words[key] = self.token_map[:, token].tolist()
            self.seen[key] = int(self.select[token]) & 0xFFFFFFFF
            self.scores[key] = self.work.score[token].cpu().clone()
            self.written[key] = value[token].cpu().clone()
        for name, count in spans:
            self.requests[name].done += count
        return self

    def _batch(self, spans, where):
        """(per_request, query_start_loc, positions, token ids); the rest is poison."""
        per_request = poisoned((4, len(spans) + 2), torch.int32, "cpu")
        starts = poisoned((len(spans) + 3,), torch.int32, "cpu")
        starts[0] = 0
        for i, (name, count) in enumerate(spans):
            request = self.requests[name]
            row = self.row(name)
            scores = request.plan.num_scores if row else 0
            fields = [row, request.prompt_len, self.slot(name), scores]
            per_request[:, i] = torch.tensor(fields, dtype=torch.int32)
            starts[i + 1] = starts[i] + count
        positions = torch.tensor([position for _, position in where] + [-1, -1])
        ids = [
            (self.requests[name].ids or [0] * 99)[position] for name, position in where
        ]
        ids = torch.tensor([*ids, -7], dtype=torch.int32)
        return [t.to(self.device) for t in (per_request, starts, positions, ids)]

    def captured(self):
        """This step's log and rows, which a GPU appends in any order."""
        count = int(self.work.capture_log[0, LogHead.COUNT])
        log = self.work.capture_log[1 : 1 + count].tolist()
        return sorted(zip(log, self.work.capture[:count].tolist(), strict=True))

    def row(self, name):
        plan = self.requests[name].plan
        return 0 if plan is None else 1 + [p is plan for p in self.plans].index(True)

    def slot(self, name):
        return self.row(name) and 1 + list(self.requests).index(name)

    def bit(self, name, bit):
        """Whether a bit was set at each position of a request."""
        request = self.requests[name]
        return [bool(self.seen[name, i] >> bit & 1) for i in range(request.done)]
