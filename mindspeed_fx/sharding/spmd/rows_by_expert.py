"""What rows sorted by expert take from a table of the experts, such as biases (GPT-OSS's): where the rows were sent to
their experts (:mod:`token_dispatch`), it is taken there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd import token_dispatch
from mindspeed_fx.sharding.spmd.experts import OwnRows, rows_at


def rows_by_expert(rows: Any, table: Any, indices: Any) -> Any:
    """``table[e]`` for each of ``rows``, where e is its expert.

    Args:
        rows: of tokens sorted by expert; on DTensors, own rows.
        table: [experts, ...].
        indices: any shape; the experts that sort the tokens.

    Returns:
        [rows, ...]; on DTensors own rows, zero where there is none.

    Raises:
        ShardingError: the rows have met no expert yet.
    """
    if not isinstance(table, DTensor):
        return table[indices.reshape(-1).sort()[0]]
    if not isinstance(rows, OwnRows):
        raise ShardingError(
            f"a table of {tuple(table.shape)} is taken by expert for rows that have met no weight of an expert yet; "
            'plan "ep" gathers tokens instead'
        )
    values = _of_rows(rows.routing.own(table), rows.routing.ends, rows.value.shape[0])
    return OwnRows(token_dispatch.own_rows(values, table.device_mesh), rows.routing)


def _of_rows(table: Tensor, ends: Tensor, rows: int) -> Tensor:
    """[rows, ...]: ``table[e]`` where e's rows end at ``ends[e]``, and zero behind the last."""
    row = torch.arange(rows, device=ends.device)
    expert = torch.searchsorted(ends, row, right=True)
    return rows_at(table, expert.clamp(max=ends.shape[0] - 1), expert < ends.shape[0])
