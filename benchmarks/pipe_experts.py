"""DeepSpeed's experts of Megatron's layer over two gloo processes and a slow link: whole, in pieces, and in two parts.

    python -m benchmarks.pipe_experts --rounds 7
    python -m benchmarks.pipe_experts --modelled ascend910b2

The second: what overlap.schedule says of the graphs of rank 0 of eight, bfloat16, whose collectives move nothing.

One step, forward and backward. The link is a process group whose exchanges end only as many seconds after their start,
and after the end of the one before, as their bytes take, while the processor is free: an injected delay, not a network.
Without it the exchanges of a step take no time but their own; with it as much as ``--share`` of the whole step's
compute. Both graphs and eager layers; the pieces' order is the layer's, and overlap.schedule keeps or betters it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import common
from benchmarks.overlap_gloo import Link, put_behind

RUNS = {
    "whole": "",
    "experts": "--use-pipe-experts",
    "experts, 2 slices": "--use-pipe-experts --pipe-experts-multi-data 2",
    "parts": "--ampipe-degree 2",
}


def install(link: Link) -> None:
    """Put the link behind the exchanges of CPU tensors."""

    def exchange(x, outputs, inputs, group):
        out = x.new_empty(sum(outputs), *x.shape[1:])
        link.works[out.data_ptr()] = dist.all_to_all_single(out, x, outputs, inputs, async_op=True)
        link.started(out, x.numel() * x.element_size())
        return out

    put_behind(link, "all_to_all_single", exchange)


class Wire(Link):
    """A link on which a byte takes ``delay`` seconds."""

    sent = 0

    def started(self, tensor: torch.Tensor, size: int = 0) -> None:
        self.sent += size
        self.free = max(self.free, time.perf_counter()) + self.delay * size
        self.ends[tensor.data_ptr()] = self.free


def build(words: str, args: argparse.Namespace, ranks: int = 2, **more):
    """A transformer layer of Megatron's with DeepSpeed's experts on ``ranks`` ranks."""
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.flags.values import apply
    from tests.megatron.gpt_models import tiny_gpt

    given = apply(
        f"--moe-model-type deepspeed_moe --num-experts {args.experts} --ffn-hidden-size {args.ffn} "
        f"--seq-length {args.tokens} {words}"
    )
    model = tiny_gpt(
        layers=1,
        hidden=args.hidden,
        heads=8,
        kv_heads=8,
        ffn=args.ffn,
        experts=args.experts,
        seq=args.tokens,
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.0,
        expert_model_parallel_size=ranks,
        **more,
    )
    add_parts(model, given)
    layer = model.decoder.layers[0]
    for n, parameter in enumerate(layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(n))
    return layer


def modelled(args: argparse.Namespace) -> None:
    """Prints the modelled step of every run, forward and backward."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import mindspeed_fx.megatron_adaptor
    from mindspeed_fx.report import recorder

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=8, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    common.header(f"{vars(args)}")
    dtype = torch.bfloat16
    for name, words in RUNS.items():
        layer = build(words, args, 8, moe_router_dtype="fp32", params_dtype=dtype, bf16=True).to(dtype)
        torch._dynamo.reset()
        with recorder.collecting() as graphs:
            options = {"codegen": "eager", "hardware": args.modelled}
            run = torch.compile(layer, backend="mindspeed", options=options, fullgraph=True)
            hidden = torch.randn(args.tokens, 1, args.hidden, dtype=dtype, requires_grad=True)
            run(hidden, attention_mask=None, rotary_pos_emb=None)[0].float().sum().backward()
        reports = [r.report for g in graphs for r in g.runs if r.report.name == "overlap.schedule"]
        for side, report in zip(("forward", "backward"), reports, strict=True):
            print(f"{name:20}{side:10}{report.notes[0]}")


def start_rank(rank: int, store: str, args: argparse.Namespace) -> tuple[Wire, torch.Tensor]:
    """Be one of two ranks of experts behind a link; the link, and this rank's tokens."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import mindspeed_fx.megatron_adaptor

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    link = Wire(0.0)
    install(link)
    hidden = torch.randn(args.tokens, 1, args.hidden, generator=torch.Generator().manual_seed(rank))
    return link, hidden


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    link, hidden = start_rank(rank, store, args)
    steps, same = {}, {}
    for name, words in RUNS.items():
        layer = build(words, args)
        graph = torch.compile(layer, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
        for kind, call in (("eager", layer), ("graph", graph)):
            torch._dynamo.reset()
            steps[f"{name}, {kind}"] = make_step(call, layer, hidden)
            same[f"{name}, {kind}"] = [x.detach().clone() for x in steps[f"{name}, {kind}"]()]
    # parts have capacities of their own: other tokens are dropped
    for name, results in same.items():
        if not name.startswith("parts"):
            torch.testing.assert_close(results, same["whole, eager"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(same["parts, graph"], same["parts, eager"], rtol=1e-3, atol=1e-4)
    print_exposed(link, steps, "whole, graph", args)


def print_exposed(link: Wire, steps: dict, first: str, args: argparse.Namespace) -> None:
    """Time ``steps`` with and without a link that takes the share ``args.share`` of step ``first``; ends the group."""
    link.sent = 0
    steps[first]()
    sent = link.sent
    alone = [statistics.median(common.interleaved({first: steps[first]}, 3, warmup=1)[first])]
    dist.broadcast_object_list(alone, src=0)
    taken = args.share * alone[0]
    both = {}
    for name, step in steps.items():
        both[name, False], both[name, True] = over(link, 0.0, step), over(link, taken / sent, step)
    times = common.interleaved(both, args.rounds, warmup=1)
    for seconds in times.values():  # the slower rank of a round counts
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds[:] = slowest.tolist()
    if dist.get_rank() == 0:
        common.header(f"{vars(args)}: {sent / 2**20:.1f} MiB sent a step, {taken * 1e3:.0f} ms")
        print(f"{'':24}{'no delay':>12}{'slow link':>12}{'exposed':>12}   ms, medians; exposed: of what the link takes")
        for name in steps:
            pairs = zip(times[name, True], times[name, False], strict=True)
            exposed = statistics.median(slow - fast for slow, fast in pairs) / taken
            fast, slow = (statistics.median(times[name, delayed]) * 1e3 for delayed in (False, True))
            print(f"{name:24}{fast:12.1f}{slow:12.1f}{exposed:12.2f}")
    dist.barrier()
    dist.destroy_process_group()


def over(link: Wire, delay: float, step):
    """``step`` with so many seconds a byte."""

    def run():
        link.delay = delay
        step()

    return run


def make_step(call, layer, hidden):
    leaves = list(layer.parameters())

    def step():
        dist.barrier()
        out, _ = call(hidden, attention_mask=None, rotary_pos_emb=None)
        return [out, *torch.autograd.grad(out.pow(2).mean(), leaves)]

    return step


if __name__ == "__main__":
    arguments = common.arguments(rounds=7, hidden=512, ffn=1024, experts=4, tokens=1024, share=0.5, modelled="")
    if arguments.modelled:
        modelled(arguments)
        raise SystemExit
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(f"{folder}/store", arguments), nprocs=2)
