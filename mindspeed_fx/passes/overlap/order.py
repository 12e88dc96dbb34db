"""One order of collectives per group on every rank: what the order is, its hash, and the check across ranks.

Ranks that compile the same program get the same order, because nothing in the scheduler depends on the rank, on time or
on hash seeds. The check is for what it cannot see: ranks whose graphs differ. It goes through the store of the process
group and waits for nobody, so it cannot hang: each rank writes its order and compares with those that are there already.
"""

from __future__ import annotations

import hashlib
import json
from typing import Mapping, Sequence

import torch
import torch.fx as fx

from mindspeed_fx import compat, compat_distributed
from mindspeed_fx.passes.base import PassError
from mindspeed_fx.passes.overlap.collectives import group_of, is_start, kind
from mindspeed_fx.report.source import source_line


class OrderMismatch(PassError):
    """Ranks of one group would call its collectives in different orders."""


def orders(gm: fx.GraphModule) -> dict[str, list[str]]:
    """Group -> its collectives in order, each as a line of text: operator, dtype, shape, source line."""
    found: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        if is_start(node):
            found.setdefault(group_of(node), []).append(describe(node))
    return found


def describe(node: fx.Node) -> str:
    """A collective as every rank would write it: operator, dtype and shape of its inputs, source line without path."""
    values = [a.meta.get("val") for a in node.all_input_nodes]
    shapes = ", ".join(f"{str(v.dtype).removeprefix('torch.')}{[compat.hint(s) for s in v.shape]}" for v in values if isinstance(v, torch.Tensor))
    line = source_line(node).rsplit("/", 1)[-1]
    return f"{kind(node)}({shapes})" + (f" at {line}" if line else "")


def digest(order: Sequence[str]) -> str:
    """Hash of one group's order."""
    return hashlib.sha256("\n".join(order).encode()).hexdigest()[:16]


def compare(group: str, by_rank: Mapping[int, Sequence[str]]) -> None:
    """Raise OrderMismatch, naming the first collective that differs, unless all ranks have one order."""
    (first, reference), *others = sorted(by_rank.items())
    for rank, order in others:
        if list(order) == list(reference):
            continue
        at = next((k for k, (a, b) in enumerate(zip(reference, order)) if a != b), min(len(reference), len(order)))
        a, b = (o[at] if at < len(o) else "nothing more" for o in (reference, order))
        raise OrderMismatch(
            f'group "{group}": ranks {first} and {rank} call their collectives in different orders; the first to differ is number {at + 1} of {max(len(reference), len(order))}: '
            f"rank {first} has {a}, rank {rank} has {b} (hashes {digest(reference)}, {digest(order)}). Training would hang or mix up data."
        )


def check_across_ranks(gm: fx.GraphModule, side: str) -> dict[str, str]:
    """Compare this rank's orders with what the other ranks of each group have written so far.

    Graphs are matched by the set of their collectives, so a rank that compiles more or other graphs is not an error.

    Returns:
        Group -> hash. Empty without a process group.

    Raises:
        OrderMismatch: on the rank that comes later.
    """
    found = orders(gm)
    store = compat_distributed.default_store()
    if store is not None:
        for group, order in found.items():
            ranks = compat_distributed.ranks_of(group)
            key = f"mindspeed_fx/order/{group}/{side}/{hashlib.sha256(json.dumps(sorted(order)).encode()).hexdigest()[:16]}"
            own = compat.rank()
            store.set(f"{key}/{own}", json.dumps(order))
            there = {r: json.loads(store.get(f"{key}/{r}")) for r in ranks if r == own or store.check([f"{key}/{r}"])}
            compare(group, there)
    return {group: digest(order) for group, order in found.items()}

