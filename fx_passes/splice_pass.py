"""The pass: finds the wanted sites of a whole Dynamo graph and splices them, once."""

from collections import Counter
from dataclasses import replace
from typing import Any, Final

from torch import fx

from eyesplice.fx_passes.added_boundaries import find_added_boundaries
from eyesplice.fx_passes.fused_boundaries import defer_adds, find_fused_boundaries
from eyesplice.fx_passes.graph_facts import LayerMap, value_of
from eyesplice.fx_passes.inner_sites import find_heads, find_router_logits
from eyesplice.fx_passes.plan import SplicePlan
from eyesplice.fx_passes.records import Found
from eyesplice.fx_passes.report import Form, SiteRow, SpliceReport
from eyesplice.fx_passes.splice import read_anchors, splice
from eyesplice.fx_passes.tokens import token_dimension
from eyesplice.ops import contracts
from eyesplice.ops.layout import Stage

SPLICED: Final = (contracts.boundary_, contracts.inline_, contracts.custom_gain)
"""The ops, as a report counts them; each `custom_gain` has a user's own op behind it."""

_NOT_FOUND: Final = "no such value was found in the graph"


class SplicePass:
    """Splices the wanted sites of one model's graph.

    Idempotent: a graph that already holds spliced ops (a warm start hands the edited
    graph back) is left alone. A graph without anchors is none of ours.
    """

    def __init__(self, plan: SplicePlan) -> None:
        self.plan = plan

    def __call__(self, graph: fx.Graph) -> SpliceReport | None:
        """Edit the graph in place.

        Args:
            graph: a whole Dynamo graph, with `nn_module_stack` on its nodes.

        Returns:
            The site table, or None when there was nothing to do.
        """
        anchored = read_anchors(graph, self.plan)
        if not anchored.nodes:
            return None
        layers = LayerMap(graph, self.plan.layers_path)
        found = self._keep_wanted(self._find(graph, layers))
        if self.plan.defer_adds:
            found.fused = defer_adds(found.fused, layers, self.plan)
        rows = self._rows(found)
        splice(graph, found, anchored)
        graph.lint()
        counts = Counter(node.target for node in graph.nodes)
        boundary, inline, custom = (counts[op] for op in SPLICED)
        return SpliceReport(rows, boundary, inline, custom, num_hooks=len(found.hooked))

    def _find(self, graph: fx.Graph, layers: LayerMap) -> Found:
        plan = self.plan
        tokens = token_dimension(graph)
        found = Found()
        find_fused_boundaries(layers, plan, tokens, found)
        if not any(boundary.branch for boundary in found.fused):
            # A first norm alone is no chain of fused adds: the model adds in plain sight.
            added = Found()
            find_added_boundaries(layers, plan, tokens, added)
            if added.inline or not found.missing:
                found = added
        find_heads(layers, plan, tokens, found)
        find_router_logits(layers, plan, tokens, found)
        return found

    def _keep_wanted(self, found: Found) -> Found:
        stages = {site.table for site in self.plan.wanted}
        tables = {table for table, _ in stages}
        return Found(
            fused=[b for b in found.fused if b.table in tables],
            inline=[v for v in found.inline if (v.table, v.stage) in stages],
            hooked={key: path for key, path in found.hooked.items() if key in stages},
            missing=found.missing,
        )

    def _rows(self, found: Found) -> tuple[SiteRow, ...]:
        """The site table."""
        fused = {boundary.table: boundary for boundary in found.fused}
        inline = {(value.table, value.stage): value for value in found.inline}
        rows = []
        for site in sorted(self.plan.wanted):
            table, stage = site.table
            node: fx.Node | None = None
            if table in fused and (stage != Stage.BRANCH or fused[table].branch):
                boundary = fused[table]
                node = (boundary.branch, boundary.stream, boundary.norm)[stage]
                shape = value_of(boundary.stream)
                assert node is not None
                form: Form = (
                    "inline" if stage in self.plan.custom.cut(table) else "fused"
                )
                row = SiteRow(site, form, node.name, _shape(shape))
            elif (table, stage) in inline:
                node = inline[table, stage].value
                row = SiteRow(site, "inline", node.name, _shape(value_of(node)))
            elif (table, stage) in found.hooked:
                # Only routers: no other value runs inside an op.
                logits = f"[tokens, {self.plan.num_experts}]"
                row = SiteRow(site, "module", found.hooked[table, stage], logits)
            else:
                reason = found.missing.get((table, stage), _NOT_FOUND)
                row = SiteRow(site, None, reason=reason)
            ops = tuple(
                c.op for c in self.plan.custom.at(table, stage) if c.site == site
            )
            rows.append(replace(row, custom=ops if row.form else ()))
        return tuple(rows)


def spliced_calls(graph: fx.Graph) -> list[tuple[str, tuple[Any, ...]]]:
    """The name of each op in the graph and its arguments, with the fake tensors."""
    return [
        (
            node.target._schema.name.partition("::")[2],
            fx.map_arg(node.args, value_of),
        )
        for node in graph.nodes
        if node.target in SPLICED
    ]


def _shape(value: object) -> str:
    return str(list(getattr(value, "shape", ()))).replace("'", "")


__all__ = ["SPLICED", "SplicePass", "spliced_calls"]
