"""Whether memory plans leave every bit of a training step as it was, dropout included, over the architectures of the
zoo.

python -m tests.zoo.neutral [--from litgpt=DIR] [--from torchtitan=DIR] [architecture ...]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder

PLANS = {
    "planned": {"memory_budget": "min"},
    "recomputed": {"recompute": {"**": "recompute"}},
    "moved": {"recompute": {"**": "offload"}, "offload": True, "memory_budget": "1GiB"},
}
"""The planner's own, and everything that can be made again, or moved to host memory."""
PASSES = ("recompute.budget", "recompute.policy")
DROPS = ("attention_dropout", "activation_dropout", "dropout", "hidden_dropout", "dropout_p")


def with_dropout(model: torch.nn.Module, p: float = 0.1) -> torch.nn.Module:
    """``model`` with ``p`` wherever it drops anything."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        for name in DROPS:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, p)
    return model


def step(model: torch.nn.Module, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[list[torch.Tensor], Report]:
    """The loss and every gradient of one step, and what was done."""
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with recorder.collecting() as graphs:
        loss = torch.compile(model, backend="mindspeed", options={"codegen": "eager", **options})(**inputs).loss
        loss.backward()
        report = Report(list(graphs), [])
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)], report


def decisions(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, int]:
    """Values that each of :data:`PLANS` makes again or moves; raises where a bit differs."""
    expected, _ = step(model, inputs, {})
    found = {}
    for name, options in PLANS.items():
        values, report = step(model, inputs, options)
        differ = sum(not torch.equal(a, b) for a, b in zip(values, expected, strict=True))
        if differ:
            own = not all(map(torch.equal, step(model, inputs, {})[0], expected))
            raise AssertionError(
                f"{name}: {differ} of {len(expected)} results differ"
                + (", and so they do without a plan: the model seeds its own draws" if own else "")
            )
        found[name] = sum(report.counts.get(p, 0) for p in PASSES)
    return found


def main() -> None:
    from tests.zoo import architectures, table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", help="all by default")
    parser.add_argument(
        "--from", dest="sources", action="append", default=[], metavar="NAME=DIR", help="as table.py takes it"
    )
    args = parser.parse_args()
    table.quiet()
    sources = table.sources_of(parser, args.sources)
    for name in args.architectures or architectures.every(sources):
        try:
            model, inputs = architectures.made(name, sources)
            with_dropout(model)(**inputs).loss.backward()
        except Exception as error:  # noqa: BLE001  the model is not ours
            print(f"{name}: not tried, {table.one_line(error)}", flush=True)
            continue
        try:
            print(name, decisions(model, inputs), flush=True)
        except Exception as error:  # noqa: BLE001  the next one all the same
            own = " (so does torch's own aot_eager backend)" if table.fails_with_aot_eager(model, inputs) else ""
            print(f"{name}: FAILED{own}, {table.one_line(error)}", flush=True)


if __name__ == "__main__":
    main()
