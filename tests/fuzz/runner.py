"""Runs seeds, makes what fails small, and prints it."""

from __future__ import annotations

import dataclasses
import string
from collections import Counter
from dataclasses import dataclass

from .generate import Case, generate
from .minimize import minimize
from .oracle import Failure, Verdict, judge
from .program import indented

BACKENDS = {"eager": "aot_eager", "inductor": "inductor"}
"""codegen -> torch's own backend that does the same without our passes."""


@dataclass
class Tally:
    programs: int = 0
    compared: int = 0
    incomparable: int = 0
    """Programs of which no tensor was compared: ill-conditioned, or run with one size alone."""
    theirs: int = 0
    """Failures that torch's own backend shares."""
    errors: int = 0
    """Seeds that gave no program, or one that could not be compared: errors of these tests."""
    failures: list[tuple[Case, Failure]] = dataclasses.field(default_factory=list)
    rewrites: Counter[str] = dataclasses.field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, {self.compared} tensors compared, {self.incomparable} programs with none, "
            f"{self.theirs} failures of torch's own backend, {len(self.failures)} of ours, "
            f"{self.errors} errors of tests"
        )


def run_seed(seed: int, codegen: str = "eager", layers: int = 0) -> tuple[Case, Verdict]:
    case = generate(seed, codegen, layers)
    verdict = judge(case)
    if verdict.failure:
        own = judge(case, BACKENDS[codegen])
        verdict = dataclasses.replace(verdict, theirs=own.failure is not None)
    return case, verdict


def count(tally: Tally, case: Case, verdict: Verdict) -> None:
    tally.programs += 1
    tally.compared += verdict.compared
    tally.rewrites += verdict.rewrites
    if verdict.failure and verdict.theirs:
        tally.theirs += 1
    elif verdict.failure:
        tally.failures.append((case, verdict.failure))
    elif not verdict.compared:
        tally.incomparable += 1


def shrink(case: Case, failure: Failure, seconds: float = 120.0) -> Case:
    own = BACKENDS[case.settings.options["codegen"]]

    def fails(smaller: Case) -> Failure | None:
        verdict = judge(smaller)
        if not verdict.failure or judge(smaller, own).failure:
            return None
        return verdict.failure

    return minimize(case, failure, fails, seconds)


SCRIPT = """\
DTYPE, SEED, GRAD, DYNAMIC = torch.$dtype, $seed, "$grad", $dynamic
OPTIONS = $options


def prepare(call, sizes):
    torch.manual_seed(SEED)
    model = Model().to(DTYPE)
    torch.manual_seed(SEED + call)
    inputs = [x.to(DTYPE).requires_grad_(GRAD == "train") if x.is_floating_point() else x for x in make_inputs(*sizes)]
    for p in list(model.parameters())[::2] if GRAD == "frozen" else ():
        p.requires_grad_(False)
    torch.manual_seed(SEED + call)
    return model, inputs


def step(function, model, inputs):
    with torch.set_grad_enabled(GRAD != "no_grad"):
        outputs = function(*inputs)
    wanted = [o for o in outputs if o.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.linspace(0.5, 1.5, o.numel()).to(o.dtype).view(o.shape) for o in wanted])
    return [*(o.detach() for o in outputs), *(t.grad for t in (*model.parameters(), *inputs))]


if __name__ == "__main__":
    import mindspeed_fx

    for call, sizes in enumerate($calls):
        model, inputs = prepare(call, sizes)
        eager = step(model, model, inputs)
        model, inputs = prepare(call, sizes)
        compiled = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=DYNAMIC, options=OPTIONS)
        for i, (a, b) in enumerate(zip(eager, step(compiled, model, inputs))):
            both = a is not None and b is not None
            print(call, i, (a.double() - b.double()).abs().max().item() if both else f"eager {a}, compiled {b}")
"""


def script(case: Case, failure: Failure | None = None) -> str:
    """A file that runs by itself: the program, how it is compiled, and what eager PyTorch and the compiled one differ
    in."""
    s = case.settings
    values = {"dtype": s.dtype, "seed": case.seed, "grad": s.grad, "dynamic": s.dynamic, "options": s.options}
    tail = string.Template(SCRIPT).substitute(values, calls=_calls(case))
    head = f": {failure.kind}, {failure.where}\n{_commented(failure.detail)}" if failure else ""
    return f"# seed {case.seed}{head}\n{case.program.text()}\n{tail}"


def _calls(case: Case) -> list[tuple[int, int]]:
    sizes = case.program.sizes
    return [sizes[0 if case.settings.dynamic is False else i % len(sizes)] for i in range(case.settings.calls)]


def _commented(text: str) -> str:
    return "\n".join("# " + line for line in text.splitlines())


def told(case: Case, failure: Failure) -> str:
    s = case.settings
    lines = case.program.text().split("class Model")[1].splitlines()
    shown = "\n".join(line for line in ["class Model" + lines[0], *lines[1:]] if line.strip())
    return f"seed {case.seed}: {failure.kind}, {failure.where}: {failure.detail}\n  {s}\n{indented(shown)}"
