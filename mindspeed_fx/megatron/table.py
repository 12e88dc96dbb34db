"""Every change the adaptor makes to Megatron-core, with its reason and where it holds."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from mindspeed_fx.megatron import (  # noqa: F401  *_npu register themselves
    attached_losses,
    averages,
    buckets,
    checkpoint,
    checkpoint_worker,
    collectives,
    context_parallel,
    cross_entropy,
    cuda_calls,
    experts,
    experts_npu,
    forward_beside_backward,
    fp8_linears,
    fusions,
    gated_delta_net,
    groups,
    jit,
    linear,
    main_grad_npu,
    missing,
    moe,
    muon,
    norm,
    offload,
    optimizer,
    packed_sequences,
    patches,
    ripipe,
    rng,
    rope_scaling,
    rotary,
    run_arguments,
    several_tensors,
    sinkhorn,
    sliced_states,
    torch_fsdp2,
    uneven,
    vision,
    wide_norms,
    zero_experts,
    zero_memory,
)
from mindspeed_fx.megatron.deepseek4 import streams
from mindspeed_fx.megatron.dualpipev import placement
from mindspeed_fx.megatron.groups import has_accelerator
from mindspeed_fx.megatron.patches import EVERYWHERE, IN_GRAPH, WITHOUT_ACCELERATOR, WITHOUT_CUDA, Patch

DEALLOCATE = "pipeline_parallel.schedules:deallocate_output_tensor"
GATHERED = "fused_ema_adamw has a state that Megatron does not gather, and without gloo Megatron gathers none"
HIDES = "its handwritten backward hides it from the passes"


def table() -> list[Patch]:
    """The patches for this machine and this Megatron-core."""
    without_cuda = _without_cuda() if groups.kind() != "cuda" else []
    return (
        _everywhere()
        + packed_sequences.table()
        + uneven.table()
        + fp8_linears.table(missing.has_transformer_engine())
        + wide_norms.table()
        + streams.table()
        + torch_fsdp2.table()
        + placement.table()
        + forward_beside_backward.table()
        + _data_parallel()
        + _optimizers()
        + muon.table(has_accelerator())
        + _without_transformer_engine()
        + gated_delta_net.table(missing.has_transformer_engine())
        + _in_graph()
        + without_cuda
        + (_with_accelerator() if has_accelerator() else _without_accelerator())
    )


def device_words() -> tuple[str | None, str | None]:
    """What stands in Megatron's code for "cuda" and for "torch.cuda." in tensor types; None where they stay."""
    kind = groups.kind()
    empty = torch.empty(0, device=kind).type()
    types = empty.removesuffix("FloatTensor")
    return (None if kind == "cuda" else kind), (None if types == "torch.cuda." else types)


