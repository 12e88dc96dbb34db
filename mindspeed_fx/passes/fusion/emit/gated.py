"""Activation and product become one gated operator."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import PassReport, calls, site, skip
from mindspeed_fx.passes.fusion.analysis.gated import _match_activation, packed_source
from mindspeed_fx.passes.fusion.emit import algebra


def fuse(
    gm: fx.GraphModule,
    name: str,
    operator: str,
    activation_of: Callable[[fx.Node], tuple[fx.Node, tuple] | None],
    overload: Any,
    packed_up: tuple = (),
    accept: Callable[[tuple[fx.Node, tuple], fx.Node], bool] | None = None,
) -> PassReport:
    """Rewrite every product of an activated gate and an up projection.

    Args:
        activation_of: (gate, further arguments of the operator) when a node is the activation of ``gate``, else None.
        overload: called with (gate, up, *further), or (source, *packed_up, *further) when the two are the halves
            [gate | up] of one tensor, whose gradient then is one tensor too.
        accept: whether what ``activation_of`` found and this up belong together; all do when None.
    """
    report = PassReport(name)
    late: dict[fx.Node, str] = {}
    for node in calls(gm, aten.mul.Tensor):
        for side, up in match.operands(node, aten.mul.Tensor):
            result = _match_activation(side, activation_of)
            if (
                result is None
                or not isinstance(up, fx.Node)
                or up is result.gate
                or (accept is not None and not accept(result[:2], up))
            ):
                continue
            reason = _rewrite(gm, report, operator, node, up, result, overload, packed_up)
            if reason:
                late[node] = reason
            break
    # What a product first meets (a weight) may be no up projection and the next factor be one.
    report.skipped += [skip(operator, node, reason) for node, reason in late.items() if not node._erased]
    rewrite.finish(gm)
    return report


def _rewrite(gm, report, operator, root, up, result, overload, packed_up) -> str | None:
    gate = result.gate
    if not match.is_float(up):
        return f"up is not a floating-point tensor but {match.value(up)}"
    shapes = [tuple(match.value(n).shape) for n in (gate, up)]
    if shapes[0] != shapes[1]:
        return f"gate and up have different shapes, {shapes[0]} and {shapes[1]}"
    narrow = match.uncast(gate)
    if match.value(narrow).dtype == match.value(up).dtype == match.value(root).dtype:
        gate = narrow  # computed in float32 inside the operator
    region = [root, *result.nodes]
    reason = match.unsafe(region, [gate, up, *result.over, *result.under])
    if reason:
        return reason
    dtype = functools.reduce(
        torch.promote_types, (match.value(n).dtype for n in (gate, up, *result.over, *result.under))
    )
    if dtype != match.value(root).dtype:
        return f"gate and up give {dtype}, the model goes on in {match.value(root).dtype}"
    source = packed_source(gate, up)
    arguments = (gate, up, *result.further) if source is None else (source, *packed_up, *result.further)
    new = algebra.multiply_factors(
        gm, root, rewrite.insert(gm, root, overload, arguments), result.number, result.over, result.under
    )
    report.rewrites.append(site(operator, root, region))
    return rewrite.replace(gm, root, new)
