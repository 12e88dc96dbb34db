"""Linear into cross-entropy: ``cross_entropy(linear(hidden, weight), target)`` becomes ``mindspeed::linear_cross_entropy``.

Starts from what ``fusion.cross_entropy`` leaves, which runs before (by name) and has one spelling for every loss. From
its logits back to the linear it steps over casts, views, slices and transposes of tokens (the shift of a language
model) and a soft-cap, and applies those of the tokens to the hidden states instead. Safe because each acts on rows
alone, and nobody else may read the logits. Saves the logits and their gradient, the largest tensors of a large vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx import compat
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.kernels.linear_cross_entropy_work import in_cpp
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.linear_cross_entropy", "mindspeed::linear_cross_entropy"

SMALLEST = 128 * 2**20
"""Bytes of logits, in the type the loss is computed in, below which the unfused form is faster where torch's operators make
the chunks. Measured against this backend with the pass off (AMD EPYC, one core, float32, hidden 512): 1.01 to 1.13 of its time
at up to 64 MiB, 1.01 to 1.03 at 128, 1.01 at 256."""

SMALLEST_CPP = 24 * 2**20
"""The same where the function in C++ does: 0.93 to 1.07 of the time at 16 MiB, where nothing of the memory is saved, 0.93 to 0.97 from
32 MiB on at a vocabulary of 8192, 1.00 to 1.04 at 32768 (benchmarks/linear_cross_entropy.py, two cores)."""

PLAIN = (*match.VIEWS, aten.to.dtype, aten.contiguous.default, aten.clone.default)
"""What keeps every row as it is."""


class Head(NamedTuple):
    """The linear in front of a loss: ``logits = steps(product(hidden, weight, bias))``."""

    product: fx.Node
    steps: list[fx.Node]
    """From the product to the logits."""
    softcap: float
    region: list[fx.Node]
    """Every node from the product to the logits."""


@register(NAME, stage="captured", level=1, after=("plain functions",))
def linear_cross_entropy(gm: fx.GraphModule, context: Context) -> PassReport:
    """The last linear and the loss become one operator, whose logits never exist whole."""
    report = PassReport(NAME)
    named = NAME in context.options.enable
    for node in calls(gm, torch.ops.mindspeed.cross_entropy.default, aten.cross_entropy_loss.default):
        head = _head(node.args[0])
        if isinstance(head, Head):
            reason = _refused(head, node, named, context.options.target) or _rewrite(gm, report, node, head, named)
        else:
            reason = head
        if reason:
            report.skipped.append(skip(OPERATOR, node, reason))
    match.finish(gm)
    return report


# --------------------------------------------------------------------------- from the loss back to the linear


def _head(logits: fx.Node) -> Head | str | None:
    """The linear that makes ``logits``; why it is out of reach; None when there is none."""
    n, steps, region, softcap = logits, [], [], 0.0
    while _product(n) is None:
        if match.is_call(n, *PLAIN, aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.transpose.int, aten.permute.default):
            if not acts_on_rows(n):
                return f"{n.name} ({n.target}) rearranges the classes" if _near(n) else None
            region.append(n)
            steps.append(n)
            n = n.args[0]
            continue
        capped = _softcap(n)
        if capped is None or softcap:
            return f"{n.name} ({n.target}) stands between the linear and the loss; only casts, views, slices of tokens and a soft-cap may" if _near(n) else None
        inner, softcap, nodes = capped
        region += nodes
        n = inner
    return Head(n, steps[::-1], softcap, [n, *region[::-1]])


def _product(n: Any) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """(hidden, matrix, bias, transposed) when ``n`` is hidden @ matrix (+ bias); ``transposed``: matrix is [classes, hidden]."""
    if match.is_call(n, aten.linear.default):
        x, w, b, transposed = n.args[0], n.args[1], match.argument(n, "bias"), True
    elif match.is_call(n, aten.matmul.default, aten.mm.default):
        x, w, b, transposed = n.args[0], n.args[1], None, False
    elif match.is_call(n, aten.addmm.default) and match.argument(n, "beta") == 1 and match.argument(n, "alpha") == 1:
        b, x, w, transposed = *n.args, False
    else:
        return None
    if match.value(x).dim() < 2 or match.value(w).dim() != 2 or (b is not None and match.value(b).dim() != 1):
        return None
    if not transposed:
        w, transposed = match.untransposed(w)
    return x, w, b, transposed


def _near(n: fx.Node, depth: int = 3) -> bool:
    """True when a linear feeds ``n`` over at most ``depth`` other calls."""
    return n.op == "call_function" and any(_product(a) is not None or (depth > 0 and _near(a, depth - 1)) for a in n.all_input_nodes)


def acts_on_rows(n: fx.Node) -> bool:
    """True when ``n`` leaves the last dimension, the classes, alone."""
    before, after = match.value(n.args[0]), match.value(n)
    last = before.dim() - 1
    if not match.is_float(n) or after.dim() == 0 or before.shape[-1] != after.shape[-1]:
        return False
    if match.is_call(n, aten.permute.default):
        return n.args[1][-1] % (last + 1) == last
    if match.is_call(n, aten.transpose.int):
        return all(d % (last + 1) != last for d in n.args[1:])
    if match.is_call(n, aten.slice.Tensor, aten.narrow.default, aten.select.int):
        return match.argument(n, "dim", 0) % (last + 1) != last
    return True


def _softcap(n: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """(x, cap, nodes) when ``n`` is cap * tanh(x / cap)."""
    tanh, cap = match.unscale(n)
    if not match.is_call(tanh, aten.tanh.default):
        return None
    x = next((x for x, inverse in match.unscalings(tanh.args[0]) if cap > 0 and abs(cap * inverse - 1) <= 1e-6), None)
    if x is None:
        return None
    nodes, inside = [], n
    while inside is not x:
        nodes.append(inside)
        inside = next(a for a in inside.args if isinstance(a, fx.Node) and match.number(a) is None)
    return x, float(cap), nodes


# --------------------------------------------------------------------------- when not


def _refused(head: Head, node: fx.Node, named: bool, target: str) -> str | None:
    """Why the logits that ``node`` reads must, or had better, exist; None when they need not."""
    if node.target == aten.cross_entropy_loss.default:
        return "fusion.cross_entropy, on whose result this pass builds, is off or left this loss as it is"
    for n in head.region:
        for user in n.users:
            if user.op == "output":
                return "the logits are returned by the compiled function; compile a function that returns only the loss"
            if user is not node and user not in head.region:
                return f"the logits are also read by {user.name} ({user.target}), so they must exist; compute it from the hidden states, or detached in a function of its own"
    x, w, b, _ = _product(head.product)
    dtype, computed = match.value(head.product).dtype, match.value(node)[0].dtype
    if computed.itemsize > accumulation_dtype(dtype).itemsize:
        return f"the loss of {dtype} logits is computed in {computed}, the operator computes it in {accumulation_dtype(dtype)}"
    logits = match.value(node.args[0])
    size = compat.hint(logits.shape[0]) * compat.hint(logits.shape[1]) * computed.itemsize
    smallest = SMALLEST_CPP if in_cpp(dtype, target) is None else SMALLEST
    if size < smallest and not named:
        return f'the logits take {size / 2**20:.1f} MiB; below {smallest >> 20} MiB the unfused form is faster; put "{NAME}" in enable to save their memory all the same'
    return match.unsafe([*head.region, node], [x, w, b, node.args[1]])


# --------------------------------------------------------------------------- the rewrite


def _rewrite(gm: fx.GraphModule, report: PassReport, node: fx.Node, head: Head, named: bool) -> str | None:
    losses, sums = (next((u for u in node.users if match.is_call(u, match.operator.getitem) and u.args[1] == i), None) for i in (0, 1))
    if losses is None:
        return "only the log-sum-exp of the tokens is used, which the chunks do not give"
    reduction, old = _reduction(losses, node)
    factor = 0.0
    if sums is not None:
        found = _z_loss(sums, node, reduction, old)
        if isinstance(found, str):
            return f"the log-sum-exp of the tokens is used too (a z-loss), which the chunks do not give; the logits exist, and are read once: {found}"
        factor, end = found
    trains = torch.is_grad_enabled() and head.product.meta["needs_grad"]  # a whole compilation may stand under no_grad
    if reduction == "none" and trains and not named:
        return (
            "the losses of single tokens are used, so that their gradients would take a fourth matrix product; "
            f'return their plain sum or mean, or put "{NAME}" in enable to save the memory all the same'
        )
    hidden, weight, bias = _inputs(gm, node, head)
    _, target, ignore, smoothing = node.args
    old = old if sums is None else end
    new = match.insert(gm, old, torch.ops.mindspeed.linear_cross_entropy.default, (hidden, weight, bias, target, ignore, smoothing, factor, head.softcap, reduction))
    if match.is_call(old, aten.mean.default):
        new = match.insert(gm, old, aten.div.Tensor, (new, match.value(losses).shape[0]))
    reason = match.substitute(gm, old, new)
    if reason is None:
        report.rewrites.append(site(OPERATOR, node, [*head.region, node, losses]))
    return reason


def _reduction(losses: fx.Node, node: fx.Node) -> tuple[str, fx.Node]:
    """How the losses are reduced, and the node that holds the result: ("none", losses) unless they are used in one plain
    sum or mean alone."""
    n = losses
    while len(n.users) == 1 and match.is_call(user := next(iter(n.users)), *PLAIN):
        n = user
    if len(n.users) != 1 or not match.is_call(user, aten.sum.default, aten.mean.default) or match.value(user).dtype != match.value(losses).dtype:
        return "none", losses
    count = next(iter(user.users), None)
    if len(user.users) == 1 and match.is_call(user, aten.sum.default) and match.is_call(count, aten.div.Tensor) and count.args[0] is user:
        kept = count.args[1]
        if match.is_call(kept, aten.sum.default) and match.is_call(kept.args[0], aten.ne.Scalar) and tuple(kept.args[0].args) == (node.args[1], node.args[2]):
            return "mean", count
    return "sum", user


def _z_loss(sums: fx.Node, node: fx.Node, reduction: str, old: fx.Node) -> tuple[float, fx.Node] | str:
    """(factor, loss + factor * z) where the loss ``old`` and the squares of ``sums``, reduced alike, meet; what is in the way."""
    n, factor, squared, masked, summed, divided = sums, 1.0, False, False, False, False
    while True:
        user = next(iter(n.users), None)
        if len(n.users) != 1 or user.op != "call_function":
            return "it is used for more than the square that is added to the loss"
        other = next((a for a in user.args if a is not n), None)
        if match.squared(user) is n and not squared and not masked:
            squared = True
        elif match.is_call(user, *PLAIN, aten.squeeze.dim, aten.unsqueeze.default):
            pass
        elif match.is_call(user, *match.MUL) and match.number(other) is not None:
            factor *= match.number(other) ** (1 if squared else 2)
        elif match.is_call(user, aten.mul.Tensor) and not summed and _counts(other, node) and match.value(user).numel() == match.value(n).numel():
            masked = True
        elif match.is_call(user, aten.sum.default) and not summed:
            summed = True
        elif match.is_call(user, *match.DIV) and user.args[0] is n and match.number(other) is not None:
            factor /= match.number(other) ** (1 if squared else 2)
        elif match.is_call(user, aten.div.Tensor) and user.args[0] is n and summed and not divided and match.is_call(uncount := match.uncast(other), aten.sum.default) and _counts(uncount.args[0], node):
            divided = True
        elif match.operands(user, aten.add.Tensor) and isinstance(other, fx.Node) and match.uncast(other) is old:
            if not squared or reduction == "none" or match.value(user).itemsize > match.value(old).itemsize or len(old.users) != 1 or len(other.users) != 1:
                return "it is not squared and added to the mean or sum of the losses"
            if not (masked and summed and divided == (reduction == "mean")) or match.is_call(old, aten.mean.default):
                return "it is not reduced over the tokens of the loss; multiply by (target != ignore_index), and divide by its sum where the loss is a mean"
            return float(factor), user
        else:
            averaged = match.is_call(user, aten.mean.default, aten.mean.dim)
            return "its mean is over all tokens, those included that the loss ignores; multiply by (target != ignore_index) and divide by its sum" if averaged else f"{user.name} ({user.target})"
        n = user


def _counts(n: Any, node: fx.Node) -> bool:
    """True for target != ignore_index, in any type and shape."""
    while match.is_call(n, aten.to.dtype, *match.VIEWS):
        n = n.args[0]
    target = node.args[1]
    while match.is_call(target, *match.VIEWS):
        target = target.args[0]
    if not match.is_call(n, aten.ne.Scalar) or n.args[1] != node.args[2]:
        return False
    compared = n.args[0]
    while match.is_call(compared, *match.VIEWS):
        compared = compared.args[0]
    return match.same(compared, target)


def _inputs(gm: fx.GraphModule, node: fx.Node, head: Head) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """hidden [tokens, hidden] as ``head.steps`` choose and order its rows, weight [vocab, hidden], bias."""
    hidden, weight, bias, transposed = _product(head.product)
    for step in head.steps:
        if match.is_call(step, *match.VIEWS):
            shape = [*match.value(step).shape[:-1], match.value(hidden).shape[-1]]
            hidden = match.insert(gm, node, aten.reshape.default, (hidden, shape))
        elif not match.is_call(step, *PLAIN):
            hidden = match.insert(gm, node, step.target, (hidden, *step.args[1:]), dict(step.kwargs))
    weight = weight if transposed else match.insert(gm, node, aten.t.default, (weight,))
    dtype = match.value(head.product).dtype
    # Under autocast the linear casts its inputs itself.
    return tuple(i if i is None or match.value(i).dtype == dtype else match.insert(gm, node, aten.to.dtype, (i, dtype)) for i in (hidden, weight, bias))
