"""Calls of the indexer and of attention to chosen keys, in the sizes that torch_npu's operators take: 16 bits alone."""

from __future__ import annotations

from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import normal
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def sparse_cases(dtype: torch.dtype) -> Iterator[Call]:
    if dtype not in (torch.float16, torch.bfloat16):
        return
    for queries, keys, count in ((6, 6, 4), (3, 5, 8)):
        q, k, weights = (normal(2, *shape, dtype=dtype) for shape in ((queries, 64, 128), (keys, 128), (queries, 64)))
        q, weights = q / 8, weights / 8
        scores, indices = ops.lightning_indexer(q, k, weights, count)
        yield f"lightning_indexer-{count}", ops.lightning_indexer, (q, k, weights, count), "npu_lightning_indexer"
        yield (
            f"lightning_indexer_backward-{count}",
            ops.lightning_indexer_backward,
            (torch.randn_like(scores), q, k, weights, indices),
            "npu_lightning_indexer_grad",
        )
        q, k = normal(2, queries, 4, 576, dtype=dtype), normal(2, keys, 1, 576, dtype=dtype)
        args = (q, k, None, indices, 0.05, 512)
        out, lse = ops.sparse_attention(*args)
        yield f"sparse_attention-{count}", ops.sparse_attention, args, "npu_sparse_flash_attention"
        yield (
            f"sparse_attention_backward-{count}",
            ops.sparse_attention_backward,
            (torch.randn_like(out), q, k, None, indices, out, lse, 0.05, 512),
            "npu_sparse_flash_attention_grad",
        )
