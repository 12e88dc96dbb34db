"""RMSNorm of queries or keys per head and their rotation: ``rope(rms_norm(x))`` becomes ``mindspeed::qk_norm_rope``.

It reads what the passes before it found, so that every spelling of the norm and of the rotation is here too; between
the two heads may be transposed, viewed and cast, and of each head only the first elements may turn (partial rotary).
Safe because the operator computes the same formulas, without the rounding between them. Where it pays: norm and
rotation apart read and write every head twice in each direction, the operator once; that needs a kernel of the target
that does both. On cpu generated code fuses
the two operators by itself: one core, forward and backward, 512 to 2048 tokens of 8 to 32 heads, the operator's
reference took 1.16 to 1.5 of the time of the two apart in float32 and 1.03 to 1.2 in bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import before_copy
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.base import find
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "fusion.qk_norm_rope", "mindspeed::qk_norm_rope"
ops = torch.ops.mindspeed
SWAPS = (aten.transpose.int, aten.permute.default)
RESHAPES = (*match.RESHAPES, aten.unsqueeze.default, aten.squeeze.dim)
STILL = (aten.to.dtype, aten.contiguous.default, aten.clone.default)
"""What changes neither the shape nor the order of the dimensions."""


class Found(NamedTuple):
    root: fx.Node
    """What the operator stands for: the rotation, or it and what passes beside it joined."""
    norm: fx.Node
    moves: list[fx.Node]
    """From the norm to the rotation."""
    region: list[fx.Node]


@register(NAME)
def qk_norm_rope(gm: fx.GraphModule, context: Context) -> PassReport:
    """RMSNorm of heads and the rotation of the result become one operator."""
    report = PassReport(NAME)

    def fuse(node: fx.Node) -> Outcome:
        result = _match_norm(node)
        return _rewrite(gm, node, result, context) if isinstance(result, Found) else result

    rewrite_each(report, OPERATOR, calls(gm, ops.rope.default), fuse)
    rewrite.finish(gm)
    return report


def _match_norm(rope: fx.Node) -> Found | str | None:
    """The norm before ``rope`` and what lies between; the reason of a near miss; None where there is no norm."""
    turned = rope.args[0]
    part = match.part(turned)
    whole = part.source if part is not None and part.dim == match.value(turned).dim() - 1 else turned
    moves, copies, last = [], [], whole
    while True:
        if (plain := before_copy(last)) is not last:
            while last is not plain:
                copies.append(last)
                last = last.args[0]
        elif match.is_call(last, *SWAPS, *RESHAPES, *STILL):
            moves.insert(0, last)
            last = last.args[0]
        else:
            break
    if any(_match_normalize(before_copy(a)) and len(a.users) > 1 for a, _ in match.operands(last, aten.mul.Tensor)):
        return "what the norm makes before its weight is used elsewhere in the model"
    if not _match_normalize(last):
        return None
    norm, dim = last.args[0], match.value(whole).shape[-1]
    if match.value(last).shape[-1] != dim:
        return f"the norm is over {match.value(last).shape[-1]} elements, each head has {dim}"
    if any(a.meta["needs_grad"] for a in rope.args[1:3]):
        return "cos and sin need gradients, which the operator does not give"
    if not all(_keeps_heads(m, dim) for m in moves):
        return "the elements of a head are moved between the norm and the rotation"
    root, other = rope, []
    if whole is not turned:
        joined = _match_concat(rope, whole, part, dim)
        if joined is None:
            return f"elements {part.start} to {part.stop} of {dim} turn and are not joined with the others as they were"
        root, other = joined
    region = [root, rope, turned, *other, *moves, *copies, last, norm]
    if any(set(n.users) - set(region) for n in (last, *moves, *copies, whole) if n is not root):
        return "the normalized heads are used elsewhere in the model"
    return Found(root, norm, moves, [n for i, n in enumerate(region) if n not in region[:i]])


def _match_normalize(n: fx.Node) -> bool:
    return (
        match.is_call(n, match.operator.getitem) and n.args[1] == 0 and match.is_call(n.args[0], ops.rms_norm.default)
    )


def _keeps_heads(move: fx.Node, dim: int) -> bool:
    """True when the last dimension of ``move`` is that of what it moves."""
    before, rank = match.value(move.args[0]), match.value(move).dim()
    if match.is_call(move, aten.transpose.int):
        return all(d % rank != rank - 1 for d in move.args[1:3])
    if match.is_call(move, aten.permute.default):
        return move.args[1][-1] % rank == rank - 1
    return before.shape[-1] == match.value(move).shape[-1] == dim


def _match_concat(rope: fx.Node, whole: fx.Node, part: match.Pieces, dim: int) -> tuple[fx.Node, list[fx.Node]] | None:
    """(the concatenation of ``rope`` and the elements of ``whole`` after it, what lies on the way)."""
    way = [rope]
    while len(way[-1].users) == 1 and match.is_call(user := next(iter(way[-1].users)), aten.to.dtype):
        way.append(user)
    cat = next(iter(way[-1].users)) if len(way[-1].users) == 1 else None
    if (
        not match.is_call(cat, aten.cat.default)
        or part.start
        or part.step != 1
        or len(cat.args[0]) != 2
        or cat.args[0][0] is not way[-1]
    ):
        return None
    arg, rest = cat.args[0][1], match.uncast(cat.args[0][1])
    other, axis = match.part(rest), match.argument(cat, "dim", 0)
    if (
        other is None
        or other.source is not whole
        or (other.dim, other.start, other.stop, other.step) != (part.dim, part.stop, dim, 1)
        or axis % match.value(cat).dim() != part.dim
    ):
        return None
    while arg is not rest:
        way.append(arg)
        arg = arg.args[0]
    return cat, [*way[1:], rest]


def _rewrite(gm: fx.GraphModule, rope: fx.Node, result: Found, context: Context) -> Outcome:
    root, norm, moves, region = result
    x, weight, eps, cast_first = norm.args
    cos, sin, interleaved = rope.args[1:]
    if reason := match.unsafe(region, [x, weight, cos, sin]):
        return reason
    for move in moves:
        if match.is_call(move, *RESHAPES):
            if not match.value(x).is_contiguous():
                return (
                    "heads that are parts of a larger tensor are viewed between the norm and the rotation, which "
                    "would copy them"
                )
            x = rewrite.insert(gm, root, aten.view.default, (x, list(match.value(move).shape)))
        elif match.is_call(move, *SWAPS):
            x = rewrite.insert(gm, root, move.target, (x, *move.args[1:]))
    args = (x, weight, cos, sin, eps, cast_first, interleaved)
    new_node = rewrite.insert(gm, root, ops.qk_norm_rope.default, args)
    new = rewrite.insert(gm, root, match.operator.getitem, (new_node, 0))
    if match.value(new).dtype != match.value(rope).dtype:
        types = f"in {match.value(rope).dtype} from a norm in {match.value(norm)[0].dtype}".replace("torch.", "")
        return f"the rotation is computed {types}"
    if reason := _unpaid(args, new_node, context):
        return reason
    return rewrite.substitute(gm, root, new) or site(OPERATOR, root, region)


def _unpaid(args: tuple, result: fx.Node, context: Context) -> str | None:
    """Why norm and rotation are better apart on the target."""
    options = context.options
    if context.left_to_inductor(NAME):
        return (
            "on cpu the code that Inductor generates for the norm and the rotation was measured no slower (the "
            f'operator took 1.0 to 1.5 of its time); put "{NAME}" in enable to fuse all the same'
        )
    if options.target == "cpu" or NAME in options.enable:
        return None
    x, weight, cos, sin, *_, interleaved = fx.map_arg(args, match.value)
    y, rstd = match.value(result)
    backward = (y, x, weight, rstd, cos, sin, interleaved, weight is not None)
    for operator, arg in ((ops.qk_norm_rope, fx.map_arg(args, match.value)), (ops.qk_norm_rope_backward, backward))[
        : 2 if result.meta["needs_grad"] else 1
    ]:
        kernel, reasons = find(operator.default).choose(options.target, arg, {}, codegen=options.codegen == "inductor")
        if kernel is None:
            return f"no kernel for both: {reasons[-1] if reasons else f'{options.target} has none'}"
    return None
