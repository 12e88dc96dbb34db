"""CPU kernel of torch_npu's merge of two attentions. It has no derivative there: attention's own backward serves."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation


def _fake(
    prev_attn_out,
    prev_softmax_max,
    prev_softmax_sum,
    cur_attn_out,
    cur_softmax_max,
    cur_softmax_sum,
    *,
    actual_seq_qlen=None,
    input_layout="SBH",
    input_softmax_layout="",
):
    return torch.empty_like(prev_attn_out), torch.empty_like(prev_softmax_max), torch.empty_like(prev_softmax_sum)


@emulation("npu_ring_attention_update", _fake)
def npu_ring_attention_update(
    prev_attn_out,
    prev_softmax_max,
    prev_softmax_sum,
    cur_attn_out,
    cur_softmax_max,
    cur_softmax_sum,
    *,
    actual_seq_qlen=None,
    input_layout="SBH",
    input_softmax_layout="",
):
    """(out, max, sum): m = max(mp, mc), a = lp exp(mp - m), b = lc exp(mc - m), l = a + b, out = (op a + oc b) / l.

    SBH: out [S, B, N * D], statistics [B, N, S, 8]. TND: out [T, N, D], statistics [T, N, 8], ``actual_seq_qlen`` from
        0.
    """
    assert (
        prev_attn_out.shape == cur_attn_out.shape
        and prev_attn_out.dtype == cur_attn_out.dtype
        and prev_attn_out.dim() == 3
    )
    assert prev_softmax_max.shape[-1] == 8 and prev_softmax_max.dtype == torch.float32
    top = torch.maximum(prev_softmax_max, cur_softmax_max)
    old, new = prev_softmax_sum * (prev_softmax_max - top).exp(), cur_softmax_sum * (cur_softmax_max - top).exp()
    total = old + new
    a, b = ((x / total)[..., 0] for x in (old, new))
    if input_layout == "SBH":
        a, b = (x.permute(2, 0, 1).unsqueeze(-1) for x in (a, b))
        parts = [x.float().unflatten(2, (a.shape[2], -1)) for x in (prev_attn_out, cur_attn_out)]
    else:
        assert input_layout == "TND" and actual_seq_qlen is not None and actual_seq_qlen[0] == 0, (
            "TND wants lengths that start with 0"
        )
        a, b = a.unsqueeze(-1), b.unsqueeze(-1)
        parts = [prev_attn_out.float(), cur_attn_out.float()]
    out = (parts[0] * a + parts[1] * b).view(prev_attn_out.shape)
    return torch.empty_like(prev_attn_out).copy_(out), top, total
