"""What a compiled program must agree in with eager PyTorch, and how far it may be off.

Values may differ by rounding alone. How much that is, the program itself tells: its reference runs in float64, and
twice more with inputs and parameters moved by the rounding error of the coarsest type that it computes in; what that
changes, times a factor, is allowed, and so is what eager PyTorch is off in that type. That is a lower estimate, which
knows nothing of what cancels inside: where it does not suffice, the error is sampled with one rounding of everything
that every operator reads (rounding.py). What a program casts to a narrower type is rounded in its reference, too;
where that decides (a square of 1e20 in float32, say), a result need only be as close as eager PyTorch's to that of a
run without such casts. Types, shapes, which gradients there are and what was written into inputs must
be equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch._inductor.config as inductor_config

import mindspeed_fx  # noqa: F401  registers the backend
from mindspeed_fx.report import recorder

from .collectives import alone
from .generate import Case
from .program import build, inputs_of, load
from .rounding import Widened, deviations

FACTOR = 8.0
"""Standard deviations of the error that are allowed (rounding.py), and of the lower estimate this often what one
rounding of the inputs changes: rewrites of a few operators may round differently in each."""

ILL = 0.5
"""Tolerances over this part of a tensor's largest number say nothing: such a tensor is not compared."""


@dataclass
class Result:
    """Tensors by name ("output 0", "gradient m3", "input x1"), None where there is no gradient."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    kind: str
    """"raised" or "differs"."""
    where: str
    detail: str

    def same_as(self, other: Failure | None) -> bool:
        if other is None or other.kind != self.kind:
            return False
        return self.kind == "differs" or self.detail.split(":")[0] == other.detail.split(":")[0]


@dataclass(frozen=True)
class Verdict:
    failure: Failure | None
    compared: int = 0
    """Tensors compared; 0 for a program that eager PyTorch does not run with other sizes."""
    theirs: bool = False
    """torch's own backend fails alike."""
    rewrites: Counter[str] = field(default_factory=Counter)
    """Pass -> what it rewrote."""


def step(model, function, inputs, grad: str) -> Result:
    """One call of ``function`` (the model, compiled or not) and its gradients."""
    for p in model.parameters():
        p.grad = None
    result = Result()
    with torch.no_grad() if grad == "no_grad" else contextlib.nullcontext():
        outputs = function(*inputs)
    if grad != "no_grad":
        wanted = [o for o in outputs if o.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [_cotangent(o) for o in wanted])
        for name, p in model.named_parameters():
            result.tensors[f"gradient {name}"] = p.grad
        for i, x in enumerate(inputs):
            if x.is_floating_point():
                result.tensors[f"gradient of input {i}"] = x.grad
    for i, o in enumerate(outputs):
        result.tensors[f"output {i}"] = o.detach()
    for i, x in enumerate(inputs):
        result.tensors[f"input {i}"] = x.detach()
    return result


def _cotangent(o: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).to(o.dtype).view(o.shape)


def prepare(case: Case, space: dict, call: int, dtype: torch.dtype, moved: int | None = None):
    """Model and inputs of a call; ``moved``: by one rounding error of the coarsest type, with signs of that seed."""
    settings = case.settings
    model = build(space, case.seed, getattr(torch, settings.dtype)).to(dtype)
    sizes = case.program.sizes[0 if settings.dynamic is False else call % len(case.program.sizes)]
    inputs = inputs_of(space, case.seed + call, sizes, getattr(torch, settings.dtype))
    inputs = tuple(x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs)
    if moved is not None:
        torch.manual_seed(moved)
        with torch.no_grad():
            for t in [*model.parameters(), *inputs]:
                if t.is_floating_point():
                    t.mul_(1 + case.finest * (2 * torch.rand_like(t) - 1))
    if settings.grad == "frozen":
        for p in list(model.parameters())[::2]:
            p.requires_grad_(False)
        inputs = tuple(x.detach() for x in inputs)
    torch.manual_seed(case.seed + call)  # for what the program draws
    return model, inputs


def judge(case: Case, backend: str = "mindspeed") -> Verdict:
    """Compiles and runs the case; the first call that fails decides. Rewrites are not counted where layers are alike:
    while they are, each layer is captured for itself.
    """
    as_eager = inductor_config.patch(fallback_random=True)  # generated code draws what eager PyTorch does
    if case.layers:
        with alone(), as_eager:
            return _judge(case, backend)
    with recorder.collecting() as records, alone(), as_eager:
        verdict = _judge(case, backend)
    runs = [run for record in records for run in record.runs]
    return dataclasses.replace(verdict, rewrites=Counter(run.report.name for run in runs for _ in run.report.rewrites))


