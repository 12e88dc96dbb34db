"""Parts of MindSpeed-LLM's models that Megatron-core's have not: scales, soft-caps, norms of what a layer adds.

They are put on a GPTModel when it is built, as hooks and as norms of its layers, whose weights have MindSpeed-LLM's
names in checkpoints. Without the flags nothing is changed.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from typing import Any, Callable

import torch
from torch import Tensor, nn

from mindspeed_fx.megatron import (
    absorbed_attention,
    adaptive_memory,
    alibi,
    ampipe,
    biases,
    capacity,
    deepspeed_moe,
    expert_placement,
    group_limited_router,
    hot_experts,
    patches,
    rope_scaling,
    shortcut,
    sparse_attention,
    sparse_mixer,
    square_root_router,
    tp_2d,
    zero_experts,
    zero_memory,
)
from mindspeed_fx.megatron.deepseek4 import model as deepseek4
from mindspeed_fx.megatron.deepseek4.settings import NAME as DEEPSEEK4
from mindspeed_fx.megatron.flags import recomputed
from mindspeed_fx.megatron.flags.llm_parts import ALL_HEADS, DENSE_BIAS, POST_NORM, SHORTCUT
from mindspeed_fx.megatron.norm import AllHeadsRMSNorm, OffsetRMSNorm
from mindspeed_fx.megatron.run_arguments import training_arguments

TARGET = "models.gpt.gpt_model:GPTModel.__init__"


def gpt_model_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """``GPTModel.__init__`` with the parts that the flags of the run ask for."""
    flags = training_arguments()
    if getattr(flags, "mindspeed_layers", None) == SHORTCUT:
        args, kwargs = _with_shortcuts(args, kwargs)
    if getattr(flags, "mindspeed_layers", None) == DEEPSEEK4:
        args, kwargs = deepseek4.with_layers(args, kwargs, flags)
    patches.original(TARGET)(self, *args, **kwargs)
    if flags is not None:
        add_parts(self, flags)


def _with_shortcuts(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of ``GPTModel.__init__`` whose layers are LongCat's."""
    if "transformer_layer_spec" in kwargs:
        return args, {**kwargs, "transformer_layer_spec": shortcut.make_shortcuts(kwargs["transformer_layer_spec"])}
    return (args[0], shortcut.make_shortcuts(args[1]), *args[2:]), kwargs


