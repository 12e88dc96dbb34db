"""How long the overlap passes take on a large graph, pass by pass.

    python -m benchmarks.overlap_time --nodes 36000

The graph is the backward of Megatron-style layers under tensor and sequence parallelism (sequence first, an all_gather
before and a reduce_scatter after each pair of products, weight gradients), one layer traced and copied: no model has so
many layers, but graphs get as many nodes from smaller operators. "After" counts the nodes that the passes leave.
Seconds are of this process's processor time, one thread. As under torch.compile the graph's code is written when it is
first called, whatever the passes did to it (torch's lazy graph modules); Inductor never asks for it. It is timed beside
the passes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import time

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx

PASSES = ("overlap.split", "overlap.decompose", "overlap.bucket", "overlap.schedule")


def layer(grad, x, gathered, act, mid, w_up, w_down, norm, ranks: int, group: str):
    """Backward of a gated feed-forward layer between a gather and a scatter, as eager autograd writes it."""
    ops, c10d = torch.ops.aten, torch.ops._c10d_functional
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(grad, ranks, group))
    dact, dw_down, _ = torch.ops.mindspeed.linear_backward(whole, act, w_down, [True, True, False])
    gate, up = mid.chunk(2, -1)
    s = ops.sigmoid(gate)
    dup = dact * (gate * s)
    dgate = dact * up * s * (1 + gate * (1 - s))
    dy, dw_up, _ = torch.ops.mindspeed.linear_backward(ops.cat([dgate, dup], -1), gathered, w_up, [True, True, False])
    dx = c10d.wait_tensor(c10d.reduce_scatter_tensor(dy, "sum", ranks, group))
    dn = dx * norm
    out = grad + (dn - x * (dn * x).mean(-1, keepdim=True))
    return out, dw_down, dw_up, (dx * x).sum(0)


def forward_layer(x, w_qkv, w_out, w_up, w_down, norm, ranks: int, group: str):
    """Forward of attention and a gated feed-forward layer under tensor and sequence parallelism; chunks pay here, and
    end at attention.
    """
    ops, c10d = torch.ops.aten, torch.ops._c10d_functional
    gather = lambda t: c10d.wait_tensor(c10d.all_gather_into_tensor(t, ranks, group))  # noqa: E731
    scatter = lambda t: c10d.wait_tensor(c10d.reduce_scatter_tensor(t, "sum", ranks, group))  # noqa: E731
    q, k, v = (
        t.view(1, t.shape[0], -1, 128).transpose(1, 2)
        for t in torch.ops.mindspeed.linear(gather(x * norm), w_qkv).chunk(3, -1)
    )
    a = ops.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(q.shape[2], -1)
    x = x + scatter(torch.ops.mindspeed.linear(a, w_out))
    gate, up = torch.ops.mindspeed.linear(gather(x * norm), w_up).chunk(2, -1)
    return (x + scatter(torch.ops.mindspeed.linear(ops.silu(gate) * up, w_down)),)


def graph(
    nodes: int, ranks: int = 8, tokens: int = 8192, hidden: int = 4096, ffn: int = 14336, forward: bool = False
) -> fx.GraphModule:
    """At least ``nodes`` nodes; placeholders "tangents", and "primals" for parameters, others are saved activations."""
    make = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
    f = ffn // ranks
    with FakeTensorMode():
        rows = tokens // ranks
        backward = [
            make(rows, hidden),
            make(rows, hidden),
            make(tokens, hidden),
            make(tokens, f),
            make(tokens, 2 * f),
            make(2 * f, hidden),
            make(hidden, f),
            make(hidden),
        ]
        ahead = [
            make(rows, hidden),
            make(3 * hidden // ranks, hidden),
            make(hidden, hidden // ranks),
            make(2 * f, hidden),
            make(hidden, f),
            make(hidden),
        ]
        one, arguments, parameters = (forward_layer, ahead, 1) if forward else (layer, backward, 5)
        traced = make_fx(lambda *a: one(*a, ranks, dist.group.WORLD.group_name))(*arguments)
    traced.graph.eliminate_dead_code()
    whole, outputs, grad = fx.Graph(), [], None
    count = 0
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    stacked: list[dict] = []
    while count < nodes:  # placeholders first
        k, memo = len(stacked), {}
        for at, n in enumerate(inputs):
            if at == 0 and k:
                continue
            new = whole.placeholder(f"{'tangents' if at == 0 else 'primals' if at >= parameters else 'saved'}_{k}_{at}")
            new.meta = {**n.meta, "val": torch.empty_like(n.meta["val"])}  # memory of its own
            memo[n] = new
        stacked.append(memo)
        count += len(traced.graph.nodes) - 1
    for memo in stacked:
        memo.setdefault(inputs[0], grad)
        out = whole.graph_copy(traced.graph, memo)
        grad = out[0]
        outputs += list(out[1:])
    whole.output((grad, *outputs))
    return _LazyGraphModule(torch.nn.Module(), whole)


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import mindspeed_fx  # noqa: F401  registers passes and operators
    from mindspeed_fx import passes
    from mindspeed_fx.graph.recompile import defer_recompile
    from mindspeed_fx.options import Options
    from mindspeed_fx.passes.base import Context

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[36_000])
    parser.add_argument("--device", default="ascend910b2")
    parser.add_argument("--passes", nargs="*", default=PASSES)
    parser.add_argument("--ffn", type=int, default=14336, help="smaller: weight gradients hide less, and chunks pay")
    parser.add_argument("--forward", action="store_true", help="the forward of layers with attention, where chunks pay")
    parser.add_argument("--profile", help="name of a pass to profile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    known = {p.name: p for p in passes.registered()}
    options = Options(target="npu", codegen="eager", hardware=args.device).resolve("npu")
    print(f"# {datetime.date.today()} torch {torch.__version__}; {args.device}")
    for nodes in args.nodes:
        gm = graph(nodes, ffn=args.ffn, forward=args.forward)
        before, total, told = len(gm.graph.nodes), 0.0, []
        with defer_recompile(gm):  # as the pipeline does
            for name in args.passes:
                gc.collect()
                begin = time.process_time()
                if args.profile == name:
                    import cProfile
                    import pstats

                    with cProfile.Profile() as profile:
                        report = known[name].run(gm, Context(options, "forward" if args.forward else "backward"))
                    pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
                else:
                    report = known[name].run(gm, Context(options, "forward" if args.forward else "backward"))
                took = time.process_time() - begin
                total += took
                told.append(
                    f"{name.removeprefix('overlap.')} {took:.2f} s ({len(report.rewrites)} sites, "
                    f"{len(gm.graph.nodes)} nodes)"
                )
                for note in report.notes:
                    told.append(f"    {note}")
            begin = time.process_time()
        told.append(f"the pipeline's end {time.process_time() - begin:.2f} s")
        total += time.process_time() - begin
        begin = time.process_time()
        gm.real_recompile()
        told.append(
            f"not in the sum: torch.fx writes the graph's code at its first call, {time.process_time() - begin:.2f} s"
        )
        print(f"{before} nodes, {len(gm.graph.nodes)} after: {total:.2f} s\n  " + "\n  ".join(told))


if __name__ == "__main__":
    main()
