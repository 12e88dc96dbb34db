"""Seconds and link of every node, from the cost model.

Groups whose outermost tier of the network is the same share that tier as one link: tensor parallelism inside a machine
and data parallelism between machines run side by side, two groups inside a machine do not.
"""

from __future__ import annotations

from collections import Counter

import torch.fx as fx

from mindspeed_fx.compat import distributed
from mindspeed_fx.cost.collectives import Collective, collective
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import detect
from mindspeed_fx.cost.hardware import hardware as hardware_named
from mindspeed_fx.graph.collectives import group_of, is_start, kind
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.graph.storage import dense_bytes
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap.model.task_graph import CostOf

_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


FUSED = "mindspeed_fx_fused"
"""Key in ``node.meta`` of a product and collective in one operator: kind of the collective and name of its group."""
TILES = 8
"""Pieces in which such an operator is assumed to overlap the two (the default of CoC and of CANN's tiling is not
published).
"""


def cost_of(gm: fx.GraphModule, hardware: Hardware, fused: bool) -> CostOf:
    """What :func:`~mindspeed_fx.passes.overlap.model.task_graph.tasks_of` asks of each node of ``gm``.

    Args:
        fused: pointwise work is fused by Inductor; a kernel's time then stands at its last node.
    """
    from mindspeed_fx.cost.graph import estimate

    seconds = {n.name: n.seconds for n in estimate(gm, hardware, fused=fused).nodes}

    known: dict[tuple, tuple[float, str]] = {}

    def cost(node: fx.Node) -> tuple[float, str]:
        if is_start(node):
            key = (node.target, group_of(node), argument(node, "group_size"), moved_bytes(node))
            if key not in known:
                modelled = transfer(node, hardware)
                known[key] = float(modelled.seconds), modelled.tier
            return known[key]
        if FUSED in node.meta:
            product, sent = seconds.get(node.name, 0.0), float(fused_transfer(node, hardware).beta)
            return max(product, sent) + min(product, sent) / TILES, ""
        return seconds.get(node.name, 0.0), ""

    return cost


def device(options: Options) -> tuple[Hardware | None, str]:
    """The device of the cost model: option "hardware", else the one at hand; or None and why there is none."""
    name, why = (options.hardware, "") if options.hardware else detect(options.target)
    return (hardware_named(name) if name else None), why


def deciding_device(context: Context) -> tuple[Hardware | None, str]:
    """The device by whose costs a graph is rewritten or ordered; or None and why nothing is decided by costs."""
    if context.sharding is not None and context.sharding.program.traffic.uneven:
        return None, "ranks share something unevenly: they have other sizes each, and would come to other orders"
    hardware, why = device(context.options)
    return hardware, f"no cost model: {why}"


def transfer(node: fx.Node, hardware: Hardware, share: tuple[int, int] = (1, 1)) -> Collective:
    """Modelled time of a functional collective and the tier it crosses.

    Args:
        share: (a, b): of the collective that moves a of b equal parts of it.
    """
    name = kind(node).removesuffix("_").removesuffix("_out").removesuffix("_coalesced").removesuffix("_")
    ranks = ranks_of(node)
    return collective(
        _KINDS.get(name, "all_reduce"),
        moved_bytes(node) * share[0] // share[1],
        len(ranks),
        hardware,
        per_machine(ranks, hardware.node),
    )


def fused_transfer(node: fx.Node, hardware: Hardware) -> Collective:
    """Modelled time of the collective inside an operator that also multiplies: of the gathered input, or of the
    product.
    """
    kind_, group = node.meta[FUSED]
    a, b = ((x[0] if isinstance(x, (list, tuple)) else x).meta["val"] for x in node.args[:2])
    try:
        ranks = distributed.ranks_of(group)
    except Exception:  # a graph that was traced elsewhere
        ranks = list(range(node.args[3] if len(node.args) > 3 and isinstance(node.args[3], int) else 2))
    if (
        kind_ == "all_to_all_single"
    ):  # the tokens as they travel: before the product that reads them, after the one that makes them
        result = node.meta["val"][0]
        size = a.element_size() * (a.numel() if "alltoallv_gmm" in str(node.target) else result.numel())
        return collective(_KINDS[kind_], size, len(ranks), hardware, per_machine(ranks, hardware.node))
    size = (
        a.element_size() * a.shape[0] * (a.shape[1] * len(ranks) if kind_ == "all_gather_into_tensor" else b.shape[1])
    )
    return collective(_KINDS[kind_], size, len(ranks), hardware, per_machine(ranks, hardware.node))


def moved_bytes(node: fx.Node) -> int:
    """The larger of a collective's input and output, as the cost model counts."""
    return max(dense_bytes(node.meta.get("val")), dense_bytes([a.meta.get("val") for a in node.all_input_nodes]))


def ranks_of(node: fx.Node) -> list[int]:
    """Global ranks of a collective's group; where no such group is set up, the first ranks in number as the node
    says.
    """
    try:
        return distributed.ranks_of(group_of(node))
    except Exception:  # a graph that was traced elsewhere
        return list(range(int(argument(node, "group_size") or 2)))


def per_machine(ranks: list[int], machine: int) -> int | None:
    """How many of the ranks are in one machine; None (neighbours first) when machines hold unequal numbers."""
    counts = set(Counter(r // machine for r in ranks).values())
    return counts.pop() if len(counts) == 1 else None
