"""What a layer gathered for its products, which ``sharding.regather`` has the backward gather again, by option.

Sequence parallelism gathers the tokens of all ranks before a product. The gradient of the weight reads them whole, and
a graph would keep them so: as many times the rank's own part as there are ranks. Megatron keeps the part, and gathers
once more in the backward (Korthikanti et al. 2022, arXiv 2205.05198). A gather is marked where products alone read it
and where it is of no parameter.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.collectives import is_start, is_wait
from mindspeed_fx.graph.op_sets import name
from mindspeed_fx.graph.storage import is_view
from mindspeed_fx.passes.base import PassReport, site, skip
from mindspeed_fx.passes.sharding.recognize import kind_of
from mindspeed_fx.passes.sharding.verify import forward_of

aten = torch.ops.aten


def mark_gathered_inputs(gm: fx.GraphModule, report: PassReport) -> None:
    """Marks gathers that products alone read, to be recomputed in the backward; ``report`` says why others are not."""
    forward = forward_of(gm)
    of_parameters = _of_one_input(gm)
    for n in gm.graph.nodes:
        kind = kind_of(n) if n in forward and n not in of_parameters and is_start(n) else None
        if kind is None or kind[0] != "all_gather":
            continue
        marked, reader = _whole_of(n, forward)
        if reader is not None:
            report.skipped.append(
                skip("all_gather", n, f"{reader.name} ({reader.target}) reads it, which is no product")
            )
            continue
        for node in marked:
            partitioner.mark_recompute(node)
        report.rewrites.append(site("all_gather", n))


def _of_one_input(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that are computed from a single input of the graph, as a parameter's whole is from its part."""
    sources: dict[fx.Node, fx.Node] = {}
    for n in gm.graph.nodes:
        inputs = {n} if n.op == "placeholder" else {sources.get(a) for a in n.all_input_nodes}
        if len(inputs) == 1 and (source := inputs.pop()) is not None:
            sources[n] = source
    return set(sources)


def _whole_of(start: fx.Node, forward: set[fx.Node]) -> tuple[list[fx.Node], fx.Node | None]:
    """A gather with its wait and what lays its result out; and who reads it and is no product, if anyone does."""
    results, todo = [start], [start]
    while todo:
        for user in todo.pop().users:
            if user not in forward or user in results:
                continue
            if is_wait(user) or is_view(user) or user.target in (aten.cat.default, aten.clone.default):
                results.append(user)
                todo.append(user)
            elif partitioner.flops(user) == 0 and name(user.target) != "linear_main_grad":
                return results, user
    return results, None
