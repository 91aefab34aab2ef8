"""From a request to table rows.

`write_entries` and `read_entries` say which entry each function is; here they get their
conditions, their order, and the gates that they wait for. At one place of the forward pass
the reads come first, each gate right behind the read that it needs, then the writes, both
in the order in which they were declared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from eyesplice._errors import SpecError
from eyesplice.fx_passes.conditions import ClauseBuilder, TokenNames, too_many_bits
from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.experts_together import check_together
from eyesplice.fx_passes.functions import (
    names_of,
    paths_of,
    resolver,
    sites_of,
)
from eyesplice.fx_passes.gate_forms import simplify
from eyesplice.fx_passes.gate_placement import (
    Circuit,
    Gated,
    LatchBits,
    Logic,
    Part,
    TooManyBits,
    reduced_scores,
)
from eyesplice.fx_passes.gates import Compare, Constant, Gate, ScoreKey, parse_gate
from eyesplice.fx_passes.kernels import is_own_op
from eyesplice.fx_passes.order import Place, place_of
from eyesplice.fx_passes.overflow import refuse_overflow
from eyesplice.fx_passes.plain import within
from eyesplice.fx_passes.program import (
    CaptureInfo,
    Entry,
    FunctionInfo,
    Program,
    ScoreInfo,
)
from eyesplice.fx_passes.program_checks import check_family, check_room, function_info
from eyesplice.fx_passes.read_entries import keys_of, read_entries
from eyesplice.fx_passes.reads import Read
from eyesplice.fx_passes.request import Request
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.fx_passes.write_entries import write_entry
from eyesplice.fx_passes.writes import Write
from eyesplice.ops.layout import ClauseKind, Opcode, Scope

_ALL: Final = "all"
_MAX_GATE_TEXT: Final = 4000
"""More than gates of 32 bits take; it bounds the time that simplifying them takes."""


def lower(request: Request, context: Context) -> Program:
    """The program that does what the request says.

    `residual.post` of a layer and `residual.pre` of the next are one value: what is done
    at the former comes first.

    Args:
        request: parsed with the same context.
        context: what the model offers.

    Raises:
        SpecError: a vector that a kernel cannot divide by the norm of, a gate on what is
            not known where its function acts, too many conditions, scores or entries, op
            families that are not compiled in, writes so large that values could
            overflow, or router writes that leave too few experts together.
    """
    return _Lowering(request, context).program()


@dataclass(frozen=True, slots=True)
class _Bits:
    """What decides whether a function acts: masks of one bit of `select` each.

    `when` is its condition, `enabled` its condition and its gate.
    """

    when: int
    enabled: int
    gated: bool


class _Lowering:
    """One request on its way to a program."""

    def __init__(self, request: Request, context: Context) -> None:
        self.request = request
        self.context = context
        self.functions = request.functions
        self.paths = paths_of(self.functions)
        self.slots: dict[ScoreKey, int] = {}
        self.captures: list[CaptureInfo] = []
        self.capture_of: dict[tuple[int, Site], int] = {}
        names = TokenNames(context.token_sets, None, context.vocab_size)
        self.clauses = ClauseBuilder(names=names)
        armed = sorted({place_of(s) for s, why in context.armed.items() if not why})
        self.circuit = Circuit(self._site_of, armed, 0)
        self.tables: dict[Table, list[Entry]] = {}
        self.known = 0

    def program(self) -> Program:
        paired = zip(self.paths, self.functions, strict=True)
        writes = [(path, f) for path, f in paired if isinstance(f, Write)]
        refuse_overflow(writes, self.context)
        check_together(writes, self.context)
        self._number_reads()
        gates = self._gates()
        bits = self._bits(gates)
        self._emit(bits)
        program = Program(
            digest=self.request.digest(self.context.vectors, self.context.token_sets),
            clauses=tuple(self.clauses.clauses),
            tables={table: tuple(found) for table, found in self.tables.items()},
            functions=self._infos(),
            scores=self._scores(gates),
            captures=tuple(self.captures),
            latched=sum(
                bit
                for part, bit in self.circuit.bits.items()
                if isinstance(part, LatchBits)
            ),
            token_ids=tuple(self.clauses.token_ids),
            needs_every_token=self._needs_every_token(),
        )
        check_room(program, self.context)
        return program

    def _site_of(self, key: ScoreKey) -> Site:
        return Site(key.layer, self.functions[key.read].submodule)

    def _number_reads(self) -> None:
        """Give every score its slot and every capture its index."""
        limit = self.context.max_scores
        for i, function in enumerate(self.functions):
            if not isinstance(function, Read):
                continue
            for key in keys_of(i, function):
                self.slots[key] = len(self.slots)
            if not function.scores:
                for site in sites_of(function):
                    self.capture_of[i, site] = len(self.captures)
                    self.captures.append(CaptureInfo(i, site))
            if len(self.slots) > limit:
                raise SpecError(
                    self.paths[i],
                    f"{len(self.slots)} scores with those before it",
                    f"at most {limit} per request (max_scores): one for each layer, and "
                    "for each feature of sae",
                    "read less, or raise `max_scores` in the configuration",
                )

    def _gates(self) -> dict[int, Gate]:
        """The gate of each function that has one, in its one form."""
        found = {}
        texts = {f.gate for f in self.functions if f.gate is not None}
        if (length := sum(map(len, texts))) > _MAX_GATE_TEXT:
            raise SpecError(
                "gates",
                f"{length} characters in {len(texts)} different gates",
                f"at most {_MAX_GATE_TEXT} characters in one request, reads under their "
                "full names",
                "use fewer or simpler gates",
            )
        for i, function in enumerate(self.functions):
            if function.gate is not None:
                resolve = resolver(
                    self.functions, function.app, self.context.num_layers
                )
                with within(self.paths[i]):
                    found[i] = simplify(parse_gate(function.gate, resolve))
        return found

    def _bits(self, gates: Mapping[int, Gate]) -> list[_Bits]:
        """The bits of every function: first those of conditions, then those of gates."""
        whens = []
        for path, function in zip(self.paths, self.functions, strict=True):
            with within(path):
                whens.append(1 << self.clauses.add(function.when))
        if Constant(False) in gates.values():
            never = 1 << self.clauses.nowhere()
        self.circuit.first_bit = len(self.clauses.clauses)
        bits = []
        for i, (function, when) in enumerate(zip(self.functions, whens, strict=True)):
            enabled = when
            match gates.get(i):
                case None | Constant(value=True):
                    pass
                case Constant():
                    enabled = never
                case gate:
                    enabled = self._gate_bit(
                        i, gate, 0 if function.when == _ALL else when
                    )
            bits.append(_Bits(when, enabled, i in gates))
        return bits

    def _gate_bit(self, i: int, gate: Gate, when: int) -> int:
        function = self.functions[i]
        text = str(function.gate)
        is_read = isinstance(function, Read)
        with within(self.paths[i]):
            try:
                gated = Gated(i, sites_of(function)[0], is_read, text)
                return self.circuit.add(gate, gated, when)
            except TooManyBits:
                raise too_many_bits("gate", text) from None

    def _emit(self, bits: list[_Bits]) -> None:
        """Fill the tables, place after place."""
        acting: dict[Place, list[tuple[int, Site]]] = {}
        for i, function in enumerate(self.functions):
            for site in sites_of(function):
                acting.setdefault(place_of(site), []).append((i, site))
        self.known = (1 << self.circuit.first_bit) - 1
        for place in sorted(acting.keys() | set(self.circuit.fronts.values())):
            for part, front in self.circuit.fronts.items():
                if front == place:
                    self._emit_part(part, place)
            self._emit_logic(place)
            functions = acting.get(place, [])
            for i, site in functions:
                if isinstance(self.functions[i], Read):
                    self._emit_read(i, site, bits[i])
            for i, site in functions:
                write = self.functions[i]
                if isinstance(write, Write):
                    with within(self.paths[i]):
                        gating = self._gating(i, site, bits[i])
                        entry = write_entry(write, site, self.context, **gating)
                        table = self._table(place)
                        if is_own_op(write.kernel):
                            use = (write.kernel, write.weight, site, write.app)
                            table = self.context.custom.free(*use, self.tables).table
                    self._append(table, entry)

    def _emit_read(self, i: int, site: Site, bits: _Bits) -> None:
        read, place = self.functions[i], place_of(site)
        assert isinstance(read, Read)
        keys = [key for key in keys_of(i, read) if key.layer == site.layer]
        slot = self.slots[keys[0]] if keys else self.capture_of[i, site]
        gating = self._gating(i, site, bits)
        for entry in read_entries(read, site, slot, self.context, **gating):
            self._append(self._table(place), entry)
        for part in self.circuit.bits:
            own = isinstance(part, Compare) and part.score in keys
            if own and part not in self.circuit.fronts:
                self._emit_part(part, place)
        self._emit_logic(place)

    def _gating(self, i: int, site: Site, bits: _Bits) -> dict[str, int]:
        """Entry fields that say on which tokens a function acts, and count them."""
        function = self.functions[i]
        counted = site == sites_of(function)[0] and (
            bits.gated or isinstance(function, Write)
        )
        counting = {"bit": bits.when, "counter": 1 + i} if counted else {}
        return {"clause_mask": bits.enabled, **counting}

    def _emit_logic(self, place: Place) -> None:
        """Combine what is known, as soon as it is."""
        for part, bit in self.circuit.bits.items():
            if bit & self.known or not isinstance(part, Logic):
                continue
            if part.mask & ~self.known == 0:
                self._emit_part(part, place)

    def _emit_part(self, part: Part, place: Place) -> None:
        bit = self.circuit.bits[part]
        self.known |= bit
        match part:
            case Compare(score=score, reduce=reduce):
                entry = Entry(
                    stage=place.stage,
                    opcode=Opcode.COMPARE,
                    function=part.comparison,
                    u=reduce,
                    v=self._scope(part) if reduce else Scope.NONE,
                    lo=part.value,
                    slot=self.slots[score],
                    bit=bit,
                )
            case Logic(kind=kind, mask=mask):
                entry = Entry(
                    stage=place.stage,
                    opcode=Opcode.LOGIC,
                    function=kind,
                    u=mask,
                    bit=bit,
                )
            case LatchBits(mask=mask):
                entry = Entry(stage=place.stage, opcode=Opcode.LATCH, u=mask, bit=bit)
        self._append(self._table(place), entry)

    def _scope(self, part: Compare) -> Scope:
        read = self.functions[part.score.read]
        assert isinstance(read, Read)
        return read.scope

    def _table(self, place: Place) -> Table:
        """The table of the entries at a place."""
        return self.context.custom.table_of(place.table, place.stage)

    def _append(self, table: Table, entry: Entry) -> None:
        check_family(entry, self.context)
        self.tables.setdefault(table, []).append(entry)

    def _infos(self) -> tuple[FunctionInfo, ...]:
        names = names_of(self.functions)
        pairs = zip(names, self.functions, strict=True)
        return tuple(function_info(name, f, self.context) for name, f in pairs)

    def _scores(self, gates: Mapping[int, Gate]) -> tuple[ScoreInfo, ...]:
        reduced = reduced_scores(gates.values())
        found = []
        for key in self.slots:
            read = self.functions[key.read]
            assert isinstance(read, Read)
            scope = read.scope if key in reduced else Scope.NONE
            feature = key.feature if read.kernel == "sae" else None
            found.append(ScoreInfo(key.read, key.layer, feature, scope))
        return tuple(found)

    def _needs_every_token(self) -> bool:
        after = any(c.kind is ClauseKind.AFTER for c in self.clauses.clauses)
        return after or any(isinstance(f, Read) for f in self.functions)
