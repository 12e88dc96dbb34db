"""Calls of every operator that has an NPU kernel, on CPU tensors: (name, operator, arguments, kernel that is to take
it).
"""

import itertools

import torch

ops = torch.ops.mindspeed


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def stored(shape, order, dtype=torch.float32):
    """A random tensor of ``shape`` whose dimensions lie in memory in ``order``."""
    return normal(*(shape[i] for i in order), dtype=dtype).permute([order.index(i) for i in range(len(order))])


BNSD, BSND, SBND = (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)


def norm_cases(dtype):
    for cast_first, weight in itertools.product((True, False), (None, dtype, torch.float32)):
        w = None if weight is None else normal(16, dtype=weight)
        name = f"{cast_first}-{str(weight)[6:]}"
        x = normal(2, 3, 16, dtype=dtype)
        y, rstd = ops.rms_norm(x, w, 1e-5, cast_first)
        yield f"rms_norm-{name}", ops.rms_norm, (x, w, 1e-5, cast_first), "npu_rms_norm"
        yield (
            f"rms_norm_backward-{name}",
            ops.rms_norm_backward,
            (torch.randn_like(y), x, w, rstd, cast_first, w is not None),
            "npu_rms_norm_backward",
        )
        residual = normal(2, 3, 16, dtype=dtype)
        y, s, rstd = ops.add_rms_norm(x, residual, w, 1e-5, cast_first)
        plain = w is None or w.dtype == dtype
        yield (
            f"add_rms_norm-{name}",
            ops.add_rms_norm,
            (x, residual, w, 1e-5, cast_first),
            "npu_add_rms_norm" if plain else "addition and npu_rms_norm",
        )
        for grad_sum in (None, torch.randn_like(s)):
            args = (torch.randn_like(y), grad_sum, s, w, rstd, cast_first, w is not None)
            yield (
                f"add_rms_norm_backward-{name}-{grad_sum is None}",
                ops.add_rms_norm_backward,
                args,
                "npu_rms_norm_backward and addition",
            )
    for weight, bias in itertools.product((None, normal(16, dtype=dtype)), repeat=2):
        x, residual, name = (
            normal(2, 3, 16, dtype=dtype),
            normal(2, 3, 16, dtype=dtype),
            f"{weight is None}-{bias is None}",
        )
        y, mean, rstd = ops.layer_norm(x, weight, bias, 1e-5)
        needs = (weight is not None, bias is not None)
        yield f"layer_norm-{name}", ops.layer_norm, (x, weight, bias, 1e-5), "aten native_layer_norm"
        yield (
            f"layer_norm_backward-{name}",
            ops.layer_norm_backward,
            (torch.randn_like(y), x, weight, mean, rstd, *needs),
            "aten native_layer_norm_backward",
        )
        y, s, mean, rstd = ops.add_layer_norm(x, residual, weight, bias, 1e-5)
        yield f"add_layer_norm-{name}", ops.add_layer_norm, (x, residual, weight, bias, 1e-5), "npu_add_layer_norm"
        args = (torch.randn_like(y), torch.randn_like(s), s, weight, mean, rstd, *needs)
        yield (
            f"add_layer_norm_backward-{name}",
            ops.add_layer_norm_backward,
            args,
            "aten native_layer_norm_backward and addition",
        )
    strided = stored((4, 3, 16), (1, 0, 2), dtype)
    yield "rms_norm-strided", ops.rms_norm, (strided, normal(16, dtype=dtype), 1e-5, False), "npu_rms_norm"


