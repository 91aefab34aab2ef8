"""Repeated launches against Triton's own: the same kernel, instances and arguments.

The driver is one that launches nothing and notes what it was asked to.
"""

import gc
import os
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from eyesplice.ops import launch, launch_custom, launch_graph, launch_step  # noqa: E402
from eyesplice.ops.layout import (  # noqa: E402
    CLAUSE_WORDS,
    MAX_CLAUSES,
    MAX_TOKEN_IDS,
    WORDS,
    Family,
)
from eyesplice.ops.relaunch import KeptLaunch, Relaunch  # noqa: E402
from eyesplice.ops.site_tables import SiteTables, open_tables, tables_of  # noqa: E402
from eyesplice.ops.work import empty_work  # noqa: E402


@triton.jit(do_not_specialize=["count"])
def kernel(p_out, pair, p_in, count, stride, BLOCK: tl.constexpr):
    o_t = tl.arange(0, BLOCK)
    b = tl.load(p_in + o_t * stride, mask=o_t < count, other=0)
    b += tl.load(pair[0] + o_t) + tl.load(pair[1] + o_t)
    tl.store(p_out + o_t, b)


class Driver:
    """Notes each launch: instances, the binary, and every argument."""

    def __init__(self) -> None:
        self.launches = []
        properties = {"max_shared_mem": 232448}
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, *_: (1, hash(binary), 32, 0, 1024),
            get_device_properties=lambda _: properties,
            unload_module=lambda *_: None,
        )

    def launcher_cls(self, source, metadata):
        def run(x, y, z, stream, function, packed, meta, enter, leave, *args):
            self.launches.append(((x, y, z, stream, function), args))

        return run

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 7


KEPT = (launch_step._ROUTE, launch_step._COLLECT)
KERNELS = (
    *(relaunch._kernel for relaunch in KEPT),
    *(launch.boundary_kernel, launch.inline_kernel, launch_custom.custom_gain_kernel),
)


def _forget_launches(*layers) -> None:
    for relaunch in KEPT:
        relaunch.forget()
    for layer in layers:
        tables_of(layer.program).launches.clear()


def _forget_kernels() -> None:
    _forget_launches()
    for jit_function in (kernel, *KERNELS):
        jit_function.device_caches.clear()
    # A compiled kernel that goes asks the driver of its day to unload it.
    gc.collect()


@pytest.fixture
def device(monkeypatch):
    _forget_kernels()
    noting = Driver()
    monkeypatch.setattr(driver, "_active", noting)
    yield noting
    noting.launches.clear()
    _forget_kernels()


def address(argument):
    """A tensor as the address that a compiled kernel takes; what else there is, itself."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def same(one, other) -> bool:
    """Whether two arguments are one address, equal numbers, or tuples of such."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    one, other = address(one), address(other)
    return type(one) is type(other) and one == other


def differing(one, other) -> int:
    """How many arguments of two launches differ."""
    return sum(not same(*both) for both in zip(one, other, strict=True))


def assert_same(mine, by_triton) -> None:
    """The same binary, instances, addresses and numbers."""
    assert mine[0] == by_triton[0]
    assert same(mine[1], by_triton[1])


class Call:
    """The kernel above, its tensors and a `Relaunch` of it."""

    def __init__(self, noting: Driver) -> None:
        self.noting = noting
        self.relaunch = Relaunch(kernel, ("p_in", "count"))
        self.out = torch.zeros(64, dtype=torch.int32)
        self.pair = (torch.zeros(64, dtype=torch.int32), torch.ones(64))

    def parts(self, given, count, grid=3):
        return grid, (self.out, *self.pair), (given, count)

    def first(self, given, count) -> None:
        self.relaunch.launch(
            *self.parts(given, count),
            *(self.out, self.pair, given, count, given.stride(0)),
            BLOCK=32,
            num_warps=2,
        )

    def again(self, given, count, grid=3) -> bool:
        """Launch again if that is right; what was launched must be what Triton would."""
        before = len(self.noting.launches)
        if not self.relaunch.again(*self.parts(given, count, grid)):
            assert len(self.noting.launches) == before
            return False
        args = (self.out, self.pair, given, count, given.stride(0))
        kernel[(grid,)](*args, BLOCK=32, num_warps=2)
        mine, by_triton = self.noting.launches[before:]
        assert_same(mine, by_triton)
        return True


