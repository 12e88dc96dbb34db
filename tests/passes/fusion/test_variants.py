"""Every operator in variants of one spelling: order of operands, type, eps, layout, frozen inputs, shared weights,
other readers of intermediate values, parts cut off from the gradient, no gradient at all, dynamic sizes."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mindspeed_fx.passes.fusion import linear_cross_entropy, merged_linear
from tests.passes.fusion.variants import Case, Table, Variant, Weight, check, variants

HALVES = (torch.float64, torch.float32, torch.bfloat16)
WIDE = (torch.float64, torch.float32)

# --------------------------------------------------------------------------- norms


def root_mean_square(h, x):
    wide = h.wide(x)
    return h.mul(wide, h(torch.rsqrt(h.add(h(h(wide.pow(2)).mean(-1, keepdim=True)), h.eps)))).to(x.dtype)


def rms_norm(h, x, w):
    return h.mul(h(root_mean_square(h, x)), w)


def rms_norm_widely_weighted(h, x, w):
    wide = h.wide(x)
    return h.mul(
        h.mul(wide, torch.rsqrt(h.add(wide.square().mean(-1, keepdim=True), h.eps))), h.add(1.0, h.wide(w))
    ).to(x.dtype)


def rms_norm_by_norm(h, x, w):
    wide = h.wide(x)
    return h.mul(h.mul(h(wide / h.mul(h(wide.norm(2, -1, keepdim=True)), 8**-0.5)), 1.0).to(x.dtype), w)


def rms_norm_normalized(h, x, w):
    return h.mul(h.mul(h(F.normalize(x, dim=-1)), 8**0.5), w)


def rms_norm_weight_inside(h, x, w):
    return h.mul(h.mul(x, w), h(torch.rsqrt(h.add(h((x * x).mean(-1, keepdim=True)), h.eps))))


def rms_norm_eps_beside(h, x, w):
    return h.mul(h(x / h.add(h(x.pow(2).mean(-1, keepdim=True).sqrt()), h.eps)), w)


def rms_norm_called(h, x, w):
    return F.rms_norm(x, (8,), w, h.eps)


def add_rms_norm(h, x, r, w):
    return rms_norm(h, h.add(x, r), w)


def centered(h, x):
    wide = h.wide(x)
    apart = h(wide - h(wide.mean(-1, keepdim=True)))
    return h(apart / torch.sqrt(h.add(h(apart.pow(2).mean(-1, keepdim=True)), h.eps))).to(x.dtype)


def layer_norm(h, x, w, b):
    return h.add(h.mul(h(centered(h, x)), w), b)


def layer_norm_unbiased(h, x, w, b):
    return h.add(h.mul(w, h(x - h(x.mean(-1, keepdim=True)))) / torch.sqrt(h.add(h(x.var(-1, keepdim=True)), h.eps)), b)


def layer_norm_annotated(h, x, w, b):
    return h.add(h.mul(w, h(x - h(x.mean(-1, keepdim=True)))) / h.add(h(x.std(-1, keepdim=True)), h.eps), b)


def layer_norm_called(h, x, w, b):
    return F.layer_norm(x, (8,), w, b, h.eps)


def add_layer_norm(h, x, r, w, b):
    return F.layer_norm(h.add(x, r), (8,), w, b, h.eps)


# --------------------------------------------------------------------------- activations and dropout


def dropout_add(h, x, r, b):
    return h.add(r, F.dropout(h.add(x, b), 0.3))


def swiglu(h, g, u):
    return h.mul(h(F.silu(g)), u)


def swiglu_in_parts(h, x, w):
    gate, up = h(F.linear(x, w)).chunk(2, -1)
    return h.mul(h.mul(gate, h(torch.sigmoid(gate))), up)


def swiglu_divided(h, g, u):
    return h(h.mul(g, u) / h.add(1.0, h(torch.exp(h(-g)))))


def swiglu_tanh(h, g, u):
    return h.mul(h.mul(g, u), h(h.mul(h.add(h(torch.tanh(g / 2)), 1.0), 0.5)))


def swiglu_widened(h, g, u):
    return h.mul(h(F.silu(h.wide(g)).to(g.dtype)), u)


def weighted_swiglu(h, g, u, p):
    return h.mul(h.mul(h(F.silu(g)), u), p)


def weighted_up(h, g, u, p):
    return h.mul(h(F.silu(g)), h.mul(p, u))


def weighted_gate(h, g, u, p):
    return h.mul(h.mul(h(F.silu(g)), p), u)


def clipped_swiglu(h, g, u):
    g, u = h(g.clamp(max=0.75)), h(u.clamp(-0.75, 0.75))
    return h.mul(h.add(u, 1.0), h.mul(g, torch.sigmoid(h.mul(g, 1.702))))


def geglu(approximate):
    return lambda h, g, u: h.mul(h(F.gelu(g, approximate=approximate)), u)


def reglu(h, x, a, b):
    return h.mul(h(h(F.linear(x, a)).relu()), h(F.linear(x, b)))


def gelu_tanh(h, x):
    inner = h.mul(math.sqrt(2 / math.pi), h.add(x, h.mul(0.044715, h(torch.pow(x, 3.0)))))
    return h.mul(h.mul(0.5, x), h.add(1.0, h(torch.tanh(inner))))


def gelu_erf(h, x):
    return h.mul(h.mul(x, 0.5), h.add(1.0, h(torch.erf(x / math.sqrt(2.0)))))


def gelu_erfc(h, x):
    return h.mul(h(x / 2), h(torch.erfc(h(h(-x) / math.sqrt(2.0)))))


def quick_gelu_divided(h, x):
    return h(x / h.add(1, h(torch.exp(h.mul(-1.702, x)))))


def relu_times_x(h, x):
    return h.mul(h(torch.maximum(x, h(torch.zeros_like(x)))), x)


def quick_gelu(h, x):
    return h.mul(x, h(torch.sigmoid(h.mul(1.702, x))))


def squared_relu(h, x):
    return h(F.relu(x)).square()


# --------------------------------------------------------------------------- heads


def half(h, x, cos, sin):
    a, b = x.chunk(2, -1)
    return h.add(h.mul(x, cos), h.mul(h(torch.cat((-b, a), -1)), sin))


def neighbours(h, x, cos, sin):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return h.add(h.mul(x, cos), h.mul(h(turned), sin))


def qk_norm_rope(h, x, w, cos, sin):
    return half(h, h(rms_norm(h, x, w).transpose(1, 2)), cos, sin)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def weights(h, q, k, mask=causal):
    return h(h(h.mul(h(q @ k.mT), 0.5).masked_fill(mask(q.shape[-2]), float("-inf"))).softmax(-1))


def attention(h, q, k, v):
    return weights(h, q, k) @ v


def attention_with_mask(h, q, k, v, m):
    return h.add(h(q @ k.transpose(-1, -2)) * 0.5, h(m.detach())).softmax(-1) @ v


def attention_called(h, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)


def attention_grouped(h, q, k, v):
    k, v = (h(x.repeat_interleave(2, 1)) for x in (k, v))
    return weights(h, q, k) @ v


def attention_capped(h, q, k, v):
    scores = h.mul(h(torch.tanh(h.mul(h(q @ k.mT), 0.5 / 3.0))), 3.0)
    return h(scores.masked_fill(causal(6), float("-inf"))).softmax(-1) @ v


def attention_with_sinks(h, q, k, v, sinks):
    scores = h((q @ k.mT * 0.5).masked_fill(causal(6), float("-inf")))
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, 6, 1)
    return h(h(torch.cat((scores, column), -1)).softmax(-1))[..., :-1] @ v


def attention_alibi(h, q, k, v):
    i = torch.arange(6)
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None]
    bias = h.mul(slopes, h((i[None, :] - i[:, None]).to(q.dtype)))
    return h(h.add(h.mul(h(q @ k.mT), 0.5), bias).masked_fill(causal(6), float("-inf"))).softmax(-1) @ v


def attention_by_sums(h, q, k, v):
    scores = h(h.mul(h(q @ k.mT), 0.5).masked_fill(causal(6), float("-inf")))
    e = h(torch.exp(scores - scores.amax(-1, keepdim=True).detach()))
    return h(e / h(e.sum(-1, keepdim=True))) @ v


def attention_by_a_trained_scale(h, q, k, v, scale):
    return h(h.mul(h(q @ k.mT), scale).masked_fill(causal(6), float("-inf"))).softmax(-1) @ v


def attention_in_five_dimensions(h, q, k, v):
    scores = h.mul(h(q.unflatten(1, (2, 2)) @ h(k.unsqueeze(2)).mT), 0.5)
    return h(h(scores.masked_fill(causal(6), float("-inf"))).softmax(-1)) @ v.unsqueeze(2)


def attention_gated(h, q, k, v):
    keep = h((~causal(6)).to(q.dtype))
    return h(h.mul(h(q @ k.mT), keep) - h.mul(1e4, h(1 - keep))).softmax(-1) @ v


def attention_dropout(h, q, k, v):
    return h(F.dropout(weights(h, q, k), 0.3)) @ v


def packed(h, q, k, v, ids):
    document = F.pad((ids == 0).cumsum(-1), (1, 0))[:, :-1]
    same = document[:, None, :, None] == document[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, h(same & ~causal(6)), scale=0.5)


def scaled_masked_softmax(h, s):
    return h(h.mul(s, 0.5).masked_fill(causal(6), -10000.0)).softmax(-1)


# --------------------------------------------------------------------------- losses


def cross_entropy(h, logits, t):
    return F.cross_entropy(h.wide(logits), t, label_smoothing=h.eps)


def by_hand(h, logits, t):
    probs = h(h.wide(logits).log_softmax(-1))
    picked = h(probs.gather(-1, t.clamp(min=0)[:, None])).squeeze(-1)
    return -h.add(h.mul(0.9, picked), h.mul(0.1, h(probs.mean(-1)))).sum()


def z_loss(h, logits, t):
    logits = h.wide(logits)
    return h.add(F.cross_entropy(logits, t), h.mul(h.eps, h(h(logits.logsumexp(-1)).square().mean())))


def one_hot_loss(h, logits, t):
    probs = h(h.wide(logits).log_softmax(-1))
    return -h.mul(h(F.one_hot(t.clamp(min=0), 7).to(probs.dtype)), probs).sum(-1).mean()


def smoothed_loss(h, logits, t):
    """fairseq's"""
    probs, t = h(h.wide(logits).log_softmax(-1)), t.clamp(min=0)[:, None]
    one, all_ = (h(x.masked_fill(t == 0, 0.0)).sum() for x in (-probs.gather(-1, t), -probs.sum(-1, keepdim=True)))
    return h.add(h.mul(0.9 - 0.1 / 6, one), h.mul(0.1 / 6, all_))