def glu_cases(dtype):
    x, up, grad = normal(3, 5, 16, dtype=dtype), normal(3, 5, 8, dtype=dtype), normal(3, 5, 8, dtype=dtype)
    yield "swiglu-packed", ops.swiglu, (x,), "npu_swiglu"
    yield "swiglu_backward-packed", ops.swiglu_backward, (grad, x), "npu_swiglu_backward"
    yield "swiglu-two", ops.swiglu, (up, grad), "triton, one read"
    yield "swiglu_backward-two", ops.swiglu_backward, (grad, up, up + 1), "triton, both gradients in one read"
    for activation in ("gelu", "gelu_tanh", "relu", "sigmoid"):
        kernel = "npu_geglu" if activation.startswith("gelu") else "triton, one read"
        backward = (
            "npu_geglu, npu_geglu_grad" if activation.startswith("gelu") else "triton, both gradients in one read"
        )
        yield f"glu-packed-{activation}", ops.glu, (x, None, activation), kernel
        yield f"glu_backward-packed-{activation}", ops.glu_backward, (grad, x, None, activation), backward
        yield f"glu-two-{activation}", ops.glu, (up, up + 1, activation), "triton, one read"
        yield (
            f"glu_backward-two-{activation}",
            ops.glu_backward,
            (grad, up, up + 1, activation),
            "triton, both gradients in one read",
        )
    for wide in (False, True):
        weight = normal(3, 5, 1, dtype=torch.float32 if wide else dtype)
        yield f"weighted_swiglu-packed-{wide}", ops.weighted_swiglu, (x, None, weight), "npu_swiglu and product"
        yield (
            f"weighted_swiglu_backward-packed-{wide}",
            ops.weighted_swiglu_backward,
            (grad, x, None, weight),
            "npu_swiglu, npu_swiglu_backward and products",
        )
        yield f"weighted_swiglu-two-{wide}", ops.weighted_swiglu, (up, up + 1, weight), "aten silu and products"
        yield (
            f"weighted_swiglu_backward-two-{wide}",
            ops.weighted_swiglu_backward,
            (grad, up, up + 1, weight),
            "aten silu_backward and products",
        )


def activation_cases(dtype):
    x, grad = normal(3, 5, 8, dtype=dtype), normal(3, 5, 8, dtype=dtype)
    yield "activation-quick", ops.activation, (x, "quick_gelu"), "npu_fast_gelu"
    yield "activation_backward-quick", ops.activation_backward, (grad, x, "quick_gelu"), "npu_fast_gelu_backward"
    yield "activation-squared", ops.activation, (x, "squared_relu"), "aten relu and product"
    yield "activation_backward-squared", ops.activation_backward, (grad, x, "squared_relu"), "aten relu and products"
    packed = normal(3, 5, 16, dtype=dtype)
    for alpha, (given, up), interleaved in itertools.product((1.702, 1.0), ((packed, None), (x, x + 1)), (False, True)):
        if up is not None and interleaved:
            continue
        name, settings = f"{alpha}-{'packed' if up is None else 'two'}-{interleaved}", (alpha, 0.7, 1.0, interleaved)
        quick = alpha == 1.702
        yield (
            f"clipped_swiglu-{name}",
            ops.clipped_swiglu,
            (given, up, *settings),
            "npu_fast_gelu, aten clamps and products" if quick else "aten clamps, sigmoid and products",
        )
        yield (
            f"clipped_swiglu_backward-{name}",
            ops.clipped_swiglu_backward,
            (grad, given, up, *settings),
            "npu_fast_gelu and its backward, aten clamps and products"
            if quick
            else "aten clamps, sigmoid and products",
        )
    for bias in (None, normal(8, dtype=dtype)):
        yield (
            f"dropout_add-{bias is None}",
            ops.dropout_add,
            (x, bias, grad, 0.0),
            "aten native_dropout, products and additions",
        )
        seed = torch.tensor([3, 5], dtype=torch.int32)
        yield (
            f"dropout_add_seeded-{bias is None}",
            ops.dropout_add_seeded,
            (x, bias, grad, seed, 0.3),
            "triton, mask drawn in place",
        )
        yield (
            f"dropout_add_seeded_backward-{bias is None}",
            ops.dropout_add_seeded_backward,
            (grad, seed, 0.3),
            "triton, mask drawn again",
        )


