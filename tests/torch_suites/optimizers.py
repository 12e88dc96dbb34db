"""Every configuration of every optimizer that torch's own tests compile, and every schedule of a learning rate that is
a tensor, against the eager optimizer: what inductor/test_compiled_optimizers.py covers, but its counts of kernels.

    python -m tests.torch_suites.optimizers [--levels 1,2] [--device cpu]

The configurations come from the installed torch (``torch.testing._internal``).
"""

from __future__ import annotations

import argparse
import copy
import warnings
from typing import Any, Callable, Iterator

import torch
from torch.optim import lr_scheduler
from torch.testing._internal import common_optimizers

from tests.torch_suites.torch_programs import compile_inner_step

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 10),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 10),
    "step": lambda o: lr_scheduler.StepLR(o, 1, 100),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 2], 100),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 100),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, cycle_momentum=False),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.02, steps_per_epoch=1, epochs=10, cycle_momentum=False),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.001),
    "linear": lr_scheduler.LinearLR,
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.99, patience=1),
    "polynomial": lr_scheduler.PolynomialLR,
}
STEPS = 2
WITHOUT = ("SparseAdam", "LBFGS")
"""Not in torch's list of optimizers that compile: sparse gradients, and a step that needs a closure."""


def configurations(device: str) -> Iterator[tuple[str, type, dict[str, Any], Callable | None]]:
    """(name, optimizer, arguments, schedule) of every case."""
    inputs_of = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs
    for info in common_optimizers.optim_db:
        if info.optim_cls.__name__ in WITHOUT:
            continue
        for case in inputs_of(device, None, info, skip=("differentiable", "fused")):
            kwargs = dict(case.kwargs)
            schedules = SCHEDULES if isinstance(kwargs.get("lr"), torch.Tensor) else {"": None}
            settings = ", ".join(f"{k}={v}" for k, v in kwargs.items())
            for schedule, make in schedules.items():
                yield f"{info.optim_cls.__name__}({settings}) {schedule}".strip(), info.optim_cls, kwargs, make


def train(
    kind: type, kwargs: dict[str, Any], schedule: Callable | None, device: str, compiled: dict[str, Any] | None = None
) -> tuple:
    """Parameters and states after the steps, eager or as ``compiled`` says to torch.compile."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Muon steps matrices only
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=kind.__name__ != "Muon") for _ in range(2))).to(device)
    model(torch.ones(2, 10, device=device)).sum().backward()
    optimizer = kind(model.parameters(), **copy.deepcopy(kwargs))
    step = compile_inner_step(optimizer, **compiled) if compiled else optimizer.step
    planned = schedule(optimizer) if schedule else None  # wraps the step once more
    for _ in range(STEPS):
        step()
        if planned is not None:
            planned.step(1.0) if isinstance(planned, lr_scheduler.ReduceLROnPlateau) else planned.step()
    parameters = list(model.parameters())
    return [p.detach().clone() for p in parameters], [dict(optimizer.state[p]) for p in parameters]


def failure(case: tuple, device: str, compiled: dict[str, Any]) -> str:
    """How a compiled run differs from the eager one; empty where it does not."""
    try:
        expected = train(*case, device)
        torch.testing.assert_close(train(*case, device, compiled), expected)
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", default="2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="part of a case's name")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    cases = [c for c in configurations(args.device) if args.only in c[0]]
    for level in map(int, args.levels.split(",")):
        ours = {"backend": "mindspeed", "options": {"level": level, "codegen": "eager"}}
        failed = {name: told for name, *case in cases if (told := failure(tuple(case), args.device, ours))}
        shared = {c[0] for c in cases if c[0] in failed and failure(c[1:], args.device, {"backend": "aot_eager"})}
        for name, told in failed.items():
            print(f"{'fails with aot_eager too' if name in shared else 'FAILS'}: {name}: {told}")
        equal, kinds = len(cases) - len(failed), len({kind for _, kind, _, _ in cases})
        print(f"level {level}: {len(cases)} cases of {kinds} optimizers: {equal} equal, {len(shared)} fail with")
        print(f"aot_eager too, {len(failed) - len(shared)} fail here alone", flush=True)


if __name__ == "__main__":
    main()
