"""What one deployment asks of the pass: everything that shapes the edited graph."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eyesplice import _version, fx_passes, ops
from eyesplice.fx_passes.custom_sites import NO_CUSTOM_SITES, CustomSite, CustomSites
from eyesplice.fx_passes.sites import Site, Table
from eyesplice.ops.layout import ALL_FAMILIES


@dataclass(frozen=True, order=True, slots=True)
class HiddenRouter:
    """A router that runs inside the experts' op, so that its logits are in no graph.

    Attributes:
        layer: its decoder layer.
        module: path of the module whose output the logits are.
        reason: why that module cannot be hooked, None if it can.
    """

    layer: int
    module: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """The sites to arm in one model, and the names by which the pass knows its graph.

    Attributes:
        layers_path: path of the decoder layers below the compiled module ("layers").
        num_layers: decoder layers in the model.
        wanted: sites to arm.
        attention_ops: qualified names ("vllm::unified_attention_with_output") of the
            ops that mix tokens; the first one of a layer separates its two boundaries.
        fused_norm_op, norm_op: names of fused add + RMSNorm and of RMSNorm.
        moe_ops: names of the ops that take router logits as an argument.
        num_experts: experts of a mixture layer, 0 for a dense model.
        hidden_routers: routers that a hook reaches and a graph does not.
        tensor_parallel_size: ranks that share a layer.
        defer_adds: let a boundary leave its add to the next one, as Inductor does.
        families: the op families to compile in, bits of `Family`.
        custom: the users' own ops to run.
    """

    layers_path: str
    num_layers: int
    wanted: frozenset[Site]
    attention_ops: frozenset[str] = field(default_factory=frozenset)
    fused_norm_op: str = "vllm_ir::fused_add_rms_norm"
    norm_op: str = "vllm_ir::rms_norm"
    moe_ops: frozenset[str] = field(default_factory=frozenset)
    num_experts: int = 0
    hidden_routers: tuple[HiddenRouter, ...] = ()
    tensor_parallel_size: int = 1
    defer_adds: bool = True
    families: int = int(ALL_FAMILIES)
    custom: CustomSites = NO_CUSTOM_SITES

    def tables(self) -> tuple[Table, ...]:
        """Every program table of the deployment, in memory order."""
        values = {site.table[0] for site in self.wanted}
        cut = {part for table in values for part in self.custom.tables(table)}
        return tuple(sorted(cut | {custom.table for custom in self.custom}))

    def tables_of_layer(self, layer: int) -> tuple[Table, ...]:
        """The tables that a decoder layer's anchor lists.

        The boundary at the final norm belongs to no layer: the last one lists it.
        """
        last = layer == self.num_layers - 1
        return tuple(
            table
            for table in self.tables()
            if table.layer == layer or (last and table.layer == self.num_layers)
        )

    def custom_of_layer(self, layer: int) -> tuple[CustomSite, ...]:
        """The users' own ops whose weights a layer's anchor lists, after its tables."""
        tables = self.tables_of_layer(layer)
        return tuple(custom for custom in self.custom if custom.table in tables)

    def to_json(self) -> str:
        """A canonical form: equal plans give equal text."""
        plain = asdict(self)
        plain["wanted"] = [str(site) for site in sorted(self.wanted)]
        plain["attention_ops"] = sorted(self.attention_ops)
        plain["moe_ops"] = sorted(self.moe_ops)
        return json.dumps(plain, sort_keys=True)


def salt(parts: Iterable[str]) -> str:
    """A hash of what shapes the graph: the code of both rooms, the version, `parts`.

    Any change gives another value, so that a compiled graph made by other code or for
    other sites is never loaded. Values of vectors are no part of it.
    """
    digest = hashlib.sha256(_version.__version__.encode())
    for package in (ops, fx_passes):
        assert package.__file__ is not None
        for file in sorted(Path(package.__file__).parent.glob("*.py")):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()[:16]
