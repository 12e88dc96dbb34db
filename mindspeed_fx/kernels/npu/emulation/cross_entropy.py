"""CPU kernels of the cross-entropies of torch_npu. Sources: its documentation; aclnnFusedLinearOnlineMaxSum,
aclnnFusedCrossEntropyLossWithMaxSum and aclnnFusedLinearCrossEntropyLossGrad of CANN's operator documentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mindspeed_fx.kernels.npu.emulation.registry import emulation

# --------------------------------------------------------------------------- of logits


def _fake_loss(
    input,
    target,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale_for_zloss=0.0,
    return_zloss=False,
):
    loss = input.new_empty(input.shape[:1] if reduction == "none" else (1,))
    return loss, input.new_empty(input.shape), torch.empty_like(loss), input.new_empty(input.shape[:1])


def _setup_loss(ctx, inputs, output):
    _, target, weight, *ctx.settings = inputs
    ctx.save_for_backward(output[1], target, weight)


def _backward_loss(ctx, grad, *_):
    log_prob, target, weight = ctx.saved_tensors
    reduction, ignore_index, smoothing, scale, _ = ctx.settings
    return torch.ops.npu.npu_cross_entropy_loss_backward(
        grad, log_prob, target, weight, None, None, reduction, ignore_index, smoothing, scale
    ), *(None,) * 7


def _only_defaults(weight, reduction, ignore_index, label_smoothing, zloss):
    """What the documentation does not allow in training."""
    changed = (
        weight is not None or label_smoothing != 0.0 or zloss != 0.0 or (reduction == "mean" and ignore_index != -100)
    )
    if changed:
        raise NotImplementedError(
            f"npu_cross_entropy_loss(reduction={reduction!r}, ignore_index={ignore_index}, "
            f"label_smoothing={label_smoothing}, z-loss scale {zloss}, weight "
            f"{'given' if weight is not None else None}) has no gradient "
            "that is documented: in training it allows the defaults alone, and another ignore_index only without mean. "
            "Use torch.nn.functional.cross_entropy, which fusion.cross_entropy lowers as far as the kernel goes"
        )


@emulation("npu_cross_entropy_loss", _fake_loss, _setup_loss, _backward_loss)
def npu_cross_entropy_loss(
    input,
    target,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale_for_zloss=0.0,
    return_zloss=False,
):
    """(loss, log_prob, zloss, lse_for_zloss), all in the type of ``input``. A negative ``ignore_index`` ignores
    nothing:
    targets must be classes."""
    _only_defaults(weight, reduction, ignore_index, label_smoothing, lse_square_scale_for_zloss)
    assert ((target >= 0) & (target < input.shape[1])).all(), "npu_cross_entropy_loss: a target is no class"
    log_prob = F.log_softmax(input.float(), -1)
    loss = F.nll_loss(log_prob, target, reduction=reduction, ignore_index=max(ignore_index, -1)).reshape(-1)
    undefined = input.new_full((input.shape[0],), float("nan"))
    return (
        loss.to(input.dtype),
        log_prob.to(input.dtype),
        torch.full_like(loss, float("nan"), dtype=input.dtype),
        undefined,
    )


@emulation("npu_cross_entropy_loss_backward", lambda grad_loss, log_prob, *args, **kwargs: torch.empty_like(log_prob))
def npu_cross_entropy_loss_backward(
    grad_loss,
    log_prob,
    target,
    weight=None,
    grad_zloss=None,
    lse_for_zloss=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale_for_zloss=0.0,
):
    """grad * (softmax - onehot), for each token or shared among them."""
    _only_defaults(weight, reduction, ignore_index, label_smoothing, lse_square_scale_for_zloss)
    p = log_prob.float().exp()
    p = p - F.one_hot(target, p.shape[1])
    grad = grad_loss.float() / (p.shape[0] if reduction == "mean" else 1)
    return (p * grad.unsqueeze(-1) if reduction == "none" else p * grad).to(log_prob.dtype)


# --------------------------------------------------------------------------- of a linear layer, vocabulary-parallel


def _fake_max_sum(input, weight, target, vocab_start_index, vocab_end_index, return_logits=False):
    tokens = input.shape[0]
    stats = (input.new_empty(tokens, dtype=torch.float32) for _ in range(3))
    logits = input.new_empty((tokens, weight.shape[0]) if return_logits else (0,))
    return *stats, input.new_empty((tokens + 7) // 8, dtype=torch.uint8), torch.empty_like(target), logits


def _pack(bits):
    """Booleans [n] as bytes [(n + 7) // 8], the first in the highest bit, filled up with ones."""
    padded = F.pad(bits.to(torch.uint8), (0, -bits.shape[0] % 8), value=1).view(-1, 8)
    return (padded << torch.arange(7, -1, -1, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _unpack(packed, n):
    return (packed[:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8) & 1).reshape(-1)[:n].bool()


@emulation("npu_fused_linear_online_max_sum", _fake_max_sum)
def npu_fused_linear_online_max_sum(input, weight, target, vocab_start_index, vocab_end_index, return_logits=False):
    """(logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits): the largest logit, the sum of
    exp(logit - largest), and the target's logit minus the largest; mask bits are 1 where the target is outside
    [vocab_start_index, vocab_end_index], where the last two are 0."""
    logits = input.float() @ weight.float().t()
    top = logits.amax(-1)
    less = logits - top[:, None]
    outside = (target < vocab_start_index) | (target > vocab_end_index)
    local = (target - vocab_start_index).masked_fill(outside, 0)
    predicted = less.gather(1, local[:, None]).squeeze(1).masked_fill(outside, 0.0)
    return (
        top,
        less.exp().sum(-1),
        predicted,
        _pack(outside),
        local,
        logits.to(input.dtype) if return_logits else input.new_empty(0),
    )


def _fake_with_max_sum(
    logits_max,
    sum_exp_logits,
    predicted_logits,
    *,
    label_smoothing=0.0,
    input=None,
    weight=None,
    vocab_parallel_logits=None,
):
    softmax = (
        logits_max.new_empty(0)
        if vocab_parallel_logits is None
        else vocab_parallel_logits.new_empty(vocab_parallel_logits.shape, dtype=torch.float32)
    )
    return torch.empty_like(logits_max), softmax


@emulation("npu_fused_cross_entropy_loss_with_max_sum", _fake_with_max_sum)
def npu_fused_cross_entropy_loss_with_max_sum(
    logits_max,
    sum_exp_logits,
    predicted_logits,
    *,
    label_smoothing=0.0,
    input=None,
    weight=None,
    vocab_parallel_logits=None,
):
    """(loss, softmax): log(sum) minus the target's logit, as the first operator made it relative to the largest."""
    assert label_smoothing == 0.0 and input is None and weight is None
    loss = sum_exp_logits.log() - predicted_logits
    if vocab_parallel_logits is None:
        return loss, logits_max.new_empty(0)
    return loss, (vocab_parallel_logits.float() - logits_max[:, None]).exp() / sum_exp_logits[:, None]


def _fake_linear_backward(grad, input, weight, *args, **kwargs):
    return torch.empty_like(input), torch.empty_like(weight)


@emulation("npu_fused_linear_cross_entropy_loss_with_max_sum_backward", _fake_linear_backward)
def npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
    grad,
    input,
    weight,
    target_mask,
    masked_target,
    label_smoothing=0.0,
    logits_max=None,
    sum_exp_logits=None,
    softmax=None,
):
    """(dinput, dweight): (softmax - onehot where the target is inside) * grad, times weight and input."""
    assert label_smoothing == 0.0 and weight.shape[0] >= 128
    p = (
        softmax
        if softmax is not None
        else (input.float() @ weight.float().t() - logits_max[:, None]).exp() / sum_exp_logits[:, None]
    )
    inside = (~_unpack(target_mask, grad.shape[0])).float()
    p = p - F.one_hot(masked_target.long(), p.shape[1]) * inside[:, None]
    p = p * grad[:, None]
    return (p @ weight.float()).to(input.dtype), (p.t() @ input.float()).to(weight.dtype)
