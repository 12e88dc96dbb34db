"""Every planner under one simulator: ours, torch's knapsacks (dp, greedy, ilp) and Megatron's modes, over a zoo of
models and random steps.

    python -m benchmarks.memory_rivals [--random 36] [--budgets 10] [--models gpt2,llama,...] [--hardware cpu] [--clock
    10] [--enough 1]

Each graph has that many limits, even steps from the least peak we find to the peak of saving everything. A rival has no
notion of a peak: it gets its best plan among those that fit, over ten fractions or all of its layers, which is more
than a user has. The gap is modelled time of the step over a time that no plan within the limit can beat: the optimum of
all choices for up to 16 values, else the lower bound, the larger of the planner's own and that of integer programs
(HiGHS), which may take ``--clock`` seconds for one limit, and are left out where the planner's own leaves at most
``--enough`` % of a gap. "certified" is what they make of our plan (option "certify"). Zoo: joint graphs as AOTAutograd
makes them, without our operators, so that torch's formulas for FLOP see every product. Random steps have no layers for
Megatron's modes.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import statistics
from dataclasses import dataclass
from typing import Any, Callable

import torch

from benchmarks import common
from mindspeed_fx.compat import inductor, partitioner
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.partition.order import prepare_early
from mindspeed_fx.passes.base import PassReport
from mindspeed_fx.passes.recompute.policy import cheapest_saved
from mindspeed_fx.passes.recompute.problem.dataflow import record
from mindspeed_fx.passes.recompute.problem.joint_graph import JointGraph
from mindspeed_fx.passes.recompute.problem.policies import fix_by_policy
from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem
from mindspeed_fx.passes.recompute.solve.budget_search import Search
from mindspeed_fx.passes.recompute.solve.whole_step import WholeStep
from tests.passes.recompute import random_steps

TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests"
ZOO = (
    "bloom,codegen,cohere,falcon,gemma2,glm4,gpt2,gpt_neox,gptj,"
    "llama,mistral,olmo2,opt,phi3,qwen2,qwen3,stablelm,starcoder2"
)
SOLVERS = ("dp", "greedy", "ilp")
FEW = 16

FRACTIONS = [f / 10 for f in range(1, 11)]


@dataclass
class Case:
    name: str
    schedule: RematProblem
    seconds: float
    """Of the step when nothing is made again."""
    rivals: dict[str, list[Plan]]
    unplanned: list[float] | None = None


def of_model(name: str, model: Callable, inputs: dict[str, Any], device: str, layers: int) -> Case:
    """The first joint graph of ``model(**inputs)``."""
    results: list[Case] = []

    def choose(graph: Any, info: Any) -> None:
        if results:
            return
        prepare_early(graph, info)  # for all of them: it takes nothing and needs less memory
        tape = record(graph, info)
        if isinstance(tape, str):
            raise ValueError(f"{name}: {tape}")
        step = JointGraph(graph.owning_module, info, tape, hardware(device), False, hardware(device).target)
        evaluate = lambda nodes: step.schedule.evaluate({step.number[n] for n in nodes})  # noqa: E731
        rivals = {f"torch {s}": [evaluate(partitioner.knapsack(graph, info, f, s)) for f in FRACTIONS] for s in SOLVERS}
        modes = ["selective", "full", *(f"block:{n}" for n in range(1, layers))]
        rivals["megatron"] = [
            evaluate([v.node for v in cheapest_saved(tape, fix_by_policy(tape, mode, False, PassReport("")))])
            for mode in modes
        ]
        results.append(
            Case(
                name,
                step.schedule,
                step.seconds,
                {k: [p for p in plans if p] for k, plans in rivals.items()},
                step.unplanned,
            )
        )

    def backend(gm: Any, example_inputs: Any) -> Any:
        cut = lambda joint, args, **settings: partitioner.partition(joint, args, choose, **settings)  # noqa: E731
        return inductor.compile_without_codegen(gm, example_inputs, inner=lambda g, *_: g, partition=cut)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**inputs)
    return results[0]


def of_random(seed: int, most: int) -> Case:
    """A random step: torch's knapsacks decide which of the values that saving everything keeps are kept."""
    import torch._functorch._activation_checkpointing.knapsack as knapsacks

    schedule, seconds = random_steps.step(seed, most)
    kept_anyhow = {schedule.root[i] for i in schedule.returned}
    items = sorted((v for v in Search(schedule).richest.saved - kept_anyhow), key=lambda v: -schedule.saved_bytes[v])
    total = sum(schedule.saved_bytes[v] for v in items)
    rivals: dict[str, list[Plan]] = {}
    for solver in SOLVERS:
        solve = getattr(knapsacks, f"{solver}_knapsack")
        for f in FRACTIONS:
            _, saved, _ = (
                (0, [], [])
                if not items
                else solve([schedule.saved_bytes[v] / total for v in items], [schedule.seconds[v] for v in items], f)
            )
            rivals.setdefault(f"torch {solver}", []).append(
                schedule.evaluate({*kept_anyhow, *(items[i] for i in saved)})
            )
    return Case(f"random {seed}", schedule, seconds, rivals)


