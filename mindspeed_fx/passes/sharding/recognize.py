"""Which plan the collectives of a graph amount to: for models that are parallel by hand, such as Megatron-core's, and
as a check of our own.

Nothing is rewritten. A collective belongs to the layer whose module made it; what every layer does over one group of
ranks is the pattern that is named. Data parallelism of Megatron reduces gradients outside of the graph and is not seen.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Iterator, Sequence

import torch.fx as fx

from mindspeed_fx.compat import distributed
from mindspeed_fx.compat.fake import hint
from mindspeed_fx.graph.collectives import group_of, is_blocking, is_start, kind
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.storage import dense_bytes
from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.overlap.model.costs import device
from mindspeed_fx.sharding.audit import alternatives

NAME = "sharding.recognize"
LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks|block)\.\d+)(?:\.|$)")
SHORT = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
EXPERTS = re.compile(r"experts|\bmoe\b|token_dispatcher|router")


@dataclass(frozen=True)
class Collective:
    """One collective of a graph."""

    kind: str
    """"all_reduce", "all_gather", "reduce_scatter", "all_to_all" or another word."""
    group: str
    bytes: int
    """Of its input on one rank."""
    module: str

    @property
    def layer(self) -> str:
        """Path of the layer that it is part of; "" outside of layers."""
        result = LAYER.match(self.module)
        return result.group(1) if result else ""


def kind_of(node: fx.Node) -> tuple[str, str] | None:
    """The word for a collective and the name of its group; None for other nodes, and over one rank."""
    if str(node.target) == "mindspeed.expert_exchange.default":
        return "all_to_all", node.args[4]
    if (
        not (is_start(node) or (is_blocking(node) and kind(node) in SHORT))
        or len(distributed.ranks_of(group_of(node))) < 2
    ):
        return None
    word = kind(node).removesuffix("_").removesuffix("_coalesced")
    return SHORT.get(word, word), group_of(node)


def list_collectives(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Collective]]:
    """The collectives of ``gm``, in order, over more than one rank, each with its node."""
    for n in gm.graph.nodes:
        if (result := kind_of(n)) is not None:
            size = hint(dense_bytes([a.meta.get("val") for a in n.all_input_nodes]))
            yield n, Collective(*result, size, module_path(n))


def collectives_of(gm: fx.GraphModule) -> list[Collective]:
    """The collectives of ``gm``, in order, over more than one rank."""
    return [c for _, c in list_collectives(gm)]


def per_layer(collectives: Sequence[Collective]) -> dict[str, tuple[int, Counter]]:
    """Group -> (number of layers that use it, what most of them do: collective -> how often)."""
    layers: dict[str, dict[str, Counter]] = {}
    for c in collectives:
        if c.layer:
            layers.setdefault(c.group, {}).setdefault(c.layer, Counter())[
                "experts' " * bool(EXPERTS.search(c.module)) + c.kind
            ] += 1
    return {
        group: (
            len(factor),
            Counter(dict(Counter(tuple(sorted(x.items())) for x in factor.values()).most_common(1)[0][0])),
        )
        for group, factor in layers.items()
    }


def amounts_to(counts: Counter) -> str:
    """The named plan that does this once per layer and direction, or ""."""
    dense = {k: n for k, n in counts.items() if not k.startswith("experts'")}
    expert, name = set(counts) - set(dense), ""
    if dense == {"all_reduce": 2}:
        name = "tp"
    elif dense in (
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 4, "reduce_scatter": 2},
        {"all_gather": 2, "reduce_scatter": 4},
    ):
        name = "tp_sp"  # four gathers: the inputs of linear layers are gathered again in the backward instead of kept
    elif dense == {"all_to_all": 4}:
        name = "ulysses"
    elif dense == {"all_to_all": 1}:
        name = "ulysses of packed queries, keys and values, one way"
    if any("all_to_all" in k for k in expert):
        name = f"{name}+ep" if name else "ep"
    return name


@register(NAME)
def recognize(gm: fx.GraphModule, context: Context) -> PassReport:
    """Names the plan that a graph's collectives amount to."""
    report = PassReport(NAME)
    result = collectives_of(gm)
    if not result:
        return report.note_reason("no collectives over several ranks")
    report.notes += describe_collectives(result, context.side)
    if context.side == "forward":
        report.notes += _compare_plans(gm, result, context)
    return report


def _compare_plans(gm: fx.GraphModule, collectives: Sequence[Collective], context: Context) -> list[str]:
    """What other plans over the same ranks would cost, where tensor parallelism was recognized and there is a cost
    model.
    """
    hardware, why = device(context.options)
    lines = []
    for group, (_, counts) in per_layer(collectives).items():
        name, ranks = amounts_to(counts), len(distributed.ranks_of(group))
        if name.split("+")[0] not in ("tp", "tp_sp"):
            continue
        if hardware is None:
            lines.append(f"no other plan is compared: no cost model: {why}")
        elif (
            layer := alternatives.layer_of(
                gm,
                {c.layer for c in collectives if c.layer and c.group == group},
                ranks,
                name.startswith("tp_sp"),
                hardware,
            )
        ) is not None:
            lines += alternatives.describe_best(
                name, alternatives.alternative_plans(layer, ranks, hardware), ranks, hardware
            )
    return lines


def describe_collectives(collectives: Sequence[Collective], side: str) -> list[str]:
    """What :func:`recognize` says of a graph's collectives."""
    lines = []
    for group, (layers, counts) in per_layer(collectives).items():
        ranks = len(distributed.ranks_of(group))
        name = amounts_to(counts)
        each = ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
        amount = sum(c.bytes for c in collectives if c.group == group and c.layer) / max(layers, 1) / 2**20
        lines.append(
            f"{side}, {ranks} ranks of group {group}: {each} per layer ({layers} layers, {amount:.3g} MiB each) amount "
            "to " + (f'plan "{name}"' if name else "no named plan")
        )
    outside = Counter(c.kind for c in collectives if not c.layer)
    if outside:
        lines.append(f"{side}, outside of layers: " + ", ".join(f"{n} {word}" for word, n in sorted(outside.items())))
    return lines