def _everywhere() -> list[Patch]:
    alone = "without torch.distributed Megatron could not build a model; it gets groups of one"
    return [
        Patch(
            "jit:jit_fuser",
            jit.jit_fuser,
            "functions compiled at import would be compiled regions inside the compiled model",
            EVERYWHERE,
        ),
        Patch(
            "utils:get_tensor_model_parallel_group_if_none",
            groups.group_or_default,
            f"its warning breaks the graph; {alone}",
            EVERYWHERE,
        ),
        Patch(groups.USE_MPU_PROCESS_GROUPS, classmethod(groups.use_mpu_process_groups), alone, EVERYWHERE),
        Patch(groups.GLOBAL_MEMORY_BUFFER, groups.get_global_memory_buffer, f"{alone}, and a buffer", EVERYWHERE),
        Patch(
            "utils:GlobalMemoryBuffer.get_tensor",
            groups.buffer_get_tensor,
            "a graph cannot own a shared buffer; a CPU has no need of one",
            IN_GRAPH if has_accelerator() else EVERYWHERE,
        ),
        Patch(rope_scaling.FACTOR, rope_scaling.factor_of, "Megatron has YaRN's factor alone", EVERYWHERE),
        Patch(
            "transformer.torch_norm:WrappedTorchNorm.__new__",
            norm.torch_norm_new,
            "torch's norms refuse sequence parallelism for want of an attribute",
            EVERYWHERE,
        ),
        Patch(
            "transformer.moe.moe_utils:router_gating_linear",
            moe.router_gating_linear,
            f"{HIDES}; without TransformerEngine it names an undefined function",
            IN_GRAPH if missing.has_transformer_engine() else EVERYWHERE,
        ),
        Patch(
            "transformer.moe.router:TopKRouter._apply",
            moe.convert_router,
            "a model in 16 bits turns its biases of experts back to float32 in the forward, which a graph cannot",
            EVERYWHERE,
        ),
        *(
            Patch(
                f"{owner}.backward",
                staticmethod(attached_losses.backward_of(owner)),
                "reads or sets a class attribute, which a graph cannot",
                EVERYWHERE,
            )
            for owner in (attached_losses.ROUTER, attached_losses.AHEAD)
        ),
        Patch(
            f"{checkpoint.WITHOUT_OUTPUT}.__init__",
            checkpoint.without_output_init,
            "asks TransformerEngine for a recipe of fp8 where none is wanted",
            EVERYWHERE,
        ),
        Patch(
            cross_entropy.LOSS,
            cross_entropy.vocab_parallel_cross_entropy,
            "plain cross-entropy, which a pass recognises; Megatron's overwrites float32 logits (eager CUDA and NPU "
            "keep it)",
            EVERYWHERE,
        ),
        *context_parallel.table(),
        *ripipe.table(),
        *several_tensors.table(),
        Patch(
            groups.NCCL_OPTIONS,
            groups.get_nccl_options,
            "NCCL's options where there is none; HCCL's are MindSpeed's flags",
            EVERYWHERE,
        ),
        Patch(
            cross_entropy.FUSED_LOSS,
            cross_entropy.fused_vocab_parallel_cross_entropy,
            "the same; Megatron's rounds the gradient to bfloat16 (eager CUDA and NPU keep it)",
            EVERYWHERE,
        ),
    ]


def _data_parallel() -> list[Patch]:
    """Buckets of gradients and parameters, and the checkpoint of what an optimizer keeps for them."""
    return [
        Patch(sliced_states.GET, averages.get_parameter_state_dp_zero, GATHERED, EVERYWHERE),
        Patch(sliced_states.LOAD, averages.load_parameter_state_from_dp_zero, GATHERED, EVERYWHERE),
        Patch(
            optimizer.RESHARDABLE,
            optimizer.sharded_param_state_fully_reshardable,
            "a checkpoint of several buckets, which are padded, has the values of other parameters",
            EVERYWHERE,
        ),
        Patch(
            buckets.BACKWARD_HOOK,
            buckets.make_backward_post_hook,
            "the graph of a compiled chunk adds gradients to main_grad and tells the buckets where they are made",
            EVERYWHERE,
        ),
        Patch(
            buckets.FORWARD_HOOK,
            buckets.make_forward_pre_hook,
            "the graph of a compiled chunk waits for gathered parameters where it first uses them",
            EVERYWHERE,
        ),
    ]


def _optimizers() -> list[Patch]:
    """Where Megatron would take torch's Adam."""
    module = importlib.import_module("megatron.core.optimizer")
    if not module.USING_PYTORCH_OPTIMIZER:
        return []
    reason = "over torch's Adam Megatron's distributed optimizer cannot go on from a checkpoint"
    return [
        Patch("optimizer:Adam", optimizer.Adam, reason, EVERYWHERE, copies=False),
        Patch("optimizer:USING_PYTORCH_OPTIMIZER", False, reason, EVERYWHERE),
        Patch("optimizer.distrib_optimizer:Adam", optimizer.Adam, reason, EVERYWHERE, copies=False),
        Patch("optimizer.distrib_optimizer:HAVE_APEX_OR_TE", True, reason, EVERYWHERE),
        Patch("optimizer.distrib_optimizer:USING_APEX_OPTIMIZER", True, reason, EVERYWHERE),
    ]


def _without_transformer_engine() -> list[Patch]:
    if missing.has_transformer_engine():
        return []
    reason = "compares a version with None where TransformerEngine is not installed"
    norms = "its norms are torch's then, which do not take its words"
    return [
        Patch("utils:is_te_min_version", missing.is_te_min_version, reason, EVERYWHERE),
        Patch(vision.TARGET, vision.clip_vit_init, norms, EVERYWHERE),
    ]


