"""What SwiGLU and the other gated linear units share: the product ``activation(gate) * up`` becomes one operator."""

from __future__ import annotations

from typing import Any, Callable

import torch.fx as fx

from mindspeed_fx.passes.base import PassReport, calls, site, skip
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten


def fuse(gm: fx.GraphModule, name: str, operator: str, activation_of: Callable[[fx.Node], tuple[fx.Node, tuple] | None], overload: Any, packed_up: tuple = (), accept: Callable[[tuple[fx.Node, tuple], fx.Node], bool] | None = None) -> PassReport:
    """Rewrite every product of an activated gate and an up projection.

    Args:
        activation_of: (gate, further arguments of the operator) when a node is the activation of ``gate``, else None.
        overload: called with (gate, up, *further), or (source, *packed_up, *further) when the two are the halves
            [gate | up] of one tensor, whose gradient then is one tensor too.
        accept: whether what ``activation_of`` found and this up belong together; all do when None.
    """
    report = PassReport(name)
    for node in calls(gm, aten.mul.Tensor):
        for activated, up in match.operands(node, aten.mul.Tensor):
            found = activation_of(match.uncast(activated))
            if found is not None and isinstance(up, fx.Node) and up is not found[0] and (accept is None or accept(found, up)):
                reason = _rewrite(gm, report, operator, node, activated, up, *found, overload, packed_up)
                if reason:
                    report.skipped.append(skip(operator, node, reason))
                break
    match.finish(gm)
    return report


def _rewrite(gm, report, operator, root, activated, up, gate, further, overload, packed_up) -> str | None:
    if not match.is_float(up):
        return f"up is not a floating-point tensor but {match.value(up)}"
    shapes = [tuple(match.value(n).shape) for n in (gate, up)]
    if shapes[0] != shapes[1]:
        return f"gate and up have different shapes, {shapes[0]} and {shapes[1]}"
    narrow = match.uncast(gate)
    if match.value(narrow).dtype == match.value(up).dtype == match.value(root).dtype:
        gate = narrow  # computed in float32 inside the operator
    region = [root, activated, match.uncast(activated)]
    reason = match.unsafe(region, [gate, up])
    if reason:
        return reason
    source = packed(gate, up)
    arguments = (gate, up, *further) if source is None else (source, *packed_up, *further)
    new = match.insert(gm, root, overload, arguments)
    if match.value(new).dtype != match.value(root).dtype:
        gm.graph.erase_node(new)
        return f"gate and up give {match.value(new).dtype}, the model goes on in {match.value(root).dtype}"
    report.rewrites.append(site(operator, root, region))
    return match.substitute(gm, root, new)


def packed(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The tensor whose halves are [gate | up], if there is one."""
    a, b = match.part(gate), match.part(up)
    if a and b and match.same(a.source, b.source) and a.step == b.step == 1 and a.dim == b.dim == match.value(a.source).dim() - 1:
        if a.start == 0 and a.stop == b.start and b.stop == match.value(a.source).shape[-1] and a.stop == b.stop - b.start:
            return a.source
    return None
