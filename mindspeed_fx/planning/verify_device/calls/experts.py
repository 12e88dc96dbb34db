"""Calls of experts: products by group, tokens sorted and put back, and what the Megatron frontend defines."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import normal
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def moe_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Products by group, and tokens sorted by expert."""
    ends = {"all": [3, 3, 8, 12], "rest": [0, 4, 4, 9], "none": [0, 0, 0, 0]}
    for (name, offsets), transposed in itertools.product(ends.items(), (False, True)):
        x, weight = (
            normal(12, 6, dtype=dtype),
            normal(4, 5, 6, dtype=dtype).transpose(1, 2) if transposed else normal(4, 6, 5, dtype=dtype),
        )
        offsets = torch.tensor(offsets, dtype=torch.int32)
        yield f"grouped_matmul-{name}-{transposed}", ops.grouped_matmul, (x, weight, offsets), "npu_grouped_matmul"
        args = (normal(12, 5, dtype=dtype), x, weight, offsets, True, True)
        yield (
            f"grouped_matmul_backward-{name}-{transposed}",
            ops.grouped_matmul_backward,
            args,
            "npu_grouped_matmul, of groups of rows and of columns",
        )
    for k, flat in itertools.product((1, 3), (False, True)):
        tokens, indices = normal(7, 5, dtype=dtype), torch.stack([torch.randperm(4)[:k] for _ in range(7)])
        indices = indices.flatten() if flat else indices
        permuted, order = ops.moe_permute(tokens, indices)
        yield f"moe_permute-{k}-{flat}", ops.moe_permute, (tokens, indices), "npu_moe_token_permute"
        yield (
            f"moe_permute_backward-{k}-{flat}",
            ops.moe_permute_backward,
            (torch.randn_like(permuted), order, 7),
            "npu_moe_token_permute_grad_v2",
        )
        for probs in (None, torch.rand(7, k).to(dtype), torch.rand(7, k)):
            name = f"{k}-{flat}-{'none' if probs is None else str(probs.dtype)[6:]}"
            out = ops.moe_unpermute(permuted, order, probs, k)
            joint = probs is None or probs.dtype == dtype
            yield (
                f"moe_unpermute-{name}",
                ops.moe_unpermute,
                (permuted, order, probs, k),
                "npu_moe_token_unpermute" if joint else "triton, copies added as they are found",
            )
            yield (
                f"moe_unpermute_backward-{name}",
                ops.moe_unpermute_backward,
                (torch.randn_like(out), permuted, order, probs, k),
                "npu_moe_token_unpermute_grad_v2" if joint else "triton, both gradients in one read",
            )
    for k, wide in itertools.product((1, 3), (False, True) if dtype == torch.bfloat16 else (False,)):
        tokens, marked = normal(7, 6, dtype=dtype), torch.rand(7, 5).argsort(-1) < k
        probs = torch.rand(7, 5).to(torch.float32 if wide else dtype)
        permuted, share, order = ops.moe_permute_map(tokens, marked, probs, k)
        yield (
            f"moe_permute_map-{k}-{wide}",
            ops.moe_permute_map,
            (tokens, marked, probs, k),
            "npu_moe_token_permute_with_routing_map",
        )
        yield (
            f"moe_permute_map_backward-{k}-{wide}",
            ops.moe_permute_map_backward,
            (torch.randn_like(permuted), torch.randn_like(share), order, marked, k),
            "npu_moe_token_permute_with_routing_map_grad",
        )


def router_cases(dtype: torch.dtype) -> Iterator[Call]:
    """The choice of experts: what Mixtral, Qwen3, DeepSeek-V2 and V3 and GPT-OSS ask for, and what lies between."""
    whole, grouped = (1, 1, 1), (4, 2, 2)
    softmax, gating = "npu_moe_gating_top_k_softmax_v2", "npu_moe_gating_top_k"
    for name, score, biased, groups, eps, scale, kernel in (
        ("mixtral", "softmax", False, whole, 0.0, 1.0, softmax),
        ("scaled", "softmax", False, (4, 4, 1), 0.0, 2.5, softmax),
        ("as-they-are", "softmax", False, whole, None, 1.0, gating),
        ("deepseek_v2", "softmax", False, (4, 2, 1), None, 16.0, gating),
        ("ernie", "softmax", True, whole, 1e-12, 1.0, gating),
        ("deepseek_v3", "sigmoid", True, grouped, 1e-20, 2.5, gating),
        ("glm4_moe", "sigmoid", True, (1, 1, 2), 1e-20, 1.0, gating),
        ("sigmoids", "sigmoid", False, grouped, None, 2.5, gating),
        ("small-groups", "sigmoid", True, (8, 4, 2), 1e-20, 1.0, "aten topk"),
    ):
        logits, bias = normal(9, 16, dtype=dtype), normal(16) / 4 if biased else None
        args = (logits, bias, 4, score, *groups, eps, scale)
        weights, ids = ops.router_topk(*args)
        yield f"router_topk-{name}", ops.router_topk, args, kernel
        divided = score == "sigmoid" and eps is not None
        yield (
            f"router_topk_backward-{name}",
            ops.router_topk_backward,
            (torch.randn_like(weights), logits, None if eps is None else weights, ids, score, eps, scale),
            "npu_moe_gating_top_k_backward" if divided else "aten scatter of the chosen gradients",
        )
    batched = normal(2, 3, 16, dtype=dtype)
    yield "router_topk-batched", ops.router_topk, (batched, None, 2, "softmax", *whole, 0.0, 1.0), softmax


