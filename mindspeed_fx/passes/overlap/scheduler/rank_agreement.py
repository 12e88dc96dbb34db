"""One order of collectives per group on every rank: what the order is, its hash, and the check across ranks.

Ranks that compile the same program get the same order, because nothing in the scheduler depends on the rank, on time or
on hash seeds. The check is for what it cannot see: ranks whose graphs differ. It goes through the store of the process
group and waits for nobody, so it cannot hang: each rank writes its order and compares with those that are there
already.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Mapping, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import distributed, fake
from mindspeed_fx.graph.collectives import group_of, is_start, kind
from mindspeed_fx.passes.base import PassError
from mindspeed_fx.report.source import source_line


class OrderMismatch(PassError):
    """Ranks of one group would call its collectives in different orders."""


def orders(gm: fx.GraphModule) -> dict[str, list[str]]:
    """Group -> its collectives in order, each as a line of text: operator, dtype, shape, source line."""
    results: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        if is_start(node):
            results.setdefault(group_of(node), []).append(describe(node))
    return results


def describe(node: fx.Node) -> str:
    """A collective as every rank would write it: operator, dtype and shape of its inputs, source line without path."""
    values = [a.meta.get("val") for a in node.all_input_nodes]
    shapes = ", ".join(
        f"{str(v.dtype).removeprefix('torch.')}{[fake.hint(s) for s in v.shape]}"
        for v in values
        if isinstance(v, torch.Tensor)
    )
    line = source_line(node).rsplit("/", 1)[-1]
    return f"{kind(node)}({shapes})" + (f" at {line}" if line else "")


def digest(order: Sequence[str]) -> str:
    """Hash of one group's order."""
    return hashlib.sha256("\n".join(order).encode()).hexdigest()[:16]


def compare(group: str, by_rank: Mapping[int, Sequence[str]], note: str = "") -> None:
    """Raise OrderMismatch, naming the first collective that differs, unless all ranks have one order."""
    (first, reference), *others = sorted(by_rank.items())
    for rank, order in others:
        if list(order) == list(reference):
            continue
        at = next((k for k, (a, b) in enumerate(zip(reference, order)) if a != b), min(len(reference), len(order)))
        a, b = (o[at] if at < len(o) else "nothing more" for o in (reference, order))
        raise OrderMismatch(
            f'group "{group}": ranks {first} and {rank} call their collectives in different orders; the first to '
            f"differ is number {at + 1} of {max(len(reference), len(order))}: "
            f"rank {first} has {a}, rank {rank} has {b} (hashes {digest(reference)}, {digest(order)}). Training would "
            f"hang or mix up data.{note}"
        )


def check_across_ranks(gm: fx.GraphModule, side: str, settings: str = "") -> dict[str, str]:
    """Compare this rank's orders with what the other ranks of each group have written so far.

    Graphs are matched by the set of their collectives, so a rank that compiles more or other graphs is not an error.
    One set may have
    several orders in a process: compiled with other settings, or beside other compute. So each rank writes every order
    it came to, and ranks differ when each has one that the other has not, or when they do under the same settings.

    Args:
        settings: what this order was made with, as every rank writes it.

    Returns:
        Group -> hash. Empty without a process group.

    Raises:
        OrderMismatch: on the rank that comes later.
    """
    result = orders(gm)
    store = distributed.default_store()
    if store is not None:
        for group, order in result.items():
            ranks, own = distributed.ranks_of(group), distributed.rank()
            members = hashlib.sha256(json.dumps(sorted(order)).encode()).hexdigest()[:16]
            key = f"mindspeed_fx/order/{group}/{side}/{members}"
            written = lambda r: json.loads(store.get(f"{key}/{r}")) if store.check([f"{key}/{r}"]) else []
            mine = written(own)
            if [settings, order] not in mine:
                mine.append([settings, order])
            store.set(f"{key}/{own}", json.dumps(mine))
            for r in ranks:
                if r != own:
                    _compare_all(group, {own: mine, r: written(r)})
    return {group: digest(order) for group, order in result.items()}


def _compare_all(group: str, by_rank: Mapping[int, Sequence[Sequence[Any]]]) -> None:
    """Raise OrderMismatch when each of two ranks has an order that the other has not, whatever the settings or under
    the same.
    """
    common = set.intersection(*({s for s, _ in written} for written in by_rank.values()))
    for settings in (*sorted(common), None):
        seen = {
            rank: [(s, order) for s, order in written if settings in (None, s)] for rank, written in by_rank.items()
        }
        only = {
            rank: next(
                ((s, o) for s, o in mine if not all(o in [x for _, x in others] for others in seen.values())), None
            )
            for rank, mine in seen.items()
        }
        if all(only.values()):
            note = (
                ""
                if settings is not None
                else " They were compiled with different options: "
                + ", ".join(f"rank {r} {s}" for r, (s, _) in sorted(only.items()))
            )
            compare(group, {rank: order for rank, (_, order) in only.items()}, note)
