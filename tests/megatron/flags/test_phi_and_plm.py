"""Phi-3.5-MoE and PLM by MindSpeed-LLM's flags: the parts against formulas written out, and in one graph."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from mindspeed_fx.megatron import sparse_mixer
from tests.megatron.flags.layer_effects import SPEC
from tests.megatron.flags.values import apply, build_with_parts, config_of, logits_by_formula

pytestmark = pytest.mark.usefixtures("on_one_rank")
TOKENS, EXPERTS = 4096, 6
ROUTER = SimpleNamespace(apply_z_loss=lambda x: x, training=True)
SCORES = (0.3, 0.298, 0.297, 0.2961, -0.4, 0.299)
"""Experts 0, 1, 2, 3 and 5 are within 2 % of the largest, expert 4 is not."""


def shares(scores, without=()):
    """softmax of the scores that are near the largest, as MindSpeed-LLM's router.py has it, written out."""
    left = [s for i, s in enumerate(scores) if i not in without]
    top = max(left)
    near = [i for i, s in enumerate(scores) if i not in without and (top - s) / max(abs(s), top) <= 0.02]
    total = sum(math.exp(scores[i]) for i in near)
    return [math.exp(s) / total if i in near else 0.0 for i, s in enumerate(scores)]


def test_sparse_mixer():
    """Frequencies of what is drawn, weights, and the gradient of a weight."""
    torch.manual_seed(0)
    logits = torch.tensor(SCORES, dtype=torch.float64).expand(TOKENS, 1, EXPERTS).clone().requires_grad_()
    probs, chosen = sparse_mixer.route(ROUTER, logits)
    assert torch.equal(chosen, probs > 0) and (chosen.sum(-1) == 2).all() and not chosen[:, 4].any()
    p = shares(SCORES)
    pairs = {(i, j): p[i] * shares(SCORES, (i,))[j] for i in range(EXPERTS) for j in range(EXPERTS) if i != j}
    for i in range(EXPERTS):  # drawn first or second; five standard deviations
        likely = sum(q for pair, q in pairs.items() if i in pair)
        assert abs(chosen[:, i].double().mean() - likely) < 5 * (likely * (1 - likely) / TOKENS) ** 0.5 + 1e-9
    for token in range(64):
        weights = {i: probs[token, i].item() for i in chosen[token].nonzero().view(-1).tolist()}
        assert any(
            abs(weights[i] / (p[i] * f) - 1) < 1e-12 and abs(weights[j] / (shares(SCORES, (i,))[j] * g) - 1) < 1e-12
            for i, j in (tuple(weights), tuple(weights)[::-1])
            for f in (1.0, 0.3333)
            for g in (1.0, 0.3333)
        )
    is_third = (probs > 0) & (probs < 0.1)
    best = {i: 0 if i else 5 for i in range(EXPERTS)}  # of the second, by the first
    likely = 0.75 * sum(q * ((i != 0) + (j != best[i])) for (i, j), q in pairs.items())
    assert not is_third[:, 0].any() and abs(is_third.sum(-1).double().mean() - likely) < 5 / TOKENS**0.5


def test_gradients_of_sparse_mixer():
    """That of a weight is softmax's, w_i (1 at i - w), whatever the weight was multiplied by."""
    torch.manual_seed(1)
    scores = (torch.randn(32, 1, EXPERTS, dtype=torch.float64) * 0.02 + 1).requires_grad_()
    probs, chosen = sparse_mixer.route(ROUTER, scores)
    towards = torch.randn_like(probs)
    (found,) = torch.autograd.grad((probs * towards).sum(), scores)
    for token in range(32):
        row = scores[token, 0].tolist()
        i, j = chosen[token].nonzero().view(-1).tolist()
        right = []
        for first, second in ((i, j), (j, i)):
            gradient = torch.zeros(EXPERTS, dtype=torch.float64)
            for expert, p in ((first, shares(row)), (second, shares(row, (first,)))):
                whole = torch.tensor(p, dtype=torch.float64)
                gradient += towards[token, expert] * p[expert] * (torch.eye(EXPERTS)[expert] - whole)
            right.append(torch.allclose(found[token, 0], gradient, rtol=1e-10, atol=1e-13))
        assert any(right)


def test_evaluation_takes_the_largest():
    logits = torch.tensor(SCORES, dtype=torch.float64).view(1, 1, -1)
    probs, chosen = sparse_mixer.route(SimpleNamespace(apply_z_loss=lambda x: x, training=False), logits)
    assert chosen[0].nonzero().view(-1).tolist() == [0, 5]
    assert probs[0, 0].item() == pytest.approx(shares(SCORES)[0])
    assert probs[0, 5].item() == pytest.approx(shares(SCORES, (0,))[5])


