"""Models of layer_lists.py compiled and stepped beside eager PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
import types
import warnings
from typing import Any, Callable, Iterator

import torch
import torch._inductor.config as inductor_config

import mindspeed_fx  # noqa: F401  registers the backend
from mindspeed_fx.report import recorder

from .layer_lists import Program, smaller
from .oracle import Failure
from .program import load

STEPS = 3
SECONDS = 300
"""What a step may take. Dynamo of torch 2.13 reads ``enumerate(reversed(layers))`` for ever where a layer registers a
hook on a tensor, in torch's own backends too."""
Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a program: what differs from eager, the steps compared, calls of regions that Dynamo read once, and whether
    torch's own backend fails, too."""

    failure: Failure | None
    steps: int
    regions: int = 0
    theirs: bool = False


def judge(program: Program, codegen: str = "eager") -> Outcome:
    eager = list(_steps(program, lambda model: model))
    with recorder.collecting() as graphs:
        failure, steps = _compare(eager, _steps(program, _compile(program, "mindspeed", codegen)))
    regions = sum(int(str(g.effective.get("regions", "0")).split()[0]) for g in graphs)
    if failure is None:
        return Outcome(None, steps, regions)
    plain = program if failure.kind == "raised" else program.without("marked")
    theirs, _ = _compare(list(_steps(plain, lambda model: model)), _steps(plain, _compile(plain, "aot_eager")))
    return Outcome(failure, steps, regions, theirs is not None)


def shrink(program: Program, failure: Failure, seconds: float, codegen: str = "eager") -> Program:
    """A program with such a failure of which nothing can be left out, or the smallest that time allows."""
    end = time.monotonic() + seconds
    for candidate in smaller(program):
        if time.monotonic() > end:
            break
        outcome = judge(candidate, codegen)
        if failure.same_as(outcome.failure) and not outcome.theirs:
            return shrink(candidate, failure, end - time.monotonic(), codegen)
    return program


def _compile(program: Program, backend: str, codegen: str = "") -> Callable:
    options = {"options": {"codegen": codegen, "level": program.seed % 3}} if backend == "mindspeed" else {}
    return lambda model: torch.compile(model, backend=backend, dynamic="dynamic" in program.settings or None, **options)


def _compare(eager: list[Values | Exception], steps: Any) -> tuple[Failure | None, int]:
    """The first difference, and how many steps were compared."""
    for number, expected in enumerate(eager):
        actual = next(steps)
        if isinstance(expected, Exception):  # what it says there is eager's to tell
            return None, number
        if isinstance(actual, Exception):
            return Failure("raised", f"step {number}", f"{type(actual).__name__}: {str(actual)[:600]}"), number
        for name in expected.keys() | actual.keys():
            if why := _difference(expected.get(name), actual.get(name)):
                return Failure("differs", f"step {number}, {name}", why), number
    return None, len(eager)


def _difference(expected: Any, actual: Any) -> str:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return "" if expected is None and actual is None or _same(expected, actual) else f"{actual} for {expected}"
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return f"{actual.dtype} {tuple(actual.shape)} for {expected.dtype} {tuple(expected.shape)}"
    if torch.allclose(actual, expected, rtol=1e-8, atol=1e-11, equal_nan=True):
        return ""
    return f"off by {(actual - expected).abs().max().item():.3g} of {expected.abs().max().item():.3g}"


def _same(expected: Any, actual: Any) -> bool:
    return type(expected) is type(actual) and expected == actual


def _steps(program: Program, wrap: Callable) -> Any:
    """Of each step what came of it: values by name, or the error."""
    torch._dynamo.reset()
    module = sys.modules["fuzzed_layers"] = types.ModuleType("fuzzed_layers")  # where dataclasses look for their own
    with warnings.catch_warnings(), inductor_config.patch(fallback_random=True):
        warnings.simplefilter("ignore")
        space = load(program, module.__name__, vars(module))
        torch.manual_seed(program.seed)
        model = space["Model"]().double()
        if "frozen" in program.settings:
            for layer in model.layers[:3]:
                layer.requires_grad_(False)
        function = wrap(model)
        for number in range(STEPS):
            try:
                torch.manual_seed(program.seed + number)
                for text, at, when in program.changes:
                    if when == number:
                        exec(text, space, {"layer": model.layers[at], "model": model})
                        model.double()
                with in_time(SECONDS):
                    values = _step(program, model, function, number)
                yield values
            except Exception as error:
                yield error


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """
    Raises:
        TimeoutError: what is inside takes longer.
    """

    def stop(*unused: Any) -> None:
        raise TimeoutError(f"not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _step(program: Program, model: Any, function: Callable, number: int) -> Values:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(program.seed + number)
    batch = 5 if number == 1 and "other sizes" in program.settings else 3
    x = torch.randn(batch, 2, 4, dtype=torch.float64, requires_grad=True)
    mask, bias = torch.rand(batch, 2, 4) < 0.2, torch.randn(4, dtype=torch.float64)
    without = number == 2 and "no_grad" in program.settings
    with torch.no_grad() if without else contextlib.nullcontext():
        (loss,) = function(x, mask, bias)
    if loss.requires_grad:
        loss.backward()
    values: Values = {"loss": loss.detach(), "gradient of x": x.grad, "needs a gradient": loss.requires_grad}
    values |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    values |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for i, layer in enumerate(model.layers):
        kept = {k: v for k, v in vars(layer).items() if isinstance(v, int | float | str | torch.Tensor)}
        values |= {f"{k} of layer {i}": v for k, v in kept.items()}
    return values
