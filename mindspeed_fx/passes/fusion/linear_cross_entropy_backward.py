"""The gradient of the logits, a tile at a time: the two or three products that read
``mindspeed::cross_entropy_backward`` become ``mindspeed::linear_cross_entropy_backward``.

For the losses that ``fusion.linear_cross_entropy`` leaves because the logits are returned (as Hugging Face models do),
so that their gradient cannot be written over them. Works on the joint graph, where the backward is there to be read,
whatever the model returns. Between the gradient and the products only the rows of tokens may be viewed, transposed or
padded; the forward must have made the logits by the same steps, so that a row's gradient needs nothing but that row.
Another gradient of the logits is added tile by tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import strip_transpose
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.op_sets import IDENTITIES, TRANSPOSES
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.storage import is_view, owner
from mindspeed_fx.passes.base import Context, PassReport, Site, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis.loss_head import acts_on_rows

NAME, OPERATOR = "fusion.linear_cross_entropy_backward", "mindspeed::linear_cross_entropy_backward"

SMALLEST = 32 * 2**20
"""Bytes of the gradient of the logits below which tiles save no memory, or less than they cost in time; of 16-bit
types, whose tiles are slower, twice as many. Measured on a Llama of one layer (one thread, 1,024 tokens), in tiles and
whole: float32 16 MiB 76 and 70 ms, 48 and 49 MiB of peak; 32 MiB 143 and 154 ms, 76 and 90 MiB; bfloat16 16 MiB 83 and
65 ms, 54 and 45 MiB; 32 MiB 163 and 136 ms, 82 and 85 MiB; 64 MiB 295 and 275 ms, 138 and 165 MiB."""

FILL = {"grad": 0.0, "lse": float("inf")}
"""What padded rows hold: exp(logits - inf) is zero whatever the logits."""


class Products(NamedTuple):
    """What reads the gradient [tokens, vocab]: for each gradient that is computed, its node and whether it comes
    transposed.
    """

    hidden: fx.Node | None
    weight: tuple[fx.Node, bool] | None
    bias: fx.Node | None
    region: list[fx.Node]


@register(NAME)
def linear_cross_entropy_backward(gm: fx.GraphModule, context: Context) -> PassReport:
    """The gradient of the logits never exists whole."""
    report = PassReport(NAME)
    nodes = calls(gm, torch.ops.mindspeed.cross_entropy_backward.default)
    rewrite_each(report, OPERATOR, nodes, lambda node: _match_gate(node, context) or _rewrite(gm, node))
    if report.rewrites:
        gm.graph.eliminate_dead_code()
        recompile(gm)
    return report


def _match_gate(node: fx.Node, context: Context) -> str | None:
    if NAME in context.options.enable:
        return None
    if context.options.target != "cpu":
        return (
            f'not measured on {context.options.target}; put "{NAME}" in enable to save the memory of the gradient '
            "of the logits"
        )
    if context.options.codegen == "inductor" and not _outlives(node.args[1]):
        return "nobody else reads the logits, so that generated code writes their gradient over them"
    value = match.value(node)
    size = fake.hint(value.shape[0]) * fake.hint(value.shape[1]) * value.itemsize
    least = SMALLEST * (2 if value.itemsize < 4 else 1)
    return (
        f"the gradient of the logits takes {size / 2**20:.1f} MiB; below {least >> 20} MiB nothing is gained"
        if size < least
        else None
    )


def _outlives(logits: fx.Node) -> bool:
    """True when the memory of ``logits`` is returned to the caller."""
    todo = [owner(logits)]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if is_view(user):
                todo.append(user)
    return False


# --------------------------------------------------------------------------- from the gradient to the products


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Site | str:
    end, steps, extra, reason = _path(node)
    if reason:
        return reason
    result = _products(end)
    if isinstance(result, str):
        return result
    linear = _linear(node.args[1])
    if linear is None:
        return "the logits are not a linear whose tokens alone were viewed, sliced or transposed"
    hidden, weight, product = linear
    reason = _other_operands(result, hidden, weight) or _later(gm, [hidden, weight[0], extra], end)
    if reason:
        return reason
    _insert(gm, node, end, steps, extra, result, hidden, weight, product)
    return site(OPERATOR, node, [node, *steps, *result.region])


def _path(node: fx.Node) -> tuple[fx.Node, list[fx.Node], fx.Node | None, str | None]:
    """The last node that is the gradient [tokens, vocab], the row steps that lead to it, the other gradient that is
    added on the way, and why that fails."""
    n, steps, extra = node, [], None
    while len(n.users) == 1:
        user = next(iter(n.users))
        if _is_row_step(user, n):
            steps.append(user)
        elif extra is None and match.is_call(user, aten.add.Tensor) and not user.kwargs and _same_type(*user.args):
            extra = user.args[1] if user.args[0] is n else user.args[0]
            steps.append(user)
        else:
            break
        n = user
    if match.value(n).dim() != 2:
        readers = ", ".join(f"{u.name} ({u.target})" for u in n.users) or "nobody"
        return n, steps, extra, f"the gradient of the logits is read by {readers}"
    return n, steps, extra, None


def _same_type(a: Any, b: Any) -> bool:
    return (
        isinstance(a, fx.Node)
        and isinstance(b, fx.Node)
        and match.value(a).shape == match.value(b).shape
        and match.value(a).dtype == match.value(b).dtype
    )


def _is_row_step(user: fx.Node, n: fx.Node) -> bool:
    """True when ``user`` is ``n`` with its tokens viewed, transposed, copied or padded with zeros; classes stay
    last.
    """
    before, after = match.value(n), match.value(user)
    if (
        not isinstance(after, torch.Tensor)
        or after.dtype != before.dtype
        or after.dim() < 2
        or before.shape[-1] != after.shape[-1]
    ):
        return False
    last = before.dim() - 1
    if match.is_call(user, *match.RESHAPES, *IDENTITIES, aten.transpose.int, aten.permute.default):
        return acts_on_rows(user)
    if match.is_call(user, aten.slice_backward.default):
        return user.args[0] is n and user.args[2] % (last + 1) != last
    if match.is_call(user, aten.slice_scatter.default):
        return (
            user.args[1] is n and match.argument(user, "dim", 0) % (last + 1) != last and match.is_zeros(user.args[0])
        )
    return False


def _products(end: fx.Node) -> Products | str:
    """What reads ``end`` [tokens, vocab]; why when one of them is no product of a linear's backward."""
    hidden = weight = bias = None
    region = []
    for user in end.users:
        if match.is_call(user, aten.mm.default) and user.args[0] is end and hidden is None:
            hidden = user
        elif match.is_call(user, aten.mm.default) and user.args[1] is end and weight is None:
            weight = (user, True)
        elif (
            match.is_call(user, *TRANSPOSES)
            and len(user.users) == 1
            and match.is_call(product := next(iter(user.users)), aten.mm.default)
            and product.args[0] is user
            and weight is None
        ):
            weight = (product, False)
            region.append(user)
        elif (
            match.is_call(user, aten.sum.dim_IntList)
            and list(user.args[1]) == [0]
            and match.argument(user, "dtype") is None
            and bias is None
        ):
            bias = user
        else:
            return f"the gradient of the logits is also read by {user.name} ({user.target})"
    if hidden is None and weight is None:
        return "no product reads the gradient of the logits"
    return Products(hidden, weight, bias, region + [n for n in (hidden, weight and weight[0], bias) if n is not None])