ROPE_FORMS = [
    ("11SD", BNSD, (1, 1, 6, 32), True), ("B1SD", BNSD, (2, 1, 6, 32), False), ("BNSD", BNSD, (2, 4, 6, 32), False),
    ("1S1D", BSND, (1, 1, 6, 32), True), ("BS1D", BSND, (2, 1, 6, 32), False), ("BSND", BSND, (2, 4, 6, 32), False),
    ("S11D", SBND, (6, 32), True), ("SB1D", SBND, (2, 1, 6, 32), False), ("SD", BNSD, (6, 32), True),
]  # fmt: skip


def rope_cases(dtype):
    for (form, order, angles, both), wide in itertools.product(ROPE_FORMS, (False, True)):
        for interleaved in (False, True) if both else (False,):
            x = stored((2, 4, 6, 32), order, dtype)
            cos, sin = (normal(*angles, dtype=torch.float32 if wide else dtype) for _ in range(2))
            y = ops.rope(x, cos, sin, interleaved)
            name = f"{form}-{'interleave' if interleaved else 'half'}-{'wide' if wide else 'same'}"
            yield f"rope-{name}", ops.rope, (x, cos, sin, interleaved), "npu_rotary_mul"
            grad = torch.empty_like(y).copy_(torch.randn(y.shape))
            yield (
                f"rope_backward-{name}",
                ops.rope_backward,
                (grad, x, cos, sin, interleaved, False),
                "npu_rotary_mul_backward",
            )
    x, cos = normal(6, 4, 32, dtype=dtype), normal(6, 1, 32, dtype=dtype)
    yield "rope-TND", ops.rope, (x, cos, cos + 1, False), "npu_rotary_mul"
    x = normal(2, 6, 3 * 4 * 32, dtype=dtype).view(2, 6, 4, 96)[..., :32].transpose(1, 2)
    yield "rope-slice", ops.rope, (x, normal(6, 32, dtype=dtype), normal(6, 32, dtype=dtype), False), "npu_rotary_mul"
    yield (
        "rope-one-token",
        ops.rope,
        (normal(2, 4, 1, 32, dtype=dtype), normal(1, 32, dtype=dtype), normal(1, 32, dtype=dtype), True),
        "npu_rotary_mul",
    )


def qk_cases(dtype):
    for turned, weight in itertools.product((32, 16), (None, dtype, torch.float32)):
        name = f"{turned}-{str(weight)[6:]}"
        x, w = stored((2, 4, 6, 32), BSND, dtype), None if weight is None else normal(32, dtype=weight)
        angles = (normal(6, turned, dtype=dtype), normal(6, turned, dtype=dtype))
        y, rstd = ops.qk_norm_rope(x, w, *angles, 1e-6, True, False)
        yield (
            f"qk_norm_rope-{name}",
            ops.qk_norm_rope,
            (x, w, *angles, 1e-6, True, False),
            "triton, norm and rotation in one read of a head",
        )
        args = (torch.randn_like(y), x, w, rstd, *angles, False, w is not None)
        yield (
            f"qk_norm_rope_backward-{name}",
            ops.qk_norm_rope_backward,
            args,
            "triton, both gradients in one read of a head",
        )


def attention_cases(dtype):
    keep = torch.rand(2, 1, 9, 9) < 0.7
    keep[..., 0] = True
    empty_row = keep.clone()
    empty_row[0, 0, 3] = False
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
    yield from _attention("soft-cap", dtype, BSND, None, True, 4, heads=2, v_dim=16, softcap=2.0)

    for name in ("full", "causal", "window", "bool-causal", "bias"):
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


def _attention(name, dtype, order, mask, causal, window, heads, v_dim, keys=9, sinks=None, softcap=0.0, queries=9):
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