def scaled_linear_loss(h, x, w, t):
    return F.cross_entropy(h.wide(h.mul(h(F.linear(x, w)), 0.25)), t)


def linear_loss(h, x, w, t):
    return F.cross_entropy(h.wide(h(F.linear(x, w))), t, reduction="sum")


def linear_z_loss(h, x, w, t):
    logits, kept = h(x @ w.t()), t != -100
    z = h(h.mul(h(logits.logsumexp(-1)).square(), kept)).sum() / kept.sum()
    return h.add(F.cross_entropy(logits, t), h.mul(0.3, z))


def returned_logits(h, x, w, t):
    logits = F.linear(x, w)
    return torch.stack((F.cross_entropy(logits, t), logits.detach().sum()))


# --------------------------------------------------------------------------- experts


def experts_of(scores):
    return scores.topk(2)[1]


def grouped_called(h, x, w, ends):
    if x.dtype == torch.float64:  # only to compare with: ATen has no such kernel
        return torch.cat([x[:2] @ w[0], x[2:] @ w[2]])
    return F.grouped_mm(x, w, offs=ends)


def grouped_loop(h, x, w):
    return torch.cat([h(x[:2] @ w[0]), h(x[2:3] @ w[1]), h(x[3:] @ w[2])])


def moe(h, x, p, w, scores):
    order = experts_of(scores).flatten().argsort()
    rows = h(h(x[order // 2]) @ w)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return h(h(h.mul(rows, p.flatten()[order].unsqueeze(-1)))[back]).view(-1, 2, w.shape[1]).sum(1)


def gathered_experts(h, x, w, scores):
    return torch.bmm(h(x.unsqueeze(1)), h(w[experts_of(scores).flatten()])).squeeze(1)


def one_hot_dispatch(h, x, gate, scores):
    chosen = scores.argmax(-1)
    mask = h.mul(
        h(F.one_hot(chosen, 3).to(x.dtype)[..., None] * F.one_hot(torch.arange(6) // 2, 3).to(x.dtype)[:, None]),
        gate[:, :1, None],
    )
    there = h(torch.einsum("sec,sm->ecm", h(mask.bool().to(x.dtype)), x))
    return torch.einsum("sec,ecm->sm", mask, h(there.sin()))


def merged(h, x, a, b):
    return h.mul(h(F.linear(x, a)), h(F.linear(x, b)))


def integers(*values, dtype=torch.int64):
    return lambda generator: torch.tensor(values, dtype=dtype)


def scores(*shape):
    return lambda generator: torch.rand(*shape, generator=generator, dtype=torch.float64).mul(1e6).long()


TARGET, HEADS, TABLES = integers(1, 2, -100, 0, 3, 4), (2, 2, 6, 4), (Weight((6, 4)), Weight((6, 4)))
ANY_SIZE = (lambda: patch.multiple(linear_cross_entropy, SMALLEST=0, SMALLEST_CPP=0),)

CASES = {
    "rms_norm": Case("fusion.rms_norm", rms_norm, ((2, 3, 8), Weight((8,)))),
    "rms_norm, wide weight": Case("fusion.rms_norm", rms_norm_widely_weighted, ((2, 3, 8), Weight((8,)))),
    "rms_norm, called": Case("fusion.rms_norm", rms_norm_called, ((3, 8), Weight((8,)))),
    "add_rms_norm": Case("fusion.add_rms_norm", add_rms_norm, ((2, 3, 8), (2, 3, 8), Weight((8,)))),
    "layer_norm": Case("fusion.layer_norm", layer_norm, ((2, 3, 8), Weight((8,)), Weight((8,)))),
    "layer_norm, called": Case("fusion.layer_norm", layer_norm_called, ((3, 8), Weight((8,)), Weight((8,)))),
    "add_layer_norm": Case("fusion.add_layer_norm", add_layer_norm, ((2, 3, 8), (2, 3, 8), Weight((8,)), Weight((8,)))),
    "dropout_add": Case("fusion.dropout_add", dropout_add, ((2, 3, 8), (2, 3, 8), Weight((8,))), draws=True),
    "swiglu": Case("fusion.swiglu", swiglu, ((2, 3, 8), (2, 3, 8))),
    "swiglu, parts": Case("fusion.swiglu", swiglu_in_parts, ((3, 8), Weight((6, 8)))),
    "swiglu, widened": Case("fusion.swiglu", swiglu_widened, ((3, 8), (3, 8))),
    "weighted_swiglu": Case("fusion.weighted_swiglu", weighted_swiglu, ((3, 8), (3, 8), (3, 1))),
    "clipped_swiglu": Case("fusion.clipped_swiglu", clipped_swiglu, ((3, 8), (3, 8))),
    "geglu": Case("fusion.glu", geglu("none"), ((3, 8), (3, 8))),
    "geglu, tanh": Case("fusion.glu", geglu("tanh"), ((3, 8), (3, 8))),
    "reglu": Case("fusion.glu", reglu, ((3, 8), Weight((4, 8)), Weight((4, 8)))),
    "gelu, tanh": Case("canonicalize.gelu", gelu_tanh, ((3, 8),)),
    "gelu, erf": Case("canonicalize.gelu", gelu_erf, ((3, 8),)),
    "quick_gelu": Case("fusion.activation", quick_gelu, ((3, 8),)),
    "squared_relu": Case("fusion.activation", squared_relu, ((3, 8),)),
    "rope, halves": Case("fusion.rope", half, (HEADS, *TABLES)),
    "rope, neighbours": Case("fusion.rope", neighbours, (HEADS, *TABLES)),
    "qk_norm_rope": Case(
        "fusion.qk_norm_rope", qk_norm_rope, ((2, 6, 2, 4), Weight((4,)), Table((6, 4)), Table((6, 4)))
    ),
    "attention": Case("fusion.attention", attention, (HEADS, HEADS, HEADS)),
    "attention, mask": Case("fusion.attention", attention_with_mask, (HEADS, HEADS, HEADS, (2, 1, 6, 6)), slack=2.0),
    "attention, called": Case("fusion.attention", attention_called, (HEADS, (2, 1, 6, 4), (2, 1, 6, 4))),
    "attention, grouped": Case("fusion.attention", attention_grouped, ((2, 4, 6, 4), HEADS, HEADS)),
    "attention, capped": Case("fusion.attention", attention_capped, (HEADS, HEADS, HEADS)),
    "attention, sinks": Case("fusion.attention", attention_with_sinks, (HEADS, HEADS, HEADS, Weight((2,)))),
    "attention, alibi": Case("fusion.attention", attention_alibi, (HEADS, HEADS, HEADS), slack=2.0),
    "attention, sums": Case("fusion.attention", attention_by_sums, (HEADS, HEADS, HEADS)),
    "attention, trained scale": Case(
        "fusion.attention", attention_by_a_trained_scale, (HEADS, HEADS, HEADS, Weight((2, 1, 1)))
    ),
    "attention, five dimensions": Case("fusion.attention", attention_in_five_dimensions, ((2, 4, 6, 4), HEADS, HEADS)),
    "attention, gated": Case("fusion.attention", attention_gated, (HEADS, HEADS, HEADS), slack=2.0),
    "attention, dropout": Case(
        "fusion.attention",
        attention_dropout,
        (HEADS, HEADS, HEADS),
        draws=True,
        dtypes=WIDE,
        reasons=("equal and fixed sequence lengths",),
    ),
    "attention, packed": Case(
        "fusion.attention",
        packed,
        (HEADS, HEADS, HEADS, lambda g: torch.tensor([[3, 1, 0, 4, 0, 2], [1, 0, 5, 5, 5, 5]])),
    ),
    "scaled_masked_softmax": Case(
        "fusion.scaled_masked_softmax",
        scaled_masked_softmax,
        ((2, 2, 6, 6),),
        options=(("enable", ["fusion.scaled_masked_softmax"]),),
    ),
    "cross_entropy": Case("fusion.cross_entropy", cross_entropy, ((6, 7), TARGET)),
    "cross_entropy, by hand": Case("fusion.cross_entropy", by_hand, ((6, 7), TARGET)),
    "cross_entropy, z-loss": Case("fusion.cross_entropy", z_loss, ((6, 7), TARGET), count=2),
    "cross_entropy, one-hot": Case("fusion.cross_entropy", one_hot_loss, ((6, 7), TARGET)),
    "cross_entropy, smoothed": Case("fusion.cross_entropy", smoothed_loss, ((6, 7), TARGET)),
    "linear_cross_entropy, scaled": Case(
        "fusion.linear_cross_entropy", scaled_linear_loss, ((6, 5), Weight((7, 5)), TARGET), patches=ANY_SIZE
    ),
    "linear_cross_entropy": Case(
        "fusion.linear_cross_entropy", linear_loss, ((6, 5), Weight((7, 5)), TARGET), patches=ANY_SIZE
    ),
    "linear_cross_entropy, z-loss": Case(
        "fusion.linear_cross_entropy", linear_z_loss, ((6, 5), Weight((7, 5)), TARGET), patches=ANY_SIZE
    ),
    "grouped_matmul": Case(
        "fusion.grouped_matmul",
        grouped_called,
        ((6, 8), Weight((3, 8, 16)), integers(2, 2, 6, dtype=torch.int32)),
        dtypes=(torch.bfloat16,),
        layouts=("plain",),
    ),
    "grouped_matmul, loop": Case(
        "fusion.grouped_matmul",
        grouped_loop,
        ((6, 8), Weight((3, 8, 4))),
        options=(("enable", ["fusion.grouped_matmul"]),),
        dynamic=False,
    ),
    "moe_permute": Case(
        "fusion.moe_permute",
        moe,
        ((5, 4), (5, 2), Weight((4, 4)), scores(5, 3)),
        count=2,
        reasons=("sorted choices are not", "rows are not"),
    ),
    "gathered_experts": Case("fusion.gathered_experts", gathered_experts, ((6, 4), Weight((3, 4, 5)), scores(3, 3))),
    "one_hot_dispatch": Case(
        "fusion.one_hot_dispatch", one_hot_dispatch, ((6, 5), (6, 3), scores(6, 3)), count=2, dynamic=False
    ),
    "merged_linear": Case(
        "fusion.merged_linear",
        merged,
        ((3, 8), Weight((6, 8)), Weight((6, 8))),
        options=(("target", "cuda"), ("hardware", "h100"), ("enable", ["fusion.merged_linear"])),
        patches=(lambda: patch.object(merged_linear, "_unpaid", lambda group, device: None),),
        reasons=("a weight is computed in the graph", "some weights are trained and some are not"),
    ),
}
SPELLINGS = {
    "rms_norm, norm": Case("fusion.rms_norm", rms_norm_by_norm, ((2, 3, 8), Weight((8,)))),
    "rms_norm, normalized": Case("fusion.rms_norm", rms_norm_normalized, ((2, 3, 8), Weight((8,)))),
    "rms_norm, weight inside": Case("fusion.rms_norm", rms_norm_weight_inside, ((2, 3, 8), Weight((8,)))),
    "rms_norm, eps beside": Case(
        "fusion.rms_norm",
        rms_norm_eps_beside,
        ((2, 3, 8), Weight((8,))),
        reasons=("eps is added to the root mean square",),
    ),
    "layer_norm, n - 1": Case("fusion.layer_norm", layer_norm_unbiased, ((2, 3, 8), Weight((8,)), Weight((8,)))),
    "layer_norm, annotated": Case(
        "fusion.layer_norm",
        layer_norm_annotated,
        ((2, 3, 8), Weight((8,)), Weight((8,))),
        reasons=("eps is added to the standard deviation",),
    ),
    "swiglu, divided": Case("fusion.swiglu", swiglu_divided, ((3, 8), (3, 8))),
    "swiglu, tanh": Case("fusion.swiglu", swiglu_tanh, ((3, 8), (3, 8))),
    "weighted_swiglu, up": Case("fusion.weighted_swiglu", weighted_up, ((3, 8), (3, 8), (3, 1))),
    "weighted_swiglu, gate": Case("fusion.weighted_swiglu", weighted_gate, ((3, 8), (3, 8), (3, 1))),
    "gelu, erfc": Case("canonicalize.gelu", gelu_erfc, ((3, 8),)),
    "quick_gelu, divided": Case("fusion.activation", quick_gelu_divided, ((3, 8),)),
    "squared_relu, product": Case("fusion.activation", relu_times_x, ((3, 8),)),
}
"""Other spellings of the same, most of them for the slow tests alone."""


FOUND = {
    "memory of other elements was read where those of a head do not lie side by side": (
        "attention, packed",
        Variant(torch.float32, layouts=("strided", "plain", "plain", "plain")),
    ),
    "the stored order of a result changed two sums before the output": (
        "layer_norm",
        Variant(torch.bfloat16, layouts=("strided", "plain", "plain"), stopped=1, train=False),
    ),
    "a scaled input was taken for a part of the formula": ("gelu, tanh", Variant(sites=2)),
    "a copy that keeps the model's layout stood between two operators": (
        "qk_norm_rope",
        Variant(layouts=("strided", "strided", "plain", "plain")),
    ),
    "no reason": ("weighted_swiglu", Variant(extra=("read", 1))),
    "no reason where the product is stored in another order": (
        "weighted_swiglu",
        Variant(torch.float16, swaps=1, layouts=("padded", "turned", "turned"), extra=("read", 1)),
    ),
    "no reason where a norm is read before its weight": (
        "qk_norm_rope",
        Variant(swaps=241, layouts=("plain", "strided", "expanded", "every other"), extra=("read", 5), dynamic=True),
    ),
    "a view of the copy and its detach were both returned": (
        "rms_norm, normalized",
        Variant(torch.float32, layouts=("strided", "turned"), swaps=102, frozen=1, stopped=2, extra=("returned", 5)),
    ),
    "a log-sum-exp was inserted before what was erased": (
        "cross_entropy, by hand",
        Variant(swaps=63, extra=("overwritten", 4), dynamic=True),
    ),
    "a factor was no longer expanded": (
        "weighted_swiglu, gate",
        Variant(torch.float32, layouts=("every other", "turned", "expanded"), sites=2),
    ),
    "a cast stood between the loss and its z-loss": ("linear_cross_entropy, z-loss", Variant(torch.float16)),
}


@pytest.mark.parametrize("what", FOUND)
def test_found_once(what):
    name, variant = FOUND[what]
    check((CASES | SPELLINGS)[name], variant)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=1, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
@given(st.data())
def test_one_variant(name, data):
    """Another one for each operator: what is simplest differs with its place in the list."""
    check(CASES[name], data.draw(variants(CASES[name], turn=list(CASES).index(name))))


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
@given(st.sampled_from(list(SPELLINGS)), st.data())
def test_other_spellings(name, data):
    check(SPELLINGS[name], data.draw(variants(SPELLINGS[name], turn=list(SPELLINGS).index(name))))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SPELLINGS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_many_variants(name, data):
    case = (CASES | SPELLINGS)[name]
    check(case, data.draw(variants(case)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SPELLINGS)
def test_as_it_comes(name):
    case = (CASES | SPELLINGS)[name]
    check(case, Variant(dtype=case.dtypes[0]))
