"""Two attentions of the same queries over different keys become the attention over all of them.

Source: Liu et al. 2023, "Ring Attention", section 3; ``npu_ring_attention_update`` of torch_npu, which takes the
largest score and the sum of exponentials of a row apart: (log-sum-exp, 1) is such a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels.base import LIBRARY, operator


def _fake(out, lse, block, block_lse):
    return torch.empty_like(out), torch.empty_like(lse)


@operator("ring_attention_update(Tensor out, Tensor lse, Tensor block, Tensor block_lse) -> (Tensor, Tensor)", _fake)
def ring_attention_update(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Weights both results by their share of the softmax. Has no gradient: the gradient of attention by blocks of keys
    needs only the log-sum-exp of all (:func:`mindspeed::attention_backward
    <mindspeed_fx.kernels.attention.attention_backward>`).

    Args:
        out: [batch, heads, q_seq, dim], float: attention over the keys so far.
        lse: [batch, heads, q_seq], float32 or float64: its log-sum-exp; finite, so that a row has seen a key.
        block: as ``out``, any float: attention over further keys.
        block_lse: as ``lse``; -inf for rows that see none of them.

    Returns:
        ``out`` and ``lse`` over all keys, dtypes and layouts as ``out`` and ``lse``.
    """
    both = torch.logaddexp(lse, block_lse)
    old, new = (lse - both).exp().unsqueeze(-1), (block_lse - both).exp().unsqueeze(-1)
    # Nothing is written into an empty tensor: of two such generated code makes one. Products lie as their first factor.
    return (out * old + block * new).to(out.dtype), both


def _setup(ctx, inputs, output):
    raise NotImplementedError(
        "mindspeed::ring_attention_update has no gradient; call it in the forward of an autograd.Function, whose "
        "backward calls mindspeed::attention_backward block by block"
    )


torch.library.register_autograd(
    "mindspeed::ring_attention_update", lambda ctx, *grads: None, setup_context=_setup, lib=LIBRARY
)


@ring_attention_update.shard
def _sharding_rule(out, lse, block, block_lse):
    return [([d, d], [d, d, d, d]) for d in range(3)] + [([3, REPLICATED], [3, REPLICATED, 3, REPLICATED])]


@ring_attention_update.costs
def _cost(result, out, lse, block, block_lse):
    return once(result, out, lse, block, block_lse, vector=3 * out.numel + 4 * SPECIAL * lse.numel)
