"""DeepSeek-V4's layers in Megatron's model and transformers' model of it give the same logits and gradients of weights
that both have."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.flags.deepseek4_formulas import EXPERTS, HEADS, HIDDEN, RANK, ROTATED, VOCABULARY, WIDTH, K, build
from tests.megatron.flags.deepseek4_runs import LENGTH, WINDOW

pytest.importorskip("transformers.models.deepseek_v4", reason="this transformers has no DeepSeek-V4")
pytestmark = pytest.mark.usefixtures("on_one_rank")
POOLS = {"wkv": "kv_proj", "wgate": "gate_proj", "norm": "kv_norm"}
STREAMS = {"hc_fn.weight": "fn", "hc_base": "base", "hc_scale": "scale"}
PARTS = {
    "linear_q": "q_a_proj",
    "linear_kv": "kv_proj",
    "q_layernorm": "q_a_norm",
    "kv_layernorm": "kv_norm",
    "linear_q_up_proj": "q_b_proj",
    "linear_o_down_proj": "o_a_proj",
    "linear_o_up_proj": "o_b_proj",
}
FFN = 64


def transformers_model(args):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    yarn = dict(
        rope_type="yarn", factor=args.rope_factor, beta_fast=args.beta_fast, beta_slow=args.beta_slow,
        original_max_position_embeddings=args.original_seq_len,
    )  # fmt: skip
    pooled, chosen = "heavily_compressed_attention", "compressed_sparse_attention"
    config = DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, moe_intermediate_size=FFN, num_hidden_layers=4, head_dim=WIDTH,
        num_attention_heads=HEADS, q_lora_rank=RANK, num_experts_per_tok=K, n_routed_experts=EXPERTS,
        rope_theta=args.rope_theta, compress_rope_theta=args.compress_rope_theta, rope_parameters=yarn,
        partial_rotary_factor=ROTATED / WIDTH, max_position_embeddings=args.original_seq_len * 4,
        layer_types=["sliding_attention", chosen, pooled, chosen], compress_rates={chosen: 4, pooled: 6},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], hc_mult=args.hc_mult, hc_eps=args.hc_eps,
        hc_sinkhorn_iters=args.hc_sinkhorn_iters, swiglu_limit=0.5, sliding_window=WINDOW, o_groups=args.o_groups,
        o_lora_rank=args.o_lora_rank, index_n_heads=args.index_n_heads, index_head_dim=args.index_head_dim,
        index_topk=args.index_topk, rms_norm_eps=1e-5, use_cache=False, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config).double().eval()


def renamed(name):
    """transformers' name of a parameter of Megatron's; None where several are one there."""
    if not name.startswith("decoder."):
        last = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight",
        }
        return last.get(name, f"model.{name}".replace("final_layernorm", "norm").replace("hc_fn.weight", "hc_fn"))
    _, _, layer, part, rest = name.split(".", 4)
    at = f"model.layers.{layer}."
    if part == "mlp":
        return at + "mlp.gate.weight" if rest == "router.weight" else None
    if part in ("attn_mhc", "mlp_mhc"):
        return f"{at}{'attn_hc' if part == 'attn_mhc' else 'ffn_hc'}.{STREAMS[rest]}"
    if part != "self_attention":
        return f"{at}{part.replace('pre_mlp', 'post_attention')}.{rest}"
    if rest == "attn_sink":
        return f"{at}self_attn.sinks"
    first, _, more = rest.partition(".")
    if first in PARTS:
        return f"{at}self_attn.{PARTS[first]}.{more}"
    at += "self_attn.compressor."
    if first == "indexer":
        first, _, more = more.partition(".")
        at += "indexer."
        if first == "wq_b":
            return f"{at}q_b_proj.{more}"
        if first == "weights_proj":
            return f"{at}scorer.{rest.partition('.')[2]}"
    if more == "ape":
        return f"{at}position_bias"
    part, _, weight = more.partition(".")
    return f"{at}{POOLS[part]}.{weight}"


@torch.no_grad()
def copy_weights(model, into):
    """All of Megatron's; returns the pairs of parameters that are one."""
    theirs, pairs = dict(into.named_parameters()), {}
    for name, parameter in model.named_parameters():
        if (other := renamed(name)) is not None:
            theirs[other].copy_(parameter.view(theirs[other].shape))
            pairs[name] = (parameter, theirs.pop(other))
    for mine, layer in zip(model.decoder.layers, into.model.layers):
        gate, router, shared = layer.mlp.gate, mine.mlp.router, mine.mlp.shared_experts
        if hasattr(router, "tid2eid"):
            gate.tid2eid.copy_(router.tid2eid)
        else:
            gate.e_score_correction_bias.copy_(router.expert_bias)
        for i, expert in enumerate(mine.mlp.experts.local_experts):
            layer.mlp.experts.gate_up_proj[i].copy_(expert.linear_fc1.weight)
            layer.mlp.experts.down_proj[i].copy_(expert.linear_fc2.weight)
        halves = shared.linear_fc1.weight.chunk(2)
        theirs_shared = layer.mlp.shared_experts
        for linear, weight in zip((theirs_shared.gate_proj, theirs_shared.up_proj), halves):
            linear.weight.copy_(weight)
        theirs_shared.down_proj.weight.copy_(shared.linear_fc2.weight)
    left = [name for name in theirs if ".mlp.experts." not in name and ".mlp.shared_experts." not in name]
    assert not left, left
    return pairs


def test_logits_and_gradients():
    args, model = build(
        "--indexer-loss-coeff 0", moe_aux_loss_coeff=0.0, moe_ffn_hidden_size=FFN,
        moe_shared_expert_intermediate_size=FFN, activation_func_clamp_value=0.5, bias_activation_fusion=False,
    )  # fmt: skip
    other = transformers_model(args)
    pairs = copy_weights(model, other)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    found = model(input_ids=ids, position_ids=None, attention_mask=None)
    expected = other(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # cosines and scores are float32 there
    towards = torch.randn_like(found)
    leaves = list(zip(*pairs.values()))
    gradients = (
        torch.autograd.grad((y * towards).sum(), x, allow_unused=True) for y, x in zip((found, expected), leaves)
    )
    for name, one, right in zip(pairs, *gradients):
        if right is None:
            assert "indexer" in name, name  # it learns from its own loss, which transformers has not
            continue
        assert (one - right).norm() <= 1e-3 * right.norm(), name