def megatron_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Operators that the Megatron frontend defines."""
    import mindspeed_fx.megatron.experts_npu
    import mindspeed_fx.megatron.main_grad_npu  # noqa: F401

    for name, counts in {"all": [3, 0, 4], "rest": [1, 2, 2], "none": [0, 0, 0]}.items():
        x, grad, weights, counts = (
            normal(7, 5, dtype=dtype),
            normal(7, 4, dtype=dtype),
            [normal(4, 5, dtype=dtype) for _ in range(3)],
            torch.tensor(counts),
        )
        yield f"grouped_linear-{name}", ops.grouped_linear, (x, weights, counts), "npu_grouped_matmul"
        yield (
            f"grouped_linear_backward-{name}",
            ops.grouped_linear_backward,
            (grad, x, weights, counts),
            "npu_grouped_matmul, of groups of rows and of columns",
        )
        buffers = [normal(4, 5) for _ in weights]
        yield (
            f"grouped_linear_main_grad-{name}",
            ops.grouped_linear_main_grad,
            (x, weights, counts, buffers, False, [-1] * len(weights)),
            "npu_grouped_matmul",
        )
        yield (
            f"grouped_linear_backward-wide-{name}",
            ops.grouped_linear_backward,
            (grad, x, weights, counts, True),
            "npu_grouped_matmul, of groups of rows and of columns"
            if dtype == torch.float32
            else "npu_grouped_matmul and npu_grouped_matmul_add_ to zeros",
        )
        # scales that are powers of two: numbers of 8 bits do not depend on the type that they are made in
        yield f"grouped_linear_fp8-{name}", ops.grouped_linear_fp8, (x, weights, counts, "mx"), ""
        args = (grad, x, weights, counts, "mx", [True, True])
        yield f"grouped_linear_fp8_backward-{name}", ops.grouped_linear_fp8_backward, args, ""
    weight, into = normal(4, 5, dtype=dtype), normal(4, 5)
    yield "linear_main_grad", ops.linear_main_grad, (x.unflatten(0, (1, 7)), weight, into, False, -1), "aten linear"
    yield (
        "add_to_main_grad",
        ops.add_to_main_grad,
        (into, grad, x, -1),
        "aten addmm_" if dtype == torch.float32 else "npu_grouped_matmul_add_",
    )


def inference_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Feed-forward layers and 8-bit products, and gradients added to one buffer; of 16 bits, which torch_npu has."""
    if dtype == torch.float32:
        return
    x, bias1, bias2 = normal(12, 6, dtype=dtype), normal(8, dtype=dtype), normal(5, dtype=dtype)
    weights = normal(6, 8, dtype=dtype), normal(8, 5, dtype=dtype)
    for activation in ("fastgelu", "gelu", "relu", "silu"):
        yield f"ffn-{activation}", ops.ffn, (x, *weights, bias1, bias2, None, activation), "npu_ffn"
    experts = normal(3, 6, 8, dtype=dtype), normal(3, 8, 5, dtype=dtype)
    biases = normal(3, 8, dtype=dtype), None
    yield "ffn-experts", ops.ffn, (x, *experts, *biases, [5, 0, 7], "silu"), "npu_ffn"
    if dtype == torch.float16:
        gated = normal(6, 16, dtype=dtype), normal(8, 5, dtype=dtype)
        for activation in ("geglu", "swiglu", "reglu"):
            yield f"ffn-{activation}", ops.ffn, (x, *gated, None, None, None, activation), "npu_ffn"
    rows, matrices = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((12, 6), (3, 6, 5)))
    offsets, scale = torch.tensor([5, 5, 11]), (torch.rand(3, 5) / 127).to(dtype)
    for name, of_tokens in (("tokens", torch.rand(12)), ("columns", None)):
        args = (rows, matrices, offsets, scale, of_tokens, dtype)
        yield f"quant_grouped_matmul-{name}", ops.quant_grouped_matmul, args, "npu_grouped_matmul with scales"
    grad, weight, buffer = normal(12, 5, dtype=dtype), normal(3, 6, 5, dtype=dtype), normal(3, 6, 5)
    yield "grouped_matmul_add", ops.grouped_matmul_add, (buffer, x, grad, offsets), "npu_grouped_matmul_add_"
    args = (x, weight, offsets, buffer)
    yield "grouped_matmul_main_grad", ops.grouped_matmul_main_grad, args, "npu_grouped_matmul"
