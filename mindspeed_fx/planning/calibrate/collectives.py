"""Collectives between the ranks of a run under torchrun, by kind, size and group."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_fx.planning.calibrate.cases import Row
from mindspeed_fx.planning.calibrate.measure import Progress
from mindspeed_fx.planning.calibrate.timing import clock, summarize

SIZES = (2**12, 2**18, 2**22, 2**25)
"""Bytes, as :mod:`mindspeed_fx.cost.collectives` counts them."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
ROUNDS = 12
"""A number, not a time: every rank has to call as often as the others."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def measure_collectives(device: torch.device, progress: Progress) -> list[Row]:
    """Rows of every kind, size and group; the slowest rank's time counts. The same on every rank; [] for one rank.

    Groups are pairs of neighbours, all ranks of a machine, and all ranks; those that are equal are measured once.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return []
    rows = []
    for ranks, per_node in groups_of(dist.get_world_size(), local_ranks()):
        group = group_with(dist.get_rank(), ranks)
        for kind in KINDS:
            for size in SIZES:
                progress(f"{kind} of {size:,} bytes by {ranks} ranks")
                rows.append(_measure(kind, size, ranks, per_node, group, device))
    return rows


def local_ranks() -> int:
    """Ranks of this machine, as torchrun says; all, if it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def groups_of(world: int, local: int) -> list[tuple[int, int]]:
    """(ranks, of these in one machine) of the groups to measure."""
    results = [(n, n) for n in sorted({2, local}) if 1 < n <= local and world % n == 0]
    return results + ([(world, local)] if world > local else [])


def group_with(rank: int, ranks: int) -> Any:
    """This rank's group of ``ranks`` neighbours; every rank calls it."""
    own = None
    for first in range(0, dist.get_world_size(), ranks):
        group = dist.new_group(list(range(first, first + ranks)))
        own = group if first <= rank < first + ranks else own
    return own


def _measure(kind: str, size: int, ranks: int, per_node: int, group: Any, device: torch.device) -> Row:
    run = _prepare(kind, size, ranks, group, device)
    samples = []
    for _ in range(ROUNDS + 1):
        dist.barrier(group)
        start = clock(device)
        run()
        samples.append(clock(device) - start)
    worst = torch.tensor(samples[1:], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    timing = summarize(worst.tolist())
    label = f"{kind} {size} {ranks} {per_node}"
    return Row("collective", label, "float32", "", timing.seconds, timing.spread, (), timing.is_noisy)


def _prepare(kind: str, size: int, ranks: int, group: Any, device: torch.device) -> Any:
    """The call of one collective on its own tensors."""
    whole = torch.ones(size // 4 // ranks * ranks, device=device)
    part = torch.ones(whole.numel() // ranks, device=device)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    return lambda: dist.all_reduce(whole, group=group)


def start_group(target: str) -> bool:
    """Join the ranks of torchrun, if this process is one of several; whether a group was started here."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return False
    dist.init_process_group(BACKENDS[target])
    return True
