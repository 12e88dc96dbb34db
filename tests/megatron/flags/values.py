"""What flags make of arguments, of Megatron's configuration and of a model, and a model's logits by formula."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from mindspeed_fx.megatron import flags
from mindspeed_fx.megatron.flags.config import with_config_fields
from tests.megatron.flags.words import parse


def apply(words: str):
    args = parse(words.split())
    flags.apply(args, words.split())
    return args


def config_of(args, kind=None):
    """Megatron-core's configuration, as core_transformer_config_from_args takes it: every field that is an argument."""
    import dataclasses

    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = kind or (MLATransformerConfig if args.multi_latent_attention else TransformerConfig)
    with with_config_fields(args):
        fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}
    names = {"num_moe_experts": args.num_experts, "use_cpu_initialization": True, "add_bias_linear": False}
    return kind(**{k: v for k, v in {**fields, **names}.items() if not (k == "rope_type" and v is None)})


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Numbers in float64 that every rank draws alike."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill_experts(layer) -> None:
    """Weights of a router, and of the experts of this rank, that do not depend on the number of ranks."""
    first = layer.local_expert_indices[0]
    with torch.no_grad():
        layer.router.weight.copy_(normal(1, *layer.router.weight.shape) * 0.3)
        for i, expert in enumerate(layer.experts.local_experts):
            for parameter in expert.parameters():
                parameter.copy_(normal(10 + first + i, *parameter.shape) * 0.2)


def build_with_parts(words: str):
    """(Megatron's arguments, a GPTModel with random weights of norms) as the flags ask."""
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import tiny_gpt

    args = apply(words)
    fields = {"layernorm_zero_centered_gamma": False, "window_size": None, "window_attn_skip_freq": None}
    model = tiny_gpt(**{name: getattr(args, name, default) for name, default in fields.items()})
    add_parts(model, args)
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if "norm" in name):
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return args, model


def logits_by_formula(model, args, ids, frequencies=None, factor=1.0):
    """What MindSpeed-LLM's gpt_model.py, transformer_layer.py and rms_norm.py compute, written out.

    Args:
        ids: [batch, length] int64.
        frequencies: of the rotation, [width / 2]; plain ones by default.
        factor: of its cosines and sines.

    Returns:
        [batch, length, vocabulary] float32.
    """
    weights, config, length = dict(model.named_parameters()), model.config, ids.shape[1]
    heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    has_parts = getattr(args, "mindspeed_layers", None) == "post_norm"
    ahead = torch.arange(length)[:, None] - torch.arange(length)

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], eps=1e-5) * (weights[name] + int(args.add_rmsnorm_offset))

    def rotate(x):
        plain = 10000 ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.arange(length)[:, None] * (plain if frequencies is None else frequencies)
        cos, sin = (factor * f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin

    def attend(x, layer):
        qkv = functional.linear(x, weights[f"{layer}.self_attention.linear_qkv.weight"])
        q, k, v = qkv.unflatten(-1, (groups, -1)).split([heads // groups * dim, dim, dim], -1)
        q, k = rotate(q.unflatten(-1, (-1, dim)).flatten(2, 3)), rotate(k)
        k, v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) / dim**0.5
        if args.attn_logit_softcapping:
            scores = torch.tanh(scores / args.attn_logit_softcapping) * args.attn_logit_softcapping
        hidden = ahead < 0
        if has_parts and layer.endswith("0"):
            hidden = hidden | (ahead >= args.interleave_sliding_window)
        weight = scores.masked_fill(hidden, -math.inf).softmax(-1)
        merged = torch.einsum("bhst,bthd->bshd", weight, v).flatten(2)
        projection = f"{layer}.self_attention.linear_proj"
        return functional.linear(merged, weights[f"{projection}.weight"], weights.get(f"{projection}.bias"))

    def feed(x, layer):
        gate, up = functional.linear(x, weights[f"{layer}.mlp.linear_fc1.weight"]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, weights[f"{layer}.mlp.linear_fc2.weight"])

    x = weights["embedding.word_embeddings.weight"][ids]
    x = x * (args.scale_emb or 1) * args.embedding_multiplier_scale
    x = x * math.sqrt(x.shape[-1]) if args.input_embeds_norm else x
    for layer in (f"decoder.layers.{n}" for n in range(config.num_layers)):
        for before, compute, after in (
            ("input_layernorm", attend, "post_attn_norm"),
            ("pre_mlp_layernorm", feed, "post_mlp_layernorm"),
        ):
            addend = compute(norm(x, f"{layer}.{before}.weight"), layer)
            addend = norm(addend, f"{layer}.{after}.weight") if has_parts else addend
            x = x + addend * (args.scale_depth / math.sqrt(args.num_layers) if args.scale_depth else 1)
    x = norm(x, "decoder.final_layernorm.weight")
    x = x / (args.hidden_size / args.dim_model_base) if args.dim_model_base else x
    logits = functional.linear(x, weights["output_layer.weight"], weights.get("output_layer.bias"))
    logits = logits * (args.output_multiplier_scale or 1)
    cap = args.output_logit_softcapping
    return torch.tanh(logits / cap) * cap if cap else logits
