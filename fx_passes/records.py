"""What the finders found, as frozen records that the splice consumes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from eyesplice.fx_passes.sites import Table
from eyesplice.ops.layout import Stage


@dataclass(frozen=True, slots=True)
class FusedBoundary:
    """A norm node that becomes one `boundary_` op: all its stages at once.

    Attributes:
        table: the boundary.
        norm: the fused add + RMSNorm (or, without `branch`, the RMSNorm) to replace.
        stream, branch: its inputs.
        weight, weight_offset: the scale is `weight + weight_offset`.
        eps: added to the mean square.
        copy_stream: the stream's buffer is not ours to write to (a graph input, or
            read again later), so the op gets a copy.
        defer: the next boundary adds the branch to the stream.
        pending: the branch of the boundary before, which that one left to this one.
    """

    table: Table
    norm: fx.Node
    stream: fx.Node
    branch: fx.Node | None
    weight: fx.Node
    weight_offset: float
    eps: float
    copy_stream: bool
    defer: bool = False
    pending: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class InlineValue:
    """A value that gets an `inline_` op in front of the node `before`.

    A value that is a graph input is copied first: its buffer is not ours to write to.
    """

    table: Table
    stage: Stage
    value: fx.Node
    before: fx.Node


@dataclass(slots=True)
class Found:
    """Everything found in one graph.

    Attributes:
        fused, inline: what to splice, in graph order.
        hooked: path of the module whose hook arms a stage of a table, outside the graph.
        missing: why a stage of a table has no value that can be armed.
    """

    fused: list[FusedBoundary] = field(default_factory=list)
    inline: list[InlineValue] = field(default_factory=list)
    hooked: dict[tuple[Table, Stage], str] = field(default_factory=dict)
    missing: dict[tuple[Table, Stage], str] = field(default_factory=dict)

    def refuse(
        self, table: Table, reason: str, stages: Iterable[Stage] = tuple(Stage)
    ) -> None:
        """Say why the table has no value at these stages; by default, at any."""
        for stage in stages:
            self.missing[table, stage] = reason
