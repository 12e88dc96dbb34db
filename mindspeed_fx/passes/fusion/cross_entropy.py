"""Cross-entropy: ``cross_entropy(logits.float(), target)`` becomes ``mindspeed::cross_entropy``.

Matches ``aten.cross_entropy_loss`` and ``nll_loss(log_softmax(x))``, any reduction, ignore index and label smoothing,
and losses written out with ``gather`` (:mod:`mindspeed_fx.passes.fusion.analysis.nll`) or with one-hot targets
(:mod:`mindspeed_fx.passes.fusion.analysis.targets`). A log-sum-exp of the same logits (a z-loss) is the operator's
second result. The widening cast of 16-bit logits moves into the operator, so that no float32 copy of them exists; the
reduction stays outside as plain sums. Safe because the operator's formula is the definition, computed in float32.
"""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.edit import drop_dead
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site, skip
from mindspeed_fx.passes.fusion.analysis.nll import Likelihood, likelihoods
from mindspeed_fx.passes.fusion.analysis.targets import MEAN, NONE, SUM
from mindspeed_fx.passes.fusion.emit.nll import emit_loss, read_plainly, repeat_steps
from mindspeed_fx.passes.fusion.emit.targets import pick_instead

NAME, OPERATOR = "fusion.cross_entropy", "mindspeed::cross_entropy"


@register(NAME)
def cross_entropy(gm: fx.GraphModule, context: Context) -> PassReport:
    """Cross-entropy of token logits reads them once, in their own type."""
    report = PassReport(NAME)
    pick_instead(gm)
    losses = calls(gm, aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)
    rewrite_each(report, OPERATOR, losses, functools.partial(_fuse_call, gm))
    read_plainly(gm)
    for result in likelihoods(gm):
        node = result.root if isinstance(result, Likelihood) else result[0]
        rewrite_each(report, OPERATOR, [node], lambda _: _fuse_written_out(gm, result))
    rewrite.finish(gm)
    _share_log_sum_exp(gm, report)
    return report


