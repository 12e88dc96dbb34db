"""torch.distributed.pipelining: what a rank of its DualPipeV runs, without its processes."""

from __future__ import annotations

from typing import Any

KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}


def dual_pipe_v(ranks: int, rank: int, microbatches: int) -> list[tuple[tuple[str, int, int], ...]]:
    """Calls of a rank in order, one, or two that run beside each other: (kind, stage, number of the micro-batch).

    Kinds: "F" a forward, "B" a backward, "I" and "W" its gradients of inputs and of weights apart. Rank r of p holds
    stages r and 2 p - 1 - r. Source: DeepSeek's DualPipeV, as torch 2.13 has it.

    Args:
        microbatches: 2 p at least, below which torch has no order.
    """
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    schedule = ScheduleDualPipeV.__new__(ScheduleDualPipeV)
    schedule.pp_group_size, schedule._n_microbatches = ranks, microbatches
    actions = schedule._calculate_single_rank_operations(rank)
    return [_calls(a) for a in actions if a is not None]


def _calls(action: Any) -> tuple[tuple[str, int, int], ...]:
    parts = action.sub_actions or (action,)
    return tuple((KINDS[p.computation_type.name], p.stage_index, p.microbatch_index) for p in parts)