def add_parts(model: Any, args: Namespace) -> None:
    """Add what ``args`` ask for to a GPTModel, or to a pipeline stage of one.

    With e the embedding, x what the last layer returns, s scores after their scale, f what attention or MLP returns:
    e' = a e, x' = x d / h, logits' = c tanh(m logits / c), s' = c tanh(s / c), and f' = norm(f) or f' = f k / sqrt(L).
    """
    scale = embedding_scale(args, model.config)
    if model.pre_process and scale != 1.0:
        model.embedding.register_forward_hook(lambda module, inputs, output: output * scale)
    if model.post_process:
        _scale_logits(model.output_layer, args)
    if model.post_process and getattr(args, "add_output_layer_bias", False):
        biases.add_to_columns(model.output_layer)
    if getattr(args, "mindspeed_layers", None) == DEEPSEEK4:
        deepseek4.add_parts(model, args)
    elif getattr(args, "enable_dsa_indexer", False):
        sparse_attention.add_indexers(model, args)
    elif getattr(args, "absorb_up_projections", False):
        absorbed_attention.absorb_all(model)
    if getattr(args, "square_root_scores", False):
        square_root_router.change_routers(model)
    if getattr(args, "tp_2d", False):
        tp_2d.divide(model, args)
    for layer in model.decoder.layers:
        _change_layer(layer, args)
    if getattr(args, "gemm_gradient_accumulation_fusion", False):
        _add_to_main_grads(model)
    if getattr(args, "scaled_rotation", None):
        rope_scaling.set_frequencies(model, args)
    if getattr(args, "capacity_over_sequence", False):
        capacity.count_over_sequence(model)
    if getattr(args, "moe_model_type", None) == deepspeed_moe.NAME:
        ampipe.divide_layers(model, deepspeed_moe.set_gates(model, args))
    if getattr(args, "biased_softmax", False):
        zero_experts.add_zero_experts(model, args)
    if getattr(args, "enable_mla_scale_q_lora", False) or getattr(args, "enable_mla_scale_kv_lora", False):
        _scale_latents(model, args)
    if getattr(args, "sparse_mixer", False):
        _set_routing(model, sparse_mixer.route)
    if settings := getattr(args, "group_limited", None):
        _set_routing(
            model, functools.partial(group_limited_router.route, groups=group_limited_router.Groups(*settings))
        )
    if getattr(args, "fix_router", False):
        _fix_routers(model)
    if kind := getattr(args, "router_softmax_in_fp32", ""):
        _widen_softmaxes(model, rounds=kind == "rounded")
    if getattr(args, "enable_recompute_layers_per_pp_rank", False) and model.config.recompute_granularity == "full":
        here = recomputed.with_stage(args, recomputed.stage_of(model))
        model.config.recompute_num_layers = recomputed.whole_layers(here)
    if getattr(args, "moe_zero_memory", "disable") != "disable":
        zero_memory.set_levels(model, args)
    if getattr(args, "moe_adaptive_recompute_activation", False):
        adaptive_memory.prepare(model, args)
    if getattr(args, "enable_expert_placement", False) or getattr(args, "print_expert_load", False):
        expert_placement.prepare(model, args)
    if getattr(args, "balanced_moe_experts", False):
        hot_experts.prepare(model, args)
    if getattr(args, "full_attention_interval", 0):
        _change_delta_nets(model)
    if getattr(args, "add_rmsnorm_offset", False):  # MindSpeed-LLM's weights start at one, Megatron's at zero
        for norm in (m for m in model.modules() if isinstance(m, OffsetRMSNorm)):
            norm.start, norm.is_wide = 1.0, getattr(args, "rmsnorm_weight_in_fp32", False)
            norm.reset_parameters()


def embedding_scale(args: Namespace, config: Any) -> float:
    """What the embedding is multiplied by; sqrt(h) in the type of the weights, as Gemma has it."""
    scale = (getattr(args, "scale_emb", None) or 1.0) * (getattr(args, "embedding_multiplier_scale", None) or 1.0)
    if getattr(args, "input_embeds_norm", False):
        scale *= torch.tensor(config.hidden_size**0.5, dtype=config.params_dtype, device="cpu").item()
    return scale


def _scale_logits(output_layer: Any, args: Namespace) -> None:
    base, scale = getattr(args, "dim_model_base", None), getattr(args, "output_multiplier_scale", None)
    cap = getattr(args, "output_logit_softcapping", None)
    if base:
        narrow = base / args.hidden_size
        output_layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * narrow, *inputs[1:]))
    if scale or cap:
        change = _capped(cap, scale or 1.0)
        output_layer.register_forward_hook(lambda module, inputs, output: (change(output[0]), *output[1:]))