def _judge(case: Case, backend: str) -> Verdict:
    torch._dynamo.reset()
    space = load(case.program)
    dtype = getattr(torch, case.settings.dtype)
    compared, compiled, model = 0, None, None
    for call in range(case.settings.calls):
        try:
            eager = step(*_doubled(prepare(case, space, call, dtype)), case.settings.grad)
            reference = [
                step(*_doubled(prepare(case, space, call, torch.float64, moved)), case.settings.grad)
                for moved in (None, 1, 2)
            ]
        except RuntimeError:  # its sizes are part of the program, or it cannot run in float64
            return Verdict(None, compared)
        fresh, inputs = prepare(case, space, call, dtype)
        if compiled is None:
            options = {} if backend != "mindspeed" else {"options": _options(case)}
            model = fresh
            compiled = torch.compile(model, backend=backend, dynamic=case.settings.dynamic, fullgraph=True, **options)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                actual = step(model, compiled, inputs, case.settings.grad)
        except Exception as error:
            failure = Failure("raised", f"call {call}", f"{type(error).__name__}: {str(error)[:600]}")
            return Verdict(failure, compared)
        failure, count = compare(
            actual,
            eager,
            reference,
            case,
            lambda: _rounded(case, space, call, reference[0]),
            lambda: _widened(case, space, call),
        )
        compared += count
        if failure:
            return Verdict(Failure(failure.kind, f"call {call}, {failure.where}", failure.detail), compared)
    return Verdict(None, compared)


def _rounded(case: Case, space: dict, call: int, exact: Result) -> dict[str, torch.Tensor]:
    def run() -> dict[str, torch.Tensor | None]:
        with torch.utils._python_dispatch._disable_current_modes():
            model, inputs = prepare(case, space, call, torch.float64)
        return step(model, model, inputs, case.settings.grad).tensors

    return deviations(run, exact.tensors, case.finest)


def _widened(case: Case, space: dict, call: int) -> dict[str, torch.Tensor | None]:
    if re.search("training=True|rand|bernoulli|dropout", "".join(case.program.lines())):
        return {}  # other types draw other numbers
    pair = _doubled(prepare(case, space, call, torch.float64))
    try:
        with Widened():
            return step(*pair, case.settings.grad).tensors
    except RuntimeError:  # a type of its own is part of the program
        return {}


def _doubled(pair):
    model, inputs = pair
    return model, model, inputs


def _options(case: Case) -> dict:
    return {**case.settings.options, "strict": "enable" not in case.settings.options}


def compare(
    actual: Result,
    eager: Result,
    reference: list[Result],
    case: Case,
    rounded: Callable[[], dict[str, torch.Tensor]] = dict,
    widened: Callable[[], dict[str, torch.Tensor | None]] = dict,
) -> tuple[Failure | None, int]:
    """The first tensor that is no other by rounding alone, and how many were compared.

    Args:
        rounded: the standard deviation of every element under rounding, asked for where the estimate does not do.
        widened: the tensors of a run without casts to narrower types, asked for where that does not do either.
    """
    compared, deviation, unrounded = 0, None, None
    for name, ours in actual.tensors.items():
        theirs = eager.tensors[name]
        if (ours is None) != (theirs is None):
            return Failure(
                "differs", name, f"{'no gradient' if ours is None else 'a gradient'}, unlike eager"
            ), compared
        if ours is None or theirs is None:
            continue
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return Failure(
                "differs", name, f"{ours.dtype} {tuple(ours.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
            ), compared
        if not ours.is_floating_point():
            if not torch.equal(ours, theirs):
                return Failure("differs", name, "not equal"), compared
            continue
        exact, *others = (r.tensors[name] for r in reference)
        if exact is None or exact.shape != ours.shape or not exact.numel():
            continue
        values = [t.double() for t in (ours, theirs, exact, *others) if t is not None]
        # Where eager PyTorch has no number, of rows that see no key for example, ours may have any.
        numbers = torch.stack([t.isfinite() for t in values[1:]]).all(0)
        if not numbers.any():
            continue
        ours, theirs, exact, *others = (t[numbers] for t in values)
        scale = exact.abs().max().item()
        moved = max([(o - exact).abs().max().item() for o in others] or [0.0])
        allowed = FACTOR * moved + 4 * (theirs - exact).abs().max().item() + FACTOR * case.finest * scale + 1e-13
        if allowed > ILL * scale and scale > 0:
            continue
        compared += 1
        error = (ours - exact).abs().max().item()
        if not error <= allowed:
            deviation = rounded() if deviation is None else deviation
            if name in deviation:
                allowed = max(allowed, FACTOR * deviation[name][numbers].max().item())
        if not error <= allowed:
            unrounded = widened() if unrounded is None else unrounded
            true = unrounded.get(name)
            if true is not None and true.shape == numbers.shape and true[numbers].isfinite().all():
                error = (ours - true[numbers]).abs().max().item()
                allowed = max(allowed, (theirs - true[numbers]).abs().max().item())
        if not error <= allowed:
            return Failure(
                "differs", name, f"off by {error:.3g}, allowed {allowed:.3g}, largest number {scale:.3g}"
            ), compared
    return None, compared
