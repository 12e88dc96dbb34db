"""Every limit that a lowering checks: the report names it, with the value that broke it."""

import pytest
import torch

from mindspeed_fx.kernels import REGISTRY

ops = torch.ops.mindspeed
BF, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def t(*shape, dtype=BF):
    return torch.empty(shape, dtype=dtype, device="meta")


def bsnd(b, n, s, d, dtype=BF):
    return t(b, s, n, d, dtype=dtype).transpose(1, 2)


def attention(q=None, k=None, v=None, mask=None, causal=False, scale=0.5, window=0, softcap=0.0, sinks=None):
    q = bsnd(2, 4, 8, 16) if q is None else q
    k = bsnd(*q.shape, dtype=q.dtype) if k is None else k
    return ops.attention, (q, k, k if v is None else v, mask, causal, scale, window, softcap, sinks)


def linear(hidden=None, weight=None, bias=None, target=None, smoothing=0.0, z_loss=0.0, softcap=0.0):
    hidden, weight = t(8, 16) if hidden is None else hidden, t(128, 16) if weight is None else weight
    return ops.linear_cross_entropy_tokens, (
        hidden,
        weight,
        bias,
        t(8, dtype=torch.int64) if target is None else target,
        -100,
        smoothing,
        z_loss,
        softcap,
    )


def routed(tokens=None, marked=None, probs=None, k=2):
    tokens = t(8, 4) if tokens is None else tokens
    return ops.moe_permute_map, (
        tokens,
        t(8, 4, dtype=torch.bool) if marked is None else marked,
        t(8, 4) if probs is None else probs,
        k,
    )


def chosen(logits=None, bias=None, k=2, groups=1, kept=1):
    logits = t(8, 16) if logits is None else logits
    return ops.router_topk, (logits, bias, k, "softmax", groups, kept, 1, 0.0, 1.0)


def choice_gradient(score="sigmoid", experts=16, dtype=BF):
    weights, ids = t(8, 2, dtype=F32), t(8, 2, dtype=torch.int64)
    return ops.router_topk_backward, (weights, t(8, experts, dtype=dtype), weights, ids, score, 1e-20, 1.0)


def packed(q=None, ends=torch.empty(3, dtype=torch.int64, device="meta")):
    q = bsnd(1, 2, 16, 16) if q is None else q
    return ops.varlen_attention, (q, q, q, t(1, q.shape[2], dtype=torch.int64), ends, True, 0.5, 0)


def packed_backward(q):
    _, (*qkv, documents, ends, causal, scale, window) = packed(q)
    given = (q, *qkv, q, t(*q.shape[:3], dtype=F32), documents, ends, causal, scale, window)
    return ops.varlen_attention_backward, given


