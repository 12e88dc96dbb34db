"""CPU kernel of torch_npu's feed-forward layer."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.ffn import GATED, activate
from mindspeed_fx.kernels.npu.emulation.registry import emulation


@emulation("npu_ffn", lambda x, weight1, weight2, activation, **more: x.new_empty(*x.shape[:-1], weight2.shape[-1]))
def npu_ffn(x, weight1, weight2, activation, *, expert_tokens=None, bias1=None, bias2=None, **more):
    """act(x W1 + b1) W2 + b2 in float32, rounded once; rows of experts by their counts."""
    assert x.dtype == weight1.dtype == weight2.dtype in (torch.float16, torch.bfloat16), x.dtype
    assert activation not in GATED or (expert_tokens is None and x.dtype == torch.float16)
    for bias in (bias1, bias2):
        assert bias is None or bias.dtype == (torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
    if expert_tokens is None:
        return _layer(x, weight1, weight2, bias1, bias2, activation)
    assert sum(expert_tokens) == x.shape[0]
    biases = [[None] * len(expert_tokens) if b is None else b for b in (bias1, bias2)]
    parts = zip(x.split(list(expert_tokens)), weight1, weight2, *biases)
    return torch.cat([_layer(*part, activation) for part in parts])


def _layer(x, weight1, weight2, bias1, bias2, activation):
    inner = x.float() @ weight1.float()
    inner = activate(inner if bias1 is None else inner + bias1.float(), activation)
    out = inner @ weight2.float()
    return (out if bias2 is None else out + bias2.float()).to(x.dtype)