def every_choice(schedule: RematProblem) -> list[Plan]:
    """All plans of a step with few values; none of one with more than :data:`FEW`."""
    anyhow = {schedule.root[i] for i in schedule.returned} & set(schedule.values)
    free = [v for v in schedule.values if v not in anyhow and schedule.savable[v]]
    some = (itertools.combinations(free, n) for n in range(len(free) + 1)) if len(free) <= FEW else ()
    return [p for s in itertools.chain.from_iterable(some) if (p := schedule.evaluate({*anyhow, *s}))]


def compare(case: Case, budgets: int, clock: float = 10.0, enough: float = 0.0) -> dict[str, list[float]]:
    """Planner -> for each limit the gap to what no plan can beat; infinite where none of its plans fits."""
    search = WholeStep(case.schedule, case.unplanned)
    low, high = search.least.bytes, max(search.least.bytes, search.richest.bytes)
    every = every_choice(case.schedule)
    gaps: dict[str, list[float]] = {"ours": [], "certified": [], **{k: [] for k in case.rivals}}
    for part in range(budgets):
        limit = low + (high - low) * part // max(1, budgets - 1)
        own = search.best(limit)
        quick = search.bound(limit) or 0.0
        near = (case.seconds + own.seconds) / (case.seconds + quick) - 1 <= enough
        better, proved = (own, None) if every or near else search.certified(limit, own, clock=clock)
        bound = min([p.seconds for p in every if p.bytes <= limit] or [max(quick, proved or 0.0), better.seconds])
        for who, plans in (("ours", [own]), ("certified", [better]), *case.rivals.items()):
            best = min((p.seconds for p in plans if p.bytes <= limit), default=math.inf)
            if best < bound * (1 - 1e-9):
                raise AssertionError(
                    f"{case.name}: {who} takes {best} s at {limit} bytes, and no plan should take less than {bound}"
                )
            gaps[who].append((case.seconds + best) / (case.seconds + bound) - 1)
    return gaps


def main() -> None:
    arg = common.arguments(random=36, budgets=10, models=ZOO, hardware="cpu", most=24, clock=10.0, enough=1.0)
    from tests.zoo import architectures

    common.header(
        f"gaps in % to a time that no plan within the limit can beat; modelled, {arg.hardware}, {arg.budgets} "
        "limits per graph"
    )
    print(f"{'graph':<14} {'nodes':>6} | mean (worst) gap, and limits that none of its plans meets")
    every: dict[str, list[float]] = {}
    cases: list[Callable[[], Case]] = []
    for name in filter(None, arg.models.split(",")):
        model, inputs = architectures.build(name)
        ids = torch.randint(3, 100, (16, 64))
        cases.append(
            lambda n=name, m=model.float(), i={**inputs, "input_ids": ids, "labels": ids}: of_model(
                n, m, i, arg.hardware, 2
            )
        )
    cases += [lambda s=s: of_random(s, 6 + s % (arg.most - 5)) for s in range(arg.random)]
    for make in cases:
        case = make()
        gaps = compare(case, arg.budgets, arg.clock, arg.enough / 100)
        print(
            f"{case.name:<14} {len(case.schedule.sources):>6} | "
            + "; ".join(f"{who} {line(g)}" for who, g in gaps.items()),
            flush=True,
        )
        for who, g in gaps.items():
            every.setdefault(who, []).extend(g)
    print(f"all {len(cases)} graphs")
    for who, g in every.items():
        print(f"{who:<14} {line(g)}")


def line(gaps: list[float]) -> str:
    finite = [100 * g for g in gaps if g < math.inf]
    missed = len(gaps) - len(finite)
    return (f"{statistics.mean(finite):.2f} ({max(finite):.2f})" if finite else "-") + (
        f", {missed} of {len(gaps)} not met" if missed else ""
    )


if __name__ == "__main__":
    main()