REFUSED = [
    (
        ops.ring_attention_update,
        (t(1, 2, 4, 8, dtype=F64), t(1, 2, 4, dtype=F64), t(1, 2, 4, 8), t(1, 2, 4, dtype=F64)),
        "out is float64",
    ),
    (
        ops.ring_attention_update,
        (t(1, 2, 4, 8), t(1, 2, 4, dtype=F64), t(1, 2, 4, 8), t(1, 2, 4, dtype=F32)),
        "lse is float64; valid: float32",
    ),
    (
        ops.ring_attention_update,
        (t(1, 2, 8, 4).mT, t(1, 2, 4, dtype=F32), t(1, 2, 4, 8), t(1, 2, 4, dtype=F32)),
        "last dimension of out is not contiguous",
    ),
    (ops.rms_norm, (t(4, 8, dtype=F64), None, 1e-5, True), "x is float64; valid: float16, bfloat16, float32"),
    (ops.rms_norm, (t(8), None, 1e-5, True), "dimensions of x is 1; valid: 2 to 8"),
    (ops.rms_norm, (t(*[1] * 8, 8), None, 1e-5, True), "dimensions of x is 9; valid: 2 to 8"),
    (ops.rms_norm, (t(4, 8), t(8, dtype=F64), 1e-5, True), "weight is float64"),
    (ops.rms_norm_backward, (t(4, 8, dtype=F64), t(4, 8), None, t(4, 1, dtype=F32), True, False), "grad is float64"),
    (
        ops.add_rms_norm,
        (t(4, 8), t(4, 8), t(8, dtype=F32), 1e-5, True),
        "npu_add_rms_norm: x is bfloat16, gamma float32; valid: one type",
    ),
    (ops.layer_norm, (t(4, 8), t(8, dtype=F32), None, 1e-5), "weight is float32; valid: bfloat16"),
    (ops.add_layer_norm, (t(8), t(8), None, None, 1e-5), "dimensions of x is 1; valid: 2 to 8"),
    (ops.swiglu, (t(4, 8), t(4, 8)), "npu_swiglu: gate and up are two tensors"),
    (ops.swiglu, (t(4, 8, dtype=F64),), "x is float64"),
    (ops.glu, (t(4, 8), None, "relu"), "npu_geglu: the activation is relu; valid: gelu, gelu_tanh"),
    (ops.glu, (t(4, 8), t(4, 8), "gelu"), "npu_geglu: gate and up are two tensors"),
    (ops.weighted_swiglu, (t(4, 8), None, t(4, 1, dtype=F64)), "weight is float64"),
    (ops.weighted_swiglu, (t(4, 8), t(4, 8), t(4, 1)), "npu_swiglu: gate and up are two tensors"),
    (ops.activation, (t(4, 8), "squared_relu"), "npu_fast_gelu: the activation is squared_relu; valid: quick_gelu"),
    (ops.activation, (t(*[1] * 9), "quick_gelu"), "npu_fast_gelu: dimensions of x is 9; valid: 1 to 8"),
    (ops.activation_backward, (t(4, 8, dtype=F32), t(4, 8), "quick_gelu"), "grad is float32; valid: bfloat16"),
    (ops.clipped_swiglu, (t(4, 8), None, 1.5, 7.0, 1.0, True), "npu_fast_gelu: alpha is 1.5; valid: 1.702"),
    (ops.clipped_swiglu, (t(4, 8), t(4, 8, dtype=F64), 1.702, 7.0, 1.0, False), "up is float64"),
    (ops.dropout_add, (t(4, 8, dtype=F64), None, t(4, 8, dtype=F64), 0.1), "x is float64"),
    (
        ops.scaled_masked_softmax,
        (t(2, 4, 48, 64), t(1, 1, 48, 64, dtype=torch.bool), 0.5),
        "npu_scaled_masked_softmax: rows is 48; valid: multiples of 32",
    ),
    (
        ops.scaled_masked_softmax,
        (t(2, 4, 64, 8192), t(1, 1, 64, 8192, dtype=torch.bool), 0.5),
        "columns is 8192; valid: 32 to 4096",
    ),
    (
        ops.scaled_masked_softmax,
        (t(4, 64, 64), t(1, 64, 64, dtype=torch.bool), 0.5),
        "dimensions of x is 3; valid: 4 to 4",
    ),
    (
        ops.scaled_masked_softmax_backward,
        (t(2, 4, 64, 64, dtype=F32), t(2, 4, 64, 64), t(1, 1, 64, 64, dtype=torch.bool), 0.5),
        "grad is float32; valid: bfloat16",
    ),
    (ops.rope, (t(2, 4, 6, 896), t(6, 896), t(6, 896), False), "head_dim is 896; valid: 2 to 895"),
    (ops.rope, (t(2, 4, 6, 32, dtype=F64), t(6, 32), t(6, 32), False), "x is float64"),
    (ops.rope, (t(2, 4, 6, 30), t(6, 30), t(6, 30), False), "rows of 60 bytes in BNSD; valid: multiples of 32"),
    (ops.rope, (t(1000, 4, 6, 32), t(6, 32), t(6, 32), False), "B of BNSD is 1000; valid: 1 to 999"),
    (ops.rope, (t(2, 1000, 6, 32), t(6, 32), t(6, 32), False), "N of BNSD is 1000; valid: 1 to 999"),
    (ops.rope, (t(25, 40, 6, 32), t(6, 32), t(6, 32), True), "B * N of interleaved BNSD is 1000; valid: 1 to 999"),
    (ops.rope, (t(2, 4, 6, 32), t(2, 1, 6, 32), t(2, 1, 6, 32), True), "valid: 11SD, 1S1D, S11D"),
    (
        ops.rope,
        (t(2, 4, 6, 32), t(4, 6, 32), t(4, 6, 32), False),
        "valid: 11SD, B1SD, BNSD, 1S1D, BS1D, BSND, S11D, SB1D, SBND",
    ),
    (ops.rope, (t(2, 2, 4, 6, 32), t(6, 32), t(6, 32), False), "x has 5 dimensions"),
    (ops.rope, (t(2, 4, 6, 32), t(6, 16), t(6, 16), False), "as long as a head"),
    (ops.rope_backward, (t(2, 4, 6, 32), t(2, 4, 6, 32), t(6, 32), t(6, 32), False, True), "the angles need gradients"),
    (*attention(bsnd(1, 2, 4, 769)), "head_dim is 769; valid: 1 to 768"),
    (*attention(bsnd(1, 257, 4, 16)), "heads is 257; valid: 1 to 256"),
    (*attention(bsnd(1, 6, 4, 16), bsnd(1, 4, 4, 16)), "6 heads and 4 of keys; valid: a multiple"),
    (*attention(bsnd(1, 2, 4, 16), v=bsnd(1, 2, 4, 32)), "head_dim of v is 32; valid: up to that of k, 16"),
    (*attention(bsnd(2**21 + 1, 1, 1, 1)), "batch is 2097153; valid: 1 to 2097152"),
    (*attention(bsnd(1, 1, 2**20 + 1, 1)), "length of q is 1048577; valid: 1 to 1048576"),
    (*attention(bsnd(1, 2, 4, 16), bsnd(1, 2, 2**20 + 1, 16)), "length of k is 1048577"),
    (*attention(bsnd(1, 2, 4, 16, dtype=F64)), "q is float64"),
    (
        *attention(bsnd(1, 2, 4, 16), bsnd(1, 2, 4, 16, dtype=F32)),
        "q, k and v are bfloat16, float32, float32; valid: one type",
    ),
    (*attention(mask=t(8, 8, dtype=F32)), "the bias is float32; valid: the type of q, bfloat16"),
    (*attention(mask=t(8, 8), scale=0.0), "a bias with scale 0"),
    (*attention(k=bsnd(2, 4, 9, 16), causal=True, window=3), "a window of 3 keys with 8 queries and 9 keys"),
    (*attention(causal=True, softcap=30.0), "a soft-cap of 30.0; the kernel has none"),
    (*attention(sinks=t(4, dtype=F64)), "sinks are float64; valid: float32, bfloat16"),
    (
        ops.cross_entropy,
        (t(200001, 8), t(200001, dtype=torch.int64), -100, 0.0),
        "tokens is 200001; valid: 1 to 200000",
    ),
    (ops.cross_entropy, (t(4, 8), t(4, dtype=torch.int64), -100, 0.1), "label_smoothing is 0.1; valid in training: 0"),
    (ops.cross_entropy, (t(4, 8), t(4, dtype=torch.int32), -100, 0.0), "target is int32; valid: int64"),
    (ops.cross_entropy, (t(4, 8, dtype=F64), t(4, dtype=torch.int64), -100, 0.0), "logits is float64"),
    (*linear(t(8, 16, dtype=F32), t(128, 16, dtype=F32)), "hidden is float32; valid: float16, bfloat16"),
    (*linear(weight=t(128, 16, dtype=torch.float16)), "hidden is bfloat16, weight float16; valid: one type"),
    (*linear(weight=t(127, 16)), "vocabulary is 127; valid: 128 to"),
    (*linear(t(8, 65535), t(128, 65535)), "hidden size is 65535; valid: 1 to 65534"),
    (*linear(bias=t(128)), "a bias; the kernel has none"),
    (*linear(smoothing=0.1), "label_smoothing is 0.1"),
    (*linear(z_loss=1e-4), "a z-loss of 0.0001"),
    (*linear(softcap=30.0), "a soft-cap of 30.0"),
    (*linear(target=t(8, dtype=torch.int16)), "target is int16; valid: int32, int64"),
    (ops.grouped_matmul, (t(8, 4), t(1, 4, 4), t(1, dtype=torch.int64)), "groups is 1; valid: 2 to 1024"),
    (ops.grouped_matmul, (t(8, 65536), t(2, 65536, 4), t(2, dtype=torch.int64)), "k is 65536; valid: 1 to 65535"),
    (ops.grouped_matmul, (t(8, 4), t(2, 4, 65536), t(2, dtype=torch.int64)), "n is 65536; valid: 1 to 65535"),
    (
        ops.grouped_matmul,
        (t(8, 4), t(2, 4, 4, dtype=F32), t(2, dtype=torch.int64)),
        "x is bfloat16, weight float32; valid: one type",
    ),
    (
        ops.grouped_matmul_backward,
        (t(8, 4, dtype=F32), t(8, 4), t(2, 4, 4), t(2, dtype=torch.int64), True, True),
        "grad is float32; valid: bfloat16",
    ),
    (ops.moe_permute, (t(8, 4, dtype=F64), t(8, 2, dtype=torch.int64)), "tokens is float64"),
    (
        ops.moe_permute,
        (t(2**23, 1), t(2**23, 2, dtype=torch.int64)),
        "elements of indices is 16777216; valid: 0 to 16777214",
    ),
    (ops.moe_permute, (t(8, 4), t(8, 2, dtype=torch.int16)), "indices is int16; valid: int32, int64"),
    (ops.moe_permute, (t(2, 4), t(2, 513, dtype=torch.int64)), "choices of a token is 513; valid: 0 to 512"),
    (*routed(probs=t(8, 4, dtype=F64)), "probs is float64; valid: bfloat16, float32"),
    (*routed(t(8, 4, dtype=torch.float16), probs=t(8, 4, dtype=F32)), "probs is float32; valid: float16"),
    (*routed(t(8, 4, dtype=F64), probs=t(8, 4, dtype=F64)), "tokens is float64"),
    (*routed(marked=t(8, 4, dtype=torch.int32)), "routing_map is int32; valid: bool, int8"),
    (*routed(k=512), "choices of a token is 512; valid: 1 to 511"),
    (
        *routed(t(2**23, 1), t(2**23, 4, dtype=torch.bool), t(2**23, 4)),
        "copies of tokens is 16777216; valid: 0 to 16777214",
    ),
    (
        ops.moe_permute_map_backward,
        (t(16, 4), t(16, dtype=F64), t(16, dtype=torch.int64), t(8, 4, dtype=torch.bool), 2),
        "probs is float64",
    ),
    (*packed(ends=None), "where documents end is not known"),
    (*packed_backward(bsnd(1, 2, 16, 769)), "head_dim is 769; valid: 1 to 768"),
    (*packed(bsnd(1, 1, 2**20 + 1, 8)), "tokens is 1048577; valid: 1 to 1048576"),
    (*packed(bsnd(2**10, 1, 2**10 + 1, 8)), "tokens is 1049600; valid: 1 to 1048576"),
    (*packed(ends=t(1025, dtype=torch.int64)), "documents is 1025; valid: 1 to 1024"),
    (*packed(bsnd(1, 2, 16, 769)), "head_dim is 769; valid: 1 to 768"),
    (*attention(sinks=t(2, 4, 8, dtype=F32)), "a sink for each query; valid: one for each head"),
    (ops.attention_seeded, (*[bsnd(2, 257, 8, 16)] * 3, None, True, 0.5, 0, 0.1), "heads is 257; valid: 1 to 256"),
    (ops.moe_permute_backward, (t(513, 4), t(513, dtype=torch.int64), 1), "choices of a token is 513; valid: 1 to 512"),
    (
        ops.moe_unpermute,
        (t(513, 4), t(513, dtype=torch.int64), t(1, 513), 1),
        "choices of a token is 513; valid: 1 to 512",
    ),
    (*chosen(t(8, 16, dtype=F64)), "logits is float64"),
    (*chosen(bias=t(16)), "softmax of the chosen logits alone"),
    (*chosen(t(8, 4), k=5), "k is 5; valid: 1 to 4"),
    (*chosen(t(8, 1025), k=1025), "k is 1025; valid: 1 to 1024"),
    (*chosen(t(8, 2049), bias=t(2049)), "experts is 2049; valid: 1 to 2048"),
    (*chosen(t(8, 6), groups=3, kept=2), "experts of a group is 2; valid: 3 to 2048"),
    (*chosen(t(8, 520), groups=65, kept=2), "experts, groups filled up to 32 is 2080; valid: 1 to 2048"),
    (*choice_gradient(score="softmax"), "sigmoids that are divided by their sum alone"),
    (*choice_gradient(experts=2049), "experts is 2049; valid: 2 to 2048"),
    (*choice_gradient(dtype=F64), "logits is float64"),
    (ops.moe_unpermute, (t(8, 4), t(8, dtype=torch.int64), t(4, 2, dtype=F64), 2), "probs is float64"),
]


