"""Linear into cross-entropy: ``cross_entropy(linear(hidden, weight), target)`` becomes
``mindspeed::linear_cross_entropy``.

Starts from what ``fusion.cross_entropy`` leaves, which runs before (by name) and has one spelling for every loss. From
its logits back to the linear it steps over casts, views, slices and transposes of tokens (the shift of a language
model), scales (Granite, Cohere; a trained temperature; one for each token), a bias, a slice of the classes (a padded
vocabulary) and a soft-cap, and applies them to the hidden states, the bias and the weight instead. From the losses on
it steps over signs, numbers and masks of zeros and ones, whose tokens become ignored ones. Safe because each acts on
rows alone or on all of them alike, and nobody else may read the logits. Saves the logits and their gradient, the
largest tensors of a large vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, symbols
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.kernels.linear_cross_entropy_work import in_cpp
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import mask
from mindspeed_fx.passes.fusion.analysis.loss_head import PLAIN, Head, head_of, product
from mindspeed_fx.passes.fusion.emit.loss_head import inputs

NAME, OPERATOR = "fusion.linear_cross_entropy", "mindspeed::linear_cross_entropy"

SMALLEST = 128 * 2**20
"""Bytes of logits, in the type the loss is computed in, below which the unfused form is faster where torch's operators
make the chunks. Measured against this backend with the pass off (AMD EPYC, one core, float32, hidden 512): 1.01 to 1.13
of its time at up to 64 MiB, 1.01 to 1.03 at 128, 1.01 at 256."""

SMALLEST_CPP = 24 * 2**20
"""The same where the function in C++ does: 0.93 to 1.07 of the time at 16 MiB, where nothing of the memory is saved,
0.93 to 0.97 from 32 MiB on at a vocabulary of 8192, 1.00 to 1.04 at 32768 (benchmarks/linear_cross_entropy.py, two
cores)."""


class Reduction(NamedTuple):
    """``root`` is ``factor`` times the losses of the tokens that ``masks`` keep, reduced to their "sum" or "mean";
    "none": the losses as they are.
    """

    kind: str
    root: fx.Node
    factor: float = 1.0
    masks: tuple[tuple[str, fx.Node, fx.Node], ...] = ()
    """("keep" | "drop", mask, the losses it is applied to)"""


@register(NAME)
def linear_cross_entropy(gm: fx.GraphModule, context: Context) -> PassReport:
    """The last linear and the loss become one operator, whose logits never exist whole."""
    report = PassReport(NAME)
    named = NAME in context.options.enable

    def fuse(node: fx.Node) -> Outcome:
        head = head_of(node.args[0])
        if not isinstance(head, Head):
            return head
        return _needs_logits(head, node, named, context.options.target) or _rewrite(gm, node, head, named)

    losses = calls(gm, torch.ops.mindspeed.cross_entropy.default, aten.cross_entropy_loss.default)
    rewrite_each(report, OPERATOR, losses, fuse)
    rewrite.finish(gm)
    return report


# --------------------------------------------------------------------------- when not


def _needs_logits(head: Head, node: fx.Node, named: bool, target: str) -> str | None:
    """Why the logits that ``node`` reads must, or had better, exist; None when they need not."""
    if node.target == aten.cross_entropy_loss.default:
        return "fusion.cross_entropy, on whose result this pass builds, is off or left this loss as it is"
    for n in head.region:
        for user in n.users:
            if user.op == "output":
                return "the logits are returned by the compiled function; compile a function that returns only the loss"
            if user is not node and user not in head.region:
                return (
                    f"the logits are also read by {user.name} ({user.target}), so they must exist; compute it from "
                    "the hidden states, or detached in a function of its own"
                )
    x, w, b, _ = product(head.product)
    dtype, computed = match.value(head.product).dtype, match.value(node)[0].dtype
    if computed.itemsize > accumulation_dtype(dtype).itemsize:
        return (
            f"the loss of {dtype} logits is computed in {computed}, the operator computes it in "
            f"{accumulation_dtype(dtype)}"
        )
    if target == "cuda" and not named:
        return (
            "on cuda steps with it took 1.09 to 1.54 of generated code's time (in chunks of 64 MiB), and larger chunks "
            f'are not measured; put "{NAME}" in enable to save the memory of the logits'
        )
    logits = match.value(node.args[0])
    size = fake.hint(logits.shape[0]) * fake.hint(logits.shape[1]) * computed.itemsize
    smallest = SMALLEST_CPP if in_cpp(dtype, target) is None else SMALLEST
    if size < smallest and not named:
        return (
            f"the logits take {size / 2**20:.1f} MiB; below {smallest >> 20} MiB the unfused form is faster; put "
            f'"{NAME}" in enable to save their memory all the same'
        )
    return match.unsafe([*head.region, node], [x, w, b, node.args[1]])


# --------------------------------------------------------------------------- the rewrite


def _rewrite(gm: fx.GraphModule, node: fx.Node, head: Head, named: bool) -> Outcome:
    losses, sums = (
        next((u for u in node.users if match.is_call(u, match.operator.getitem) and u.args[1] == i), None)
        for i in (0, 1)
    )
    if losses is None:
        return "only the log-sum-exp of the tokens is used, which the chunks do not give"
    result = _reduction(losses, node)
    reduction, old = result.kind, result.root
    times, masks, factor = result.factor, result.masks, 0.0
    if sums is not None:
        result = (
            _z_loss(sums, node, reduction, old)
            if times == 1.0 and not masks
            else "the losses are masked or scaled before they are reduced"
        )
        if isinstance(result, str):
            return (
                "the log-sum-exp of the tokens is used too (a z-loss), which the chunks do not give; the logits "
                f"exist, and are read once: {result}"
            )
        factor, end = result
    trains = torch.is_grad_enabled() and head.product.meta["needs_grad"]  # a whole compilation may stand under no_grad
    if reduction == "none" and trains and not named:
        return (
            "the losses of single tokens are used, so that their gradients would take a fourth matrix product; "
            f'return their plain sum or mean, or put "{NAME}" in enable to save the memory all the same'
        )
    hidden, weight, bias, softcap = inputs(gm, node, head)
    _, target, ignore, smoothing = node.args
    old = old if sums is None else end
    if reason := match.unsafe([old], [m for _, m, _ in masks]):
        return reason
    target = _mask_target(gm, old, target, ignore, masks)
    new = rewrite.insert(
        gm,
        old,
        torch.ops.mindspeed.linear_cross_entropy.default,
        (hidden, weight, bias, target, ignore, smoothing, factor, softcap, reduction),
    )
    if match.is_call(old, aten.mean.default):
        new = rewrite.insert(gm, old, aten.div.Tensor, (new, match.value(losses).shape[0]))
    if times != 1.0:
        new = rewrite.insert(gm, old, aten.mul.Tensor, (new, times))
    return rewrite.substitute(gm, old, new) or site(OPERATOR, node, [*head.region, node, losses])


def _reduction(losses: fx.Node, node: fx.Node) -> Reduction:
    """How the losses are reduced: "none" unless they are used in one sum or mean alone, which may be of their
    multiples, where a mask leaves them.
    """
    n, factor, masks = losses, 1.0, []
    while len(n.users) == 1:
        user = next(iter(n.users))
        if user.op != "call_function":
            break
        inner, scale_by = (
            (n, -1.0)
            if match.is_call(user, aten.neg.default)
            else match.unscalings(user)[min(1, len(match.unscalings(user)) - 1)]
        )
        arg = _mask(user, n)
        if inner is n and inner is not user:
            factor *= scale_by
        elif arg is not None:
            masks.append((*arg, n))
        elif not match.is_call(
            user, *PLAIN, aten.squeeze.dim, aten.unsqueeze.default, aten.select.int
        ) or not symbols.statically_known_true(match.value(user).numel() == match.value(n).numel()):
            break
        n = user
    if (
        len(n.users) != 1
        or not match.is_call(user, aten.sum.default, aten.mean.default)
        or match.value(user).dtype != match.value(losses).dtype
    ):
        return Reduction("none", losses)
    count = next(iter(user.users), None)
    if (
        factor == 1.0
        and not masks
        and len(user.users) == 1
        and match.is_call(user, aten.sum.default)
        and match.is_call(count, aten.div.Tensor)
        and count.args[0] is user
    ):
        kept = count.args[1]
        if (
            match.is_call(kept, aten.sum.default)
            and match.is_call(kept.args[0], aten.ne.Scalar)
            and tuple(kept.args[0].args) == (node.args[1], node.args[2])
        ):
            return Reduction("mean", count)
    return Reduction("sum", user, factor, tuple(masks))


def _mask(user: fx.Node, n: fx.Node) -> tuple[str, fx.Node] | None:
    """("keep" | "drop", mask) when ``user`` is ``n`` with some losses set to zero."""
    if not match.is_float(user) or match.value(user).shape != match.value(n).shape:
        return None
    if (
        match.is_call(user, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
        and user.args[0] is n
        and match.number(user.args[2]) == 0
    ):
        return "drop", user.args[1]
    if (
        match.is_call(user, aten.where.self, aten.where.ScalarOther)
        and user.args[1] is n
        and match.number(user.args[2]) == 0
    ):
        return "keep", user.args[0]
    return next(
        (
            ("keep", m)
            for x, m in match.operands(user, aten.mul.Tensor)
            if x is n and isinstance(m, fx.Node) and mask.binary(m)
        ),
        None,
    )


def _mask_target(gm: fx.GraphModule, before: fx.Node, target: fx.Node, ignore: int, masks: tuple) -> fx.Node:
    """``target`` with ``ignore`` where a mask drops the loss."""
    for kind, m, losses in masks:
        m = m if match.value(m).dtype == torch.bool else rewrite.insert(gm, before, aten.to.dtype, (m, torch.bool))
        m = m if kind == "keep" else rewrite.insert(gm, before, aten.logical_not.default, (m,))
        shape = list(match.value(losses).shape)
        m = m if list(match.value(m).shape) == shape else rewrite.insert(gm, before, aten.expand.default, (m, shape))
        m = m if len(shape) == 1 else rewrite.insert(gm, before, aten.reshape.default, (m, [-1]))
        target = rewrite.insert(gm, before, aten.where.ScalarOther, (m, target, ignore))
    return target


def _z_loss(sums: fx.Node, node: fx.Node, reduction: str, old: fx.Node) -> tuple[float, fx.Node] | str:
    """(factor, loss + factor * z) where the loss ``old`` and the squares of ``sums``, reduced alike, meet; what is in
    the way.
    """
    n, factor, squared, masked, summed, divided = sums, 1.0, False, False, False, False
    while True:
        user = next(iter(n.users), None)
        if len(n.users) != 1 or user.op != "call_function":
            return "it is used for more than the square that is added to the loss"
        other = next((a for a in user.args if a is not n), None)
        if match.match_square(user) is n and not squared and not masked:
            squared = True
        elif match.is_call(user, *PLAIN, aten.squeeze.dim, aten.unsqueeze.default):
            pass
        elif match.is_call(user, *match.MUL) and match.number(other) is not None:
            factor *= match.number(other) ** (1 if squared else 2)
        elif (
            match.is_call(user, aten.mul.Tensor)
            and not summed
            and _counts(other, node)
            and match.value(user).numel() == match.value(n).numel()
        ):
            masked = True
        elif match.is_call(user, aten.sum.default) and not summed:
            summed = True
        elif match.is_call(user, *match.DIV) and user.args[0] is n and match.number(other) is not None:
            factor /= match.number(other) ** (1 if squared else 2)
        elif (
            match.is_call(user, aten.div.Tensor)
            and user.args[0] is n
            and summed
            and not divided
            and match.is_call(uncount := match.uncast(other), aten.sum.default)
            and _counts(uncount.args[0], node)
        ):
            divided = True
        elif match.operands(user, aten.add.Tensor) and isinstance(other, fx.Node) and match.uncast(other) is old:
            if (
                not squared
                or reduction == "none"
                or match.value(user).itemsize > match.value(old).itemsize
                or len(old.users) != 1
                or len(other.users) != 1
            ):
                return "it is not squared and added to the mean or sum of the losses"
            if not (masked and summed and divided == (reduction == "mean")) or match.is_call(old, aten.mean.default):
                return (
                    "it is not reduced over the tokens of the loss; multiply by (target != ignore_index), and "
                    "divide by its sum where the loss is a mean"
                )
            return float(factor), user
        else:
            averaged = match.is_call(user, aten.mean.default, aten.mean.dim)
            return (
                "its mean is over all tokens, those included that the loss ignores; multiply by (target != "
                "ignore_index) and divide by its sum"
                if averaged
                else f"{user.name} ({user.target})"
            )
        n = user


def _counts(n: Any, node: fx.Node) -> bool:
    """True for target != ignore_index, in any type and shape."""
    while match.is_call(n, aten.to.dtype, *match.RESHAPES):
        n = n.args[0]
    target = node.args[1]
    while match.is_call(target, *match.RESHAPES):
        target = target.args[0]
    if not match.is_call(n, aten.ne.Scalar) or n.args[1] != node.args[2]:
        return False
    alternatives = n.args[0]
    while match.is_call(alternatives, *match.RESHAPES):
        alternatives = alternatives.args[0]
    return match.same(alternatives, target)
