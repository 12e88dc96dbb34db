"""Sixty searches, and every plan that they return traced on fake ranks: models x devices x memory.

    python -m benchmarks.plan_cells

A cell is a model, a number of 910B2 and what each may use; all meshes, stages of a pipeline among them, are searched.
Each plan of the table that a search returns (the best, and the best of the next meshes) becomes the program of one
rank, forward and backward, of two layers of each kind, on tensors without storage, which is how the search tries what
it lists; one that it had to pass over is a failure of its cell. Seconds are of the processor, tracing included.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import common, plan_models
from mindspeed_fx.planning.search import plan
from mindspeed_fx.planning.search.searched_plan import SearchedPlan
from mindspeed_fx.sharding.plan import ShardingError

HARDWARE = "ascend910b2"
MEMORY = ("36GiB", "57.6GiB")
MODELS: dict[str, tuple[int, ...]] = {
    "llama_8b": (8, 16, 64, 256, 1024),
    "experts": (32, 64, 128, 512, 1024),
    "llama_70b": (64, 96, 128, 512, 2048),
    "qwen3_235b": (192, 256, 512, 1024, 2048),
    "llama_405b": (256, 512, 768, 1024, 2048),
    "deepseek_v3": (512, 768, 1024, 1536, 2048),
}
"""Model -> numbers of devices."""
CELLS = [(name, devices, memory) for name, numbers in MODELS.items() for devices in numbers for memory in MEMORY]
KEPT = 4


@dataclass
class Cell:
    """What one search returned."""

    best: str = ""
    traced: int = 0
    """Plans of which a rank made its program."""
    unsupported: int = 0
    """Plans that say themselves that no program can do them."""
    failures: dict[str, str] = field(default_factory=dict)
    """Plan -> why it does not trace."""
    refused: str = ""
    """What the search says where nothing fits."""


def traced(name: str, devices: int, memory: str, **sizes: Any) -> Cell:
    """One cell.

    Args:
        sizes: of the model; its batch is a row a device, and at least 64, unless it is given.
    """
    model, args = getattr(plan_models, name)(**{"batch": max(64, devices), **sizes})
    result = Cell()
    try:
        hit = plan(model, args, devices=devices, hardware=HARDWARE, memory=memory, keep=KEPT)
    except ShardingError as error:
        result.refused = str(error)
        return result
    result.best = f"{hit.seconds * 1e3:.0f} ms, {hit.memory / 2**30:.1f} GiB: {hit.layout}"
    for other in hit.alternatives:
        assert isinstance(other, SearchedPlan)
        result.unsupported += bool(other.unsupported)
        result.traced += other.name in hit.searched.tried.passed
    result.failures = hit.refused
    return result


def main() -> None:
    common.header(f"{len(CELLS)} searches, plans traced on fake ranks, {HARDWARE}")
    plans = failed = none = unsupported = 0
    for name, devices, memory in CELLS:
        start = time.process_time()
        cell = traced(name, devices, memory)
        plans, failed = plans + cell.traced, failed + len(cell.failures)
        unsupported, none = unsupported + cell.unsupported, none + bool(cell.refused)
        print(
            f"{name:<12} {devices:>5} {memory:>8} {time.process_time() - start:>6.1f} s {cell.traced:>2} traced, "
            f"{len(cell.failures)} failed, {cell.unsupported} unsupported  {cell.best or cell.refused}",
            flush=True,
        )
        for which, why in cell.failures.items():
            print(f"    {which}: {why}", flush=True)
    found = f"{plans} plans traced, {failed} failed, {unsupported} unsupported; nothing fits in {none}"
    print(f"{len(CELLS)} cells: {found}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