@pytest.mark.parametrize(
    "op, args, reason", REFUSED, ids=[f"{r[0]._qualified_op_name.split('::')[1]}-{i}" for i, r in enumerate(REFUSED)]
)
def test_what_is_refused_and_why(op, args, reason):
    lowering, reasons = REGISTRY[op.default].choose("npu", args, {})
    assert any(reason in r for r in reasons), (lowering and lowering.kernel, reasons)


def test_what_an_acl_graph_does_not_take():
    """Captured, attention has one layout, whatever is copied for it, and packed documents have none."""
    from mindspeed_fx.kernels.npu import acl_graph
    from mindspeed_fx.kernels.npu import attention as plain

    op, args = packed()
    q = bsnd(2, 4, 8, 16)
    assert REGISTRY[op.default].choose("npu", args, {})[1] == [] and plain._layout((q, q, q), 1) == "BSND"
    with acl_graph(True):
        assert any(
            "layout TND in an ACL graph; valid there: BNSD" in r
            for r in REGISTRY[op.default].choose("npu", args, {})[1]
        )
        assert plain._layout((q, q, q), 1) == "BNSD"
    assert plain._layout((q, q, q), 1) == "BSND"


def test_without_an_operator_that_it_needs(monkeypatch):
    from mindspeed_fx.kernels import npu

    assert "this torch_npu has no npu_from_the_future" == npu.missing(("npu_rms_norm", "npu_from_the_future"))
    monkeypatch.setattr(npu.registry, "present", lambda: False)
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: name)
    assert npu.missing(("npu_rms_norm",)) == "torch_npu is installed but not imported"


def test_what_is_not_emulated_says_why_and_what_to_do():
    from mindspeed_fx.kernels.npu.emulation import registry

    registry.define()
    npu, q, mask = torch.ops.npu, torch.randn(1, 2, 4, 8), torch.ones(2048, 2048, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="sparse_mode 5 .*give it as atten_mask with sparse_mode 1"):
        npu.npu_fusion_attention_v3(q, q, q, 2, "BNSD", atten_mask=mask, sparse_mode=5)
    logits = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="label_smoothing=0.1.*torch.nn.functional.cross_entropy"):
        npu.npu_cross_entropy_loss(logits, torch.zeros(4, dtype=torch.int64), label_smoothing=0.1)
    x, weights, ends = torch.randn(4, 8), [torch.randn(8, 8)] * 2, torch.tensor([2, 4])
    with pytest.raises(NotImplementedError, match="act_type .*apply them outside"):
        npu.npu_grouped_matmul([x], [torch.stack(weights)], group_list=ends, split_item=3, group_type=0, act_type=1)
    with pytest.raises(NotImplementedError, match="1 x, 2 weights, split_item 0.*give split_item 3"):
        npu.npu_grouped_matmul([x], weights, group_list=ends, split_item=0, group_type=0)
