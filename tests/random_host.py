"""A scheduler and a model for requests that come, go and lose their places at random."""

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.integration.config import KEY
from eyesplice.integration.raw_answers import RawAnswer
from eyesplice.integration.results import Results
from eyesplice.integration.router import Router
from eyesplice.integration.scheduler_hook import update_from_output
from eyesplice.ops import contracts
from eyesplice.ops.layout import (
    ALL_FAMILIES,
    Stage,
)
from tests.random_host_programs import KINDS, SITES, VECTOR, WIDTH, Kind, value

ROOM, TOKENS = 4, 96


@dataclass(eq=False)
class Request:
    """One request, as the scheduler and the client know it."""

    name: str
    number: int
    kind: Kind | None
    prompt_len: int
    total: int
    stop: tuple[str, ...] = ()
    refused: bool = False
    start: int = 0
    computed: int = 0
    floor: int = 0
    scheduled: bool = False
    preempted: bool = False
    finished: bool = False
    raw: RawAnswer | None = field(default_factory=RawAnswer)
    answered: int | None = None

    def token(self, position: int) -> int:
        return self.number * 50 + position

    @property
    def sampling_params(self):
        return SimpleNamespace(stop=self.stop, extra_args={KEY: "{}"})

    def is_finished(self) -> bool:
        return self.finished


class Engine:
    """A scheduler that does anything that vLLM's may do, and a model of two sites."""

    def __init__(self, seed: int, capture_rows: int, depth: int, v2: bool) -> None:
        self.random = random.Random(seed)
        plan = SplicePlan("layers", 2, frozenset(SITES))
        sizes = BufferSizes(
            tokens=TOKENS,
            requests=ROOM,
            entries=5,
            bank_rows=2,
            width=WIDTH,
            scores=4,
            capture_rows=capture_rows,
        )
        self.buffers = Buffers.allocate(
            plan, sizes, dtype=torch.float32, device=torch.device("cpu")
        )
        self.buffers.bank[1] = VECTOR
        results = Results(self.buffers, {"residual.mid": WIDTH})
        self.router, self.results = Router(self.buffers, results), results
        self.router.warm_up()
        self.depth, self.v2 = depth, v2
        self.requests: dict[str, Request] = {}
        self.all: list[Request] = []
        self.order: list[str] = []
        self.finished: set[str] = set()
        self.flying: deque = deque()

    def running(self) -> list[Request]:
        return [r for r in self.requests.values() if r.scheduled and not r.preempted]

    def schedule(self) -> None:
        draw = self.random
        preempted = []
        for request in self.running():
            if draw.random() < 0.15:
                # What was generated is kept: no end comes before it.
                request.floor = max(request.floor, request.computed)
                request.preempted, request.computed = True, 0
                preempted.append(request.name)
        for request in list(self.requests.values()):
            if draw.random() < 0.02:
                request.finished, request.raw = True, None
                del self.requests[request.name]
                self.finished.add(request.name)
        while len(self.requests) < 5 * ROOM and draw.random() < 0.7:
            number = len(self.all)
            request = Request(
                f"r{number}",
                number,
                draw.choice(KINDS),
                draw.randint(1, 9),
                draw.choice([1, 3, 8, 80]),
                stop=("x",) if draw.random() < 0.3 else (),
                refused=draw.random() < 0.1,
            )
            request.total += request.prompt_len
            self.requests[request.name] = request
            self.all.append(request)
        new, resumed = [], []
        for request in self.requests.values():
            if len(self.running()) == ROOM:
                break
            if request.preempted and draw.random() < 0.15:
                request.preempted = False
                (new if self.v2 else resumed).append(request)
            elif not request.scheduled and draw.random() < 0.5:
                request.scheduled = True
                if request.kind is None and draw.random() < 0.5:
                    request.start = min(1, request.prompt_len - 1)
                request.computed = request.start
                new.append(request)
        finished, self.finished = self.finished, set()
        self.tell(preempted, finished, new, resumed)
        spans = {}
        for request in self.running():
            if request.computed < request.total and draw.random() < 0.9:
                left = request.prompt_len - request.computed
                length = draw.randint(1, left) if left > 0 else 1
                spans[request.name] = (request, request.computed, length)
                request.computed += length
        self.flying.append((self.run(spans), spans, finished))

    def tell(self, preempted, finished, new, resumed) -> None:
        router = self.router
        for name in preempted:
            router.preempt(name)
        for name in finished:
            router.end(name)
        for request in new:
            if router.awaits(request.name):
                router.resume(request.name, request.computed)
                continue
            router.end(request.name)
            if request.kind is None:
                continue
            if request.refused:
                router.refuse(request.name, "refused")
            else:
                router.begin(
                    request.name,
                    request.kind.program(request.number % 19),
                    request.prompt_len,
                    request.computed,
                )
        for request in resumed:
            router.resume(request.name, request.computed)

    def run(self, spans):
        """One step of the model."""
        if not spans:
            return None
        kept = [name for name in self.order if name in spans]
        kept += [name for name in spans if name not in kept]
        if self.random.random() < 0.2:
            self.random.shuffle(kept)
        self.order = kept
        lengths = np.array([spans[name][2] for name in kept], dtype=np.int32)
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        tokens = [
            (spans[name][0].token(p), p)
            for name in kept
            for p in range(spans[name][1], spans[name][1] + spans[name][2])
        ]
        ids, positions = map(torch.tensor, zip(*tokens, strict=True))
        self.router.step(kept, starts, positions, ids, len(tokens), lengths)
        routed = self.router.take_step()
        for layer, site in enumerate(SITES):
            place = self.buffers.index[site.table[0]]
            contracts.inline_(
                torch.stack([value(layer, *token) for token in tokens]),
                Stage.STREAM,
                self.buffers.program[place],
                int(ALL_FAMILIES),
            )
        return routed and self.results.launch(routed)

    def update(self) -> None:
        pending, spans, finished = self.flying.popleft()
        output = SimpleNamespace()
        if pending is not None:
            setattr(output, KEY, pending.join())
        outputs = []

        def original(scheduler, scheduler_output, model_output):
            for request, first, length in spans.values():
                last = first + length - 1
                if request.finished or last < request.prompt_len - 1:
                    continue
                if request.preempted or last >= request.computed:
                    continue
                ends = last + 1 >= request.total or self.random.random() < 0.05
                ends = ends and last + 1 >= request.floor
                if ends:
                    request.finished, request.answered = True, last
                    del self.requests[request.name]
                    self.finished.add(request.name)
                outputs.append(
                    SimpleNamespace(
                        request_id=request.name,
                        finish_reason="stop" if ends else None,
                        kv_transfer_params=None,
                    )
                )
            return {0: SimpleNamespace(outputs=outputs)}

        update_from_output(
            original, self, SimpleNamespace(finished_req_ids=finished), output
        )
        for out in outputs:
            request = next(r for r in self.all if r.name == out.request_id)
            if out.kv_transfer_params:
                request.raw.add_plain(out.kv_transfer_params[KEY])

    def play(self, steps: int) -> None:
        for _ in range(steps):
            self.schedule()
            while len(self.flying) > self.depth:
                self.update()
        while self.flying:
            self.update()
