"""Private and moving APIs of ``torch.distributed.tensor``, one name each: part of :mod:`mindspeed_fx.compat`.

Importing this module imports DTensor (about half a second); only sharding does.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from mindspeed_fx.kernels.sharding import PARTIAL, REPLICATED, Even, first_plain_argument, is_even


def placement(way: Any) -> Placement:
    """A placement of :mod:`mindspeed_fx.kernels.sharding` as DTensor's."""
    return {REPLICATED: Replicate(), PARTIAL: Partial()}[way] if isinstance(way, str) else Shard(int(way))


def register_ways(overload: torch._ops.OpOverload, rule: Callable[[Sequence[Any], dict], list[tuple[list, list]]]) -> None:
    """Register a sharding rule with DTensor.

    ``torch.distributed.tensor.experimental.register_sharding`` does this too, but caches a rule by tensors and integers
    alone, so that a call with other flags would get the first call's answer, and cannot ask for even parts.

    Args:
        rule: called with the operator's arguments, tensors as DTensor specs; returns (results, tensor arguments) rows.
    """
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def spec(value: Any) -> Any:
        return value.strategies[0].output_spec if isinstance(value, OpStrategy) else value

    def strategy(schema: OpSchema) -> OpStrategy:
        rows = rule([spec(a) for a in schema.args_schema], {k: spec(v) for k, v in schema.kwargs_schema.items()})
        even = {(i, int(p)): p for _, inputs in rows for i, p in enumerate(inputs) if isinstance(p, Even)}

        def allowed(inputs: list, _outputs: Any) -> bool:
            return all(_even(x, even.get((i, p.dim))) for i, x in enumerate(inputs) for p in x.placements if isinstance(p, Shard))

        return expand_to_full_mesh_op_strategy(
            schema.get_mesh_from_args(),
            schema,
            [[placement(p) for p in results + inputs] for results, inputs in rows],
            input_index=len(overload._schema.returns),
            is_valid_strategy_cb=allowed,
        )

    info = RuntimeSchemaInfo(first_plain_argument(overload), needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(overload, strategy, info)


def _even(spec: Any, placement: Even | None) -> bool:
    if placement is None:
        return True
    parts = 1
    for size, p in zip(spec.mesh.shape, spec.placements):
        parts *= size if isinstance(p, Shard) and p.dim == int(placement) else 1
    return is_even(spec.shape, placement, parts)
