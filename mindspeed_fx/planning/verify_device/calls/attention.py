"""Calls of attention in its masks, layouts and kinds of heads, and of what is written of its softmax."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import BNSD, BSND, SBND, normal, stored
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def attention_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Attention."""
    keep = torch.rand(2, 1, 9, 9) < 0.7
    keep[..., 0] = True
    empty_row = keep.clone()
    empty_row[0, 0, 3] = False
    padded = torch.zeros(2, 1, 1, 9)
    padded[0, ..., :3] = float("-inf")
    masks = {
        "full": (None, False, 0),
        "causal": (None, True, 0),
        "window": (None, True, 4),
        "window-1": (None, True, 1),
        "bool": (keep, False, 0),
        "bool-causal": (keep, True, 0),
        "bool-window": (keep, True, 5),
        "bool-row": (keep[:, :, :1], False, 0),
        "bool-2d": (keep[0, 0], False, 0),
        "bool-heads": (keep[:1].repeat(1, 4, 1, 1), False, 0),
        "empty-row": (empty_row, False, 0),
        "bias": (normal(2, 4, 9, 9, dtype=dtype), False, 0),
        "bias-causal": (normal(1, 4, 9, 9, dtype=dtype), True, 0),
        "bias-window": (normal(1, 4, 9, 9, dtype=dtype), True, 3),
        "bias-rows": (normal(2, 1, 1, 9, dtype=dtype), False, 0),
        "bias-2d": (normal(9, 9, dtype=dtype), False, 0),
        "bias-one-row": (normal(1, 4, 1, 9, dtype=dtype), True, 0),
        "masking-bias": (torch.zeros(2, 1, 9, 9).masked_fill(~keep, float("-inf")).to(dtype), False, 0),
        "masking-bias-empty-row": (torch.zeros(2, 1, 9, 9).masked_fill(~empty_row, float("-inf")).to(dtype), False, 0),
        "masking-bias-causal": (padded.to(dtype), True, 0),
        "masking-bias-window": (padded.to(dtype).expand(2, 1, 9, 9), True, 3),
    }
    for (name, (mask, causal, window)), (layout, order) in itertools.product(
        masks.items(), (("BSND", BSND), ("BNSD", BNSD), ("SBH", SBND))
    ):
        yield from _attention(
            f"{name}-{layout}", dtype, order, mask, causal, window, heads=4 if layout == "BNSD" else 2, v_dim=16
        )
    for name, causal in (("cross", False), ("cross-causal", True)):
        yield from _attention(name, dtype, BSND, None, causal, 0, heads=1, v_dim=16, keys=13)
    yield from _attention("long", dtype, BSND, None, True, 0, heads=1, v_dim=16, keys=2050, queries=2050)
    yield from _attention("long-window", dtype, BNSD, None, True, 300, heads=1, v_dim=16, keys=2050, queries=2050)
    yield from _attention("narrow-values", dtype, BSND, None, True, 0, heads=4, v_dim=8)
    yield from _attention("narrow-values-SBH", dtype, SBND, None, True, 0, heads=2, v_dim=8)
    yield from _attention("sinks", dtype, BSND, None, True, 0, heads=2, v_dim=16, sinks=normal(4, dtype=dtype))
    yield from _attention("sinks-window", dtype, BNSD, None, True, 4, heads=2, v_dim=16, sinks=normal(4))
    masked = (masks["masking-bias-causal"][0], True, 0)
    yield from _attention("sinks-masking-bias", dtype, BSND, *masked, heads=2, v_dim=16, sinks=normal(4))
    yield from _attention("soft-cap", dtype, BSND, None, True, 4, heads=2, v_dim=16, softcap=2.0)

    for name in ("full", "causal", "window", "bool-causal", "bias", "masking-bias-causal"):
        mask, causal, window = masks[name]
        q, k, v = (stored((2, n, 9, 16), BSND, dtype) for n in (4, 2, 2))
        args = (mask, causal, 0.25, window, 0.0)
        out, lse, seed, offset = ops.attention_seeded(q, k, v, *args)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        yield (
            f"attention_seeded-{name}",
            ops.attention_seeded,
            (q, k, v, *args),
            "npu_fusion_attention_v3 with keep_prob",
        )
        yield (
            f"attention_seeded_backward-{name}",
            ops.attention_seeded_backward,
            (torch.empty_like(out).copy_(torch.randn(out.shape)), q, k, v, out, lse, seed, offset, *args),
            "npu_fusion_attention_grad_v3 with keep_prob",
        )

    numbers, ends = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 3, 6]))[None], torch.tensor([4, 7, 7, 13])
    for name, causal, window in (("full", False, 0), ("causal", True, 0), ("window", True, 3)):
        q, k, v = (stored((1, n, 13, 16), BSND, dtype) for n in (4, 2, 2))
        args = (numbers, ends, causal, 0.25, window)
        out, lse = ops.varlen_attention(q, k, v, *args)
        yield f"varlen_attention-{name}", ops.varlen_attention, (q, k, v, *args), "npu_fusion_attention_v3 in TND"
        yield (
            f"varlen_attention_backward-{name}",
            ops.varlen_attention_backward,
            (torch.empty_like(out).copy_(torch.randn(out.shape)), q, k, v, out, lse, *args),
            "npu_fusion_attention_grad_v3 in TND",
        )


