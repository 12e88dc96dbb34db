"""Arguments of pretrain_gpt.py: Megatron's flags by Megatron's names, and every option of the backend."""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

import backend_options
import torch

from mindspeed_fx.megatron.context_parallel.settings import ALGORITHMS

MODEL = {
    "num_layers": 8,
    "hidden_size": 384,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 6,
    "num_query_groups": (int, "heads of keys and values; default: 2, with latent attention as many as queries"),
    "seq_length": 256,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.02,
}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
MOE = {
    "num_experts": (int, "experts in every layer; default: none"),
    "moe_ffn_hidden_size": (int, "default: --ffn-hidden-size"),
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 1e-2,
    "moe_shared_expert_intermediate_size": (int, "default: no shared expert"),
    "moe_token_dispatcher_type": "alltoall",
}
TRAINING = {
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 400,
    "lr": 1.5e-3,
    "min_lr": 1.5e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": (int, "default: a tenth of --train-iters"),
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
    "eval_interval": 100,
    "eval_iters": 8,
    "seed": 1,
    "save": "runs/gpt",
    "save_interval": 100,
    "load": (str, "go on from the last checkpoint under this directory, bitwise as if never stopped"),
    "exit_interval": (int, "save and end after this many iterations"),
}
PARALLEL = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_virtual_stages_per_pipeline_rank": (int, "default: 1"),
    "context_parallel_size": 1,
    "context_parallel_algo": "ulysses_cp_algo",
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": (int, "default: --tensor-model-parallel-size"),
    "ddp_bucket_size": 4_000_000,
}
CHOICES = {
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root"),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "context_parallel_algo": ALGORITHMS,
}
RESUME = (*MODEL, "multi_latent_attention", *LATENT, *MOE, "global_batch_size", "train_iters", "lr", "min_lr",
          "lr_decay_style", "lr_warmup_iters", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "seed", "bf16",
          "use_distributed_optimizer")  # fmt: skip
"""What a run that goes on must have as it was. Parallel sizes, micro-batches and the compiler may be others: the values
are the same to rounding."""


def parse(description: str | None, words: list[str] | None = None) -> argparse.Namespace:
    """The arguments, checked; ``words``: the command line, by default that of the process."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model = parser.add_argument_group("model (Megatron's flags)")
    _add(model, MODEL)
    _add_switch(model, "bf16", "bfloat16 with float32 main weights; default: on an accelerator, float32 on a CPU")
    model.add_argument("--multi-latent-attention", action="store_true")
    _add(model, LATENT)
    _add(model, MOE)
    training = parser.add_argument_group("training (Megatron's flags)")
    training.add_argument("--data", nargs="+", metavar="FILE", help="text; default: Python's standard library's source")
    _add(training, TRAINING)
    training.add_argument("--peak-tflops", type=float, help="for MFU; default: measured, by matrix products")
    parallel = parser.add_argument_group("parallelism (Megatron's flags, under torchrun; data parallel has the rest)")
    _add(parallel, PARALLEL)
    parallel.add_argument("--sequence-parallel", action="store_true")
    _add_switch(parallel, "use_distributed_optimizer", "each data-parallel rank has a part of the state; default: on")
    _add_switch(parallel, "overlap_grad_reduce", "default: on where there are data-parallel ranks")
    _add_switch(parallel, "overlap_param_gather", "default: as --overlap-grad-reduce, with the distributed optimizer")
    _add_switch(parallel, "gradient_accumulation_fusion", "default: on a CPU; CUDA's needs Apex")
    compiler = parser.add_argument_group("compiler")
    compiler.add_argument("--backend", choices=("eager", "inductor", "mindspeed"), default="mindspeed")
    backend_options.add_arguments(compiler)
    return complete(parser.parse_args(words))


def _add(group: Any, table: dict[str, Any]) -> None:
    for name, value in table.items():
        kind, text = value if isinstance(value, tuple) else (type(value), f"default: {value}")
        default = None if isinstance(value, tuple) else value
        metavar = None if name in CHOICES else kind.__name__.upper()
        group.add_argument(
            _flag(name), type=kind, default=default, metavar=metavar, choices=CHOICES.get(name), help=text
        )


def _add_switch(group: Any, name: str, text: str) -> None:
    group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, help=text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Defaults that depend on others, then :func:`check`."""
    args.world_size, args.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    args.options = backend_options.given(args, args.backend)
    accelerator = torch.cuda.is_available()
    args.bf16 = accelerator if args.bf16 is None else args.bf16
    if args.gradient_accumulation_fusion is None:
        args.gradient_accumulation_fusion = not accelerator
    if args.use_distributed_optimizer is None:
        args.use_distributed_optimizer = True
    if args.num_query_groups is None:
        args.num_query_groups = args.num_attention_heads if args.multi_latent_attention else 2
    check_sizes(args)
    if args.lr_warmup_iters is None:
        args.lr_warmup_iters = args.train_iters // 10
    if args.overlap_grad_reduce is None:
        args.overlap_grad_reduce = args.backend != "inductor" and args.replicas > 1
    if args.overlap_param_gather is None:
        args.overlap_param_gather = args.overlap_grad_reduce and args.use_distributed_optimizer
    check_training(args)
    return args


