"""The entries of a read at one layer: one per score, or one that captures."""

from collections.abc import Iterator
from typing import Final

from eyesplice.fx_passes.context import Context
from eyesplice.fx_passes.gates import ScoreKey
from eyesplice.fx_passes.program import Entry
from eyesplice.fx_passes.reads import Read
from eyesplice.fx_passes.sites import Site
from eyesplice.fx_passes.tensors import values
from eyesplice.ops.layout import Opcode, Score

_SCORES: Final = {
    "dot": Score.LINEAR,
    "cosine": Score.COSINE,
    "norm": Score.NORM,
    "distance": Score.DISTANCE,
    "tanh_cosine": Score.TANH_COSINE,
}
_FUNCTIONS: Final = {
    "identity": Score.LINEAR,
    "sigmoid": Score.SIGMOID,
    "relu": Score.RELU,
    "jump_relu": Score.JUMP_RELU,
}


def keys_of(index: int, read: Read) -> Iterator[ScoreKey]:
    """The scores of the read with this index, in the order of their slots."""
    for layer in read.layers:
        for feature in range(read.scores):
            yield ScoreKey(index, layer, feature)


def read_entries(
    read: Read, site: Site, slot: int, context: Context, **gating: int
) -> Iterator[Entry]:
    """The entries of a read at one of its sites.

    Args:
        read: parsed with the same context.
        site: where.
        slot: its first score slot there; of a capture, the index of the capture.
        context: what the model offers.
        gating: `clause_mask` of the entries, and `bit` and `counter` of the first.
    """
    stage = site.table[1]
    if not read.scores:
        yield Entry(stage=stage, opcode=Opcode.CAPTURE, u=slot, **gating)
        return
    first_row, biases = 0, [0.0] * read.scores
    if read.weight is not None and read.kernel == "sae":
        first_row, _ = context.vectors.rows(read.weight, site.layer)
    elif read.weight is not None:
        first_row = context.vectors.row(read.weight, site.layer)
    if isinstance(read.bias, float):
        biases = [read.bias] * read.scores
    elif read.bias is not None:
        biases = values(context.vectors, read.bias, "numbers", site.layer).tolist()
    function = _FUNCTIONS[read.function] if read.function else _SCORES[read.kernel]
    for i, bias in enumerate(biases):
        yield Entry(
            stage=stage,
            opcode=Opcode.READ,
            function=function,
            v=first_row + i,
            bias=bias,
            hi=read.threshold or 0.0,
            slot=slot + i,
            **gating,
        )
        gating = {"clause_mask": gating["clause_mask"]}
