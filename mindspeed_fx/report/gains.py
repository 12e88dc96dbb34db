"""What a change of the model or of the options would gain, by the cost model: one row for each reason why something was
left, the largest first.

- A fusion that left a place: the kernels of the place's module that the fused operator would replace, against one
  kernel forward and one backward that do the same arithmetic, read what comes in and write what goes out, once. The
  operator itself can do no better in memory traffic, so that this is a bound: "at most".
- A pass of overlap that left a collective: the time for which the compute stream stands still for the collectives of
  that module.
- Another level, or a family of rewrites off: the difference of the two steps, where explain's ``what_if`` has both.

Of what other passes left (lowering, recomputation, sharding) no gain is modelled, and it has no row; nor have fusions
that buy memory with time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

from mindspeed_fx.report.families import FAMILIES
from mindspeed_fx.report.lanes import STEP
from mindspeed_fx.report.modelled import estimates
from mindspeed_fx.report.records import GraphRecord, PassRun

PRODUCTS_OF_VALUES = ("bmm", "baddbmm")
"""Matrix products of two computed values, such as queries and keys; those of weights are ``mm`` and ``addmm``."""
WITH_WEIGHTS = (*FAMILIES["experts"], "fusion.merged_linear")
"""Fusions that take in products with weights."""
FOR_MEMORY = ("fusion.linear_cross_entropy", "fusion.linear_cross_entropy_backward")
"""Fusions that buy memory with time."""
ELEMENTWISE = (*FAMILIES["rotations"], *FAMILIES["gates"], *FAMILIES["activations"], *FAMILIES["dropout"])
"""Fusions that take in nothing that sums."""
VECTOR = {"pointwise", "copy", "creation"}
SUMS = {"rows", "reduction", "gather", "other"}


@dataclass(frozen=True)
class Gain:
    """One change, and what it would gain."""

    what: str
    """The pass that left something, with the number of modules, or the option."""
    reason: str
    seconds: float
    """Of the modelled step."""
    is_bound: bool
    """True where the gain is this at most."""


def gains(graphs: Sequence[GraphRecord]) -> list[Gain]:
    """The changes that would gain something, the largest first; [] where nothing is modelled.

    Args:
        graphs: all of one step.
    """
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for record in graphs:
        step = _Step(record)
        for (name, reason), modules in _left(record.runs).items():
            seconds = step.exposed(modules) if name.startswith("overlap.") else step.fusing(name, modules)
            before, places = sums.get((name, reason), (0.0, 0))
            sums[name, reason] = before + seconds, places + len(modules)
    rows = [
        Gain(f"{name} in {places} module{'s' * (places != 1)}", reason, seconds, True)
        for (name, reason), (seconds, places) in sums.items()
    ]
    rows += _of_forms(graphs)
    return sorted((row for row in rows if row.seconds > 0), key=lambda row: -row.seconds)


def _left(runs: Iterable[PassRun]) -> dict[tuple[str, str], set[str]]:
    """(pass, reason) -> modules in which it left something."""
    modules: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        name = run.report.name
        if name.startswith(("fusion.", "canonicalize.", "overlap.")) and name not in FOR_MEMORY:
            for skip in run.report.skipped:
                modules.setdefault((name, skip.reason), set()).add(skip.module)
    return modules


def _of_forms(graphs: Sequence[GraphRecord]) -> list[Gain]:
    forms = next((g.what_if for g in graphs if g.what_if is not None), None)
    if forms is None:
        return []
    option = {"level": '"level": {}', "without": '"disable" of {}'}
    return [
        Gain(option[v.kind].format(v.value), "modelled by what_if", forms.base.seconds - v.seconds, False)
        for v in forms.variants
        if v.kind in option and not v.error
    ]


@dataclass
class _Kernel:
    """One kernel of the step, and the memory that it reads and writes."""

    stage: str
    node: Any
    kinds: set[str]
    """Kinds of its operators; "product" for a matrix product of two computed values."""
    reads: dict[Any, int]
    """Memory -> bytes."""
    writes: dict[Any, int]


class _Step:
    """The kernels of a forward and its backward, or of an inference graph, and who reads what they write."""

    def __init__(self, record: GraphRecord):
        self.record = record
        self.estimates = {stage: e for stage, e in estimates(record).items() if stage in STEP}
        self.kernels: list[_Kernel] = []
        self.readers: dict[Any, list[int]] = {}
        self.returned: set[Any] = set()
        saved: Mapping[str, str] = {}
        for stage in (s for s in STEP if s in self.estimates):
            self._add(stage, saved)
            saved = self.estimates[stage].calls.returned
        for number, kernel in enumerate(self.kernels):
            for key in kernel.reads:
                self.readers.setdefault(key, []).append(number)

    def _add(self, stage: str, saved: Mapping[str, str]) -> None:
        estimate = self.estimates[stage]
        calls = {call.name: call for call in estimate.calls.calls}

        def place(key: str) -> Any:
            """What the backward takes under the name of what the forward saved is the forward's memory."""
            return ("forward", saved[key]) if key in saved else (stage, key)

        for node in estimate.nodes:
            members = [calls[name] for name in (node.members or (node.name,)) if name in calls]
            reads = {place(s.key): int(estimate.value(s.bytes)) for c in members for s in c.reads}
            writes = {place(s.key): int(estimate.value(s.bytes)) for c in members for s in c.writes}
            self.kernels.append(_Kernel(stage, node, {_kind(c) for c in members}, reads, writes))
        self.returned |= {(stage, key) for key in estimate.calls.outputs}

    def exposed(self, modules: set[str]) -> float:
        """Seconds for which compute stands still for the collectives of ``modules``; "" is the whole graph."""
        return sum(
            seconds
            for stage, lanes in self.record.lanes.items()
            for k, seconds in lanes.exposed.items()
            if "" in modules or self.estimates[stage].nodes[k].module in modules
        )

    def fusing(self, name: str, modules: set[str]) -> float:
        """Seconds that one kernel for each module and direction would save."""
        return sum(max(0.0, self._saved(self._places(name, module))) for module in modules)

    def _places(self, name: str, module: str) -> list[int]:
        """The kernels that a fusion would replace in a module; where it has none of its own, in those below it."""
        kinds = VECTOR | (set() if name in ELEMENTWISE else SUMS)
        kinds |= {"matrix", "product"} if name in WITH_WEIGHTS else set()
        kinds |= {"product"} if name in FAMILIES["attention"] else set()
        mine = [k for k, kernel in enumerate(self.kernels) if kernel.kinds and kernel.kinds <= kinds]
        own = [k for k in mine if self.kernels[k].node.module == module]
        return own or [k for k in mine if self.kernels[k].node.module.startswith(f"{module}.")]

    def _saved(self, place: list[int]) -> float:
        inside = set(place)
        new = {key for k in place for key in self.kernels[k].writes}
        leaving = {key for key in new if self._leaves(key, inside)}
        total = 0.0
        for stage in STEP:
            part = [self.kernels[k] for k in place if self.kernels[k].stage == stage]
            if part:
                entering = {key: size for kernel in part for key, size in kernel.reads.items() if key not in new}
                written = {key: size for kernel in part for key, size in kernel.writes.items() if key in leaving}
                total += sum(kernel.node.seconds for kernel in part) - self._as_one(stage, part, entering, written)
        return total

    def _leaves(self, key: Any, inside: set[int]) -> bool:
        """Whether what the place makes is read outside of it. What a forward saves for its backward alone, the
        fused operator need not."""
        readers = self.readers.get(key, [])
        return any(k not in inside for k in readers) or (key in self.returned and not readers)

    def _as_one(
        self, stage: str, part: list[_Kernel], entering: Mapping[Any, int], written: Mapping[Any, int]
    ) -> float:
        """Modelled seconds of one kernel with the arithmetic of all."""
        estimate = self.estimates[stage]
        rates, value = estimate.hardware, estimate.value
        matrix = vector = 0.0
        for kernel in part:
            cost = kernel.node.cost
            shape = tuple(max(1, value(n)) for n in cost.shape)
            terms = dataclasses.replace(
                cost, matrix=value(cost.matrix), vector=value(cost.vector), read=0, write=0, launches=0, shape=shape
            ).terms(rates)
            matrix, vector = matrix + terms["matrix"], vector + terms["vector"]
        moved = dataclasses.replace(
            part[0].node.cost, matrix=0, vector=0, read=sum(entering.values()), write=sum(written.values()), launches=1
        )
        memory = dataclasses.replace(moved, cached=0).terms(rates)
        return float(memory["launch"] + max(matrix, vector, memory["memory"]))


def _kind(call: Any) -> str:
    name = call.operator.rpartition(".")[2]
    return "product" if call.kind == "matrix" and name in PRODUCTS_OF_VALUES else call.kind