def _attention(
    name: str,
    dtype: torch.dtype,
    order: tuple[int, ...],
    mask: torch.Tensor | None,
    causal: bool,
    window: int,
    heads: int,
    v_dim: int,
    keys: int = 9,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    queries: int = 9,
) -> Iterator[Call]:
    shapes = (
        ((2, 4, queries, 16), (2, heads, keys, 16), (2, heads, keys, v_dim))
        if queries == 9
        else ((1, 1, queries, 8), (1, 1, keys, 8), (1, 1, keys, 8))
    )
    q, k, v = (stored(shape, order, dtype) for shape in shapes)
    args = (q, k, v, mask, causal, 0.25, window, softcap)
    out, lse = ops.attention(*args, sinks)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    kernels = (
        ("attention in blocks of rows", "attention backward in blocks of rows")
        if softcap
        else ("npu_fusion_attention_v3", "npu_fusion_attention_grad_v3")
    )
    yield f"attention-{name}", ops.attention, (*args, sinks), kernels[0]
    yield (
        f"attention_backward-{name}",
        ops.attention_backward,
        (torch.empty_like(out).copy_(torch.randn(out.shape)), q, k, v, out, lse, *args[3:]),
        kernels[1],
    )


def statistics_cases(dtype: torch.dtype) -> Iterator[Call]:
    """The log-sum-exp of what fusion attention returns beside its result."""
    top, total = normal(2, 4, 6, 1), normal(2, 4, 6, 1).exp()
    both = (top.expand(2, 4, 6, 8).contiguous(), total.expand(2, 4, 6, 8).contiguous())
    yield "attention_lse", ops.attention_lse, both, "triton, rows of all heads of some tokens"


def softmax_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Softmax whose weights are needed."""
    x, grad = normal(2, 4, 32, 64, dtype=dtype), normal(2, 4, 32, 64, dtype=dtype)
    for name, mask in {
        "rows": torch.rand(2, 1, 32, 64) < 0.3,
        "all": torch.rand(2, 4, 32, 64) < 0.3,
        "causal": torch.ones(1, 1, 32, 64, dtype=torch.bool).triu(1),
    }.items():
        mask[..., 0] = False
        yield f"scaled_masked_softmax-{name}", ops.scaled_masked_softmax, (x, mask, 0.3), "npu_scaled_masked_softmax"
        y = ops.scaled_masked_softmax(x, mask, 0.3)
        yield (
            f"scaled_masked_softmax_backward-{name}",
            ops.scaled_masked_softmax_backward,
            (grad, y, mask, 0.3),
            "npu_scaled_masked_softmax_backward",
        )


def ring_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Two parts of a softmax put together."""
    for (name, order), wide in itertools.product(
        (("BNSD", BNSD), ("BSND", BSND), ("SBND", SBND), ("NBSD", (1, 0, 2, 3))), (False, True)
    ):
        shape = (2, 4, 6, 16)
        out, block = stored(shape, order, torch.float32 if wide else dtype), stored(shape, order, dtype)
        lse, block_lse = (stored(shape[:3], [i for i in order if i < 3]) * 5 for _ in range(2))
        block_lse[0, :, 1] = float("-inf")  # a row that sees none of the keys
        yield (
            f"ring_attention_update-{name}-{wide}",
            ops.ring_attention_update,
            (out, lse, block, block_lse),
            "npu_ring_attention_update",
        )
    out = stored((1, 32, 64, 128), BSND, dtype)  # the upstream test, shorter
    yield (
        "ring_attention_update-long",
        ops.ring_attention_update,
        (out, normal(1, 32, 64), torch.randn_like(out), normal(1, 32, 64)),
        "npu_ring_attention_update",
    )
    part = stored((2, 4, 6, 16), BSND, dtype)
    yield (
        "ring_attention_update-part",
        ops.ring_attention_update,
        (part.narrow(2, 3, 3), normal(2, 4, 6).narrow(2, 3, 3), part.narrow(2, 0, 3), normal(2, 4, 3)),
        "npu_ring_attention_update",
    )
