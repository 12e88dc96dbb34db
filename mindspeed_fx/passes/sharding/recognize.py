"""Which plan the collectives of a graph amount to: for models that are parallel by hand, such as Megatron-core's, and as a check of our own.

Nothing is rewritten. A collective belongs to the layer whose module made it; what every layer does over one group of ranks is the pattern
that is named. Data parallelism of Megatron reduces gradients outside of the graph and is not seen.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Sequence

import torch
import torch.fx as fx

from mindspeed_fx import compat, compat_distributed
from mindspeed_fx.passes.base import Context, PassReport, module_path, register
from mindspeed_fx.passes.overlap.collectives import group_of, is_start, kind

NAME = "sharding.recognize"
LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks|block)\.\d+)(?:\.|$)")
SHORT = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
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
        found = LAYER.match(self.module)
        return found.group(1) if found else ""


def collectives_of(gm: fx.GraphModule) -> list[Collective]:
    """The functional collectives of ``gm``, in order, over more than one rank."""
    found = []
    for n in gm.graph.nodes:
        if is_start(n) and len(compat_distributed.ranks_of(group_of(n))) > 1:
            word = kind(n).removesuffix("_").removesuffix("_coalesced")
            size = sum(compat.hint(v.numel()) * v.dtype.itemsize for a in n.all_input_nodes if isinstance(v := a.meta.get("val"), torch.Tensor))
            found.append(Collective(SHORT.get(word, word), group_of(n), size, module_path(n)))
    return found


def per_layer(collectives: Sequence[Collective]) -> dict[str, tuple[int, Counter]]:
    """Group -> (number of layers that use it, what most of them do: collective -> how often)."""
    layers: dict[str, dict[str, Counter]] = {}
    for c in collectives:
        if c.layer:
            layers.setdefault(c.group, {}).setdefault(c.layer, Counter())["experts' " * bool(EXPERTS.search(c.module)) + c.kind] += 1
    return {group: (len(by), Counter(dict(Counter(tuple(sorted(x.items())) for x in by.values()).most_common(1)[0][0]))) for group, by in layers.items()}


def amounts_to(counts: Counter) -> tuple[str, str]:
    """The named plan that does this once per layer and direction, or "", and what :func:`mindspeed_fx.plan` could change about it."""
    dense = {k: n for k, n in counts.items() if not k.startswith("experts'")}
    expert = set(counts) - set(dense)
    name, advice = "", ""
    if dense == {"all_reduce": 2}:
        name, advice = "tp", 'plan "tp_sp" sends as many bytes and keeps a part of what "tp" keeps whole between the pairs of linear layers; mindspeed_fx.plan chooses it where memory or norms count'
    elif dense in ({"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}, {"all_gather": 2, "reduce_scatter": 4}):
        again = dense["all_gather"] == 4 or dense["reduce_scatter"] == 4
        name = "tp_sp"
        advice = "gathers the inputs of linear layers again in the backward instead of keeping them: bytes for memory" if again else "the fewest collectives that divided pairs of linear layers need; plan would do the same over this group"
    elif dense == {"all_to_all": 4}:
        name, advice = "ulysses", "as few as heads that are divided need; a ring sends keys and values alone, which is less where few heads have keys"
    elif dense == {"all_to_all": 1}:
        name, advice = "ulysses of packed queries, keys and values, one way", ""
    if any("all_to_all" in k for k in expert):
        name = f"{name}+ep" if name else "ep"
    return name, advice


@register(NAME, stage="partitioned", level=0, exact=True)
def recognize(gm: fx.GraphModule, context: Context) -> PassReport:
    """Names the plan that a graph's collectives amount to."""
    report = PassReport(NAME)
    found = collectives_of(gm)
    if not found:
        return report.because("no collectives over several ranks")
    report.notes += described(found, context.side)
    return report


def described(collectives: Sequence[Collective], side: str) -> list[str]:
    """What :func:`recognize` says of a graph's collectives."""
    lines = []
    for group, (layers, counts) in per_layer(collectives).items():
        ranks = len(compat_distributed.ranks_of(group))
        name, advice = amounts_to(counts)
        each = ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
        amount = sum(c.bytes for c in collectives if c.group == group and c.layer) / max(layers, 1) / 2**20
        lines.append(f"{side}, {ranks} ranks of group {group}: {each} per layer ({layers} layers, {amount:.3g} MiB each) amount to " + (f'plan "{name}"' if name else "no named plan") + (f"; {advice}" if advice else ""))
    outside = Counter(c.kind for c in collectives if not c.layer)
    if outside:
        lines.append(f"{side}, outside of layers: " + ", ".join(f"{n} {word}" for word, n in sorted(outside.items())))
    return lines
