"""Requests through router, ops and results on a CPU, step by step, without an engine."""

import numpy as np
import pytest
import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.program import (
    CaptureInfo,
    Clause,
    Entry,
    FunctionInfo,
    Program,
    ScoreInfo,
)
from eyesplice.fx_passes.sites import Site
from eyesplice.integration import results
from eyesplice.integration.answer_body import Asked, body
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.integration.raw_answers import RawAnswer
from eyesplice.integration.results import Results
from eyesplice.integration.router import Router
from eyesplice.ops import contracts
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    ClauseKind,
    Opcode,
    Reduce,
    Scope,
    Score,
    Stage,
)

WIDTH, ROOM, CAPTURE_ROWS = 8, 3, 8
SITE = Site(0, "residual.mid")


def read_info(name="probe", kernel="probe", **more) -> FunctionInfo:
    return FunctionInfo(
        name=name,
        kind="read",
        kernel=kernel,
        layers=(0,),
        submodule="residual.mid",
        **more,
    )


def probing(digest="p", kind=ClauseKind.ALL, **more) -> Program:
    """A probe, a capture and an add of vector 1, all under one condition."""
    read = Entry(
        stage=Stage.STREAM,
        opcode=Opcode.READ,
        function=Score.LINEAR,
        v=1,
        clause_mask=1,
        bias=0.5,
    )
    capture = Entry(stage=Stage.STREAM, opcode=Opcode.CAPTURE, clause_mask=1)
    add = Entry(
        stage=Stage.STREAM,
        opcode=Opcode.ADD,
        u=1,
        clause_mask=1,
        gain=1.0,
        counter=3,
        bit=1,
    )
    write = FunctionInfo(
        name="add",
        kind="write",
        kernel="steering_vector",
        layers=(0,),
        submodule="residual.mid",
    )
    return Program(
        digest,
        (Clause(kind),),
        {SITE.table[0]: (read, capture, add)},
        functions=(read_info(**more), read_info("all", "capture"), write),
        scores=(ScoreInfo(0, 0, None, Scope.NONE),),
        captures=(CaptureInfo(1, SITE),),
    )


class World:
    """A model of one site: each token's value is a function of its position."""

    def __init__(self, answers: bool = True, **widths: int) -> None:
        plan = SplicePlan("layers", 1, frozenset({SITE}))
        sizes = BufferSizes(
            tokens=64,
            requests=ROOM,
            entries=4,
            bank_rows=2,
            width=WIDTH,
            scores=2,
            capture_rows=CAPTURE_ROWS,
        )
        self.buffers = Buffers.allocate(
            plan, sizes, dtype=torch.float32, device=torch.device("cpu")
        )
        self.buffers.bank[1] = torch.arange(WIDTH) / 8 + 0.25
        widths = {"residual.mid": WIDTH} | widths
        self.results = Results(self.buffers, widths, answers=answers)
        self.router = Router(self.buffers, self.results)
        self.raw: dict[str, RawAnswer] = {}

    def step(self, **spans: tuple[int, int]):
        """One step; `spans` are positions (first, last + 1) by request."""
        lengths = np.array([stop - start for start, stop in spans.values()])
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        positions = torch.cat([torch.arange(*span) for span in spans.values()])
        total = len(positions)
        self.router.step(list(spans), starts, positions, positions, total, lengths)
        routed = self.router.take_step()
        contracts.inline_(
            value(positions),
            Stage.STREAM,
            self.buffers.program[0],
            int(ALL_FAMILIES),
        )
        pending = routed and self.results.launch(routed)
        if pending is None:
            return None
        found = pending.join()
        for request in (*found.place, *found.errors):
            raw = self.raw.setdefault(request, RawAnswer())
            add_rows(raw, found, request)
            raw.add_totals(found, request)
        return found

    def expected(self, positions: torch.Tensor) -> list[float]:
        return (value(positions) @ self.buffers.bank[1] + 0.5).tolist()


def add_rows(raw: RawAnswer, found, request: str) -> None:
    if found.scores is not None and request in found.scores.requests:
        first, rows = found.scores.of(found.scores.requests.index(request))
        raw.add_scores(np.arange(first, first + len(rows), dtype=np.int32), rows)
    raw.add_captures(found.captures.get(request, ()))


def value(positions: torch.Tensor) -> torch.Tensor:
    return torch.sin(positions[:, None] * 0.7 + torch.arange(WIDTH))


def answer(world: World, request: str, program: Program, prompt_len: int = 4):
    return body(Asked(program, {}, prompt_len=prompt_len), world.raw[request])


