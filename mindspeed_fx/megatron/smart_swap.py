"""``--smart-swap`` and its like: how many bytes the graph of a chunk may hold, by what the device has.

MindSpeed's allocator watches a step and moves activations until the peak is that of the device less a reserve. Here the
compiler knows what a graph holds before it runs, so that a budget in bytes is enough (option ``memory_budget``). With D
the device's memory, R the reserve, W, G and S the bytes of weights, gradients and optimizer states of all chunks of the
rank, w the weights of this chunk, and k the forwards that wait for their backward on the rank at once:

    budget = w + (D - R - W - G - S) / k

A graph that keeps its budget keeps at most (budget - w) of one forward, so that k of them and the states fit. All ranks
of a stage find the same number.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import groups
from mindspeed_fx.megatron.flags.flag import get
from mindspeed_fx.megatron.flags.swapped import GRAPH_MEMORY, RESERVED, planning_flags
from mindspeed_fx.options import Options

GIB = 2**30
MOMENTS = {"adam": 2, "muon": 2, "dist_muon": 2, "sgd": 1}
"""Optimizer -> numbers that it keeps of a weight; others as Adam."""


@dataclass(frozen=True)
class Part:
    """Weights of one kind on a rank: of experts, or the others."""

    numel: int
    nbytes: int
    ranks: int
    """Ranks that hold the same ones, over which the distributed optimizer divides states."""


def device_bytes() -> int:
    """Memory of the device: what its driver says, of a named ``hardware`` its table's; of a CPU a rank's share of the
    host's.
    """
    named = Options.parse({}, os.environ).hardware
    if named is not None:
        return int(hardware(named).memory)
    if groups.kind() == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(getattr(torch, groups.kind()).get_device_properties(groups.current_device()).total_memory)


def gradient_bytes(args: Namespace, part: Part) -> int:
    """Bytes of the buffers that gradients are added to."""
    return 4 * part.numel if get(args, "accumulate_allreduce_grads_in_fp32") else part.nbytes


def states_bytes(args: Namespace, part: Part) -> float:
    """Bytes of main weights and moments that stay on the device between steps."""
    itemsize = part.nbytes / max(1, part.numel)
    shards = part.ranks if get(args, "use_distributed_optimizer") else 1
    main = 0 if itemsize >= 4 else 2 if get(args, "reuse_fp32_param") else 4
    of_one = 1 if get(args, "quant_states") else 2 if get(args, "o2_optimizer") else 4
    moments = MOMENTS.get(get(args, "optimizer", "adam"), 2) * of_one
    kept = 0.0 if get(args, "swap_optimizer") else 1.0
    if get(args, "optimizer_cpu_offload"):
        kept = 1.0 - get(args, "optimizer_offload_fraction", 1.0)
    return kept * (main + moments) * part.numel / shards


def most_alive(args: Namespace, rank: int, micro_batches: int) -> int:
    """Forwards of chunks that wait for their backward at once on a rank of the pipeline, at most.

    1F1B: p - rank; interleaved with v virtual stages: 2 (p - rank - 1) + (v - 1) p + 1 (Narayanan et al. 2021);
    DualPipeV and late gradients, of which chunks' parts stay for longer: as many as there are.
    """
    p = get(args, "pipeline_model_parallel_size", 1)
    v = get(args, "virtual_pipeline_model_parallel_size") or 1
    if get(args, "schedules_method") or get(args, "use_nanopipe"):
        return max(1, v * min(micro_batches, 2 * p))
    alive = p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1
    return max(1, min(alive, v * micro_batches))


def graph_bytes(args: Namespace, own: list[Part], parts: list[Part], alive: int, device: int) -> int:
    """The budget, see the module.

    Args:
        own: weights of the chunk.
        parts: weights of the rank, of all chunks.

    Raises:
        OptionError: nothing is left for activations.
    """
    weights = sum(part.nbytes for part in parts)
    states = sum(gradient_bytes(args, part) + states_bytes(args, part) for part in parts)
    left = device - RESERVED - weights - states
    if left <= 0:
        raise OptionError(
            f"{planning_flags(args)}: the device has {device / GIB:.2f} GiB, of which {RESERVED / GIB:g} are left "
            f"alone, weights take {weights / GIB:.2f} and gradients and states of the optimizer {states / GIB:.2f}: "
            "nothing is left for activations; divide the model over more ranks, or give --use-distributed-optimizer or "
            "--swap-optimizer"
        )
    is_added = get(args, "gradient_accumulation_fusion")
    handed = sum(part.nbytes + (gradient_bytes(args, part) if is_added else 0) for part in own)
    return int(handed + left / alive)


def with_budgets(args: Namespace, chunks: list[torch.nn.Module], here: list[Namespace]) -> list[Namespace]:
    """The arguments of each chunk of this rank, with the budget of its graph."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    alive = most_alive(args, parallel_state.get_pipeline_model_parallel_rank(), get_num_microbatches())
    owns = [_parts(chunk, parallel_state) for chunk in chunks]
    parts, size = [part for own in owns for part in own], get(args, "adaptive_recompute_device_size", -1)
    device = size * 2**20 + RESERVED if size > 0 else device_bytes()
    return [
        Namespace(**{**vars(one), GRAPH_MEMORY: graph_bytes(args, own, parts, alive, device)})
        for one, own in zip(here, owns, strict=True)
    ]


def _parts(chunk: torch.nn.Module, parallel_state: Any) -> list[Part]:
    groups_of = {
        True: parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_world_size(),
    }
    results = []
    for is_shared, ranks in groups_of.items():
        own = [p for p in chunk.parameters() if getattr(p, "allreduce", True) is is_shared]
        results.append(Part(sum(p.numel() for p in own), sum(p.nbytes for p in own), ranks))
    return results