def _capped(cap: float | None, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    if not cap:
        return lambda x: x * scale
    return lambda x: torch.tanh(x * (scale / cap)) * cap


def _change_layer(layer: Any, args: Namespace) -> None:
    cap, depth = getattr(args, "attn_logit_softcapping", None), getattr(args, "scale_depth", None)
    layers = getattr(args, "mindspeed_layers", None)
    if layers == ALL_HEADS and layer.config.qk_layernorm:
        attention, config = layer.self_attention, layer.config
        attention.q_layernorm, attention.k_layernorm = (
            AllHeadsRMSNorm(heads * config.kv_channels, eps=config.layernorm_epsilon)
            for heads in (config.num_attention_heads, config.num_query_groups)
        )
    if layers == DENSE_BIAS and getattr(args, "add_dense_bias", False):
        biases.add_to_rows(layer.self_attention.linear_proj)
    if cap:
        softmax, change = layer.self_attention.core_attention.scale_mask_softmax, _capped(cap)
        softmax.register_forward_pre_hook(lambda module, inputs: (change(inputs[0]), *inputs[1:]))
    if getattr(args, "alibi", False):
        alibi.add_bias(layer.self_attention.core_attention)
    if layers == POST_NORM:
        layer.post_attn_norm, layer.post_mlp_layernorm = _norm(layer.config), _norm(layer.config)
        layer.self_attn_bda = _before(layer.self_attn_bda, layer.post_attn_norm)
        layer.mlp_bda = _before(layer.mlp_bda, layer.post_mlp_layernorm)
    elif depth:
        # MindSpeed-LLM counts layers that do nothing, which --noop-layers has left out here
        factor = depth / (getattr(args, "mindspeed_init_layers", None) or args.num_layers) ** 0.5
        layer.self_attn_bda, layer.mlp_bda = (
            _before(add, lambda x: x * factor) for add in (layer.self_attn_bda, layer.mlp_bda)
        )


def _add_to_main_grads(model: Any) -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    for experts in (m for m in model.modules() if isinstance(m, SequentialMLP)):
        for expert in experts.local_experts:
            expert.linear_fc1.gradient_accumulation_fusion = True
            expert.linear_fc2.gradient_accumulation_fusion = True


def _change_delta_nets(model: Any) -> None:
    """MindSpeed-LLM's draw A of [0, 16), Megatron's of [1, 16); their norms have no offset."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    for net in (m for m in model.modules() if isinstance(m, GatedDeltaNet)):
        net.out_norm = nn.RMSNorm(net.value_head_dim, eps=net.config.layernorm_epsilon).to(net.A_log)
        net.A_init_range = (0, 16)
        net.reset_parameters()


def _scale_latents(model: Any, args: Namespace) -> None:
    """Latents of queries, and of keys and values, times the root of hidden size over their width (LongCat)."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    for attention in (m for m in model.modules() if isinstance(m, MLASelfAttention)):
        config = attention.config
        if args.enable_mla_scale_q_lora:
            _scale_output(attention.q_layernorm, (config.hidden_size / config.q_lora_rank) ** 0.5)
        if args.enable_mla_scale_kv_lora:
            _scale_output(attention.kv_layernorm, (config.hidden_size / config.kv_lora_rank) ** 0.5)


def _scale_output(module: nn.Module, scale: float) -> None:
    module.register_forward_hook(lambda module, inputs, output: output * scale)


def _fix_routers(model: Any) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    for router in (m for m in model.modules() if isinstance(m, TopKRouter)):
        router.register_forward_hook(lambda module, inputs, output: in_turn(*output, module.topk))


def _widen_softmaxes(model: Any, rounds: bool) -> None:
    """Logits enter the choice of experts in float32; with ``rounds`` the weights return to the type of the logits."""
    from megatron.core.transformer.moe.router import TopKRouter

    def widened(routing: Callable) -> Callable:
        def call(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            probs, routing_map = routing(logits.float(), *args, **kwargs)
            return probs.type_as(logits) if rounds else probs, routing_map

        return call

    for router in (m for m in model.modules() if isinstance(m, TopKRouter)):
        router.routing = widened(router.routing)


def _set_routing(model: Any, route: Callable) -> None:
    """``route(router, ...)`` as the choice of every router."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in (m for m in model.modules() if isinstance(m, TopKRouter)):
        router.routing = functools.partial(route, router)


def in_turn(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Choice j of token i becomes expert (i k + j) mod E, with the j-th largest weight of the token.

    Args:
        probs: [tokens, experts], zero where a token does not go.
        routing_map: [tokens, experts] bool.
        topk: k.

    Returns:
        The same for tokens that go to experts in turn.
    """
    tokens, experts = probs.shape
    weights = probs.topk(topk, dim=1).values
    choices = torch.arange(tokens * topk, device=probs.device).view(tokens, topk) % experts
    return torch.zeros_like(probs).scatter(1, choices, weights), torch.zeros_like(routing_map).scatter(1, choices, True)


def _norm(config: Any) -> nn.Module:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def _before(bias_dropout_add: Callable, change: Callable) -> Callable:
    """Megatron's ``bias_dropout_add`` of what ``change`` makes of the addend, before its bias."""

    def build(training: bool, fused: bool) -> Callable:
        add = bias_dropout_add(training, fused)

        def run(x_with_bias: tuple, residual: Tensor, prob: float) -> Tensor:
            return add((change(x_with_bias[0]), *x_with_bias[1:]), residual, prob)

        return run

    return build
