"""What test_variants.py varies: each operator as functions of ``h`` (how a variant adds, multiplies, casts) and of its
inputs."""

import math

import torch
import torch.nn.functional as F

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