def _in_graph() -> list[Patch]:
    functional = "functional collectives, which a graph can own and schedule; a group of one rank leaves no node"
    recompute = "runs autograd inside its backward, which cannot be captured; torch's checkpoint recomputes the same"
    counts = "reads token counts on the host"
    return [
        *(_mapping(name, functional) for name in collectives.MAPPINGS),
        *(
            [
                Patch(
                    linear.LINEAR,
                    linear.linear,
                    "async_op=True in its backward cannot be captured",
                    also=linear.is_ours_outside_graphs,
                )
            ]
            if groups.kind() == "cuda"
            else []
        ),
        Patch(
            "tensor_parallel.layers:linear_with_frozen_weight",
            linear.frozen_linear,
            "all-reduces in place in its backward",
            also=linear.is_of_8_bits,
        ),
        Patch(
            "tensor_parallel.layers:VocabParallelEmbedding.forward",
            linear.embedding_forward,
            "writes zeros in place through a mask",
        ),
        Patch("fusions.fused_bias_swiglu:bias_swiglu_impl", fusions.bias_swiglu_impl, HIDES),
        Patch("fusions.fused_bias_swiglu:weighted_bias_swiglu_impl", fusions.weighted_bias_swiglu_impl, HIDES),
        Patch("fusions.fused_bias_geglu:bias_geglu_impl", fusions.bias_geglu_impl, HIDES),
        Patch("fusions.fused_bias_gelu:bias_gelu_impl", fusions.bias_gelu_impl, HIDES),
        Patch(sinkhorn.TARGET, sinkhorn.sinkhorn, "ends when the numbers say so"),
        Patch("transformer.moe.router:TopKRouter.apply_input_jitter", moe.apply_input_jitter, "keeps a distribution"),
        Patch(moe.LAYER, moe.layer_forward, counts, also=zero_experts.is_layer_ours),
        Patch(experts.EXPERTS, experts.sequential_forward, counts, also=zero_memory.is_asked),
        Patch(f"{rotary.ROTARY}.forward", _uncached_forward(rotary.ROTARY), "lru_cache cannot be captured"),
        Patch(f"{rotary.YARN}.forward", _uncached_forward(rotary.YARN), "lru_cache cannot be captured"),
        Patch("utils:make_viewless_tensor", viewless, "sets the storage of a tensor, which a graph cannot"),
        Patch("tensor_parallel.random:checkpoint", checkpoint.checkpoint, recompute),
        Patch(f"{checkpoint.WITHOUT_OUTPUT}.checkpoint", checkpoint.checkpoint_without_output, recompute),
        Patch(
            f"{checkpoint.WITHOUT_OUTPUT}.discard_output_and_register_recompute",
            checkpoint.discard_output,
            "resizes storages, which a graph cannot; the checkpoint already drops the output",
        ),
    ]


def _mapping(name: str, reason: str) -> Patch:
    target, ours = f"tensor_parallel.mappings:{name}", getattr(collectives, name)
    if name not in collectives.UNEVEN:
        return Patch(target, ours, reason)
    return Patch(target, ours, f"{reason}; and parts of unequal length", also=collectives.moves_uneven_parts(name))


def _with_accelerator() -> list[Patch]:
    return [Patch(rng.FORK, rng.fork_in_graph, "switches the generator, which a graph cannot")]