def _fuse_call(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    """``cross_entropy``, or ``nll_loss`` of a log-softmax."""
    logits, region = _classes_last(node.args[0]), [node]
    if node.target != aten.cross_entropy_loss.default:
        softmax = match.uncast(logits or node.args[0])
        if not match.is_call(softmax, aten.log_softmax.int):
            return None  # a loss on probabilities made some other way
        region.append(softmax)
        if softmax.args[1] % (rank := match.rank(softmax)) != (rank - 1 if logits is not None else 1):
            return f"log_softmax is over dimension {softmax.args[1]}, the classes are in dimension 1"
        logits = softmax.args[0] if logits is not None else _classes_last(softmax.args[0])
    reason = _find_unsupported(node) or match.unsafe(
        region, [node.args[0] if logits is None else logits, match.argument(node, "target")]
    )
    if reason:
        return reason
    if logits is None:
        arg, rank = region[-1].args[0], match.value(node.args[0]).dim()
        logits = rewrite.insert(gm, node, aten.permute.default, (arg, [0, *range(2, rank), 1]))
    return rewrite.substitute(gm, node, _insert(gm, node, logits)) or site(OPERATOR, node, region)


def _fuse_written_out(gm: fx.GraphModule, result: Likelihood | tuple[fx.Node, str]) -> Outcome:
    if not isinstance(result, Likelihood):
        return result[1]
    return _written_out(gm, result) or site(OPERATOR, result.root, result.region)


def _share_log_sum_exp(gm: fx.GraphModule, report: PassReport) -> None:
    """``logsumexp`` of logits whose loss is known, as in a z-loss, reads them no second time."""
    sums = [
        n
        for n in calls(gm, aten.logsumexp.default)
        if [d % match.rank(n.args[0]) for d in n.args[1]] == [match.value(n.args[0]).dim() - 1]
    ]
    for node in calls(gm, torch.ops.mindspeed.cross_entropy.default) if sums else ():
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        for n in sums:
            if _tokens(n.args[0]) is not _tokens(node.args[0]) or not n.users:
                continue
            reason = match.unsafe([n, node], [_tokens(n.args[0])])
            early = any(order[user] < order[node] for user in n.users)
            if early and reason is None and all(order[a] < order[n] for a in node.all_input_nodes):
                n.append(node)  # the loss is computed where the log-sum-exp was
                order = {m: i for i, m in enumerate(gm.graph.nodes)}
            elif early:
                reason = (
                    "the log-sum-exp is used before the loss is computed; compute the loss first to read the "
                    "logits once"
                )
            if match.value(n).dtype.itemsize > match.value(node)[1].dtype.itemsize:
                reason = f"the log-sum-exp is computed in {match.value(n).dtype}"
            if reason is None:
                after = node.next
                lse = rewrite.insert(gm, after, match.operator.getitem, (node, 1))
                lse = (
                    lse
                    if match.value(lse).shape == match.value(n).shape
                    else rewrite.insert(gm, after, aten.reshape.default, (lse, list(match.value(n).shape)))
                )
                lse = (
                    lse
                    if match.value(lse).dtype == match.value(n).dtype
                    else rewrite.insert(gm, after, aten.to.dtype, (lse, match.value(n).dtype))
                )
                n.replace_all_uses_with(lse)
                report.rewrites.append(site(f"{OPERATOR}, its log-sum-exp", node, [n]))
            else:
                report.skipped.append(skip(OPERATOR, n, reason))
    rewrite.finish(gm)


def _tokens(n: fx.Node) -> fx.Node:
    """The logits that ``n`` holds, in another type or with its tokens in other dimensions."""
    while (
        match.is_call(n, aten.to.dtype, *match.RESHAPES)
        and match.is_float(n.args[0])
        and match.value(n).shape[-1] == match.value(n.args[0]).shape[-1]
    ):
        n = n.args[0]
    return n


def _written_out(gm: fx.GraphModule, result: Likelihood) -> str | None:
    """The operator in the place of a loss per token that is written out; the reason when not."""
    root, target, classes = result.root, result.target, match.value(result.logits).shape[-1]
    if match.value(root).dtype.itemsize > accumulation_dtype(match.value(result.logits).dtype).itemsize:
        return f"the loss of {match.value(result.logits).dtype} logits is computed in {match.value(root).dtype}"
    if reason := match.unsafe(result.region, [result.logits, target]):
        return reason
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    # What reads the log-probabilities before the targets are there keeps them.
    leaves = [leaf for leaf in result.leaves if order[leaf] > order[target]]
    first = min((root, *leaves), key=order.__getitem__)
    logits = (
        result.logits
        if match.value(result.logits).dim() == 2
        else rewrite.insert(gm, first, aten.reshape.default, (result.logits, [-1, classes]))
    )
    target = (
        target if match.value(target).dim() == 1 else rewrite.insert(gm, first, aten.reshape.default, (target, [-1]))
    )
    both = rewrite.insert(
        gm,
        first,
        torch.ops.mindspeed.cross_entropy.default,
        (_narrow(gm, first, logits), target, -100, result.smoothing),
    )
    loss = rewrite.insert(gm, first, match.operator.getitem, (both, 0))
    loss = loss if result.factor == 1.0 else rewrite.insert(gm, root, aten.mul.Tensor, (loss, result.factor))
    loss = repeat_steps(gm, root, loss, result.steps)
    if match.value(loss).shape != match.value(root).shape:
        loss = rewrite.insert(gm, root, aten.reshape.default, (loss, list(match.value(root).shape)))
    if reason := rewrite.substitute(gm, root, loss):
        return reason
    drop_dead(gm)
    for leaf in leaves:
        if not leaf._erased:
            lse = rewrite.insert(gm, both.next, match.operator.getitem, (both, 1))
            rewrite.substitute(gm, leaf, emit_loss(gm, leaf, result.logits, lse))
    return None


def _classes_last(n: fx.Node) -> fx.Node | None:
    """The tensor [..., classes] that ``n``, [tokens, classes] or [batch, classes, ...], is a view of; None when there
    is none.
    """
    rank, inner = match.value(n).dim(), match.uncast(n)
    if rank == 2:
        return n
    moved = match.is_call(inner, aten.transpose.int) and rank == 3 and {d % 3 for d in inner.args[1:3]} == {1, 2}
    moved = moved or (
        match.is_call(inner, aten.permute.default)
        and [d % rank for d in inner.args[1]] == [0, rank - 1, *range(1, rank - 1)]
    )
    return inner.args[0] if moved and match.value(inner).dtype == match.value(n).dtype else None


def _find_unsupported(node: fx.Node) -> str | None:
    target = match.argument(node, "target")
    if match.argument(node, "weight") is not None:
        return "class weights are not supported"
    if match.value(node.args[0]).dim() < 2:
        return (
            f"logits have {match.value(node.args[0]).dim()} dimension; the operator takes rows of them, [tokens, "
            "classes]"
        )
    if match.value(target).dtype.is_floating_point:
        return "targets are probabilities, not class indices"
    return None


def _narrow(gm: fx.GraphModule, node: fx.Node, logits: fx.Node) -> fx.Node:
    """The 16-bit tensor that ``logits`` is the float32 form of, through views."""
    shape, n = match.value(logits).shape, logits
    while match.is_call(n, *match.RESHAPES) and match.is_float(n.args[0]):
        n = n.args[0]
    source = match.uncast(n)
    if source is n or match.value(source).itemsize != 2 or source.meta["mutated"] or match.unsafe([node, n], [source]):
        return logits
    return (
        source
        if match.value(source).shape == shape
        else rewrite.insert(gm, node, aten.reshape.default, (source, list(shape)))
    )


def _insert(gm: fx.GraphModule, node: fx.Node, logits: fx.Node) -> fx.Node:
    def call(target, *args):
        return rewrite.insert(gm, node, target, args)

    target, classes = match.argument(node, "target"), match.value(logits).shape[-1]
    shape = list(match.value(target).shape)
    if len(shape) > 1:
        logits, target = call(aten.reshape.default, logits, [-1, classes]), call(aten.reshape.default, target, [-1])
    ignore, smoothing = (
        int(match.argument(node, "ignore_index", -100)),
        float(match.argument(node, "label_smoothing", 0.0) or 0.0),
    )
    reduction = match.argument(node, "reduction", MEAN)
    both = call(torch.ops.mindspeed.cross_entropy.default, _narrow(gm, node, logits), target, ignore, smoothing)
    loss = call(match.operator.getitem, both, 0)
    if reduction == NONE:
        return loss if len(shape) == 1 else call(aten.reshape.default, loss, shape)
    total = call(aten.sum.default, loss)
    if reduction == SUM:
        return total
    return call(aten.div.Tensor, total, call(aten.sum.default, call(aten.ne.Scalar, target, ignore)))
