"""The model of pretrain_gpt.py from Megatron-core's parts: processes, config, chunks, data parallelism, optimizer."""

from __future__ import annotations

import mindspeed_fx.megatron_adaptor  # isort: skip  before Megatron-core

import contextlib
import dataclasses
import os
import random
import tempfile
from argparse import Namespace
from typing import Any, Iterator

import gpt_arguments
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import VOCABULARY
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model


def start_processes(args: Namespace) -> torch.device:
    """Joins the processes, makes Megatron's groups and seeds every generator; returns this rank's device."""
    accelerator = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if accelerator else torch.device("cpu")
    torch.cuda.set_device(device)
    backend = "nccl" if accelerator else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # one process: a store in a file needs no port
        dist.init_process_group(backend, store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return device


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What Megatron-core refuses while the model is built ends the run in its words, in one line."""
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        if not str(error):
            raise
        gpt_arguments.fail(" ".join(str(error).split()))


def build_config(args: Namespace) -> TransformerConfig:
    """Megatron's config: what it has a field for, of the arguments, and what the model is by itself."""
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    flags = (*gpt_arguments.MODEL, *gpt_arguments.LATENT, *gpt_arguments.MOE, *gpt_arguments.PARALLEL)
    names = {f.name for f in dataclasses.fields(kind)} & {*flags, "sequence_parallel", "gradient_accumulation_fusion"}
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    virtual = args.num_virtual_stages_per_pipeline_rank
    latent = {"rope_type": "rope"} if args.multi_latent_attention else {}
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = kind(
        **given,
        **latent,
        num_moe_experts=args.num_experts,
        virtual_pipeline_model_parallel_size=virtual,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        moe_router_load_balancing_type="aux_loss" if args.num_experts else "none",
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
    )
    config.context_parallel_algo = args.context_parallel_algo  # MindSpeed's flag, which the adaptor reads
    return config


def build_chunk(args: Namespace, config: TransformerConfig, stage: int | None) -> torch.nn.Module:
    """One chunk of the model: this rank's stage, or virtual stage ``stage``, of the pipeline."""
    where = {"ignore_virtual": stage is None, "vp_stage": stage}
    chunk = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=args.num_experts,
            multi_latent_attention=args.multi_latent_attention,
            normalization="RMSNorm",
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        position_embedding_type="rope",
        vp_stage=stage,
    )
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    chunk.cuda(torch.cuda.current_device())
    return Float16Module(config, chunk) if args.bf16 else chunk


def build_model(args: Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    """This rank's chunks, each in Megatron's data parallelism and compiled in one graph."""
    virtual = args.num_virtual_stages_per_pipeline_rank
    chunks = [build_chunk(args, config, stage) for stage in (range(virtual) if virtual else (None,))]
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=True,
        bucket_size=args.ddp_bucket_size if args.overlap_grad_reduce else None,
    )
    model = [
        DistributedDataParallel(config, data_parallel, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]
    for chunk in model:
        compile_chunk(args, chunk)
    return model


def compile_chunk(args: Namespace, chunk: DistributedDataParallel) -> None:
    """Below Megatron's wrappers, in place."""
    if args.backend == "mindspeed":
        mindspeed_fx.megatron_adaptor.compile_chunk(chunk, args.options)
    elif args.backend != "eager":
        unwrap_model(chunk).compile(backend=args.backend)


def build_optimizer(args: Namespace, model: list[DistributedDataParallel]) -> tuple[Any, OptimizerParamScheduler]:
    """Adam with float32 main weights, which data-parallel ranks divide, and the schedule of its rate."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, model, config_overrides=get_standard_config_overrides(config))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
