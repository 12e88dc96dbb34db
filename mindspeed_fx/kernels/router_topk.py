"""The router of a mixture of experts: a score for each expert, the k best, and their weights.

    s = softmax(logits) or sigmoid(logits);  choice = s + bias, without the groups that are not kept;
    ids = topk(choice, k);  weights = scale * s[ids] / (sum(s[ids]) + eps), or scale * s[ids] where eps is None.

Source: ``npu_moe_gating_top_k`` and ``npu_moe_gating_top_k_softmax_v2`` of torch_npu; Mixtral (Jiang et al. 2024, arXiv
2401.04088, section 2.1: a softmax over the chosen logits is a softmax over all whose chosen parts are divided by their
sum); DeepSeek-V2 (arXiv 2405.04434, section 2.1.3: groups by their best expert); DeepSeek-V3 (arXiv 2412.19437,
sections 2.1.2: sigmoid, a bias for the choice alone, groups by the sum of their two best).

Only the chosen weights have gradients, so that the backward works on [tokens, k] and scatters once. With p = weights /
scale, g the gradient of the weights, and c = sum(g p):

    normalized, sigmoid:  dx = scale p (g - c) (1 - s)  where chosen, 0 elsewhere
    normalized, softmax:  dx = scale (p (g - c) where chosen, - s c (1 - sum(p)) everywhere);  sum(p) is 1 without eps
    not normalized:       the gradient of a sigmoid or a softmax, which got scale g where chosen and 0 elsewhere
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SOFTMAX, SPECIAL, once
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

aten = torch.ops.aten
SCORES = ("softmax", "sigmoid")


def _fake(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=accumulation_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


@operator(
    "router_topk(Tensor logits, Tensor? bias, int k, str score, int groups=1, int kept=1, int best=1, float? eps=None, "
    "float scale=1.0) -> (Tensor, Tensor)",
    _fake,
)
def router_topk(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int = 1,
    kept: int = 1,
    best: int = 1,
    eps: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their weights.

    Args:
        logits: [..., experts], float.
        bias: [experts], added to the scores for the choice alone, or None; it has no gradient.
        k: experts of a token, 1 to experts / groups * kept.
        score: "softmax" or "sigmoid".
        groups: equal parts of the experts, in their order.
        kept: how many groups of a token stay, those that score best.
        best: a group's score is the sum of so many of its best: 1 or 2.
        eps: divide the weights by their sum plus eps; None: do not.
        scale: of the weights, not zero.

    Returns:
        weights [..., k] in float32 (float64 for float64 logits) and ids [..., k] int64, the best first.

    Raises:
        ValueError: an unknown score, sizes that do not fit, a scale of zero.
    """
    _check(logits, k, score, groups, kept, best, scale)
    scores = _scores(logits.to(accumulation_dtype(logits.dtype)), score)
    choice = scores if bias is None else scores + bias
    if kept < groups:
        grouped = choice.unflatten(-1, (groups, -1))
        of_groups = grouped.amax(-1) if best == 1 else grouped.topk(best, -1)[0].sum(-1)
        dropped = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, of_groups.topk(kept, -1)[1], False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(k, -1)[1]
    weights = scores.gather(-1, ids)
    if eps is not None:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + eps if eps else total)
    return weights if scale == 1 else weights * scale, ids


def _scores(logits: Tensor, score: str) -> Tensor:
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def _check(logits: Tensor, k: int, score: str, groups: int, kept: int, best: int, scale: float) -> None:
    experts = logits.shape[-1]
    if score not in SCORES:
        raise ValueError(f"router_topk: score is {score!r}; valid: {', '.join(SCORES)}")
    if groups < 1 or experts % groups or not 1 <= kept <= groups:
        raise ValueError(
            f"router_topk: {kept} of {groups} groups of {experts} experts are kept; equal groups are expected, and 1 "
            "to all of them"
        )
    if not 1 <= k <= experts // groups * kept:
        raise ValueError(f"router_topk: k is {k}; valid: 1 to {experts // groups * kept}")
    if best not in (1, 2) or best > experts // groups:
        raise ValueError(f"router_topk: best is {best} of groups of {experts // groups} experts; valid: 1 or 2")
    if not scale:
        raise ValueError("router_topk: scale is 0; the weights would all be zero")