# --------------------------------------------------------------------------- the forward


def _linear(logits: fx.Node) -> tuple[fx.Node, tuple[fx.Node, bool], fx.Node] | None:
    """hidden [tokens, hidden], (weight, transposed), and the product [tokens, vocab] that ``logits`` are rows of;
    ``transposed``: the weight is [vocab, hidden]."""
    n = logits
    while not match.is_call(n, aten.mm.default, aten.addmm.default):
        rows = match.is_call(
            n, *match.RESHAPES, *IDENTITIES, aten.slice.Tensor, aten.transpose.int, aten.permute.default
        )
        if not rows or not acts_on_rows(n):
            return None
        n = n.args[0]
    if n.kwargs:
        return None
    hidden, matrix = n.args[-2:]
    return hidden, strip_transpose(matrix, *IDENTITIES), n


def _other_operands(result: Products, hidden: fx.Node, weight: tuple[fx.Node, bool]) -> str | None:
    """Why the products of the backward are not with ``hidden`` and ``weight``; None when they are."""
    matrix, transposed = weight
    if result.hidden is not None and strip_transpose(result.hidden.args[1], *IDENTITIES) != (matrix, not transposed):
        return f"{result.hidden.name} multiplies the gradient of the logits with another matrix than the forward"
    if result.weight is not None:
        product, swapped = result.weight
        x, flag = strip_transpose(product.args[0 if swapped else 1], *IDENTITIES)
        if (x, flag ^ swapped) != strip_transpose(hidden, *IDENTITIES):
            return f"{product.name} multiplies the gradient of the logits with another tensor than the forward"
    return None


