"""Layers of Qwen3-Next from MindSpeed-LLM's flags: against its formulas written out, and compiled."""

import pytest
import torch
from torch.nn import functional

from mindspeed_fx.megatron.model_parts import add_parts
from mindspeed_fx.megatron.norm import OffsetRMSNorm
from tests.megatron.flags.values import apply
from tests.megatron.gpt_models import batch, tiny_gpt, train

pytestmark = pytest.mark.usefixtures("on_one_rank")

WORDS = (
    "--spec mindspeed_llm.tasks.models.spec.qwen3_next_spec layer_spec --full-attention-interval 2 --mamba-d-conv 3 "
    "--no-enable-linear-qkv --swiglu --normalization RMSNorm --add-rmsnorm-offset --rmsnorm-weight-in-fp32"
)
K_HEADS, HEADS, K_DIM, V_DIM = 2, 4, 8, 6
SIZES = dict(
    linear_num_key_heads=K_HEADS,
    linear_num_value_heads=HEADS,
    linear_key_head_dim=K_DIM,
    linear_value_head_dim=V_DIM,
)
SET = (
    "experimental_attention_variant",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
)


def build(seq=12):
    """A GPTModel of two layers, a delta net and attention, as the flags ask."""
    torch.manual_seed(0)
    args = apply(WORDS)
    fields = {name: getattr(args, name) for name in SET}
    model = tiny_gpt(seq=seq, qk_layernorm=True, transformer_impl="local", **SIZES, **fields)
    add_parts(model, args)
    return model


def delta_net(x, net):
    """[seq, batch, hidden] as MindSpeed-LLM's qwen3_next_gated_deltanet_attention.py computes it, token by token."""
    width_k, width_v, seq = K_HEADS * K_DIM, HEADS * V_DIM, len(x)
    mixed = functional.linear(x, net.in_proj.weight)
    qkv, z, b, a = mixed.split([2 * width_k + width_v, width_v, HEADS, HEADS], -1)
    kernel = net.conv1d.weight[:, 0]
    padded = functional.pad(qkv, (0, 0, 0, 0, kernel.shape[1] - 1, 0))
    qkv = functional.silu(sum(padded[i : i + seq] * kernel[:, i] for i in range(kernel.shape[1])))
    q, k, v = qkv.split([width_k, width_k, width_v], -1)
    q, k = (t.unflatten(-1, (K_HEADS, K_DIM)) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(HEADS // K_HEADS, 2) for t in (q, k))
    v, decay = v.unflatten(-1, (HEADS, V_DIM)), (-net.A_log.exp() * functional.softplus(a + net.dt_bias)).exp()
    state, outs = torch.zeros(x.shape[1], HEADS, K_DIM, V_DIM), []
    for t in range(seq):
        state = state * decay[t][..., None, None]
        error = (v[t] - torch.einsum("bhkv,bhk->bhv", state, k[t])) * b[t].sigmoid()[..., None]
        state = state + k[t][..., None] * error[..., None, :]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[t]) / K_DIM**0.5)
    out = functional.rms_norm(torch.stack(outs), (V_DIM,), eps=1e-5) * net.out_norm.weight
    out = out * functional.silu(z.unflatten(-1, (HEADS, V_DIM)))
    return functional.linear(out.flatten(2), net.out_proj.weight)


def gated_attention(x, attention, angles):
    """[seq, batch, hidden] as MindSpeed-LLM's qwen3_next_full_attention.py computes it; angles [seq, 1, 1, dim]."""
    groups, dim = 2, 8
    mixed = functional.linear(x, attention.linear_qkv.weight).unflatten(-1, (groups, -1))
    q, gate, k, v = mixed.split([2 * dim, 2 * dim, dim, dim], -1)
    q, gate = (t.unflatten(-1, (2, dim)).flatten(2, 3) for t in (q, gate))

    def norm(t, module):
        return functional.rms_norm(t, (dim,), eps=1e-5) * (1 + module.weight)

    def rotate(t):
        return t * angles.cos() + torch.cat((-t[..., dim // 2 :], t[..., : dim // 2]), -1) * angles.sin()

    q, k = rotate(norm(q, attention.q_layernorm)), rotate(norm(k, attention.k_layernorm))
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / dim**0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    out = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return functional.linear((out * gate.sigmoid()).flatten(2), attention.linear_proj.weight)


@pytest.mark.parametrize("number", [0, 1], ids=["delta net", "attention"])
def test_a_layer_by_formula(number):
    """Values, and the gradients of the input and of every weight."""
    model = build()
    layer = model.decoder.layers[number].self_attention
    with torch.no_grad():
        for parameter in (p for p in layer.parameters() if p.ndim == 1):
            parameter.add_(torch.rand_like(parameter) / 2)
    x = torch.randn(12, 2, 32, requires_grad=True)
    angles = model.rotary_pos_emb(12)
    have = layer(x, None, rotary_pos_emb=angles)[0]
    want = gated_attention(x, layer, angles) if number else delta_net(x, layer)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    weights = [x, *layer.parameters()]
    grads = [torch.autograd.grad(out.sin().sum(), weights) for out in (have, want)]
    for got, expected in zip(*grads, strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_what_layers_start_with():
    """A of [0, 16) and norms of delta nets from one, without an offset; the other norms have one."""
    model = build()
    net = model.decoder.layers[0].self_attention
    assert net.A_init_range == (0, 16) and torch.equal(net.dt_bias, torch.ones(HEADS))
    assert type(net.out_norm) is torch.nn.RMSNorm and torch.equal(net.out_norm.weight, torch.ones(V_DIM))
    norms = [m for m in model.modules() if isinstance(m, OffsetRMSNorm)]
    assert len(norms) == 2 * 2 + 2 + 1 and all(m.is_wide and m.start == 1 for m in norms)


def test_layers_are_compiled_whole():
    """One graph, the loss and every gradient as eager."""
    model, inputs = build(seq=70), batch(seq=70)
    loss, grads = train(model, inputs)
    have = train(model, inputs, torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"}))
    torch.testing.assert_close(have[0], loss)
    for name, grad in grads.items():
        assert grad.any(), name
        torch.testing.assert_close(have[1][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("has_offset", [True, False])
def test_norms_multiply_in_float32(has_offset):
    """x of 16 bits: normalized, multiplied and only then rounded."""
    norm = OffsetRMSNorm(64, eps=1e-5) if has_offset else torch.nn.RMSNorm(64, eps=1e-5)
    norm.is_wide = True
    norm.bfloat16()
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64) / 50)
        wide = x.float()
        exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (has_offset + norm.weight.float())
        assert (norm(x).float() - exact.bfloat16().float()).abs().max() <= exact.abs().max() * 2**-8
        narrow = functional.rms_norm(x, (64,), has_offset + norm.weight, 1e-5)
        errors = [(out.float() - exact).square().mean() for out in (norm(x), narrow)]
    assert errors[0] < errors[1] if has_offset else errors[0] == errors[1]
    assert norm(x).dtype == torch.bfloat16
