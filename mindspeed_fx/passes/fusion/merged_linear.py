"""Linear layers of one input (query, key and value; gate and up) become one product: the weights are joined in the
graph.

    q, k, v = linear(x, wq), linear(x, wk), linear(x, wv)   ->   linear(x, cat(wq, wk, wv)), and slices of it

The parameters stay as they are, each with a gradient of its own, so that checkpoints and optimizers see nothing of it;
the price is that their bytes are copied in every step, forward and backward, and that the gradients of the parts are
joined. What it saves are launches, reads of the input, and the sums of its gradients. Which is more is asked of the
cost model for every group of layers (wide weights and few tokens lose, narrow layers win), so that it needs a device
that the model knows. On request alone: no device has measured it, and on cpu it was measured not to pay. Exact up to
the order of the sums in the products.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import detect, hardware
from mindspeed_fx.cost.operators import Cost, Spec, once, product
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.op_sets import TRANSPOSES, is_cast, is_pointwise, may_alias
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "fusion.merged_linear", "aten.linear"


@register(NAME)
def merged_linear(gm: fx.GraphModule, context: Context) -> PassReport:
    """Linear layers that read one input become one product with their weights joined in the graph."""
    report, options = PassReport(NAME), context.options
    if options.target == "cpu":
        return report.note_reason(
            "on cpu one product for several was measured no faster: 0.97 to 1.08 of the time apart"
        )
    if context.plan:
        return report.note_reason("the model is parallelized: parts of a joined weight would not be parts of each")
    name, why = (options.hardware, "") if options.hardware else detect(options.target)
    if name is None:
        return report.note_reason(f"whether it pays is asked of the cost model, and {why}")
    groups = {group[0]: group for group in _groups(gm)}
    rewrite_each(report, OPERATOR, groups, lambda first: _rewrite(gm, groups[first], hardware(name)))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, group: list[fx.Node], device: Hardware) -> Outcome:
    if reason := _refusal(group) or _unpaid(group, device):
        return f"{', '.join(n.name for n in group)}: {reason}"
    _merge(gm, group)
    return site(OPERATOR, group[0], group)


def _groups(gm: fx.GraphModule) -> Iterator[list[fx.Node]]:
    """Linear layers of one input, two or more, in the order of the graph; weights of one layer used twice make no
    group.
    """
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for node in calls(gm, aten.linear.default):
        result = by_input.setdefault(node.args[0], [])
        if all(node.args[1] is not other.args[1] for other in result):
            result.append(node)
    return iter([group for group in by_input.values() if len(group) > 1])


def _bias(node: fx.Node) -> Any:
    return match.argument(node, "bias")


def _refusal(group: Sequence[fx.Node]) -> str | None:
    weights, biases = [n.args[1] for n in group], [_bias(n) for n in group]
    if len({match.value(w).dtype for w in weights}) > 1 or any(match.value(w).dim() != 2 for w in weights):
        shown = ", ".join(f"{match.value(w).dtype} {tuple(match.value(w).shape)}" for w in weights)
        return f"the weights are {shown}; matrices of one type can be joined".replace("torch.", "")
    if any(fake.has_symbols(match.value(w)) for w in weights):
        return "a weight's size changes from call to call"
    if any(b is None for b in biases) != all(b is None for b in biases):
        return "some have a bias and some none"
    if any(w.meta["needs_grad"] != weights[0].meta["needs_grad"] for w in weights):
        return (
            "some weights are trained and some are not: the gradient of those that are not would be computed for "
            "nothing"
        )
    early = {n for n in group[0].graph.nodes if n.op in ("placeholder", "get_attr")}
    if not all(p is None or p in early for p in (*weights, *biases)):
        return "a weight is computed in the graph, maybe after the first layer reads its input"
    if reason := match.unsafe(list(group), [group[0].args[0], *weights, *biases]):
        return reason
    offset, total = 0, sum(match.value(w).shape[0] for w in weights)
    for node in group:
        y = match.value(node)
        part = (
            torch.empty((*y.shape[:-1], total), dtype=y.dtype, device="meta")[..., offset : offset + y.shape[-1]]
            if not fake.has_symbols(y)
            else None
        )
        offset += y.shape[-1]
        needs = next((u for u in node.users if not _takes(u, part)), None)
        if needs is not None:
            return (
                f"{needs.name} ({needs.target}) reads {node.name} as it lies in memory, and a part of a joined "
                "result would be copied for it"
            )
    return None


def _takes(user: fx.Node, part: torch.Tensor | None) -> bool:
    """Whether ``user`` reads a slice ``part`` of a row as well as a tensor of its own."""
    if match.is_call(user, *TRANSPOSES, aten.slice.Tensor, aten.linear.default):
        return True
    if is_pointwise(user.target) and (is_cast(user.target) or not may_alias(user.target)):
        return True
    if isinstance(user.target, torch._ops.OpOverload) and user.target.namespace == "mindspeed":
        return True
    if match.is_call(user, *match.RESHAPES) and part is not None:
        try:
            part.view(match.value(user).shape)
        except RuntimeError:
            return False
        return True
    # Of an unknown length: heads made of the last dimension.
    return (
        match.is_call(user, *match.RESHAPES)
        and part is None
        and match.value(user).dim() == match.value(user.args[0]).dim() + 1
    )


def _unpaid(group: Sequence[fx.Node], device: Hardware) -> str | None:
    """Why the cost model prefers the layers apart."""
    apart, together = (sum(c.seconds(device) for c in costs) for costs in costs_of(group))
    return (
        None
        if together < apart
        else f"modelled on {device.name}: {together * 1e6:.0f} us joined, {apart * 1e6:.0f} us apart"
    )


def costs_of(group: Sequence[fx.Node]) -> tuple[list[Cost], list[Cost]]:
    """Kernels of the layers apart, and of the product that they become: forward, and the gradients that are asked
    for.
    """
    y = match.value(group[0])
    tokens, width = 1, match.value(group[0].args[1]).shape[1]
    for n in y.shape[:-1]:
        tokens *= match.hint(n)
    sizes = [match.value(n.args[1]).shape[0] for n in group]

    def spec(*shape: int) -> Spec:
        return Spec(shape, str(y.dtype).removeprefix("torch."), y.dtype.itemsize)

    x, ws, ys, w, out = (
        spec(tokens, width),
        [spec(n, width) for n in sizes],
        [spec(tokens, n) for n in sizes],
        spec(sum(sizes), width),
        spec(tokens, sum(sizes)),
    )
    apart, together = [product(o, width, x, i) for o, i in zip(ys, ws)], [once(w, *ws), product(out, width, x, w)]
    to_x, to_w = group[0].args[0].meta["needs_grad"], group[0].args[1].meta["needs_grad"]
    if to_x or to_w:
        together.append(once(out, *ys))
    if to_x:
        apart += [
            *(product(x, n, o, i) for n, o, i in zip(sizes, ys, ws)),
            *[once(x, x, spec(tokens, width), vector=x.numel)] * (len(group) - 1),
        ]
        together += [once(w, *ws), product(x, sum(sizes), out, w)]
    if to_w:
        apart += [product(i, tokens, o, x) for o, i in zip(ys, ws)]
        together.append(product(w, tokens, out, x))
    return apart, together


def _merge(gm: fx.GraphModule, group: Sequence[fx.Node]) -> None:
    first, biases = group[0], [_bias(n) for n in group]
    weight = rewrite.insert(gm, first, aten.cat.default, ([n.args[1] for n in group], 0))
    bias = None if biases[0] is None else rewrite.insert(gm, first, aten.cat.default, (biases, 0))
    whole = rewrite.insert(gm, first, aten.linear.default, (first.args[0], weight, bias))
    start = 0
    for node in group:
        stop = start + match.value(node.args[1]).shape[0]
        part = rewrite.insert(gm, first, aten.slice.Tensor, (whole, -1, start, stop))
        start = stop
        for user in list(node.users):
            if fake.layout(match.value(part)) != fake.layout(match.value(node)):
                user.meta["fresh"] = True
        node.replace_all_uses_with(part)
        part.meta.update({k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta})