def _later(gm: fx.GraphModule, inputs: list[fx.Node | None], end: fx.Node) -> str | None:
    """Why the operator cannot stand where ``end`` does: an input is made after it."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    late = next((i for i in inputs if i is not None and order[i] > order[end]), None)
    return f"{late.name} is made after the gradient of the logits" if late is not None else None


# --------------------------------------------------------------------------- the rewrite


def _insert(
    gm: fx.GraphModule,
    node: fx.Node,
    end: fx.Node,
    steps: list[fx.Node],
    extra: fx.Node | None,
    result: Products,
    hidden: fx.Node,
    weight: tuple[fx.Node, bool],
    product: fx.Node,
) -> None:
    def call(target: Any, *args: Any) -> fx.Node:
        new = rewrite.insert(gm, end, target, args)
        new.meta |= {k: node.meta[k] for k in ("partitioner_tag", "seq_nr", "autograd_backward") if k in node.meta}
        return new

    grad, _, target, lse, ignore, smoothing = node.args
    rows = {"grad": grad, "target": target, "lse": lse}
    added = False
    for step in steps:
        if match.is_call(step, aten.add.Tensor):
            added = True
            continue
        rows = {name: _on_rows(call, step, vector, FILL.get(name, ignore)) for name, vector in rows.items()}
        if added:
            extra = call(step.target, extra, *step.args[1:])
    needed = [result.hidden is not None, result.weight is not None, result.bias is not None]
    matrix = weight[0] if weight[1] else call(aten.t.default, weight[0])
    both = call(
        torch.ops.mindspeed.linear_cross_entropy_backward.default,
        rows["grad"],
        product,
        rows["target"],
        rows["lse"],
        extra,
        hidden,
        matrix,
        ignore,
        smoothing,
        needed,
    )
    for index, (old, swapped) in enumerate(
        ((result.hidden, False), result.weight or (None, False), (result.bias, False))
    ):
        if old is None:
            continue
        new = call(match.operator.getitem, both, index)
        if swapped:
            new = call(aten.t.default, new)
        if old is result.bias and match.argument(old, "keepdim", False):
            new = call(aten.unsqueeze.default, new, 0)
        old.replace_all_uses_with(new)


def _on_rows(call: Any, step: fx.Node, vector: fx.Node, fill: float | int) -> fx.Node:
    """``step``, which acts on [..., vocab], applied to one number per token."""
    if match.is_call(step, *match.RESHAPES):
        return call(aten.reshape.default, vector, list(match.value(step).shape[:-1]))
    if match.is_call(step, *IDENTITIES):
        return vector
    if match.is_call(step, aten.transpose.int):
        dims = match.value(step).dim()
        return call(aten.transpose.int, vector, *(d % dims for d in step.args[1:]))
    if match.is_call(step, aten.permute.default):
        dims = match.value(step).dim()
        return call(aten.permute.default, vector, [d % dims for d in step.args[1][:-1]])
    dims = match.value(step).dim()
    if match.is_call(step, aten.slice_backward.default):
        _, _, dim, start, stop, factor = step.args
    else:
        dim, start, stop, factor = (
            match.argument(step, name, default)
            for name, default in (("dim", 0), ("start", None), ("end", None), ("step", 1))
        )
    base = call(aten.new_full.default, vector, list(match.value(step).shape[:-1]), fill)
    return call(aten.slice_scatter.default, base, vector, dim % dims, start, stop, factor)
