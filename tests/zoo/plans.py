"""Hugging Face architectures under plans, every rank in one process: equal to one device, or refused in one clear line.

    python -m tests.zoo.plans --write docs/parallel_matrix.md --update --missing [ARCHITECTURE ...] [--plans tp ...]

The models are those of :mod:`tests.zoo.parallel_models`.
"""

from __future__ import annotations

import argparse
import copy
import logging
import pathlib
import re
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.parallel_models import ARCHITECTURES, MIXTURES, build

TOLERANCE = 1e-9
SECONDS = 300
"""For one cell."""
SEED = 1
"""Of what a step draws."""

PLANS: dict[str, tuple[str, dict[str, int]]] = {
    "tp": ("tp", {"tp": 2}),
    "tp_sp": ("tp_sp", {"tp": 2}),
    "ulysses": ("ulysses", {"cp": 2}),
    "kv_allgather": ("kv_allgather", {"cp": 2}),
    "ring": ("ring", {"cp": 2}),
    "hybrid": ("hybrid", {"cp_ring": 2, "cp_ulysses": 2}),
    "zero2": ("zero2", {"dp": 2}),
    "zero3": ("zero3", {"dp": 2}),
    "ep": ("ep", {"ep": 2}),
    "ep_alltoall": ("ep_alltoall", {"ep": 2}),
    "zero2+tp_sp": ("zero2+tp_sp", {"dp": 2, "tp": 2}),
    "tp_2d": ("tp_2d", {"tp_x": 2, "tp_y": 2}),
    "search": ("search", {"dp": 2, "tp": 2}),
    "cp2 x search": ("search", {"cp": 2, "tp": 2}),
    "pp2 x search": ("search", {"pp": 2, "tp": 2}),
}
"""Column -> plan and mesh; "search" is what ``mindspeed_fx.plan`` finds for the mesh."""


def cell(name: str, column: str) -> tuple[str, str]:
    """:func:`under_plan` of an architecture of the table."""
    model, inputs = build(name)
    model.zero_grad()
    unused = copy.deepcopy(model)  # a recurrent model holds the state of its last step
    loss = model(**inputs)
    loss.backward()
    return under_plan(unused, inputs, column, lambda result: compared(model, loss, result, TOLERANCE))


