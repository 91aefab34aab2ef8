"""Launches of every op twice, through Triton and again as they were kept.

    TRITON_LIBCUDA_PATH=DIR python -m tests.fake_cuda.launches

Triton's own launcher, compiled as on a GPU, hands both to the driver in DIR, which notes
them. Prints how many pairs were the same, how many went past Triton's Python, and how many
of these by the launcher of a torch that has CUDA; `LD_LIBRARY_PATH=DIR` lets it find the
driver.
"""

import ctypes
import os
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from eyesplice.ops import direct_launch, launch, launch_graph
from eyesplice.ops.layout import WORDS, Family
from eyesplice.ops.site_tables import SiteTables, open_tables, tables_of
from eyesplice.ops.work import empty_work

HIDDEN, MAX_TOKENS = 576, 2048
FAMILIES = int(Family.ADD)

cuda = ctypes.CDLL(
    str(Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1"),
    mode=ctypes.RTLD_GLOBAL,
)
cuda.fake_noted.restype = ctypes.c_char_p

SIZES = {"i1": 1, "i32": 4, "fp32": 4, "i64": 8}


class Launcher(nvidia.CudaLauncher):
    """Triton's; it tells the driver what the kernel takes, as the kernel itself would."""

    def __init__(self, source, metadata):
        super().__init__(source, metadata)
        kinds = list(_flat(tuple(source.signature.values())))
        sizes = [8 if kind[0] == "*" else SIZES[kind] for kind in kinds]
        bytes_of = (ctypes.c_int * len(sizes))(*sizes)
        compiled = self.launch

        def expected(*args):
            cuda.fake_expect(len(sizes), bytes_of)
            compiled(*args)

        self.launch = expected


# What is known of a launcher goes by its class's name and call.
Launcher.__name__ = "CudaLauncher"


def _flat(kinds):
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _flat(kind)
        elif kind != "constexpr":
            yield kind


class Device:
    """An H200 that loads nothing."""

    launcher_cls = Launcher

    def __init__(self):
        self.utils = utils = nvidia.CudaUtils()
        utils.load_binary = lambda name, binary, *_: (
            1,
            hash(binary) % 2**32,
            32,
            0,
            1024,
        )
        utils.get_device_properties = lambda _: {"max_shared_mem": 232448}
        utils.unload_module = lambda *_: None

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 7

    def allocate_default_profile_scratch(self, *_):
        return None


class Layer:
    """The tables of one boundary, and calls of the ops on values of some tokens."""

    def __init__(self):
        def zeros(*shape, of=torch.bfloat16):
            return torch.zeros(shape, dtype=of)

        self.zeros = zeros
        self.program = zeros(3, 4, WORDS, of=torch.int32)
        self.weight = zeros(HIDDEN)
        maps = [zeros(MAX_TOKENS, of=torch.int32) for _ in range(2)]
        work = empty_work(MAX_TOKENS, 3, 2, 4, HIDDEN, torch.bfloat16, "cpu")
        site = SiteTables(*maps, zeros(4, HIDDEN), list(work))
        open_tables(self, [(self.program, site)])

    def calls(self, tokens):
        stream, branch, pending = (self.zeros(tokens, HIDDEN) for _ in range(3))
        tables = self.program, FAMILIES
        for given in (
            (None, None, False),
            (branch, None, True),
            (branch, pending, False),
        ):
            x, p, defer = given
            before = (stream, x, self.weight, 0.0, 1e-5)
            yield lambda a=before, b=(p, defer): launch_graph.boundary_(*a, *tables, *b)
        yield lambda: launch_graph.inline_(stream, 1, *tables)
        yield lambda: launch_graph.custom_gain(stream, self.program)


def noted(call):
    """What the driver was asked, without the address of the result."""
    cuda.fake_forget()
    result = call()
    text = cuda.fake_noted().decode()
    if result is None:
        return text
    parts = text.split(" ")
    parts.remove(f"{result.data_ptr():x}")
    return " ".join(parts)


def note(results, name):
    """Keep what a function of `direct_launch` says."""
    function = getattr(direct_launch, name)

    def noting(*args):
        results.append(function(*args))
        return results[-1]

    setattr(direct_launch, name, noting)


def main():
    driver._active = Device()
    launch._starts_early = lambda: True
    direct, by_torch = [], []
    note(direct, "_version_of")
    note(by_torch, "_by_torch")
    layer, pairs = Layer(), 0
    kept = tables_of(layer.program).launches
    for tokens in (1, 8, 200, 2000):
        for call in layer.calls(tokens):
            kept.clear()
            first = noted(call)
            assert len(kept) == 1, "nothing was kept"
            again = noted(call)
            assert "blocks" in first and first == again, f"{first}\n{again}"
            pairs += 1
    print(
        f"{pairs} the same, {sum(map(bool, direct))} past Triton's Python, "
        f"{sum(map(bool, by_torch))} by torch's launcher"
    )


if __name__ == "__main__":
    main()
