"""A layer of dropless experts of Megatron-core on two expert ranks over gloo, one training step: Megatron eager and
mindspeed, interleaved.

    python -m benchmarks.moe_gloo [--rounds 11] [--hidden 512] [--ffn 1024] [--experts 8] [--topk 2] [--tokens 1024]
        [--clock wall]

Eight batches take turns, so that the numbers of tokens per expert and rank change from step to step. The slower rank of
a round counts. ``--clock processor`` counts the time of each rank's own processor, on a machine that others use too.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from benchmarks import common

BATCHES = 8


def build(args: argparse.Namespace, dtype: torch.dtype) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=8,
        num_moe_experts=args.experts,
        moe_router_topk=args.topk,
        moe_ffn_hidden_size=args.ffn,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        expert_model_parallel_size=2,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    spec = get_gpt_layer_local_spec(num_experts=args.experts, moe_grouped_gemm=False, normalization="RMSNorm")
    return build_module(spec.submodules.mlp, config=config).to(dtype)


def race(rank: int, args: argparse.Namespace, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    layer = build(args, dtype)
    hidden = torch.randn(BATCHES, args.tokens, 1, args.hidden, dtype=dtype)
    rivals = {"eager": layer, "mindspeed": torch.compile(layer, backend="mindspeed", fullgraph=True, dynamic=False)}
    steps = {name: make_step(layer, call, hidden, itertools.count()) for name, call in rivals.items()}
    times = common.interleaved(steps, args.rounds, warmup=3, clock=args.clock)
    for seconds in times.values():
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds[:] = slowest.tolist()
    if rank == 0:
        common.header(f"{vars(args)}, {dtype}")
        common.table(times, {}, "mindspeed")


def make_step(layer: torch.nn.Module, call: torch.nn.Module, hidden: torch.Tensor, count: itertools.count):
    def step() -> None:
        for p in layer.parameters():
            p.grad = None
        x = hidden[next(count) % BATCHES].detach().requires_grad_()
        dist.barrier()
        out = call(x)[0]
        out.float().pow(2).mean().backward()

    return step


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import mindspeed_fx.megatron_adaptor  # noqa: F401

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):
        race(rank, args, dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = common.arguments(rounds=11, hidden=512, ffn=1024, experts=8, topk=2, tokens=1024, clock="wall")
    start = time.perf_counter()
    mp.spawn(worker, args=(tempfile.mktemp(), arguments), nprocs=2)
    print(f"{time.perf_counter() - start:.0f} s in all")