def under_plan(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    column: str,
    verdict: Callable[[Any], tuple[str, str]],
) -> tuple[str, str]:
    """What ``verdict`` says of the simulated step: ("equal", largest error) or ("wrong", what happened); and ("whole",
    what stays whole while all is equal), ("refused", the line) or ("broken", what happened)."""
    import mindspeed_fx
    from mindspeed_fx.errors import OptionError
    from mindspeed_fx.sharding.presets import named_plan

    plan, mesh = PLANS[column]
    try:
        if plan == "search":
            plan = mindspeed_fx.plan(model, (), inputs, mesh=mesh, hardware="ascend910b2")
            if plan.unsupported:
                return "refused", f"unsupported: {'; '.join(plan.unsupported)}"
            mesh = plan.sizes
        if column in TENSOR:
            plan = named_plan(plan, model, kwargs=inputs)
        torch.manual_seed(SEED)
        result = mindspeed_fx.simulate(model, mesh, plan, **inputs)
    except OptionError as error:
        return ("refused", str(error)) if "\n" not in str(error) else ("broken", str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001  goes into the table
        cause = error.__cause__ or error
        return (
            "refused" if isinstance(cause, OptionError) else "broken"
        ), f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
    word, text = verdict(result)
    whole = [*result.whole, *(layers_kept(model, plan, inputs) if column in TENSOR else ())]
    return ("whole", f"{len(whole)}: {whole[0]}") if word == "equal" and whole else (word, text)


TENSOR = ("tp", "tp_sp", "tp_2d", "zero2+tp_sp")


def layers_kept(model: torch.nn.Module, plan: Any, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Linear layers that a tensor parallel plan does not divide, and the operators because of which."""
    from mindspeed_fx.sharding.presets import whole_layers
    from mindspeed_fx.sharding.roles import read_roles

    kept = whole_layers(model, plan)
    reasons = read_roles(model, (), inputs).whole if kept else {}
    return [f'layer "{n}": {reasons.get(f"{n}.weight", "no role was read")}' for n in kept]


def compared(model: torch.nn.Module, loss: torch.Tensor, result: Any, tolerance: float) -> tuple[str, str]:
    """The verdict on a simulated step."""
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if missing := expected.keys() ^ result.gradients.keys():
        return "wrong", f"gradients appeared or disappeared: {', '.join(sorted(missing))}"
    errors = {"loss": ((result.outputs[0] - loss).abs() / loss.abs()).item()}
    # A gradient that is zero but for rounding (of a key's bias, which softmax does not see) is measured by the largest
    # of all.
    largest = max(g.abs().max() for g in expected.values())
    errors |= {
        n: ((result.gradients[n] - g).abs().max() / g.abs().max().clamp(min=1e-3 * largest)).item()
        for n, g in expected.items()
    }
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    return ("equal" if errors[worst] <= tolerance else "wrong"), f"{errors[worst]:.0e}" + (
        f" ({worst})" if not errors[worst] <= tolerance else ""
    )


def columns(name: str) -> list[str]:
    without = ("zero2+tp_sp",) if name in MIXTURES else ("ep", "ep_alltoall")
    return [c for c in PLANS if c not in without]


class OutOfTime(BaseException):
    """No ``Exception``, of which the package would make an error of its own."""


def checked(name: str, column: str, seconds: int) -> tuple[str, str]:
    """:func:`cell` within ``seconds``."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        return cell(name, column)
    except OutOfTime as error:
        return "broken", str(error)
    finally:
        signal.alarm(0)


def markdown(found: dict[tuple[str, str], tuple[str, str]]) -> str:
    """The table, and below it what was refused and why."""
    names = [n for n in ARCHITECTURES if any(n == m for m, _ in found)]
    counts = {
        word: sum(w == word for w, _ in found.values()) for word in ("equal", "whole", "refused", "wrong", "broken")
    }
    lines = ["# Hugging Face architectures under plans", "", __doc__.strip().splitlines()[0], ""]
    lines += [
        ", ".join(f"{n} {word}" for word, n in counts.items())
        + f" of {len(found)} cells. Equal: loss and every gradient to {TOLERANCE:.0e}, relative; the number is the "
        "largest error. Whole: equal, and the table below names how many things the plan does not divide, and the "
        "first of them. Two layers, float64, all ranks in one process. Columns of experts are for models that have "
        "some, zero2+tp_sp for the others; search, cp2 x search and pp2 x search are what `mindspeed_fx.plan` finds "
        "for dp 2 x tp 2, cp 2 x tp 2 and pp 2 x tp 2.",
        "",
    ]
    lines += ["| architecture | " + " | ".join(PLANS) + " |", "|---|" + "---|" * len(PLANS)]
    for n in names:
        row = [found.get((n, c), ("", "")) for c in PLANS]
        lines.append(f"| {n} | " + " | ".join(text if word == "equal" else word for word, text in row) + " |")
    lines += ["", "| cell | | what it says |", "|---|---|---|"]
    lines += [
        f"| {n}, {c} | {word} | {text.replace('|', chr(92) + '|')} |"
        for (n, c), (word, text) in sorted(found.items(), key=lambda item: names.index(item[0][0]))
        if word != "equal"
    ]
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """What :func:`markdown` wrote."""
    found = {}
    for line in text.splitlines():
        cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == len(PLANS) + 1 and cells[0] in ARCHITECTURES:
            found |= {(cells[0], c): ("equal", value) for c, value in zip(PLANS, cells[1:]) if value}
        elif len(cells) == 3 and ", " in cells[0]:
            found[tuple(cells[0].split(", "))] = (cells[1], cells[2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), help="all by default")
    parser.add_argument("--write", help="Markdown file; standard output by default")
    parser.add_argument("--update", action="store_true", help="keep the cells of --write's file that are not run")
    parser.add_argument("--skip-equal", action="store_true", help="with --update: run what is not equal alone")
    parser.add_argument("--missing", action="store_true", help="with --update: run what the file does not have alone")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for one cell")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    found = read(pathlib.Path(args.write).read_text()) if args.update else {}
    for name in args.architectures:
        for column in args.plans or columns(name):
            known = found.get((name, column), ("", ""))[0]
            if (args.skip_equal and known == "equal") or (args.missing and known):
                continue
            begin = time.perf_counter()
            found[name, column] = checked(name, column, args.seconds)
            print(name, column, *found[name, column], f"{time.perf_counter() - begin:.0f} s", flush=True)
            if args.write:
                pathlib.Path(args.write).write_text(markdown(found))  # what is known so far survives an interruption
    if not args.write:
        print(markdown(found))


if __name__ == "__main__":
    main()
