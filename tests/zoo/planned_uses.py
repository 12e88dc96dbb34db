"""The architectures of the zoo as people use them, under plans: every rank in one process, equal to one device or
refused in one clear line.

    python -m tests.zoo.planned_uses [--use NAME[+NAME...] ...] [--plan NAME ...] [--jobs 2] [NAME ...]

The matrix of plans (plans.py) has a few architectures of every kind, each called in one way. Here are all causal models
of transformers, as transformers computes them (norms and softmax in float32), in the ways of :mod:`tests.zoo.uses`.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
from collections import Counter
from typing import Any

import torch

from tests.zoo import architectures, plans, table, uses

TOLERANCE = 1e-4
"""Relative to a gradient's largest element: float32 parts add up in another order."""
SECONDS = 300
USES = tuple(name for name in uses.USES if name not in ("shortened", "regrouped", "evaluated", "cached"))
"""Those of one training step."""
PLANS = ("tp_sp", "ulysses", "ring", "hybrid", "zero3", "ep_alltoall", "search")


class Step(torch.nn.Module):
    """What a step of training differentiates."""

    def __init__(self, model: torch.nn.Module, fixed: dict[str, Any]):
        super().__init__()
        self.model, self.fixed = model, fixed

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        result = self.model(**inputs, **self.fixed)
        loss = getattr(result, "loss", None)
        return result.logits.logsumexp(-1).square().mean() + result.logits.std() if loss is None else loss


def build(name: str, use: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model and the inputs of one step: four rows, but for packed documents."""
    model, inputs = uses.build(name, use.split("+"))
    if "inputs_embeds" in inputs:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["inputs_embeds"]).detach()
    tensors = {n: v for n, v in inputs.items() if torch.is_tensor(v) and v.dim()}
    if "packed" not in use:
        tensors = {n: torch.cat([v, v.flip(0)]) for n, v in tensors.items()}
    return Step(model, {n: v for n, v in inputs.items() if n not in tensors}).train(), tensors


def compared(name: str, use: str, plan: str) -> tuple[str, str]:
    """What :func:`plans.under_plan` says, or ("unbuilt", why eager PyTorch does not run)."""
    try:
        model, inputs = build(name, use)
        unused = copy.deepcopy(model)
        torch.manual_seed(plans.SEED)
        loss = model(**copy.deepcopy(inputs))  # CTRL writes into its embeddings
        loss.backward()
        if any(p.grad.isnan().any() for p in model.parameters() if p.grad is not None):
            return "unbuilt", "eager PyTorch's gradients are not numbers"
    except Exception as error:  # noqa: BLE001  the model is not ours
        return "unbuilt", table.one_line(error)
    return plans.under_plan(unused, inputs, plan, lambda result: plans.compared(model, loss, result, TOLERANCE))


def one(case: tuple[str, str, str]) -> tuple[tuple[str, str, str], tuple[str, str]]:
    """:func:`compared` in a process of its own: nothing but the result is told."""
    table.quiet()
    try:
        with table.time_limit(SECONDS):
            return case, compared(*case)
    except BaseException as error:  # noqa: BLE001  an alarm is none of Exception
        return case, ("broken", table.one_line(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", help="by default all causal models of transformers")
    parser.add_argument("--use", action="append", help=f"{', '.join(USES)}; several with +; plain by default")
    parser.add_argument("--plan", action="append", choices=plans.PLANS, help=f"{', '.join(PLANS)} by default")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    for part in {part for use in args.use or () for part in use.split("+")} - {*USES}:
        parser.error(f"--use {part}: valid: {', '.join(USES)}")
    names, counts = args.architectures or architectures.names(), Counter[str]()
    cases = [(n, use, plan) for use in args.use or ["plain"] for n in names for plan in args.plan or PLANS]
    # a process that has seen many models holds gigabytes
    with multiprocessing.get_context("spawn").Pool(args.jobs, torch.set_num_threads, (1,), maxtasksperchild=25) as pool:
        for (name, use, plan), (word, text) in pool.imap_unordered(one, cases):
            counts[word] += 1
            print(f"{word:8} {use:12} {plan:12} {name:24} {text}", flush=True)
    print(", ".join(f"{n} {word}" for word, n in counts.items()))


if __name__ == "__main__":
    main()
