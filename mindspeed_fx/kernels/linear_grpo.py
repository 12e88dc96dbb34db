"""Linear and the loss of group-relative policy optimization in one, whose logits never exist whole.

Of token i with the log-probability l_i of its class, r_i = e^(l_i - old_i), k_i = ref_i - l_i and a_i the advantage,

    loss = sum over i of w_i (-min(r_i a_i, clip(r_i, 1 - low, 1 + high) a_i) + beta (e^(k_i) - k_i - 1))

Sources: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), equations 3 and 4; clipping of two widths: Yu et al. 2025,
"DAPO" (arXiv 2503.14476). The gradient of a token's term by l_i is known once l_i is, so that a chunk's logits become
gradients while they are there: three matrix products in all, as unfused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.linear_cross_entropy import _by_token, _empty_gradient, _saved_dtype, _work
from mindspeed_fx.kernels.linear_cross_entropy_chunks import run_in_chunks

INPUTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor advantages, Tensor weights, Tensor? old, "
    "Tensor? reference"
)
SETTINGS = "float low, float high, float beta, int ignore_index"


def linear_grpo(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    low: float = 0.2,
    high: float = 0.2,
    beta: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """The loss of GRPO from hidden states; the formula stands at the top of this file.

    Args:
        hidden: [tokens, hidden], float.
        weight: [vocab, hidden], of the same type.
        bias: [vocab] of the same type, or None.
        target: [tokens], int64, the classes that were drawn; ``ignore_index`` marks tokens without loss.
        advantages: [tokens].
        weights: [tokens], of each token's term; None: one over the number of tokens that are not ignored.
        old: [tokens], log-probabilities when the classes were drawn; None: those of now, without gradient.
        reference: [tokens], log-probabilities of the reference model, for beta; None only with beta 0.
        low, high: how far the ratio may leave 1.
        beta: factor on the divergence from the reference.
        temperature: what logits are divided by.

    Returns:
        the loss [] and, for records, without gradient, the log-probabilities [tokens], zero where ignored; in float32
        (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not fit, beta without a reference, or a temperature that is not above 0.
        IndexError: a target is neither a class nor ``ignore_index``.
    """
    torch._check_value(temperature > 0, lambda: f"linear_grpo: temperature={temperature}; valid: a number above 0")
    torch._check_value(
        reference is not None or beta == 0, lambda: f"linear_grpo: beta={beta} without a reference; valid: 0"
    )
    if weights is None:
        kept = (target != ignore_index).to(accumulation_dtype(hidden.dtype))
        weights = kept / kept.sum().clamp_min(1)
    for name, x in (("advantages", advantages), ("weights", weights), ("old", old), ("reference", reference)):
        torch._check_value(
            x is None or x.shape == target.shape,
            lambda: f"linear_grpo: {name} is {list(x.shape)}; valid: {list(target.shape)}",  # noqa: B023
        )
    hidden = hidden if temperature == 1.0 else hidden / temperature
    bias = bias if bias is None or temperature == 1.0 else bias / temperature
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    numbers = (x if x is None else x.detach() for x in (advantages, weights, old, reference))
    settings = low, high, beta, ignore_index
    loss, losses, *_ = torch.ops.mindspeed.linear_grpo_total(hidden, weight, bias, target, *numbers, *settings, needed)
    return loss, -losses


LIBRARY.define(
    "linear_grpo(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor advantages, Tensor? weights=None, "
    "Tensor? old=None, Tensor? reference=None, float low=0.2, float high=0.2, float beta=0.0, float temperature=1.0, "
    "int ignore_index=-100) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("linear_grpo", linear_grpo, "CompositeImplicitAutograd")


def _terms(
    logp: Tensor, advantages: Tensor, old: Tensor | None, reference: Tensor | None, settings: tuple
) -> tuple[Tensor, Tensor]:
    """Each token's term without its weight, and the gradient of that by the log-probability."""
    low, high, beta = settings
    ratio = torch.ones_like(logp) if old is None else (logp - old.to(logp.dtype)).exp()
    advantages = advantages.to(logp.dtype)
    free, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    term, slope = -torch.minimum(free, clipped), torch.where(free <= clipped, -free, 0.0)
    if beta:
        behind = reference.to(logp.dtype) - logp
        term, slope = term + beta * (behind.exp() - behind - 1), slope + beta * (1 - behind.exp())
    return term, slope


def _fake_total(hidden, weight, bias, target, *others):
    needed, wide = others[-1], accumulation_dtype(hidden.dtype)
    grads = (_empty_gradient(x, hidden, need) for x, need in zip((hidden, weight, bias), needed))
    return hidden.new_empty((), dtype=wide), hidden.new_empty(target.shape, dtype=wide), *grads


@operator(
    f"linear_grpo_total({INPUTS}, {SETTINGS}, bool[3] needed) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_total,
    opaque=True,
)
def linear_grpo_total(
    hidden, weight, bias, target, advantages, weights, old, reference, low, high, beta, ignore_index, needed
):
    """The loss [] of :func:`linear_grpo`, the cross-entropy of each token, and the gradients for an upstream gradient
    of 1, of size 0 where not needed."""
    settings = low, high, beta

    def slopes(at: Any, losses: Tensor) -> Tensor:
        parts = (x if x is None else x[at] for x in (advantages, old, reference))
        return -_terms(-losses, *parts, settings)[1] * weights[at].to(losses.dtype)

    losses, *grads = run_in_chunks(
        hidden, weight, bias, target, ignore_index, 0.0, 0.0, 0.0, 1.0, needed, upstream_of=slopes
    )
    grads = (hidden.new_empty(0) if g is None else g.to(_saved_dtype(hidden)) for g in grads)
    terms = _terms(-losses, advantages, old, reference, settings)[0] * weights.to(losses.dtype)
    return torch.where(target != ignore_index, terms, 0.0).sum(), losses, *grads


def _setup(ctx, inputs, output):
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(*output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 13
    grads = torch.ops.mindspeed.linear_cross_entropy_total_backward(grad, *ctx.saved_tensors)
    return *(g.to(ctx.dtype) if asked else None for g, asked in zip(grads, ctx.needs_input_grad)), *(None,) * 10


torch.library.register_autograd("mindspeed::linear_grpo_total", _backward, setup_context=_setup, lib=LIBRARY)


@linear_grpo_total.shard
def _sharding_rule(hidden, weight, bias, target, advantages, weights, old, reference, *settings):
    """By token: a term's weight says what it counts, on any rank."""
    return [([PARTIAL, 0, *_by_token(settings[-1])], [0, REPLICATED, REPLICATED, 0, 0, 0, 0, 0])]


@linear_grpo_total.costs
def _cost(out, hidden, weight, bias, target, advantages, weights, old, reference, *settings):
    return _work(out, hidden, weight, settings[-1], bias, target, advantages, weights, old, reference)