def check_sizes(args: argparse.Namespace) -> None:
    """Sets ``data_parallel_size`` and ``replicas``, the ranks that hold the same weights; ends the run where sizes do
    not go together.
    """
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    vpp, ep = args.num_virtual_stages_per_pipeline_rank or 1, args.expert_model_parallel_size
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                 "expert_model_parallel_size", "micro_batch_size", "global_batch_size", "train_iters", "num_layers",
                 "seq_length", "num_attention_heads", "num_query_groups"):  # fmt: skip
        if getattr(args, name) < 1:
            fail(f"{_flag(name)} {getattr(args, name)} is less than 1")
    if args.world_size % (tp * pp * cp):
        fail(
            f"{args.world_size} processes cannot be divided by --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {tp * pp * cp}"
        )
    args.replicas = args.world_size // (tp * pp)
    args.data_parallel_size = args.replicas // cp
    if args.num_attention_heads % args.num_query_groups:
        fail(f"--num-attention-heads {args.num_attention_heads} cannot be divided among --num-query-groups "
             f"{args.num_query_groups}")  # fmt: skip
    if args.hidden_size % args.num_attention_heads and not args.multi_latent_attention:
        fail(f"--hidden-size {args.hidden_size} cannot be divided among --num-attention-heads "
             f"{args.num_attention_heads}")  # fmt: skip
    if vpp > 1 and pp == 1:
        fail(f"--num-virtual-stages-per-pipeline-rank {vpp} divides the stages of a pipeline, and there is one stage")
    if args.num_layers % (pp * vpp):
        fail(f"--num-layers {args.num_layers} cannot be divided among {pp * vpp} stages of the pipeline")
    if args.sequence_parallel and tp == 1:
        fail("--sequence-parallel divides what --tensor-model-parallel-size leaves whole, which is 1")
    if args.sequence_parallel and args.seq_length // cp % tp:
        fail(f"--seq-length {args.seq_length} cannot be divided among the {tp * cp} ranks of --sequence-parallel")
    if cp > 1 and args.seq_length % (2 * cp):
        fail(f"--seq-length {args.seq_length} cannot be divided in {2 * cp} chunks for --context-parallel-size {cp}")
    check_experts(args, tp, ep)


def check_experts(args: argparse.Namespace, tp: int, ep: int) -> None:
    """Ends the run where experts and ranks do not go together."""
    if ep > 1 and args.num_experts is None:
        fail(f"--expert-model-parallel-size {ep} divides experts; --num-experts is not given")
    if args.num_experts is None:
        return
    expert_tp = args.expert_tensor_parallel_size or tp
    if args.num_experts % ep:
        fail(f"--num-experts {args.num_experts} cannot be divided among --expert-model-parallel-size {ep} ranks")
    ranks = args.world_size // args.pipeline_model_parallel_size
    if ranks % (ep * expert_tp):
        fail(
            f"the {ranks} ranks of a stage cannot be divided by --expert-model-parallel-size {ep} x "
            f"--expert-tensor-parallel-size {expert_tp}"
        )
    if args.moe_router_topk > args.num_experts:
        fail(f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}")
    if tp > 1 and not args.sequence_parallel:
        fail("--num-experts with --tensor-model-parallel-size above 1 needs --sequence-parallel")


def check_training(args: argparse.Namespace) -> None:
    """Ends the run where batches, schedule and overlap do not go together."""
    batch = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % batch:
        fail(
            f"--global-batch-size {args.global_batch_size} cannot be divided by --micro-batch-size "
            f"{args.micro_batch_size} x {args.data_parallel_size} data-parallel ranks"
        )
    micro_batches = args.global_batch_size // batch
    if (args.num_virtual_stages_per_pipeline_rank or 1) > 1 and micro_batches % args.pipeline_model_parallel_size:
        fail(
            f"--num-virtual-stages-per-pipeline-rank needs a multiple of {args.pipeline_model_parallel_size} "
            f"micro-batches in a step, and --global-batch-size {args.global_batch_size} gives {micro_batches}"
        )
    if not 0 <= args.lr_warmup_iters < args.train_iters:
        fail(
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves nothing of --train-iters {args.train_iters}; give 0 to "
            f"{args.train_iters - 1}, or neither flag: then it is a tenth"
        )
    if args.min_lr > args.lr:
        fail(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.multi_latent_attention and args.num_query_groups != args.num_attention_heads:
        fail("--multi-latent-attention has no groups of queries; leave --num-query-groups away")
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        fail("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")
    if args.overlap_grad_reduce and args.backend == "inductor":
        fail("--overlap-grad-reduce starts collectives inside graphs of --backend mindspeed, not of --backend inductor")


def fail(message: str) -> NoReturn:
    """End the run; rank 0 says why."""
    raise SystemExit(f"error: {message}" if int(os.environ.get("RANK", 0)) == 0 else 1)
