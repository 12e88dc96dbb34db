"""Megatron's cross-entropy over a vocabulary that may be cut over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import groups, patches

LOSS = "tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
FUSED_LOSS = "fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Loss per token, [seq, batch], float32, of logits [seq, batch, vocab / ranks].

    On CUDA and NPU eager mode keeps Megatron's own, which works in place.
    """
    if _megatrons_own():
        return patches.original(LOSS)(vocab_parallel_logits, target, label_smoothing)
    return _loss(vocab_parallel_logits, target, label_smoothing, groups.group_or_default())


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """As above without smoothing. Megatron's returns a bfloat16 gradient; this one's has the type of the logits."""
    if _megatrons_own():
        return patches.original(FUSED_LOSS)(vocab_parallel_logits, target, tp_group)
    return _loss(vocab_parallel_logits, target, 0.0, tp_group)


def _megatrons_own() -> bool:
    return not torch.compiler.is_compiling() and groups.has_accelerator() and dist.is_initialized()


def _loss(logits: Tensor, target: Tensor, label_smoothing: float, group: Any) -> Tensor:
    ranks = groups.size(group)
    classes = logits.shape[-1] * ranks
    # Megatron shares the smoothed weight among the other classes; torch among all: torch's is this much larger.
    smoothing = label_smoothing * classes / (classes - 1) if label_smoothing else 0.0
    if ranks > 1:
        return _VocabParallel.apply(logits, target, smoothing, group)
    flat = logits.float().reshape(-1, classes)
    return F.cross_entropy(flat, target.reshape(-1), reduction="none", label_smoothing=smoothing).reshape(target.shape)


class _VocabParallel(torch.autograd.Function):
    """Saves the logits in their own type and one float32 per token; Megatron saves the softmax in float32."""

    @staticmethod
    def forward(ctx, logits, target, smoothing, group):
        wide = logits.float()
        top = functional.wait_tensor(functional.all_reduce(wide.amax(-1), "max", group))
        local, outside = _local(target, logits.shape[-1], group)
        picked = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        shares = [picked, (wide - top.unsqueeze(-1)).exp().sum(-1)]
        if smoothing:
            shares.append(wide.sum(-1))
        parts = functional.wait_tensor(functional.all_reduce(torch.stack(shares), "sum", group))
        log_sum = parts[1].log() + top
        loss = log_sum - parts[0]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - parts[2] / (logits.shape[-1] * group.size()))
        ctx.save_for_backward(logits, target, log_sum)
        ctx.smoothing, ctx.group = smoothing, group
        return loss

    @staticmethod
    def backward(ctx, grad):
        logits, target, log_sum = ctx.saved_tensors
        local, outside = _local(target, logits.shape[-1], ctx.group)
        towards = (logits.float() - log_sum.unsqueeze(-1)).exp()
        if ctx.smoothing:
            towards = towards - ctx.smoothing / (logits.shape[-1] * ctx.group.size())
        here = torch.where(outside, 0.0, ctx.smoothing - 1.0).to(towards.dtype)
        towards = towards.scatter_add(-1, local.unsqueeze(-1), here.unsqueeze(-1))
        return (towards * grad.unsqueeze(-1)).to(logits.dtype), None, None, None


def _local(target: Tensor, classes: int, group: Any) -> tuple[Tensor, Tensor]:
    """The target as an index into this rank's ``classes``, 0 where it is another rank's; and where that is."""
    local = target - group.rank() * classes
    outside = (local < 0) | (local >= classes)
    return local.masked_fill(outside, 0), outside
