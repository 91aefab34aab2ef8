"""The tables of an engine, and what its layers share of them."""

import torch

from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.sites import Site
from eyesplice.integration.buffers import Buffers, BufferSizes
from eyesplice.ops.site_tables import tables_of

LAYERS = 4


def test_all_layers_share_what_is_kept():
    """Whatever room there is: a launch is looked up once, not for each boundary."""
    names = ("residual.pre", "residual.mid")
    wanted = frozenset(Site(n, name) for n in range(LAYERS) for name in names)
    plan = SplicePlan("layers", LAYERS, wanted)
    for tokens, requests, entries in ((8, 3, 1), (2047, 7, 5), (8192, 256, 8)):
        sizes = BufferSizes(
            tokens=tokens, requests=requests, entries=entries, bank_rows=2, width=24
        )
        buffers = Buffers.allocate(
            plan, sizes, dtype=torch.bfloat16, device=torch.device("cpu")
        )
        sites = [tables_of(program) for program in buffers.program]
        assert len(sites) == 2 * LAYERS
        assert len({id(site.launches) for site in sites}) == 1
        assert len({site.addresses for site in sites}) == 2 * LAYERS