def test_experts_of_phi_in_one_graph():
    """The flag gives every router of a model the choice; compiled it draws the same numbers."""
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import batch, tiny_gpt, train

    args = apply("--moe-router-load-balancing-type sparsemixer_topk --moe-router-topk 2 --num-experts 4")
    results = []
    for is_compiled in (False, True):  # two models: an eager forward must not be needed before a graph
        torch.manual_seed(0)
        model = tiny_gpt(
            experts=4, moe_router_load_balancing_type="none", moe_input_jitter_eps=0.01, moe_aux_loss_coeff=0.0
        )
        add_parts(model, args)
        assert all(layer.mlp.router.routing.func is sparse_mixer.route for layer in model.decoder.layers)
        compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
        torch.manual_seed(3)
        results.append(train(model, batch(), compiled if is_compiled else None))
    torch.testing.assert_close(results[1][0], results[0][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-4, atol=1e-6)


def test_biases_of_phi():
    from tests.megatron.gpt_models import batch

    args, model = build_with_parts(f"--spec {SPEC}.phi35_moe_spec layer_spec --add-dense-bias --add-output-layer-bias")
    names = [n for n, _ in model.named_parameters() if n.endswith("bias")]
    assert names == [f"decoder.layers.{i}.self_attention.linear_proj.bias" for i in range(2)] + ["output_layer.bias"]
    inputs = {**batch(), "labels": None}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                assert not p.any()
                p.copy_(torch.randn_like(p) * 0.1)
    logits = model(**inputs)
    torch.testing.assert_close(logits, logits_by_formula(model, args, inputs["input_ids"]))
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), logits)


def latent_logits(model, ids):
    """PLM's layers (MindSpeed-LLM's plm_spec.py and multi_latent_attention.py), written out."""
    weights, c, length = dict(model.named_parameters()), model.config, ids.shape[1]
    heads, width, rotated = c.num_attention_heads, c.qk_head_dim, c.qk_pos_emb_head_dim
    frequencies = c.rotary_base ** -(torch.arange(0, rotated, 2) / rotated)
    angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)[:, None]

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], eps=c.layernorm_epsilon) * weights[f"{name}.weight"]

    def rotate(x):  # neighbours are a pair
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        turned = torch.cat((-x[..., rotated // 2 :], x[..., : rotated // 2]), -1)
        return x * angles.cos() + turned * angles.sin()

    def attend(x, layer):
        at = f"{layer}.self_attention"
        q = functional.linear(x, weights[f"{at}.linear_q_proj.weight"]).unflatten(-1, (heads, -1))
        latent, k_rotated = functional.linear(x, weights[f"{at}.linear_kv_down_proj.weight"]).split(
            [c.kv_lora_rank, rotated], -1
        )
        kv = functional.linear(norm(latent, f"{at}.kv_layernorm"), weights[f"{at}.linear_kv_up_proj.weight"])
        k, v = kv.unflatten(-1, (heads, -1)).split([width, c.v_head_dim], -1)
        q = torch.cat((q[..., :width], rotate(q[..., width:])), -1)
        k = torch.cat((k, rotate(k_rotated.unsqueeze(2)).expand(-1, -1, heads, -1)), -1)
        scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(width + rotated)
        weight = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1)
        merged = torch.einsum("bhst,bthd->bshd", weight, v).flatten(2)
        return functional.linear(merged, weights[f"{at}.linear_proj.weight"])

    x = weights["embedding.word_embeddings.weight"][ids]
    for layer in (f"decoder.layers.{n}" for n in range(c.num_layers)):
        x = x + attend(norm(x, f"{layer}.input_layernorm"), layer)
        wide = functional.linear(norm(x, f"{layer}.pre_mlp_layernorm"), weights[f"{layer}.mlp.linear_fc1.weight"])
        x = x + functional.linear(wide.relu().square(), weights[f"{layer}.mlp.linear_fc2.weight"])
    return functional.linear(norm(x, "decoder.final_layernorm"), weights["output_layer.weight"])


def test_plm():
    from megatron.core.activations import squared_relu

    from tests.megatron.gpt_models import batch, tiny_gpt

    sizes = "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --kv-lora-rank 16 --v-head-dim 8 --multi-latent-attention"
    args = apply(f"--spec {SPEC}.plm_spec layer_spec {sizes} --rope-scaling-type plm --rotary-base 100000")
    config = config_of(args)
    assert args.spec is None and config.rope_type == "rope" and config.qk_layernorm and config.q_lora_rank is None
    fields = {name: getattr(config, name) for name in ("rope_type", "qk_layernorm", "rotary_base", "q_lora_rank")}
    model = tiny_gpt(latent=True, gated_linear_unit=False, activation_func=squared_relu, **fields).double()
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if "norm" in name):
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    inputs = {**batch(), "labels": None}
    logits = model(**inputs)
    expected = latent_logits(model, inputs["input_ids"])
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)  # angles are float32
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), logits)
