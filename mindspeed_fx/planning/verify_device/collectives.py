"""Every kind of collective between the ranks of a run under torchrun, in the types of models, against what it should
give; and the operators that multiply and communicate in one beside their two parts."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist

from mindspeed_fx.compat import npu as npu_compat
from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.kernels.npu import missing
from mindspeed_fx.planning.calibrate.timing import clock, summarize
from mindspeed_fx.planning.verify_device.checks import Check, Outcome, outcome_of
from mindspeed_fx.planning.verify_device.compare import compare
from mindspeed_fx.planning.verify_device.place import Place

ROWS, COLUMNS, ROUNDS = 8, 64, 5
"""Of a rank's part; timings, a number that all ranks share."""
Parts = list[torch.Tensor]


def gathered(parts: Parts, rank: int) -> torch.Tensor:
    """What all_gather gives every rank."""
    return torch.cat(parts)


def scattered(parts: Parts, rank: int) -> torch.Tensor:
    """What reduce_scatter gives ``rank``."""
    return _sum(parts).chunk(len(parts))[rank]


def summed(parts: Parts, rank: int) -> torch.Tensor:
    """What all_reduce gives every rank."""
    return _sum(parts)


def exchanged(parts: Parts, rank: int) -> torch.Tensor:
    """What all_to_all gives ``rank``: its share of every part."""
    return torch.cat([p.chunk(len(parts))[rank] for p in parts])


def sent(parts: Parts, rank: int) -> torch.Tensor:
    """What broadcast from rank 0 gives every rank."""
    return parts[0]


def from_neighbour(parts: Parts, rank: int) -> torch.Tensor:
    """What a ring of sends gives ``rank``."""
    return parts[rank - 1]


def _sum(parts: Parts) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


def _all_gather(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x)
    return out


def _reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x)
    return out


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def _all_to_all(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    dist.broadcast(out, 0)
    return out


def _send_recv(x: torch.Tensor) -> torch.Tensor:
    out, rank, world = torch.empty_like(x), dist.get_rank(), dist.get_world_size()
    moves = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, out, (rank - 1) % world)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return out


KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Parts, int], torch.Tensor]]] = {
    "all_gather": (_all_gather, gathered),
    "reduce_scatter": (_reduce_scatter, scattered),
    "all_reduce": (_all_reduce, summed),
    "all_to_all": (_all_to_all, exchanged),
    "broadcast": (_broadcast, sent),
    "send_recv": (_send_recv, from_neighbour),
}
"""How it is called, and what it should give."""


def checks(target: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[Check]:
    """Of the ranks of the default group; every rank runs them in this order."""
    for dtype in (*dtypes, torch.int64):
        for kind in KINDS:
            run = functools.partial(_run, kind, dtype)
            yield Check("collective", kind, str(dtype).removeprefix("torch."), run)
    for dtype in dtypes:
        for name in FUSED if target == "npu" else ():
            run = functools.partial(_run_fused, name, dtype)
            yield Check("collective", f"npu::{name}", str(dtype).removeprefix("torch."), run)


def _parts(dtype: torch.dtype, *shape: int) -> Parts:
    """The parts of all ranks, the same on each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        many = range(dist.get_world_size())
        return [(torch.randn(*shape) * 8).round().to(dtype) for _ in many]


def _run(kind: str, dtype: torch.dtype, place: Place) -> Outcome:
    rank, world = dist.get_rank(), dist.get_world_size()
    run, wanted = KINDS[kind]
    parts = _parts(dtype, ROWS * world, COLUMNS)
    own = place.send(parts[rank])
    have = run(own)
    place.wait()
    truth = [p.double() if p.is_floating_point() else p for p in parts]
    result = outcome_of(compare([have], [wanted(parts, rank)], [wanted(truth, rank)], dtype))
    seconds = _seconds(lambda: run(own), place)
    size = max(own.numel(), have.numel()) * own.element_size()
    model = collective_seconds(kind, size, world, place.hardware) if place.hardware else None
    return Outcome(
        result.error,
        result.tolerance,
        result.problem,
        detail={"seconds": seconds, "model_seconds": None if model is None else float(model), "ranks": world},
    )


def _seconds(run: Callable[[], Any], place: Place) -> float:
    """The slowest rank's median."""
    samples = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = clock(place.device)
        run()
        samples.append(clock(place.device) - start)
    worst = torch.tensor([summarize(samples).seconds], device=place.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def _all_gather_mm(x: torch.Tensor, w: torch.Tensor, group: str, world: int) -> torch.Tensor:
    return torch.ops.npu.npu_all_gather_base_mm(x, w, group, world, gather_output=False)[0]


def _mm_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group: str, world: int) -> torch.Tensor:
    return torch.ops.npu.npu_mm_reduce_scatter_base(x, w, group, world)


def _mm_all_reduce(x: torch.Tensor, w: torch.Tensor, group: str, world: int) -> torch.Tensor:
    return torch.ops.npu.npu_mm_all_reduce_base(x, w, group)


FUSED: dict[str, tuple[Callable[..., torch.Tensor], Callable[[Parts, int], torch.Tensor], bool]] = {
    "npu_all_gather_base_mm": (_all_gather_mm, gathered, True),
    "npu_mm_reduce_scatter_base": (_mm_reduce_scatter, scattered, False),
    "npu_mm_all_reduce_base": (_mm_all_reduce, summed, False),
}
"""The call, the collective in it, and whether that comes before the product."""


def _run_fused(name: str, dtype: torch.dtype, place: Place) -> Outcome:
    rank, world = dist.get_rank(), dist.get_world_size()
    run, wanted, is_first = FUSED[name]
    if reason := missing((name,)) or (f"{dtype} is not a type of it" if dtype == torch.float32 else None):
        return Outcome(reason=reason)
    rows, weights = _parts(dtype, 256 * world, 256), _parts(dtype, 256, 256)
    own = place.send((rows[rank], weights[0 if is_first else rank]))
    have = run(*own, npu_compat.hcom(dist.group.WORLD.group_name), world)
    place.wait()

    def in_parts(rows: Parts, weights: Parts) -> torch.Tensor:
        if is_first:
            return wanted(rows, rank) @ weights[0]
        return wanted([x @ w for x, w in zip(rows, weights)], rank)

    want = in_parts(rows, weights)
    truth = in_parts([x.double() for x in rows], [w.double() for w in weights])
    return outcome_of(compare([have], [want], [truth], dtype))