def _without_cuda() -> list[Patch]:
    """On a CPU, and on an NPU without torch_npu's transfer_to_npu, for which "cuda" is no device."""
    where, kind = WITHOUT_CUDA, groups.kind()
    return [
        *cuda_calls.table(),
        *checkpoint_worker.table(),
        Patch(
            linear.LINEAR,
            linear.eager_linear,
            "async_op=True in its backward cannot be captured; main_grad's extension needs CUDA",
            where,
        ),
        Patch("tensor_parallel.layers:_grad_accum_fusion_available", True, "main_grad needs no extension here", where),
        Patch(
            "torch.cuda:current_device",
            current_device,
            "Megatron writes device=torch.cuda.current_device() in a hundred places",
            where,
        ),
        Patch("torch:Tensor.cuda", cuda_calls.to_device, "moves what was made on the host", where),
        Patch("torch.nn:Module.cuda", cuda_calls.to_device, "moves a model's parameters", where),
        Patch(f"{rotary.ROTARY}.get_emb", rotary.get_emb, "moves inv_freq to CUDA", where),
        Patch(f"{rotary.YARN}.get_emb", rotary.yarn_get_emb(kind), "moves frequencies to CUDA", where),
        Patch(
            "transformer.utils:get_default_causal_mask",
            functools.partial(rotary.causal_mask, device=kind),
            "makes the mask on CUDA",
            where,
        ),
        Patch(
            "transformer.utils:get_sliding_window_causal_mask",
            functools.partial(rotary.sliding_window_causal_mask, device=kind),
            "makes the mask on CUDA",
            where,
        ),
        Patch("transformer.moe.router:Router.gating", moe.gating, "moves the router's weights to CUDA", where),
        Patch(f"{rng.TRACKER}.add", rng.add, "seeds CUDA's generator", where),
        Patch("tensor_parallel.random:_get_cuda_rng_state", rng.get_state, "reads CUDA's generator", where),
        Patch("tensor_parallel.random:_set_cuda_rng_state", rng.set_state, "sets CUDA's generator", where),
        Patch(
            "tensor_parallel.random:model_parallel_cuda_manual_seed", rng.manual_seed, "seeds CUDA's generator", where
        ),
    ]


def _without_accelerator() -> list[Patch]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    where = WITHOUT_ACCELERATOR
    result = "a tracker made inside the graph would compile the model twice"
    return [
        Patch(
            DEALLOCATE,
            keep_output_tensor,
            "frees what a stage sends as soon as the send has begun; gloo, which has no streams, still reads it",
            where,
        ),
        Patch(buckets.PARTITION, buckets.partition_buckets, "gathers several types in one message", where),
        Patch(
            "torch:Tensor.record_stream", cuda_calls.do_nothing, "tells a CUDA stream of memory; a CPU has one", where
        ),
        Patch(offload.INIT, offload.init_sub_optimizers, "pins memory for a device", where),
        Patch(offload.PARAM_GROUPS, offload.param_groups, "asks whether parameters lie on CUDA", where),
        Patch(f"{moe.DISPATCHER}._maybe_dtoh_and_synchronize", moe.to_host, "copies on a CUDA stream", where),
        Patch(f"{moe.DISPATCHER}.cuda_dtoh_stream", object(), "makes a CUDA stream where there is none yet", where),
        Patch(rng.FORK, rng.fork, "forks CUDA's generator", where),
        Patch("tensor_parallel.random:_CUDA_RNG_STATE_TRACKER", CudaRNGStatesTracker(), result, where),
        Patch("tensor_parallel.random:_CUDA_RNG_STATE_TRACKER_INITIALIZED", True, result, where),
    ]


def _uncached_forward(rotary_class: str) -> Any:
    module, name = rotary_class.split(":")
    return rotary.without_cache(vars(getattr(importlib.import_module(f"megatron.core.{module}"), name))["forward"])


def viewless(inp: torch.Tensor, requires_grad: bool, keep_graph: bool) -> torch.Tensor:
    """``make_viewless_tensor``: a copy of a view, whose base nothing holds then."""
    return inp if inp._base is None else inp.clone()


def keep_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """``deallocate_output_tensor``, but that the memory lives as long as ``out``: until its backward."""
    memory = None if out is None else out.data
    patches.original(DEALLOCATE)(out, deallocate_pipeline_outputs)
    if memory is not None:
        out.memory_of_sends = memory


def current_device() -> torch.device:
    """``torch.cuda.current_device`` where Megatron uses it as a device: the NPU or the CPU; meta where a model is built
    under ``torch.device("meta")``, which Megatron's explicit device would defeat. In a run with
    ``--init-model-with-meta-device`` it is to: nobody fills such weights later.
    """
    default = torch.get_default_device()
    is_filled = getattr(run_arguments.training_arguments(), "init_model_with_meta_device", False)
    return default if default.type == "meta" and not is_filled else torch.device(groups.kind())
