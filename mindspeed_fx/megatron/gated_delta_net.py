"""Megatron's GatedDeltaNet where flash-linear-attention and TransformerEngine are not installed.

Its kernel becomes ``mindspeed::gated_delta_rule``, eager and in a graph, and its layers are made of Megatron's own
linears with a norm of their own before them. Sources: megatron/core/ssm/gated_delta_net.py and
megatron/core/models/gpt/experimental_attention_variant_module_specs.py of 0.16.1.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx import kernels  # noqa: F401  defines the operator
from mindspeed_fx.megatron.patches import EVERYWHERE, PREFIX, Patch

RULE, SPECS = "ssm.gated_delta_net", "models.gpt.experimental_attention_variant_module_specs"


def table(has_transformer_engine: bool) -> list[Patch]:
    """The patches for what is not installed."""
    if any(importlib.util.find_spec(f"{PREFIX}.{name}") is None for name in (RULE, SPECS)):
        return []
    rule = "one operator; unrolled over chunks and rows it is thousands of nodes"
    result = [Patch(f"{RULE}:torch_chunk_gated_delta_rule", chunk_gated_delta_rule, rule, EVERYWHERE)]
    if importlib.util.find_spec("fla") is None:
        reason = "flash-linear-attention is not installed"
        importlib.import_module(f"{PREFIX}.{RULE}").__dict__.setdefault("l2norm", None)  # the import failed before it
        result += [
            Patch(f"{RULE}:HAVE_FLA", True, reason, EVERYWHERE),
            Patch(f"{RULE}:l2norm", l2norm, reason, EVERYWHERE),
            Patch(f"{RULE}:chunk_gated_delta_rule", chunk_gated_delta_rule, reason, EVERYWHERE),
        ]
    if not has_transformer_engine:
        reason = "its layers are TransformerEngine's, which is not installed"
        result += [
            Patch(f"{SPECS}:_get_backend_spec_provider", local_backend, reason, EVERYWHERE),
            Patch(f"{SPECS}:get_gated_delta_net_module_spec", gated_delta_net_spec, reason, EVERYWHERE),
            Patch(f"{SPECS}:_get_self_attention_module_spec", self_attention_spec, reason, EVERYWHERE),
        ]
    return result


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over ``dim``, computed in float32 or better and returned in the type of x."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, scaled by the root of the width of a key.

    Args:
        query, key: [batch, seq, k_heads, k_dim]; value: [batch, seq, heads, v_dim].
        g, beta: [batch, seq, heads].
        chunk_size: tokens of a chunk.
        initial_state: [batch, heads, k_dim, v_dim] or None for zeros.
        output_final_state: whether the second result is wanted; else None.
        use_qk_l2norm_in_kernel: normalize queries and keys.

    Returns:
        [batch, seq, heads, v_dim] in the type of ``query``, and the last state in float32 (float64).
    """
    q, k, v, g, beta = (x.transpose(1, 2) for x in (query, key, value, g, beta))
    eps = 1e-6 if use_qk_l2norm_in_kernel else None
    out, final, _ = torch.ops.mindspeed.gated_delta_rule(
        q, k, v, g, beta, initial_state, query.shape[-1] ** -0.5, eps, chunk_size
    )
    return out.transpose(1, 2).to(query.dtype), final if output_final_state else None


def local_backend(config: Any) -> Any:
    """Megatron's own modules."""
    from megatron.core.models.backends import LocalSpecProvider

    return LocalSpecProvider()


def gated_delta_net_spec(config: Any, backend: Any = None) -> Any:
    """A GatedDeltaNet whose input's norm stands before it."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    backend = backend or local_backend(config)
    submodules = GatedDeltaNetSubmodules(
        in_proj=backend.column_parallel_linear(),
        out_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False),
        out_proj=backend.row_parallel_linear(),
    )
    return ModuleSpec(module=GatedDeltaNet, submodules=submodules, metainfo={"fuse_input_layernorm": False})


def self_attention_spec(config: Any, backend: Any = None) -> Any:
    """The attention of the layers between, from Megatron's own modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        moe_use_legacy_grouped_gemm=config.moe_use_legacy_grouped_gemm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    attention = layer.submodules.self_attention
    attention.metainfo["fuse_input_layernorm"] = False
    return attention
