"""The indexer's choice on NPU: ``npu_lightning_indexer`` and ``npu_lightning_indexer_grad``.

Limits as documented for A2: 64 heads of queries, 128 channels, 16-bit types, at most 2,048 tokens. Scores come back in
the type of the queries. What is written where a query sees fewer tokens is not documented but for the place, -1.
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.lightning_indexer import lightning_indexer, lightning_indexer_backward
from mindspeed_fx.kernels.npu import check_types, first, lowering, within

npu = torch.ops.npu
HALVES = (torch.float16, torch.bfloat16)
CAUSAL = 3
"""sparse_mode: the last query sees the last key."""


def _limits(op, q, k, weights, count):
    return first(
        check_types(HALVES, q=q),
        check_types((q.dtype,), k=k, weights=weights),
        within(f"{op}: heads", q.shape[2], 64, 64),
        within(f"{op}: channels", q.shape[3], 128, 128),
        within(f"{op}: chosen tokens", count, 1, 2048),
    )


def _supports(q, k, weights, count):
    return _limits("npu_lightning_indexer", q, k, weights, count)


@lowering(lightning_indexer, "npu_lightning_indexer", _supports, ("npu_lightning_indexer",))
def _lightning_indexer(q, k, weights, count):
    indices, scores = npu.npu_lightning_indexer(
        q.contiguous(), k.unsqueeze(2).contiguous(), weights.contiguous(), sparse_count=count, sparse_mode=CAUSAL,
        return_value=True,
    )  # fmt: skip
    indices, scores = indices.squeeze(2), scores.squeeze(2).to(torch.float32)
    return scores.masked_fill(indices < 0, float("-inf")), indices


def _supports_backward(grad, q, k, weights, indices):
    return _limits("npu_lightning_indexer_grad", q, k, weights, indices.shape[-1])


@lowering(lightning_indexer_backward, "npu_lightning_indexer_grad", _supports_backward, ("npu_lightning_indexer_grad",))
def _lightning_indexer_backward(grad, q, k, weights, indices):
    grad = grad.masked_fill(indices < 0, 0).to(q.dtype).unsqueeze(2)
    dq, dk, dw = npu.npu_lightning_indexer_grad(
        q.contiguous(), k.unsqueeze(2).contiguous(), grad, indices.unsqueeze(2), weights.contiguous(),
        layout="BSND", sparse_mode=CAUSAL,
    )  # fmt: skip
    return dq, dk.squeeze(2), dw
