"""What a sharding rule is: how an operator may be computed part by part over one dimension of a device mesh.

An operator file declares its rule next to its reference, as plain data::

    @rms_norm.shard
    def _(x, weight, eps, cast_first):
        return [([d, d], [d, REPLICATED]) for d in range(x.ndim - 1)]  # results, then tensor arguments

Each row is one way: the placement of every result and of every tensor argument, where a number is the dimension that
is divided, :class:`Even` one that is divided without remainder, ``REPLICATED`` the whole on every rank, and ``PARTIAL``
a sum over the ranks. Computing everything everywhere is always a way and is not declared. Arguments that are None keep
their place in a row. Only rules that hold for every number of ranks are declared. A partial argument is summed before
the operator even where the operator is linear in it, because sixteen-bit parts would each be rounded; the exception is
an operator that only scales.

:func:`register_sharding_rules` hands the rules to DTensor when sharding is first used; importing this file costs
nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Sequence

from mindspeed_fx.compat.placements import REPLICATED, _is_tensor
from mindspeed_fx.graph.schema import all_arguments

Strategy = tuple[list[Any], list[Any]]
"""Placements of the results, placements of the tensor arguments."""


def along(x: Any, dim: int, ndim: int) -> Any:
    """Placement of ``x``, broadcast to ``ndim`` dimensions, where dimension ``dim`` of the whole is divided."""
    own = dim - (ndim - x.ndim) if x is not None else -1
    return REPLICATED if own < 0 or x.shape[own] == 1 else own


def strategies(operator: Any, args: Sequence[Any]) -> list[Strategy]:
    """Every way of ``operator`` for these arguments (tensors, or anything with ``shape`` and ``ndim``), replicated
    first.

    Rows keep only the arguments that are tensors here.
    """
    schema = operator.overload._schema
    present = [_is_tensor(a.type) and v is not None for a, v in zip(schema.arguments, args, strict=True)]
    optional = [v is not None for a, v in zip(schema.arguments, args) if _is_tensor(a.type)]
    matches = [([REPLICATED] * len(schema.returns), [REPLICATED] * sum(present))]
    for results, inputs in operator.sharding(*args):
        row = (list(results), [p for p, here in zip(inputs, optional, strict=True) if here])
        if len(results) != len(schema.returns):
            raise ValueError(
                f"the sharding rule of {operator.name} places {len(results)} results of {len(schema.returns)}"
            )
        if row not in matches:
            matches.append(row)
    return matches


@functools.cache
def register_sharding_rules() -> None:
    """Make every ``mindspeed::`` operator known to DTensor, forward and backward; once per process.

    Raises:
        LookupError: an operator without a rule.
    """
    from mindspeed_fx import kernels
    from mindspeed_fx.compat import dtensor

    without = [o.name for o in kernels.REGISTRY.values() if o.sharding is None]
    if without:
        raise LookupError(
            f"no sharding rule for {', '.join(without)}; declare it with @operator.shard in the operator's file"
        )
    for operator in kernels.REGISTRY.values():
        dtensor.register_strategies(operator.overload, functools.partial(_complete, operator))


def _complete(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    return strategies(operator, all_arguments(operator.overload, args, kwargs))