def test_values_may_change(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    assert not call.again(given, 5)
    call.first(given, 5)
    assert call.again(given, 5)
    for count in (0, 1, 16, -1, 2**31 - 1):
        assert call.again(given, count)
    assert call.again(given[64:], 5)
    assert call.again(torch.ones(4, dtype=torch.int32), 5)
    assert call.again(given, 5, grid=1)


def test_what_triton_compiles_anew_for_is_not_launched_again(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    others = [
        (given[1:], 5),
        (given.long(), 5),
        (given.float(), 5),
        (given[::2], 5),
        (given, 2**31),
    ]
    call.first(given, 5)
    for other in others:
        assert not call.again(*other)
        call.first(*other)
        strided = other[0].stride(0) != 1
        assert call.again(*other) is not strided
        assert call.again(given, 5)


def test_other_tables_are_not_launched_again(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    call.first(given, 5)
    out, pair = call.out, call.pair
    call.out = out.clone()
    assert not call.again(given, 5)
    call.out, call.pair = out, (pair[0], pair[1].clone())
    assert not call.again(given, 5)
    call.pair = pair
    assert call.again(given, 5)


def test_nothing_outlives_the_tables(device):
    call, given = Call(device), torch.zeros(128, dtype=torch.int32)
    call.first(given, 5)
    held = [weakref.ref(tensor) for tensor in (call.out, *call.pair)]
    device.launches.clear()
    del call.out, call.pair
    assert [ref() for ref in held] == [None] * 3


class Steps:
    """The host's two ops at a step of two requests."""

    def __init__(self) -> None:
        self.maps = torch.zeros(2, 32, dtype=torch.int32)
        self.program = torch.zeros(2, 3, 4, WORDS, dtype=torch.int32)
        self.select = torch.zeros(32, dtype=torch.int32)
        self.work = list(empty_work(32, 3, 2, 4, 8, torch.float32, "cpu"))
        self.clauses = torch.zeros(3, MAX_CLAUSES, CLAUSE_WORDS, dtype=torch.int32)
        self.ids = torch.zeros(3, MAX_TOKEN_IDS, dtype=torch.int32)
        self.sets = torch.zeros(1, 4, dtype=torch.int32)
        self.reads = torch.zeros(3, 8, dtype=torch.int32)

        self.lists = torch.zeros(4, 64, dtype=torch.int32)
        self.starts = torch.arange(8, dtype=torch.int32)
        self.positions = torch.arange(32)
        self.step_ids = torch.arange(32, dtype=torch.int32)

    def step(self, extent=4, requests=2):
        """Views of the lists that are new at each step, as a runner's are."""
        starts = self.starts[: requests + 1]
        lists = (self.lists[:], starts, self.positions[:extent])
        ids = self.step_ids[:extent]
        launch_step.route_(
            *(self.maps, self.program, self.select, self.work, *lists, ids),
            *(self.clauses, self.ids, self.sets, requests, extent, 1, 3),
        )
        launch_step.collect_(self.work, self.select, self.reads, *lists, requests)


def test_a_step_is_launched_again_as_it_is_at_first(device, monkeypatch):
    steps = Steps()
    steps.step()
    for options in ({}, {"extent": 32}, {"requests": 1}):
        device.launches.clear()
        with monkeypatch.context() as patch:
            for name in ("route_kernel", "collect_kernel", "check_rows", "work_of"):
                patch.setattr(launch_step, name, None)
            patch.setattr(Relaunch, "launch", None)
            steps.step(**options)
        again = list(device.launches)
        device.launches.clear()
        _forget_launches()
        steps.step(**options)
        for mine, anew in zip(again, device.launches, strict=True):
            assert_same(mine, anew)


def test_more_tokens_than_there_are_maps_are_refused_at_every_step(device):
    steps = Steps()
    steps.step()
    with pytest.raises(ValueError, match="extent 33 is more than the 32 maps"):
        steps.step(extent=33)


def test_two_engines_take_turns(device):
    """What one engine's step launches is what it would launch alone."""
    one, two = Steps(), Steps()
    for steps in (one, two, two, one, one):
        device.launches.clear()
        steps.step()
        in_turn = list(device.launches)
        device.launches.clear()
        _forget_launches()
        steps.step()
        for mine, anew in zip(in_turn, device.launches, strict=True):
            assert_same(mine, anew)


def test_another_layout_of_the_lists_is_not_launched_again(device):
    steps, names = Steps(), launch_step.route_kernel.arg_names
    stride = names.index("per_request_stride")
    steps.step()
    usual = steps.lists, steps.positions
    steps.lists = torch.zeros(4, 65, dtype=torch.int32)
    steps.step()
    assert [args[stride] for _, args in device.launches[::2]] == [64, 65]
    steps.lists, steps.positions = usual[0], torch.arange(64)[::2]
    with pytest.raises(ValueError, match="positions: rows must be contiguous"):
        steps.step()
    steps.positions = usual[1]
    steps.step()
    assert device.launches[-2][1][stride] == 64


HIDDEN = 32
MAX_TOKENS = 512


class Layer:
    """The ops of one layer's table, and values of any number of tokens."""

    def __init__(self, maps=MAX_TOKENS, select=MAX_TOKENS) -> None:
        self.program = torch.zeros(3, 4, WORDS, dtype=torch.int32)
        self.bank = torch.zeros(4, HIDDEN)
        self.work = list(empty_work(MAX_TOKENS, 3, 2, 4, HIDDEN, torch.float32, "cpu"))
        self.weight = torch.ones(HIDDEN)
        token_map, select = (torch.zeros(n, dtype=torch.int32) for n in (maps, select))
        site = SiteTables(token_map, select, self.bank, self.work)
        open_tables(self, [(self.program, site)])

    def boundary(self, values, *, eps=1e-5, defer=False, families=Family.ADD):
        stream, branch, pending = values
        return launch_graph.boundary_(
            *(stream, branch, self.weight, 0.0, eps, self.program, int(families)),
            *(pending, defer),
        )

    def inline(self, value, stage=0, families=Family.ADD):
        launch_graph.inline_(value, stage, self.program, int(families))

    def gain(self, value):
        return launch_graph.custom_gain(value, self.program)


def rows(tokens, dtype=torch.float32, gap=0):
    return torch.zeros(tokens, HIDDEN + gap, dtype=dtype)[:, :HIDDEN]


def once_more(device, monkeypatch, layer, call) -> None:
    """A call whose launch is kept launches what Triton would, and looks at nothing."""
    call()
    device.launches.clear()
    with monkeypatch.context() as patch:
        for module in (launch, launch_custom):
            patch.setattr(module, "work_of", None)
        call()
    mine = list(device.launches)
    device.launches.clear()
    _forget_launches(layer)
    call()
    assert len(mine) == len(device.launches) == 1
    # What the op allocates itself lies somewhere else each time.
    for one, anew in zip(mine, device.launches, strict=True):
        assert one[0] == anew[0]
        assert differing(one[1], anew[1]) <= 1


@pytest.mark.parametrize("tokens", [1, 32, 33, 500])
def test_a_boundary_is_launched_again_as_it_is_at_first(device, monkeypatch, tokens):
    layer = Layer()
    values = [rows(tokens) for _ in range(3)]
    once_more(device, monkeypatch, layer, lambda: layer.boundary(values))
    once_more(device, monkeypatch, layer, lambda: layer.inline(values[0]))
    once_more(device, monkeypatch, layer, lambda: layer.gain(values[0]))


def test_each_form_of_a_boundary_has_a_launch_of_its_own(device):
    """One table in every form by turns: each launch is the one that Triton would make."""
    layer = Layer()
    forms = [
        ((rows(4), rows(4), None), {}),
        ((rows(4), rows(4), None), {"defer": True}),
        ((rows(4), rows(4), rows(4)), {}),
        ((rows(4), None, None), {}),
        ((rows(4), rows(4), None), {"eps": 1e-6}),
        ((rows(4), rows(4, gap=8), None), {}),
        ((rows(4), rows(4, gap=1), None), {}),
        ((rows(40).flatten()[1 : 1 + 4 * HIDDEN].view(4, HIDDEN), rows(4), None), {}),
        ((rows(4), rows(4, torch.bfloat16), None), {}),
        ((rows(40), rows(40), None), {}),
        ((rows(200), rows(200), rows(200)), {}),
        ((rows(4), rows(4), None), {"families": Family.ADD | Family.RANK1}),
    ]
    seen = []
    for _ in range(2):
        for values, options in forms:
            device.launches.clear()
            layer.boundary(values, **options)
            seen.append(device.launches[0])
    for (values, options), first, again in zip(
        forms, seen, seen[len(forms) :], strict=False
    ):
        device.launches.clear()
        _forget_launches(layer)
        layer.boundary(values, **options)
        (anew,) = device.launches
        for one in (first, again):
            assert one[0] == anew[0]
            assert differing(one[1], anew[1]) <= 1


@pytest.mark.parametrize("gap", [1, 8])
def test_what_one_row_says_of_its_stride_is_not_kept_for_more(device, gap):
    """A row of a wider value is contiguous by itself."""
    layer = Layer()
    names = [f"{value}_stride" for value in ("stream", "branch", "pending")]
    places = [launch.boundary_kernel.arg_names.index(name) for name in names]
    for tokens in (1, 4):
        layer.boundary([rows(tokens, gap=gap * (tokens == 1)) for _ in range(3)])
        given = device.launches[-1][1]
        assert [given[place] for place in places] == [HIDDEN] * 3
    device.launches.clear()
    place = launch.inline_kernel.arg_names.index("value_stride")
    layer.inline(rows(1, gap=gap))
    layer.inline(rows(4))
    layer.inline(rows(4, gap=gap))
    strides = [args[place] for _, args in device.launches]
    assert strides == [HIDDEN, HIDDEN, HIDDEN + gap]


def test_tables_of_two_layers_take_turns(device):
    one, two = Layer(), Layer()
    values = [rows(4), rows(4), None]
    place = launch.boundary_kernel.arg_names.index("p_program")
    for layer in (one, two, one, two):
        device.launches.clear()
        layer.boundary(values)
        assert address(device.launches[0][1][place]) == layer.program.data_ptr()


class Layers:
    """The tables of some layers, which differ by where their maps and programs lie."""

    def __init__(self, number=2, banks=1, gap=0) -> None:
        self.programs = torch.zeros(number, 3, 4, WORDS, dtype=torch.int32)
        self.maps = torch.zeros(number, MAX_TOKENS + gap, dtype=torch.int32)
        self.select = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.banks = [torch.zeros(4, HIDDEN) for _ in range(banks)]
        self.weight = torch.ones(HIDDEN)
        empty = empty_work(MAX_TOKENS, 3, 2, 4, HIDDEN, torch.float32, "cpu")
        work = list(empty)
        self.sites = [
            SiteTables(words[:MAX_TOKENS], self.select, self.banks[n % banks], work)
            for n, words in enumerate(self.maps)
        ]
        open_tables(self, zip(self.programs, self.sites, strict=True))

    def calls(self, n, tokens):
        """Each op of layer n, a call each."""
        stream, branch = rows(tokens), rows(tokens)
        own = self.programs[n], int(Family.ADD)
        yield lambda: launch_graph.boundary_(
            stream, branch, self.weight, 0.0, 1e-5, *own
        )
        yield lambda: launch_graph.inline_(stream, 1, *own)
        yield lambda: launch_graph.custom_gain(stream, self.programs[n])


@pytest.mark.parametrize("tokens", [4, 40, 500])
def test_layers_share_what_is_kept_and_run_their_own_programs(
    device, monkeypatch, tokens
):
    layers = Layers(3)
    for call in layers.calls(0, tokens):
        call()
    with monkeypatch.context() as patch:
        # The long way is closed to the other layers.
        for module in (launch, launch_custom):
            patch.setattr(module, "work_of", None)
        for n in (1, 2, 0):
            kernels = (
                launch.boundary_kernel,
                launch.inline_kernel,
                launch_custom.custom_gain_kernel,
            )
            for call, kernel in zip(layers.calls(n, tokens), kernels, strict=True):
                device.launches.clear()
                call()
                given = dict(zip(kernel.arg_names, device.launches[0][1], strict=False))
                found = [
                    address(given[name])
                    for name in ("p_token_map", "p_select", "p_program")
                ]
                own = layers.maps[n], layers.select, layers.programs[n]
                assert found == [tensor.data_ptr() for tensor in own]


def test_a_step_of_another_size_takes_what_is_kept(device, monkeypatch):
    """Only a form of its own is compiled: few sizes make one."""
    layers = Layers()
    for call in layers.calls(0, 40):
        call()
    kept = layers.sites[0].launches
    with monkeypatch.context() as patch:
        patch.setattr(launch, "work_of", None)
        monkeypatch.setattr(launch_graph, "_MOST", len(kept) + 3)
        for tokens in range(41, 60):
            next(layers.calls(1, tokens))()
            assert len(kept) <= launch_graph._MOST


def _tables():
    """Tables of two layers, by what they are made of."""
    work = list(empty_work(MAX_TOKENS, 3, 2, 4, HIDDEN, torch.float32, "cpu"))
    maps = torch.zeros(2, 2 * MAX_TOKENS, dtype=torch.int32)
    select = torch.zeros(MAX_TOKENS, dtype=torch.int32)
    programs = torch.zeros(2, 3, 4, WORDS, dtype=torch.int32)
    bank = torch.zeros(4, HIDDEN)
    return [
        {
            "program": programs[n],
            "token_map": maps[n, :MAX_TOKENS],
            "select": select,
            "bank": bank,
            "work": work,
        }
        for n in range(2)
    ]


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("program", lambda p: torch.zeros(3, 8, WORDS, dtype=torch.int32)[:, :4]),
        ("program", lambda p: torch.zeros(3, 6, WORDS, dtype=torch.int32)),
        ("token_map", lambda m: torch.zeros(2 * MAX_TOKENS, dtype=torch.int32)[::2]),
        ("token_map", lambda m: torch.zeros(MAX_TOKENS, dtype=torch.int64)),
        ("select", lambda s: s.view(torch.float32)),
        ("bank", lambda b: b[:, : HIDDEN // 2]),
        ("bank", lambda b: b.view(torch.int32)),
        ("work", lambda w: [w[0].view(torch.float32), *w[1:]]),
        ("work", lambda w: [*w[:-1], w[-1][:1]]),
    ],
)
def test_only_what_is_laid_out_alike_is_shared(part, changed):
    """A kernel of its own, or a refusal: what the first was launched with is no guide."""
    owner = Layers(1)
    one, two = _tables()
    two[part] = changed(two[part])
    sites = [
        (made.pop("program"), SiteTables(**made)) for made in (dict(one), dict(two))
    ]
    open_tables(owner, sites)
    assert sites[0][1].launches is not sites[1][1].launches


def test_tables_that_are_opened_again_keep_no_launch(device):
    layers = Layers(2)
    for call in layers.calls(0, 40):
        call()
    before = layers.sites[0].launches
    assert before
    programs = torch.zeros(3, 6, WORDS, dtype=torch.int32), layers.programs[1]
    open_tables(layers, zip(programs, layers.sites, strict=True))
    one, two = (site.launches for site in layers.sites)
    assert not one and not two and one is not two and before


def test_tables_of_two_programs_are_refused():
    owner = Layers(2)
    site = owner.sites[0]
    with pytest.raises(ValueError, match="belong to another one as well"):
        open_tables(owner, [(program, site) for program in owner.programs])


@pytest.mark.parametrize(("options", "shared"), [({"banks": 2}, 2), ({"gap": 3}, 2)])
def test_layers_of_which_more_differs_keep_their_own(device, options, shared):
    """Another bank, or an address for which Triton compiles a kernel of its own."""
    layers = Layers(4, **options)
    assert len({id(site.launches) for site in layers.sites}) >= shared
    for n in (0, 1, 2, 3, 0, 1, 2, 3):
        for call in layers.calls(n, 40):
            device.launches.clear()
            call()
            given = device.launches[0][1]
            _forget_sites(layers)
            device.launches.clear()
            call()
            assert differing(given, device.launches[0][1]) <= 1


def _forget_sites(layers) -> None:
    _forget_launches()
    for site in layers.sites:
        site.launches.clear()


@pytest.mark.parametrize("short", ["maps", "select"])
def test_more_tokens_than_maps_are_refused_again(device, short):
    layer = Layer(**{short: 8})
    layer.boundary([rows(8), rows(8), None])
    for call in (
        lambda: layer.boundary([rows(9), rows(9), None]),
        lambda: layer.inline(rows(9)),
        lambda: layer.gain(rows(9)),
    ):
        with pytest.raises(ValueError, match="map entries for 9 tokens"):
            call()


def test_a_strided_value_is_refused_again(device):
    layer = Layer()
    layer.boundary([rows(4), rows(4), None])
    with pytest.raises(ValueError, match="stream: rows must be contiguous"):
        layer.boundary([torch.zeros(HIDDEN, 4).t(), rows(4), None])


def test_a_launch_goes_with_its_table(device):
    layer = Layer()
    layer.boundary([rows(4), rows(4), None])
    layer.inline(rows(4))
    layer.gain(rows(4))
    held = [weakref.ref(tensor) for tensor in (layer.bank, *layer.work)]
    device.launches.clear()
    del layer
    assert [ref() for ref in held] == [None] * len(held)


def test_a_table_at_the_address_of_one_that_went_is_another(device):
    """A program tells nothing of what lay there before."""
    one = Layer()
    two = Layer()
    place = one.program.data_ptr()
    two.program = one.program
    site = SiteTables(
        *(torch.zeros(8, dtype=torch.int32) for _ in range(2)), two.bank, []
    )
    open_tables(two, [(two.program, site)])
    del one
    assert two.program.data_ptr() == place
    assert tables_of(two.program) is site


def test_launches_that_always_differ_do_not_pile_up(device):
    call, given = Call(device), torch.zeros(4096, dtype=torch.int32)
    for step in range(1, 100):
        view = given.as_strided((2, 2), (step, 1))
        call.first(view, 5)
        assert call.again(view, 5)
    (site,) = call.relaunch._sites.values()
    assert len(site.launches) <= 64


class CudaLauncher:
    """The launcher of Triton 3.6, around a function that notes what it is given."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, launch) -> None:
        self.launch = launch

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        coop, early = self.launch_cooperative_grid, self.launch_pdl
        self.launch(
            *(gridX, gridY, gridZ, stream, function, coop, early, None, None), *args
        )


class Compiled:
    """A compiled kernel with a launcher, and what Triton does with both."""

    function, packed_metadata = 11, "metadata"

    def __init__(self, launcher) -> None:
        self.run = launcher

    def __getitem__(self, grid):
        def runner(*args):
            given = self.function, self.packed_metadata, None, None, None
            self.run(*grid, 7, *given, *args)

        return runner


@pytest.mark.parametrize("scratch", [0, 128])
def test_a_launcher_that_is_known_is_passed_by(device, scratch):
    seen = []
    launcher = CudaLauncher(lambda *args: seen.append(args))
    launcher.profile_scratch_size = scratch
    compiled = Compiled(launcher)
    if scratch:
        # What needs memory of its own gets it from the launcher.
        launcher.launch = None
        patched = type("CudaLauncher", (CudaLauncher,), {"__call__": _through(seen)})
        launcher.__class__ = patched
    kept = KeptLaunch(compiled, [1, None, 3], [1])
    kept(5, (2,))
    compiled[5, 1, 1](1, 2, 3)
    mine, by_triton = seen
    assert mine == by_triton


def _through(seen):
    def call(self, gridX, gridY, gridZ, stream, function, *args):
        seen.append((gridX, gridY, gridZ, stream, function, *args))

    return call


def test_a_profiler_sees_every_launch(device, monkeypatch):
    from triton import knobs

    hook = SimpleNamespace(calls=["a profiler's"])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    told = []
    compiled = type(
        "Whole", (Compiled,), {"__getitem__": lambda self, grid: partial(note, grid)}
    )(CudaLauncher(None))

    def note(grid, *args):
        told.append((grid, args))

    KeptLaunch(compiled, [1, None], [1])(3, (2,))
    assert told == [((3, 1, 1), (1, 2))]


def test_a_branch_of_another_width_is_not_taken_for_a_dense_one(device):
    layer = Layer()
    layer.boundary([rows(4), rows(4), None])
    place = launch.boundary_kernel.arg_names.index("branch_stride")
    device.launches.clear()
    layer.boundary([rows(4), torch.zeros(4, 2 * HIDDEN), None])
    assert device.launches[0][1][place] == 2 * HIDDEN


def test_a_single_row_with_an_odd_stride_gives_a_plain_one(device):
    layer = Layer()
    for stream in (rows(1), rows(1, gap=8)):
        assert layer.boundary([stream, rows(1), None]).stride() == (HIDDEN, 1)