def loss_cases(dtype):
    target = torch.tensor([3, -100, 0, 9, -100, 1])
    logits = 3 * normal(6, 10, dtype=dtype)
    _, lse = ops.cross_entropy(logits, target, -100, 0.0)
    yield "cross_entropy", ops.cross_entropy, (logits, target, -100, 0.0), "npu_cross_entropy_loss"
    yield (
        "cross_entropy_backward",
        ops.cross_entropy_backward,
        (normal(6), logits, target, lse, -100, 0.0),
        "npu_cross_entropy_loss_backward",
    )
    hidden, weight, bias, chunks = (
        normal(11, 16, dtype=dtype),
        normal(20, 16, dtype=dtype),
        normal(20, dtype=dtype),
        "products and a Triton kernel, chunk by chunk",
    )
    settings = (bias, torch.randint(0, 20, (11,)), -1, 0.1, 1e-4, 5.0)
    yield (
        "linear_cross_entropy_total-chunks",
        ops.linear_cross_entropy_total,
        (hidden, weight, *settings, True, [True, True, True]),
        chunks,
    )
    yield "linear_cross_entropy_tokens-chunks", ops.linear_cross_entropy_tokens, (hidden, weight, *settings), chunks
    yield (
        "linear_cross_entropy_tokens_backward-chunks",
        ops.linear_cross_entropy_tokens_backward,
        (normal(11), hidden, weight, *settings, [True, True, True]),
        chunks,
    )
    if dtype == torch.float32:
        return
    hidden, weight, target = normal(11, 16, dtype=dtype), normal(130, 16, dtype=dtype), torch.randint(0, 130, (11,))
    target[2], target[7] = 129, -1
    for mean, needed in itertools.product(
        (True, False), ([True, True, False], [True, False, False], [False, True, False], [False, False, False])
    ):
        args = (hidden, weight, None, target, -1, 0.0, 0.0, 0.0, mean, needed)
        yield (
            f"linear_cross_entropy_total-{mean}-{needed}",
            ops.linear_cross_entropy_total,
            args,
            "npu_fused_linear_online_max_sum and its loss and backward",
        )
    args = (hidden, weight, None, target, -1, 0.0, 0.0, 0.0)
    yield (
        "linear_cross_entropy_tokens",
        ops.linear_cross_entropy_tokens,
        args,
        "npu_fused_linear_online_max_sum and its loss",
    )
    yield (
        "linear_cross_entropy_tokens_backward",
        ops.linear_cross_entropy_tokens_backward,
        (normal(11), *args, [True, True, False]),
        "npu_fused_linear_online_max_sum and its backward",
    )
    yield (
        "linear_cross_entropy_total_backward",
        ops.linear_cross_entropy_total_backward,
        (torch.tensor(2.0), hidden, weight, hidden.new_empty(0)),
        "aten products",
    )


def moe_cases(dtype):
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
            yield f"moe_unpermute-{name}", ops.moe_unpermute, (permuted, order, probs, k), "npu_moe_token_unpermute"
            yield (
                f"moe_unpermute_backward-{name}",
                ops.moe_unpermute_backward,
                (torch.randn_like(out), permuted, order, probs, k),
                "npu_moe_token_unpermute_grad_v2",
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


def softmax_cases(dtype):
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


def ring_cases(dtype):
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


def megatron_cases(dtype):
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
    weight, into = normal(4, 5, dtype=dtype), normal(4, 5)
    yield "linear_main_grad", ops.linear_main_grad, (x.unflatten(0, (1, 7)), weight, into, False, -1), "aten linear"
    yield (
        "add_to_main_grad",
        ops.add_to_main_grad,
        (into, grad, x, -1),
        "aten addmm_" if dtype == torch.float32 else "npu_grouped_matmul_add_",
    )


FAMILIES = {
    "ring": ring_cases,
    "norm": norm_cases,
    "glu": glu_cases,
    "activation": activation_cases,
    "rope": rope_cases,
    "qk": qk_cases,
    "attention": attention_cases,
    "loss": loss_cases,
    "moe": moe_cases,
    "softmax": softmax_cases,
    "megatron": megatron_cases,
}


def cases(family, dtype):
    torch.manual_seed(0)
    return list(FAMILIES[family](dtype))
