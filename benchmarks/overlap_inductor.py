"""The order that Inductor's own overlap scheduling (torch 2.13) gives a task graph, for comparison under our simulator.

The task graph becomes an fx graph of matrix products and functional collectives on a fake process group, whose times
are handed to Inductor as its custom runtime estimation. Bucketing is off, so that both order the same collectives;
memory may grow by 0.001 GB, the least it takes. Its roofline, which asks a GPU for its bandwidth, is replaced by the
same times.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.fx as fx

from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, TaskGraph


def inductor_order(graph: TaskGraph) -> list[int]:
    """Order of all tasks after ``schedule_overlap_bucketing``."""
    from torch._inductor.fx_passes import overlap_scheduling
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    names = {g: dist.new_group(list(range(8))).group_name for g in sorted({t.group for t in graph.tasks if t.group})}
    size = {b.made_by: b.bytes for b in graph.buffers}
    mode = FakeTensorMode()
    g = fx.Graph()
    first = g.placeholder("x")
    with mode:
        first.meta["val"] = torch.empty(1, 1, dtype=torch.bfloat16, device="cuda")
    nodes: list[fx.Node] = []
    for i, task in enumerate(graph.tasks):
        needs = [nodes[n] for n in task.needs] or [first]
        rows = max(size.get(i, 0) // 2, 1)
        if task.kind == "wait":
            node = g.call_function(torch.ops._c10d_functional.wait_tensor.default, (needs[0],))
            node.meta["val"] = needs[0].meta["val"]
            nodes.append(node)
            continue
        source = needs[0]
        if len(needs) > 1:
            source = g.call_function(torch.ops.aten.stack.default, (needs,))
            source.meta["val"] = first.meta["val"]
        if task.resource == COMPUTE:
            node = g.call_function(torch.ops.aten.mm.default, (source, first))
        elif task.kind == "all_gather":
            node = g.call_function(
                torch.ops._c10d_functional.all_gather_into_tensor.default, (source, 8, names[task.group])
            )
        elif task.kind == "reduce_scatter":
            node = g.call_function(
                torch.ops._c10d_functional.reduce_scatter_tensor.default, (source, "sum", 8, names[task.group])
            )
        elif task.kind == "all_to_all":
            node = g.call_function(
                torch.ops._c10d_functional.all_to_all_single.default, (source, [1], [1], names[task.group])
            )
        else:
            node = g.call_function(torch.ops._c10d_functional.all_reduce.default, (source, "sum", names[task.group]))
        with mode:
            node.meta["val"] = torch.empty(rows, 1, dtype=torch.bfloat16, device="cuda")
        nodes.append(node)
    g.output([n for n in nodes if not n.users])
    gm = fx.GraphModule({}, g)
    milliseconds = {n: graph.tasks[i].seconds * 1e3 for i, n in enumerate(nodes)}
    kept = overlap_scheduling.estimate_roofline_runtime_ms
    overlap_scheduling.estimate_roofline_runtime_ms = lambda node: milliseconds.get(node, 0.0)
    try:
        overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=False,
            insert_overlap_deps=False,
            custom_runtime_estimation=lambda node, size=None: milliseconds.get(node, 0.0),
            collective_estimator="analytical",
            compute_estimator="analytical",
            max_memory_increase_gb=0.001,
            max_memory_increase_ratio=None,
            pre_bucketing_fsdp_collectives=False,
        )
    finally:
        overlap_scheduling.estimate_roofline_runtime_ms = kept
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    return sorted(range(len(nodes)), key=lambda i: place[nodes[i]])
