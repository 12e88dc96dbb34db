"""Planning time of memory_budget by number of layers: the search of one budget, and its certificate, on one core.

    python -m benchmarks.planner_time [--layers 4,16,32] [--rounds 5] [--steps 250,3600]

A Hugging Face Llama (hidden 128, codegen "eager", as in benchmarks/memory_budget.py) with so many layers, planned at
half the way between the least peak and that of saving everything; medians of CPU time. Pricing the operations of the
graph is not planning and is not in it. Then steps of random layers, all alike (tests/passes/recompute/random_steps.py),
for numbers of nodes that take too long to trace.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import common
from benchmarks.whole_models import Loss
from mindspeed_fx.passes.recompute import budget
from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem
from mindspeed_fx.passes.recompute.solve.whole_step import WholeStep


class Found(Exception):
    """The joint graph has been priced."""


def of_llama(layers: int) -> tuple[RematProblem, list[float]]:
    """The step of a Llama as the pass ``recompute.budget`` plans it, and the prices where no budget presses."""
    results = []

    def grab(schedule: RematProblem, unplanned: list[float]) -> None:
        results.append((schedule, unplanned))
        raise Found

    sizes = dict(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
    )
    model = Loss(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), attn_implementation="sdpa"))
    ids = torch.randint(0, 512, (4, 256))
    torch._dynamo.reset()
    own, budget.WholeStep = budget.WholeStep, grab
    try:
        torch.compile(model, backend="mindspeed", options={"codegen": "eager", "memory_budget": 0.5})(
            input_ids=ids, labels=ids, use_cache=False
        )
    except Exception:
        if not results:
            raise
    finally:
        budget.WholeStep = own
    return results[0]


def timed(schedule: RematProblem, unplanned: list[float] | None, rounds: int) -> tuple[float, str]:
    """Median seconds of planning one budget, and what was done."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        search = WholeStep(schedule, unplanned)
        limit = (search.least.bytes + search.richest.bytes) // 2
        plan = search.best(limit)
        times.append(time.process_time() - start)
    start = time.process_time()
    bound = search.bound(limit)
    certificate, takes = time.process_time() - start, sum(schedule.run_seconds)
    return (
        statistics.median(times),
        f"{search.small.evaluations} plans tried; with a certificate {certificate:.2f} s more; gap at most "
        f"{((takes + plan.seconds) / (takes + (bound or 0.0)) - 1) * 100:.1f} %",
    )


def main() -> None:
    arg = common.arguments(layers="4,16,32", rounds=5, steps="230,3300")
    common.header(f"planning time of one budget, CPU seconds (median of {arg.rounds})")
    first = None
    for layers in filter(None, arg.layers.split(",")):
        schedule, unplanned = of_llama(int(layers))
        seconds, what = timed(schedule, unplanned, arg.rounds)
        first = first or seconds
        print(
            f"llama, {layers:>4} layers {len(schedule.sources):>6} nodes {seconds:7.3f} s  {seconds / first:5.2f}  "
            f"{what}",
            flush=True,
        )
    from tests.passes.recompute.random_steps import layered

    for layers in filter(None, arg.steps.split(",")):
        schedule, _ = layered(1, int(layers), 6)
        seconds, what = timed(schedule, None, min(3, arg.rounds))
        print(
            f"random, {layers:>4} layers {len(schedule.sources):>6} nodes {seconds:7.3f} s         {what}", flush=True
        )


if __name__ == "__main__":
    main()
