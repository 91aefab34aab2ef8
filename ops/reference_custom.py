"""How strongly a user's own op acts on each token, in plain torch."""

import torch
from torch import Tensor

from eyesplice.ops.layout import Header, Opcode
from eyesplice.ops.reference_program import count
from eyesplice.ops.reference_writes import decode
from eyesplice.ops.token_map import ROW_MASK
from eyesplice.ops.work import Work


def custom_gain(
    value: Tensor,
    token_map: Tensor,
    select: Tensor,
    program: Tensor,
    work: list[Tensor],
) -> Tensor:
    """The gain of each token for the op behind it, 0 where the op must not act.

    Args:
        value: `[tokens, width]`, what the op will be run on: says how many tokens there
            are, and that whatever writes it, and with it `select`, comes first.
        token_map: int32 `[>= tokens]`, the words of this table's tokens, see
            `token_map`; 0 is idle.
        select: int32 `[>= tokens]`, bit j is clause j of the token's program.
        program: int32 `[rows, 1 + max_entries, WORDS]`, the op's own table: a row has
            one CUSTOM entry or none.
        work: tensors of `layout.WORK`; a counted entry writes `counts`.

    Returns:
        fp32 `[tokens]`.
    """
    rows = token_map[: value.shape[0]] & ROW_MASK
    gain = torch.zeros(len(rows), dtype=torch.float32, device=value.device)
    if not bool(rows.any()):
        return gain
    for row in rows.unique().tolist():
        if row == 0 or program[row, 0, Header.END_NORMED] == 0:
            continue
        (entry,) = decode(program[row, 1:2])
        if entry.opcode != Opcode.CUSTOM:
            continue
        tokens = (rows == row).nonzero()[:, 0]
        bits = select[tokens]
        chosen = tokens[(bits & entry.clause_mask) != 0]
        gain[chosen] = entry.gain
        if entry.counter:
            count(entry.counter, 0, chosen, Work(*work))
            count(entry.counter, 1, tokens[(bits & entry.bit) != 0], Work(*work))
    return gain
