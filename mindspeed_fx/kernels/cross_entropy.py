"""Cross-entropy of token logits, per token, with ignored targets and label smoothing.

Source: ``torch.nn.functional.cross_entropy``; ``npu_cross_entropy_loss`` of torch_npu. The logits are read in their
own type and widened on the fly: no float32 copy of 16-bit logits exists, forward or backward, and the backward keeps
nothing but the logits and one number per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import SOFTMAX, SPECIAL, once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator


def _fake(logits, target, ignore_index, label_smoothing):
    dtype = accumulation_dtype(logits.dtype)
    return logits.new_empty(target.shape, dtype=dtype), logits.new_empty(target.shape, dtype=dtype)


@operator(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor, Tensor)", _fake
)
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy per token.

    Args:
        logits: [tokens, vocab], float.
        target: [tokens], int64; ``ignore_index`` marks tokens with zero loss and gradient.
        label_smoothing: weight in [0, 1) of the uniform distribution.

    Returns:
        loss and log-sum-exp, each [tokens] in float32 (float64 for float64 logits). Both have gradients; the
        log-sum-exp of an ignored token counts.
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    top = wide.amax(-1, keepdim=True)
    lse = (wide - top).exp().sum(-1).log() + top.squeeze(-1)
    kept = target != ignore_index
    picked = logits.gather(-1, target.where(kept, 0).unsqueeze(-1)).squeeze(-1).to(wide.dtype)
    loss = lse - picked
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - wide.mean(-1))
    return loss.where(kept, 0.0), lse


def _fake_backward(grad, logits, target, lse, ignore_index, label_smoothing):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@operator(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, float "
    "label_smoothing) -> Tensor",
    _fake_backward,
)
def cross_entropy_backward(grad, logits, target, lse, ignore_index, label_smoothing):
    """Gradient of :func:`cross_entropy` for the logits: grad * (softmax - (1 - s) onehot - s / vocab), in their
    type.
    """
    wide = logits.to(lse.dtype)
    grad = grad.where(target != ignore_index, 0.0).unsqueeze(-1)
    p = (wide - lse.unsqueeze(-1)).exp()
    # No name for where the target is: it would stay in memory until the end.
    p = p - (torch.arange(logits.shape[-1], device=logits.device) == target.unsqueeze(-1)).to(p.dtype) * (
        1.0 - label_smoothing
    )
    if label_smoothing:
        p = p - label_smoothing / logits.shape[-1]
    return (p * grad).to(logits.dtype)


def _setup(ctx, inputs, output):
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_lse):
    if grad is None and grad_lse is None:
        return None, None, None, None
    logits, target, lse = ctx.saved_tensors
    dlogits = torch.ops.mindspeed.cross_entropy_backward
    if grad_lse is None:
        return dlogits(grad, logits, target, lse, ctx.ignore_index, ctx.label_smoothing), None, None, None
    return (
        _with_lse(dlogits, grad, grad_lse, logits, target, lse, ctx.ignore_index, ctx.label_smoothing),
        None,
        None,
        None,
    )


def _with_lse(dlogits, grad, grad_lse, logits, target, lse, ignore_index, smoothing):
    """The gradient where the log-sum-exp is used too (a z-loss): its own is grad_lse * softmax, so the two go through
    the operator as one, and what the operator then took from the target for the log-sum-exp's sake is given back. An
    ignored token has the second alone."""
    kept = target != ignore_index
    both = grad_lse if grad is None else grad.where(kept, 0.0) + grad_lse
    target = target.where(kept, 0)
    out = dlogits(both, logits, target, lse, -100, smoothing)
    out = out.scatter_add(1, target.unsqueeze(-1), (grad_lse * (1.0 - smoothing)).to(out.dtype).unsqueeze(-1))
    return out + (grad_lse * (smoothing / logits.shape[-1])).to(out.dtype).unsqueeze(-1) if smoothing else out


torch.library.register_autograd("mindspeed::cross_entropy", _backward, setup_context=_setup, lib=LIBRARY)


@cross_entropy.costs
def _cost(out, logits, target, ignore_index, label_smoothing):
    return once(out, logits, target, vector=SOFTMAX * logits.numel)


@cross_entropy_backward.costs
def _backward_cost(out, grad, logits, target, lse, ignore_index, label_smoothing):
    return once(out, grad, logits, target, lse, vector=(SPECIAL + 4) * logits.numel)


@cross_entropy.shard
def _sharding_rule(logits, target, ignore_index, label_smoothing):
    """By token. Logits divided by class need collectives inside the operator: sharding/spmd/vocabulary.py."""
    return [([0, 0], [0, 0])]


@cross_entropy_backward.shard
def _sharding_rule_backward(grad, logits, target, lse, ignore_index, label_smoothing):
    return [([0], [0, 0, 0, 0])]


triton.kernel(
    cross_entropy,
    _fake,
    "cross_entropy.forward",
    "online softmax",
    lambda logits, *rest: triton.refuse(logits.shape[-1], logits=logits),
)
triton.kernel(
    cross_entropy_backward,
    _fake_backward,
    "cross_entropy.backward",
    "one read, one write",
    lambda grad, logits, *rest: triton.refuse(logits.shape[-1], logits=logits),
    beats_codegen=False,  # generated code writes the gradient in the place of the logits
)