def rows_of(capture) -> torch.Tensor:
    import base64

    data = bytearray(base64.b64decode(capture["data"]))
    return torch.frombuffer(data, dtype=torch.float32).reshape(capture["shape"])


@pytest.mark.parametrize("large", [0, 1 << 22])
def test_captured_rows_are_as_long_as_their_sites_in_one_request(monkeypatch, large):
    monkeypatch.setattr(results, "_LARGE", large)
    narrow = Site(0, "residual.post")
    entries = tuple(
        Entry(stage=Stage.STREAM, opcode=Opcode.CAPTURE, clause_mask=1, u=index)
        for index in range(3)
    )
    program = Program(
        "three",
        (Clause(ClauseKind.ALL),),
        {SITE.table[0]: entries},
        functions=tuple(read_info(name, "capture") for name in "xyz"),
        captures=(CaptureInfo(0, SITE), CaptureInfo(1, narrow), CaptureInfo(2, SITE)),
    )
    world = World(**{narrow.submodule: WIDTH // 2})
    world.router.begin("a", program, 2)
    world.router.begin("b", program, 1)
    world.step(b=(0, 1), a=(0, 2))
    for request, tokens in (("a", 2), ("b", 1)):
        rows = value(torch.arange(tokens))
        found = answer(world, request, program)["captures"]
        wide, short = (found[f"blocks.0.hook_resid_{of}"] for of in ("mid", "post"))
        assert wide["positions"] == short["positions"] == list(range(tokens))
        assert torch.equal(rows_of(wide), rows)
        assert torch.equal(rows_of(short), rows[:, : WIDTH // 2])


def test_scores_captures_and_receipts_of_two_requests_in_one_batch():
    world, program = World(), probing()
    last = probing("last", ClauseKind.LAST)
    world.router.begin("a", program, 4)
    world.router.begin("c", last, 3)
    world.step(a=(0, 3), b=(0, 2), c=(0, 3))
    world.step(a=(3, 4), c=(3, 4))
    world.step(a=(4, 5), b=(2, 3))
    found = answer(world, "a", program)
    positions = torch.arange(5)
    assert found["scores"]["probe"]["positions"] == positions.tolist()
    assert found["scores"]["probe"]["values"] == pytest.approx(
        world.expected(positions)
    )
    capture = found["captures"]["blocks.0.hook_resid_mid"]
    assert capture["positions"] == positions.tolist()
    assert torch.equal(rows_of(capture), value(positions))
    (write,) = found["writes"]
    assert write["tokens"] == 5 and "error" not in found
    found = answer(world, "c", last, 3)
    assert found["scores"]["probe"]["positions"] == [2]
    assert found["captures"]["blocks.0.hook_resid_mid"]["positions"] == [2]
    assert found["writes"][0]["tokens"] == 1
    assert set(world.raw) == {"a", "c"}


def test_a_preempted_request_starts_again_and_answers_alike():
    world, program = World(), probing()
    world.router.begin("a", program, 4)
    world.router.begin("b", probing("other"), 4)
    world.step(a=(0, 4), b=(0, 2))
    world.router.preempt("a")
    world.router.begin("late", probing("third"), 4)
    world.step(late=(0, 2), b=(2, 3))
    world.router.end("b")
    world.router.resume("a")
    world.step(late=(2, 3), a=(0, 2))
    world.step(a=(2, 5))
    found = answer(world, "a", program)
    assert found["scores"]["probe"]["positions"] == [0, 1, 2, 3, 4]
    assert found["captures"]["blocks.0.hook_resid_mid"]["shape"] == [5, WIDTH]
    assert found["writes"][0]["tokens"] == 5


def test_every_request_of_a_full_engine_has_a_slot_and_they_come_back():
    world, program = World(), probing()
    for round_ in range(4):
        names = [f"{round_}-{number}" for number in range(ROOM)]
        for name in names:
            world.router.begin(name, program, 4)
        world.step(**dict.fromkeys(names, (0, 1)))
        for name in names:
            assert answer(world, name, program)["writes"][0]["tokens"] == 1
            world.router.end(name)
    assert world.router.live_programs == 0


def test_any_number_of_requests_may_wait_to_be_resumed():
    """Each with its own program, under a scheduler that lets others go before them."""
    world, programs = World(), {f"r{n}": probing(str(n)) for n in range(6 * ROOM)}
    for name, program in programs.items():
        world.router.begin(name, program, 4)
        world.step(**{name: (0, 1)})
        world.router.preempt(name)
    for name, program in programs.items():
        world.router.resume(name)
        world.step(**{name: (0, 2)})
        world.router.end(name)
        assert answer(world, name, program)["writes"][0]["tokens"] == 2
    assert world.router.live_programs == 0


def test_rows_that_find_no_room_are_counted_and_told():
    world, program = World(), probing()
    world.router.begin("a", program, 20)
    world.step(a=(0, 12))
    world.step(a=(12, 13))
    found = answer(world, "a", program)
    capture = found["captures"]["blocks.0.hook_resid_mid"]
    assert capture["positions"] == [*range(CAPTURE_ROWS), 12]
    assert torch.equal(rows_of(capture), value(torch.tensor(capture["positions"])))
    assert "4 captured rows found no room" in found["error"]
    assert len(found["scores"]["probe"]["values"]) == 13


def test_a_request_that_was_refused_says_so_and_disturbs_nobody():
    world, program = World(), probing()
    world.router.refuse("bad", "ran without effect: no vector x")
    world.router.begin("a", program, 4)
    world.step(a=(0, 2), bad=(0, 2))
    assert answer(world, "a", program)["writes"][0]["tokens"] == 2
    found = answer(world, "bad", program)
    assert found["error"] == "ran without effect: no vector x"
    assert found["writes"][0]["tokens"] == 0
    world.router.end("bad")
    world.router.end("a")
    assert world.step(bad=(2, 3)) is None


def test_a_batch_without_a_program_is_neither_routed_nor_collected(monkeypatch):
    world = World()
    world.router.begin("a", probing(), 4)
    world.step(a=(0, 1))
    world.step(b=(0, 4))
    assert not world.buffers.token_map.any()
    monkeypatch.setattr(contracts, "route_", None)
    monkeypatch.setattr(contracts, "collect_", None)
    assert world.step(b=(4, 5)) is None


def test_a_rank_that_does_not_answer_copies_nothing_and_collects_all_the_same():
    world = World(answers=False)
    program = probing()
    latched = Program(
        "latched",
        program.clauses,
        program.tables,
        program.functions,
        (ScoreInfo(0, 0, None, Scope.REQUEST),),
        program.captures,
    )
    world.router.begin("a", latched, 4)
    assert world.step(a=(0, 3)) is None
    assert int(world.buffers.carry[ROOM, 0, 1]) == 3


@pytest.mark.parametrize(
    ("reduce", "over", "positions"),
    [
        (Reduce.LAST, Scope.PROMPT, [3]),
        (Reduce.MEAN, Scope.GENERATED, [5]),
        (Reduce.MAX, Scope.REQUEST, [5]),
    ],
)
def test_reductions_are_made_of_the_tokens_that_they_are_over(reduce, over, positions):
    world, program = World(), probing(reduce=reduce, over=over)
    world.router.begin("a", program, 4)
    world.step(a=(0, 5))
    world.step(a=(5, 6))
    score = answer(world, "a", program)["scores"]["probe"]
    every = torch.tensor(world.expected(torch.arange(6)))
    expected = {
        Reduce.LAST: every[3],
        Reduce.MEAN: every[4:].mean(),
        Reduce.MAX: every.max(),
    }[reduce]
    assert score["positions"] == positions
    assert score["values"] == pytest.approx([float(expected)])


def test_a_reduction_over_no_token_has_no_value():
    world = World()
    program = probing(reduce=Reduce.MEAN, over=Scope.GENERATED)
    world.router.begin("a", program, 4)
    world.step(a=(0, 4))
    score = answer(world, "a", program)["scores"]["probe"]
    assert score == {"layer": 0, "values": [], "positions": []}


def test_a_capture_of_the_prompt_takes_no_room_once_the_prompt_is_over():
    world, last = World(), probing("last", ClauseKind.LAST)
    world.router.begin("a", last, 4)
    regions = []

    def step(**spans):
        region = world.results.region
        world.results.region = lambda *args: (
            regions.append(region(*args)) or regions[-1]
        )
        world.step(**spans)
        world.results.region = region

    step(a=(0, 2))
    step(a=(2, 5))
    step(a=(5, 6))
    assert [region.bound for region in regions] == [0, 1, 0]
    found = answer(world, "a", last)["captures"]["blocks.0.hook_resid_mid"]
    assert found["positions"] == [3]
    # In a slot that was another's, and from the first token after a preemption.
    world.router.preempt("a")
    world.router.resume("a")
    step(a=(0, 4))
    world.router.end("a")
    world.router.begin("b", probing("all"), 2)
    step(b=(0, 3))
    # Its first tokens came from elsewhere.
    world.router.begin("c", probing("late", ClauseKind.LAST), 6, position=4)
    step(c=(4, 6))
    assert [region.bound for region in regions[3:]] == [1, 3, 1]
