"""The router's choice on NPU: ``npu_moe_gating_top_k``, its gradient, and ``npu_moe_gating_top_k_softmax_v2``.

Both forwards and the backward are called after autograd, so that it does not matter which derivatives torch_npu has:
that of the softmax has none. 16-bit logits are widened first, because the documentation does not say in which type the
kernels compute, and models compute in float32. ``npu_moe_gating_top_k`` divides sigmoids by their sum, and softmaxes
not. Its backward is documented for sigmoids alone; for the others, and where torch_npu lacks it, a few ATen kernels on
[tokens, k] and one scatter.
"""

from __future__ import annotations

import torch

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.npu import FLOATS, check_types, first, lowering, within
from mindspeed_fx.kernels.router_topk import router_topk, router_topk_backward

npu = torch.ops.npu
EXPERTS = 2048


def _is_chosen_softmax(bias, score, groups, kept, eps) -> bool:
    """Whether the weights are the softmax of the k largest logits."""
    return score == "softmax" and bias is None and kept == groups and eps == 0


def _supports_softmax(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    op = "npu_moe_gating_top_k_softmax_v2"
    if not _is_chosen_softmax(bias, score, groups, kept, eps):
        return f"{op}: softmax of the chosen logits alone, without a bias, groups or an eps"
    return first(check_types(logits=logits), within(f"{op}: k", k, 1, min(1024, hint(logits.shape[-1]))))


@lowering(router_topk, "npu_moe_gating_top_k_softmax_v2", _supports_softmax, ("npu_moe_gating_top_k_softmax_v2",))
def _softmax(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    rows = logits.reshape(-1, logits.shape[-1]).to(torch.float32)
    weights, ids, _ = npu.npu_moe_gating_top_k_softmax_v2(rows, k=k, renorm=1)
    return _results(logits, weights if scale == 1 else weights * scale, ids, k)


def _supports(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    op, experts = "npu_moe_gating_top_k", hint(logits.shape[-1])
    size = experts // groups
    padded = -(-size // 32) * 32 * groups
    return first(
        check_types(logits=logits, bias=bias),
        within(f"{op}: experts", experts, 1, EXPERTS),
        None if kept == groups else within(f"{op}: experts of a group", size, 3, EXPERTS),
        None if kept == groups else within(f"{op}: experts, groups filled up to 32", padded, 1, EXPERTS),
    )


@lowering(router_topk, "npu_moe_gating_top_k", _supports, ("npu_moe_gating_top_k",))
def _gating(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    rows = logits.reshape(-1, logits.shape[-1]).to(torch.float32)
    sigmoid = score == "sigmoid"
    if kept == groups:  # all groups are kept: none are needed
        groups = kept = 1
    # What the kernel returns as weights is what is asked for: a sigmoid that is divided, a softmax that is not.
    direct = sigmoid == (eps is not None)
    weights, ids, scores = npu.npu_moe_gating_top_k(
        rows, k, bias=None if bias is None else bias.to(torch.float32), k_group=kept, group_count=groups,
        group_select_mode=best - 1, norm_type=int(sigmoid), out_flag=sigmoid and not direct,
        routed_scaling_factor=scale if direct else 1.0, eps=eps or 0.0,
    )  # fmt: skip
    if not direct:
        if sigmoid:
            weights = scores.gather(-1, ids.to(torch.int64))
        else:
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        weights = weights if scale == 1 else weights * scale
    return _results(logits, weights, ids, k)


def _results(logits, weights, ids, k):
    shape = (*logits.shape[:-1], k)
    return weights.view(shape), ids.to(torch.int64).view(shape)


@lowering(router_topk, "aten topk", lambda *args, **kwargs: None)
def _topk(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    return router_topk.reference(logits, bias, k, score, groups, kept, best, eps, scale)


def _supports_backward(grad, logits, weights, ids, score, eps, scale):
    op = "npu_moe_gating_top_k_backward"
    if score != "sigmoid" or eps is None:
        return f"{op}: sigmoids that are divided by their sum alone"
    return first(
        check_types(grad=grad),
        check_types(FLOATS, logits=logits),
        within(f"{op}: experts", logits.shape[-1], 2, EXPERTS),
    )


@lowering(router_topk_backward, "npu_moe_gating_top_k_backward", _supports_backward, ("npu_moe_gating_top_k_backward",))
def _gating_backward(grad, logits, weights, ids, score, eps, scale):
    experts, k = logits.shape[-1], ids.shape[-1]
    dx = npu.npu_moe_gating_top_k_backward(
        logits.reshape(-1, experts).to(torch.float32).sigmoid(),
        grad.reshape(-1, k).to(torch.float32).contiguous(),
        ids.reshape(-1, k).to(torch.int32),
        norm_type=1,
        routed_scaling_factor=scale,
        eps=eps,
    )
    return dx.view(logits.shape).to(logits.dtype)


@lowering(router_topk_backward, "aten scatter of the chosen gradients", lambda *args, **kwargs: None)
def _scatter(grad, logits, weights, ids, score, eps, scale):
    return router_topk_backward.reference(grad, logits, weights, ids, score, eps, scale)
