"""LongCat by MindSpeed-LLM's flags: zero-computation experts, the layer and the scales by formula, and in one graph."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.nn import functional

from mindspeed_fx.megatron import shortcut
from mindspeed_fx.megatron.model_parts import add_parts
from tests.megatron.flags.layer_effects import PRE, SPEC
from tests.megatron.flags.model_effects import SPARSE_MODEL
from tests.megatron.flags.values import apply

pytestmark = pytest.mark.usefixtures("on_one_rank")
EXPERTS, ZEROS, K, SCALE = 4, 3, 3, 2.5
LONGCAT = (
    f"--spec {SPEC}.longcat_spec layer_spec {SPARSE_MODEL} --num-zero-experts {ZEROS} {PRE} softmax_topk "
    f"--moe-router-enable-expert-bias --moe-router-topk-scaling-factor {SCALE} --moe-router-topk {K} --qk-layernorm "
    "--enable-mla-scale-q-lora --enable-mla-scale-kv-lora"
)


def build(flags="", **more):
    """A GPTModel of LongCat's layers in float64, random weights of norms and biases of experts."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tests.megatron.gpt_models import tiny_gpt

    args = apply(f"{LONGCAT} {flags}")
    torch.manual_seed(0)
    fields = dict(
        moe_router_load_balancing_type=args.moe_router_load_balancing_type,
        moe_router_pre_softmax=args.moe_router_pre_softmax,
        moe_router_topk_scaling_factor=args.moe_router_topk_scaling_factor,
        moe_router_topk=K,
        moe_router_dtype="fp64",
        moe_aux_loss_coeff=0.0,
        init_method_std=0.3,
    )
    config = tiny_gpt(latent=True, experts=EXPERTS, **{**fields, **more}).config
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm", multi_latent_attention=True,
        qk_layernorm=True,
    )  # fmt: skip
    model = GPTModel(
        config, shortcut.make_shortcuts(spec), vocab_size=64, max_sequence_length=16, position_embedding_type="none"
    )
    add_parts(model, args)
    model.double()
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if "norm" in name):
            parameter.copy_(torch.rand_like(parameter) + 0.5)
        for router in (layer.mlp.router for layer in model.decoder.layers):
            router.expert_bias.copy_(torch.randn(EXPERTS + ZEROS) * 0.1)
    return model


def gated(mlp, x):
    gate, up = functional.linear(x, mlp.linear_fc1.weight).chunk(2, -1)
    return functional.linear(functional.silu(gate) * up, mlp.linear_fc2.weight)


def experts_by_formula(layer, x):
    """What experts and zero experts add up to, token by token; and how many tokens each has got."""
    rows, counts = [], torch.zeros(EXPERTS + ZEROS)
    for token in x.flatten(0, -2):
        p = (layer.router.weight @ token).softmax(-1)
        total = torch.zeros_like(token)
        for i in (p.detach() + layer.router.expert_bias).topk(K).indices.tolist():
            made = gated(layer.experts.local_experts[i], token) if i < EXPERTS else token
            total = total + SCALE * p[i] * made
            counts[i] += 1
        rows.append(total)
    return torch.stack(rows).view(x.shape), counts


def test_experts_by_formula():
    layer = build().decoder.layers[0].mlp
    torch.manual_seed(1)
    x = torch.randn(5, 2, 32, dtype=torch.float64, requires_grad=True)
    expected, counts = experts_by_formula(layer, x)
    assert counts[EXPERTS:].sum() > 3 and (counts[:EXPERTS] > 0).any()
    found, _ = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(layer.router.local_tokens_per_expert.float(), counts)
    leaves, towards = [x, *layer.parameters()], torch.randn_like(x)
    for one, other in zip(
        torch.autograd.grad((found * towards).sum(), leaves, allow_unused=True),
        torch.autograd.grad((expected * towards).sum(), leaves, allow_unused=True),
    ):
        zero = torch.zeros(())
        torch.testing.assert_close(one if one is not None else zero, other if other is not None else zero.to(one))


def test_tokens_go_to_all_experts_in_turn():
    """Zero experts have their turns too, as in MindSpeed-LLM; the bias moves by where tokens would have gone."""
    layer = build("--fix-router").decoder.layers[0].mlp
    torch.manual_seed(1)
    x = torch.randn(5, 2, 32, dtype=torch.float64, requires_grad=True)
    rows = []
    for i, token in enumerate(x.flatten(0, -2)):
        p = (layer.router.weight @ token).softmax(-1)
        kept = p[(p.detach() + layer.router.expert_bias).topk(K).indices].sort(descending=True).values
        turns = [(i * K + j) % (EXPERTS + ZEROS) for j in range(K)]
        made = [gated(layer.experts.local_experts[e], token) if e < EXPERTS else token for e in turns]
        rows.append(SCALE * sum(weight * m for weight, m in zip(kept, made)))
    expected, counts = torch.stack(rows).view(x.shape), experts_by_formula(layer, x)[1]
    found, _ = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(layer.router.local_tokens_per_expert.float(), counts)
    gradients = (torch.autograd.grad(y.square().sum(), [x, layer.router.weight]) for y in (found, expected))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_biases_move_by_the_load():
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    model = build()
    router = model.decoder.layers[0].mlp.router
    before, load = router.expert_bias.clone(), torch.arange(EXPERTS + ZEROS).float()
    for layer in model.decoder.layers:
        layer.mlp.router.local_tokens_per_expert.copy_(load)
    finalize_model_grads._update_router_expert_bias([model], model.config)
    assert model.config.moe_router_enable_expert_bias
    torch.testing.assert_close(router.expert_bias, before + (load.mean() - load).sign() * 1e-3)


def test_a_layer_by_formula():
    """Attentions are Megatron's (their formula: test_phi_and_plm.py); their latents' scales are looked at here."""
    layer = build().decoder.layers[0]
    torch.manual_seed(1)
    x = torch.randn(16, 2, 32, dtype=torch.float64)
    second = layer.second_half
    norm = lambda n, t: functional.rms_norm(t, (32,), n.weight, n.eps)  # noqa: E731
    h = x + layer.self_attention(norm(layer.input_layernorm, x), None)[0]
    n = norm(layer.pre_mlp_layernorm, h)
    beside, _ = experts_by_formula(layer.mlp, n)
    h = h + gated(layer.dense_mlp, n)
    h = h + second.self_attention(norm(second.input_layernorm, h), None)[0]
    h = h + gated(second.mlp, norm(second.pre_mlp_layernorm, h)) + beside
    torch.testing.assert_close(layer(x)[0], h, rtol=1e-10, atol=1e-10)
    for attention in (layer.self_attention, second.self_attention):
        for latent, width in ((attention.q_layernorm, 24), (attention.kv_layernorm, 16)):
            t = torch.randn(3, width, dtype=torch.float64)
            scaled = functional.rms_norm(t, (width,), latent.weight, latent.eps) * (32 / width) ** 0.5
            torch.testing.assert_close(latent(t), scaled)


def test_one_graph():
    from tests.megatron.gpt_models import batch, train

    results = []
    for is_compiled in (False, True):
        model = build(moe_router_dtype="fp32")
        compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
        results.append(train(model, batch(), compiled if is_compiled else None))
    torch.testing.assert_close(results[1][0], results[0][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-5, atol=1e-7)