@operator(
    "router_topk_backward(Tensor grad, Tensor logits, Tensor? weights, Tensor ids, str score, float? eps, float scale) "
    "-> Tensor",
    lambda grad, logits, weights, ids, score, eps, scale: torch.empty(
        logits.shape, dtype=logits.dtype, device=logits.device
    ),
)
def router_topk_backward(
    grad: Tensor, logits: Tensor, weights: Tensor | None, ids: Tensor, score: str, eps: float | None, scale: float
) -> Tensor:
    """The gradient [..., experts] of the logits of :func:`router_topk`, in their type.

    Args:
        grad: of the weights [..., k].
        logits: [..., experts], as given to the forward.
        weights: what it returned, or None where eps is None.
        ids: what it returned.
    """
    wide = accumulation_dtype(logits.dtype)
    grad = grad.to(wide) if scale == 1 else grad.to(wide) * scale
    if eps is None or weights is None:
        chosen = _unnormalized(grad, logits.to(wide), ids, score)
        return (chosen if score == "softmax" else _scatter(chosen, logits, ids)).to(logits.dtype)
    p = weights if scale == 1 else weights / scale
    dx = aten._softmax_backward_data(grad, p, -1, wide)  # p (g - c)
    if score == "sigmoid":
        dx = dx * logits.gather(-1, ids).to(wide).neg().sigmoid()
    dx = _scatter(dx, logits, ids)
    if score == "softmax" and eps:
        rest = (grad * p).sum(-1, keepdim=True) * (1 - p.sum(-1, keepdim=True))
        dx = dx - logits.to(wide).softmax(-1) * rest
    return dx.to(logits.dtype)


def _unnormalized(grad: Tensor, logits: Tensor, ids: Tensor, score: str) -> Tensor:
    """The gradient of the logits where the scores themselves are the weights: of all by softmax, of the chosen by
    sigmoid.
    """
    if score == "sigmoid":
        return aten.sigmoid_backward(grad, logits.gather(-1, ids).sigmoid())
    return aten._softmax_backward_data(_scatter(grad, logits, ids), logits.softmax(-1), -1, logits.dtype)


def _scatter(values: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
    """[..., experts]: ``values`` [..., k] at ``ids``, zero elsewhere."""
    zeros = torch.zeros(logits.shape, dtype=values.dtype, device=values.device)
    return zeros.scatter(-1, ids, values)


def _setup(ctx, inputs, output):
    logits, _, _, ctx.score, *_, ctx.eps, ctx.scale = inputs
    weights, ids = output
    ctx.save_for_backward(logits, None if ctx.eps is None else weights, ids)
    ctx.mark_non_differentiable(ids)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_ids):
    dx = None
    if grad is not None:
        dx = torch.ops.mindspeed.router_topk_backward(grad, *ctx.saved_tensors, ctx.score, ctx.eps, ctx.scale)
    return dx, None, None, None, None, None, None, None, None


torch.library.register_autograd("mindspeed::router_topk", _backward, setup_context=_setup, lib=LIBRARY)


@router_topk.costs
def _cost(out, logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    # A choice costs what cost/aten.py says of topk, four for each number that is looked at.
    return once(
        out,
        logits,
        bias,
        vector=((SOFTMAX if score == "softmax" else SPECIAL) + 4 * (2 if kept < groups else 1)) * logits.numel,
    )


@router_topk_backward.costs
def _backward_cost(out, grad, logits, weights, ids, score, eps, scale):
    whole = score == "softmax" and eps is None
    return once(
        out, grad, logits, weights, ids, vector=(SPECIAL + 6) * grad.numel + (SOFTMAX + 4 if whole else 1) * out.numel
    )


@router_topk.shard
def _sharding_rule(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    return [([d, d], [d, REPLICATED]) for d in range(logits.ndim - 1)]


@router_topk_backward.shard
def _sharding_rule_backward(grad, logits, weights, ids, score, eps, scale):
    last = logits.ndim - 1
    tokens = [([d], [d, d, d, d]) for d in range(last)]
    return tokens if eps is not None else [*tokens, ([PARTIAL], [last, REPLICATED, REPLICATED, last])]
