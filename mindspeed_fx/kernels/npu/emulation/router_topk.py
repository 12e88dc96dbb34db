"""CPU kernels of torch_npu's choice of experts."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation


def _shapes(x, k):
    return x.new_empty(*x.shape[:-1], k), x.new_empty(*x.shape[:-1], k, dtype=torch.int32)


def _fake_softmax(x, *, k=1, finished=None, renorm=0, output_softmax=False):
    whole = output_softmax and renorm == 0
    return *_shapes(x, k), x.new_empty(x.shape if whole else 0, dtype=torch.float32)


@emulation("npu_moe_gating_top_k_softmax_v2", _fake_softmax)
def npu_moe_gating_top_k_softmax_v2(x, *, k=1, finished=None, renorm=0, output_softmax=False):
    """(weights, ids int32, softmax or empty): topk of the softmax, or, with renorm 1, the softmax of topk."""
    assert finished is None and renorm in (0, 1)
    wide = x.float()
    weights, ids = (wide if renorm else wide.softmax(-1)).topk(k, -1)
    weights = weights.softmax(-1) if renorm else weights
    scores = wide.softmax(-1) if output_softmax and not renorm else wide.new_empty(0)
    return weights.to(x.dtype), ids.to(torch.int32), scores


def _fake_gating(x, k, *args, **kwargs):
    return *_shapes(x, k), torch.empty(x.shape, dtype=torch.float32, device=x.device)


@emulation("npu_moe_gating_top_k", _fake_gating)
def npu_moe_gating_top_k(
    x,
    k,
    *,
    bias=None,
    input_ids=None,
    tid2eid=None,
    k_group=1,
    group_count=1,
    group_select_mode=0,
    renorm=0,
    norm_type=0,
    out_flag=False,
    routed_scaling_factor=1.0,
    eps=1e-20,
):
    """(weights, ids int32, scores float32): sigmoids are divided by their sum, softmaxes are not."""
    assert x.dim() == 2 and input_ids is None and tid2eid is None and renorm == 0
    assert bias is None or bias.dtype == x.dtype, f"npu_moe_gating_top_k: bias is {bias.dtype}, x {x.dtype}"
    scores = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        choice = choice.view(x.shape[0], group_count, -1)
        of_groups = choice.topk(2, -1)[0].sum(-1) if group_select_mode == 1 else choice.amax(-1)
        dropped = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, of_groups.topk(k_group, -1)[1], False)
        choice = choice.masked_fill(dropped.unsqueeze(-1), float("-inf")).view(x.shape)
    ids = choice.topk(k, -1)[1]
    weights = scores.gather(-1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    # Without out_flag the third result is not said to hold anything.
    return weights, ids.to(torch.int32), scores if out_flag else torch.full_like(scores, float("nan"))


@emulation(
    "npu_moe_gating_top_k_backward",
    lambda x_norm, grad_y, expertIdx, **kwargs: torch.empty(x_norm.shape, dtype=grad_y.dtype, device=x_norm.device),
)
def npu_moe_gating_top_k_backward(
    x_norm, grad_y, expertIdx, *, renorm=0, norm_type=0, routed_scaling_factor=1.0, eps=1e-20
):
    """The gradient of x where weights are sigmoids over their sum; ``x_norm`` are the sigmoids of all experts."""
    assert norm_type == 1 and renorm == 0 and x_norm.dtype == torch.float32 and expertIdx.dtype == torch.int32
    ids, grad = expertIdx.long(), grad_y.float() * routed_scaling_factor
    chosen = x_norm.gather(-1, ids)
    total = chosen.sum(-1, keepdim=True) + eps
    inner = (grad - (grad * chosen / total).sum(-1, keepdim=True)) / total
    return torch.zeros_like(x_norm).scatter(-1, ids, inner * chosen * (1 - chosen)).to(grad_y.dtype)
