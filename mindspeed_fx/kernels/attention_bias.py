"""The backward of attention whose additive mask is trained: relative position biases (T5, XLNet, ProphetNet), position
tables.

The forward is ``mindspeed::attention``, whose additive mask it is. The gradient of the bias is that of the scores,
summed over what the bias is broadcast to; the scores' gradient is written once, of which the bias's is all or a sum.
Source: Dao 2023, "FlashAttention-2", algorithm 2, whose dS it is; ``dpse`` of ``npu_fusion_attention_grad``.
"""

from __future__ import annotations

from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost import operators as cost
from mindspeed_fx.kernels import attention
from mindspeed_fx.kernels.base import accumulation_dtype, operator
from mindspeed_fx.kernels.sharding import along


def _fake(grad, q, k, v, out, lse, bias, causal, scale, window=0, softcap=0.0):
    return *attention.fake_backward(grad, q, k, v, out, lse, bias, causal, scale), bias.new_empty(bias.shape)


@operator(
    "attention_bias_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor bias, bool "
    "causal, float scale, int window=0, float softcap=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def attention_bias_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``mindspeed::attention`` with respect to q, k, v and its additive mask.

    Args:
        grad: [batch, heads, q_seq, v_dim]; ``q``, ``k``, ``v``, ``out``, ``lse`` and the options as of
            ``mindspeed::attention``.
        bias: the additive mask, broadcast to [batch, heads, q_seq, kv_seq], float.

    Returns:
        (dq, dk, dv, dbias): the first three stored as [batch, seq, heads, dim], dbias contiguous in the shape and type
        of ``bias``.
    """
    wide = accumulation_dtype(q.dtype)
    g, qw, kw, vw = grad.to(wide), q.to(wide), k.to(wide), v.to(wide)
    scores, tanh = attention.masked_scores(qw, kw, bias, causal, scale, window, softcap)
    p = attention.weights_of(scores, lse, bias)
    delta = (g * out.to(wide)).sum(-1, keepdim=True)
    ds = p * (g @ attention.repeat_kv_heads(q, vw).transpose(-1, -2) - delta)
    dbias = ds.sum_to_size(bias.shape).to(bias.dtype).contiguous()  # the bias is added after a soft-cap
    return *attention.gradients(q, k, v, qw, kw, g, p, ds if tanh is None else ds * (1 - tanh * tanh), scale), dbias


@attention_bias_backward.shard
def _sharding_rule(grad, q, k, v, out, lse, bias, causal, scale, window=0, softcap=0.0):
    # A bias that parts share has the sum of their gradients.
    results = [
        ([*grads, PARTIAL if m == REPLICATED else m], [o, dq, dk, dv, o, s, m])
        for o, s, dq, dk, dv, m, _, grads in attention.attention_strategies(q, k, bias, causal)
    ]
    keys = along(bias, 3, 4)
    return (
        results
        if causal
        else results
        + [
            (
                [PARTIAL, 2, 2, PARTIAL if keys == REPLICATED else keys],
                [REPLICATED, REPLICATED, 2, 2, REPLICATED, REPLICATED, keys],
            )
        ]
    )


@attention_bias_backward.costs
def _cost(out, grad, q, k, v, result, lse, bias, causal, scale, window=0, softcap=0.0):
    return cost.attention(out, q, k, v, causal, grad, result, lse, bias, window=window, backward=True)
