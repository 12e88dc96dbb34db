"""What Megatron-core 0.16 needs to be captured whole, and to run without CUDA.

``import mindspeed_fx.megatron_adaptor`` applies the patches; each has a reason (:func:`applied`) and :func:`undo`
restores Megatron. Patches for capture are applied everywhere and keep Megatron's numerics; patches for running without
CUDA are applied only where there is neither CUDA nor an NPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import torch

from mindspeed_fx.megatron import collectives, layers, patches, without_cuda
from mindspeed_fx.megatron.patches import Patch, applied

__all__ = ["applied", "apply", "known_limits", "undo"]

SUPPORTED = ("0.16",)
ORIGINALS: dict[str, Any] = {}
"""Megatron's own functions that a replacement still needs."""


def apply() -> None:
    """Apply the patches; a second call does nothing.

    Raises:
        ImportError: Megatron-core is missing, or of a version the patches were not written for.
    """
    if applied():
        return
    _check_version()
    from megatron.core import jit
    from megatron.core.tensor_parallel import layers as megatron_layers

    ORIGINALS["linear"] = megatron_layers.linear_with_grad_accumulation_and_async_allreduce
    patches.on_undo(jit, "jit_fuser", jit.jit_fuser)
    jit.disable_jit_fuser()
    patches.unwrap_compiled()
    patches.record("jit:jit_fuser", "functions compiled at import would be compiled regions inside the compiled model")
    patches.apply(_for_capture())
    if not accelerated():
        patches.apply(_without_cuda())
        _stand_in_for_current_device()


def undo() -> None:
    """Restore Megatron-core as it was before :func:`apply`."""
    patches.undo()


def accelerated() -> bool:
    """True where there is CUDA or an NPU."""
    return torch.cuda.is_available() or (hasattr(torch, "npu") and torch.npu.is_available())


def known_limits() -> list[str]:
    """What is not captured, or behaves differently, with the adaptor; each one sentence."""
    return [
        "Gradient accumulation fusion (main_grad) and deferred embedding weight gradients stay with Megatron's autograd.Function, which writes outside the graph and breaks it.",
        "On CPU the random-number tracker's fork does nothing inside a compiled graph: dropout in the tensor-parallel region draws from the rank's default generator.",
        "Sequence shards of uneven size (output_split_sizes, input_split_sizes) raise NotImplementedError.",
        "The gathered input of a sequence-parallel linear is kept for its weight gradient; Megatron gathers it again in the backward.",
        "MoE: the all-to-all and all-gather dispatchers read token counts on the host (tolist, masked_select), which breaks the graph at every MoE layer.",
    ]


def _check_version() -> None:
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("mindspeed_fx.megatron_adaptor needs megatron-core, which is not installed; pip install 'mindspeed-fx[megatron]'") from None
    if not version.startswith(SUPPORTED):
        raise ImportError(f"mindspeed_fx.megatron_adaptor supports megatron-core {', '.join(s + '.x' for s in SUPPORTED)}; {version} is installed")


def _for_capture() -> list[Patch]:
    functional = "written over functional collectives, which Dynamo captures; a group of one rank leaves no node"
    found = [Patch(f"tensor_parallel.mappings:{name}", getattr(collectives, name), functional) for name in _MAPPINGS]
    return found + [
        Patch("utils:get_tensor_model_parallel_group_if_none", collectives.group_or_default, "its warning breaks the graph"),
        Patch("tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce", layers.linear, "async_op=True in its backward cannot be captured"),
        Patch("tensor_parallel.cross_entropy:vocab_parallel_cross_entropy", layers.vocab_parallel_cross_entropy, "its handwritten backward hides the loss from the passes"),
        Patch("fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy", layers.fused_vocab_parallel_cross_entropy, "the same"),
        Patch("fusions.fused_bias_swiglu:bias_swiglu_impl", layers.bias_swiglu_impl, "its handwritten backward hides SwiGLU from the passes"),
        Patch("fusions.fused_bias_swiglu:weighted_bias_swiglu_impl", layers.weighted_bias_swiglu_impl, "the same"),
        Patch("transformer.torch_norm:WrappedTorchNorm.__new__", layers.torch_norm_new, "torch's norms refuse sequence parallelism for want of an attribute"),
        Patch("models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward", _rotary_forward(), "lru_cache cannot be captured"),
    ]


def _without_cuda() -> list[Patch]:
    return [
        Patch("models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_emb", without_cuda.rotary_get_emb, "moves inv_freq to CUDA"),
        Patch("transformer.utils:get_default_causal_mask", without_cuda.causal_mask, "makes the mask on CUDA"),
        Patch("transformer.utils:get_sliding_window_causal_mask", without_cuda.sliding_window_causal_mask, "makes the mask on CUDA"),
        Patch("utils:GlobalMemoryBuffer.get_tensor", without_cuda.buffer_get_tensor, "allocates on CUDA, and a graph cannot own a shared buffer"),
        Patch("tensor_parallel.random:get_cuda_rng_tracker", without_cuda.get_rng_tracker, "reads CUDA's generator"),
        Patch("tensor_parallel.random:model_parallel_cuda_manual_seed", without_cuda.manual_seed, "seeds CUDA's generator"),
    ]


def _rotary_forward() -> Any:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    cached = RotaryEmbedding.__dict__["forward"]
    plain = getattr(cached, "__wrapped__", cached)

    @functools.wraps(plain)
    def forward(self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        return plain(self, max_seq_len, offset, packed_seq, cp_group)

    return forward


def _stand_in_for_current_device() -> None:
    """Megatron writes ``device=torch.cuda.current_device()`` in a hundred places; without CUDA that call raises."""
    patches.on_undo(torch.cuda, "current_device", torch.cuda.current_device)
    torch.cuda.current_device = without_cuda.current_device
    patches.record("torch.cuda:current_device", "used as a device all over Megatron; raises without CUDA")


_MAPPINGS = (
    "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region", "scatter_to_sequence_parallel_region", "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region", "all_gather_last_dim_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region", "all_to_all",
)  # fmt: skip
