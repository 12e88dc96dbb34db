"""The modelled peak of a training step against the measured one, over a zoo of models.

    python -m benchmarks.memory_model [--models gpt2,llama,... or all] [--budgets 1.0,0.5,min] [--tokens 1024] [--device
    cpu]

Each model takes one step per budget with codegen "eager". Modelled: the peak that the plan's report states, less
parameters and inputs. Measured: allocation events of torch.profiler on cpu, the caching allocator's count on cuda, less
what was allocated before the step. Gradients of parameters are in both. "all" is every causal language model of
transformers that builds with the zoo's small configuration; what does not run in one graph is named.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from typing import Any, Callable

import torch

import mindspeed_fx
from benchmarks import common
from benchmarks.memory_rivals import ZOO

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def modelled(model: torch.nn.Module, inputs: dict[str, Any], options: dict[str, Any]) -> int:
    """Bytes at the peak of the one graph's plan, less parameters and inputs."""
    report = mindspeed_fx.explain(model, **inputs, options=options)
    runs = [r.report for g in report.graphs for r in g.runs if r.report.name == "recompute.budget"]
    if len(report.graphs) != 1 or len(runs) != 1 or not runs[0].curves:
        raise ValueError(
            "; ".join(
                [
                    f"{len(report.graphs)} graphs",
                    *(str(b).splitlines()[0] for b in report.break_reasons),
                    *(n for r in runs for n in r.notes),
                ]
            )
        )
    last = list(runs[0].curves.values())[-1]
    return last.peak - last.input_bytes


def training_step(model: torch.nn.Module, compiled: Callable, inputs: dict[str, Any]) -> common.Step:
    """One step that holds all outputs, logits too, until its end, as the model of memory has to assume."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        outputs = compiled(**inputs)
        outputs.loss.backward()

    return step


def measured(step: common.Step, device: str) -> int:
    """Bytes at the peak of ``step``, less what is there before it."""
    if device == "cpu":
        return common.peak_bytes(step, 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    arg = common.arguments(models=ZOO, budgets="1.0,0.5,min", tokens=1024, device="cpu")
    from tests.zoo import architectures

    common.header(
        f"peak of a step of {arg.tokens} tokens beyond parameters and inputs, modelled and measured, {arg.device}"
    )
    budgets = arg.budgets.split(",")
    print(f"{'model':<18}" + "".join(f"{b:>12} MiB  model/measured" for b in budgets))
    errors: list[float] = []
    for name in architectures.names() if arg.models == "all" else arg.models.split(","):
        try:
            model, inputs = architectures.build(name)
            ids = torch.randint(3, 100, (arg.tokens // 64, 64)).to(arg.device)
            model.loss_type = (
                "ForCausalLM"  # some classes name none; transformers warns, at which Dynamo breaks the graph
            )
            model, inputs = model.float().to(arg.device), {**inputs, "input_ids": ids, "labels": ids}
            results = []
            for budget in budgets:
                options = {"codegen": "eager", "memory_budget": budget if budget == "min" else float(budget)}
                expected = modelled(model, inputs, options)
                torch._dynamo.reset()
                step = training_step(model, torch.compile(model, backend="mindspeed", options=options), inputs)
                step()
                model.zero_grad(set_to_none=True)
                results.append((measured(step, arg.device), expected))
        except Exception as error:  # noqa: BLE001  the next model may do
            print(f"{name:<18}{type(error).__name__}: {str(error).splitlines()[0][:140]}", flush=True)
            continue
        errors += [abs(e / m - 1) for m, e in results]
        print(f"{name:<18}" + "".join(f"{m / 2**20:>16.2f}  {e / m:>14.4f}" for m, e in results), flush=True)
    print(f"{len(errors)} steps: median error {100 * statistics.median(errors):.2f} %, worst {100 * max(errors):.2f} %")


if __name__ == "__main__":
    main()
