"""What ``plan(...)`` returns: a plan, with the search's numbers and its reasons."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from dataclasses import dataclass
from typing import Any, Sequence

from mindspeed_fx.arguments import check_sizes
from mindspeed_fx.cost.training import interval_of
from mindspeed_fx.errors import nearest
from mindspeed_fx.planning.search import constraints
from mindspeed_fx.planning.search.branch_and_bound import Outcome, branch_and_bound
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import divisors
from mindspeed_fx.planning.search.lp_structure import there_and_back
from mindspeed_fx.planning.search.plan_table import format_plan, who_runs
from mindspeed_fx.planning.search.problem import Problem
from mindspeed_fx.planning.search.solution import Solution
from mindspeed_fx.planning.search.solve import Program
from mindspeed_fx.planning.search.strategies import ATTENTIONS
from mindspeed_fx.planning.search.strategy_space import SUMMED, Label, P, R
from mindspeed_fx.planning.search.to_plan import emit
from mindspeed_fx.planning.search.tried_plans import TriedPlans
from mindspeed_fx.sharding.plan import Plan, ShardingError, parse_placement

GiB = 2**30


@dataclass
class Searched:
    """What a search was asked and what it found; shared by the plans that come of it."""

    problem: Problem
    prices: Prices
    devices: int
    memory: float
    outcome: Outcome
    settings: dict[str, Any]
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    tried: TriedPlans = dataclasses.field(default_factory=TriedPlans)


class SearchedPlan(Plan):
    """A :class:`Plan` that the search found: ``parallelize`` takes it (with pp ``pipeline_stages``), unless
    :attr:`unsupported` says why not.
    """

    searched: Searched
    solution: Solution
    unsupported: list[str]
    """What of the plan no program can do yet; a plan with any is refused."""

    @classmethod
    def of(cls, searched: Searched, solution: Solution) -> "SearchedPlan":
        parts, unsupported = emit(searched.problem, solution)
        result = cls(name=str(solution.layout), **parts)
        for name, value in (("searched", searched), ("solution", solution), ("unsupported", unsupported)):
            object.__setattr__(result, name, value)
        return result

    def __reduce__(self) -> tuple:
        return Plan, tuple(getattr(self, f.name) for f in dataclasses.fields(Plan))

    @property
    def refused(self) -> dict[str, str]:
        """Plans that are neither returned nor listed -> why no rank can make its program of them."""
        return self.searched.refused

    # ---------------------------------------------------------------- numbers

    @property
    def layout(self) -> Any:
        """Sizes of the mesh dimensions, microbatches, ZeRO stage, recompute."""
        return self.solution.layout

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh dimension of the plan -> ranks, outermost first: for ``init_device_mesh`` and ``simulate``."""
        return {d: getattr(self.layout, d) for d in self.mesh}

    @property
    def seconds(self) -> float:
        """Modelled seconds of a training step."""
        return self.solution.seconds

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds in which four of five published runs of this class are, of what is modelled for them
        (:func:`mindspeed_fx.planning.predict.predict`; docs/cost.md)."""
        low, high = interval_of(self.searched.prices.hw, "experts" if self.searched.problem.experts else "dense")
        return self.seconds * low, self.seconds * high

    @property
    def equals(self) -> list["SearchedPlan"]:
        """The alternatives that the model cannot tell from this plan: their times are in its interval."""
        low, high = self.interval
        return [p for p in self.alternatives if p.solution is not self.solution and low <= p.seconds <= high]

    @property
    def memory(self) -> float:
        """Modelled bytes on the fullest rank."""
        return self.solution.memory

    @property
    def exposed(self) -> float:
        """Modelled seconds of a step in which a rank waits for collectives."""
        return self.solution.parts["collectives"] + self.solution.parts["exposed"]

    @property
    def gap(self) -> float:
        """No plan of the search's space is faster by more than this fraction."""
        return max(0.0, self.seconds / self.searched.outcome.bound - 1)

    @property
    def alternatives(self) -> list["SearchedPlan"]:
        """The best plan of each of the best meshes, fastest first, of which a rank can make its program."""
        every = self.searched.outcome.solutions
        plans = [self if s is self.solution else SearchedPlan.of(self.searched, s) for s in every]
        return [p for p in plans if p is self or self.searched.tried.take(p)]

    def layers(self) -> list[dict[str, Any]]:
        """Time and memory by kind of layer: layer, count, compute, collectives (seconds of one), state, kept (bytes of
        one).
        """
        problem, s, results = self.searched.problem, self.solution, []
        for run in [-1, *range(len(problem.runs))]:
            nodes = [n for n in problem.nodes if n.run == run]
            mine = [(m, sec, kept) for m, _, _, sec, kept in s.moves if m.value.producer.run == run]
            turns = s.layout.microbatches
            results.append(
                {
                    "layer": "around the layers"
                    if run < 0
                    else f"{problem.runs[run][0]} ... {problem.runs[run][-1].rpartition('.')[2]}",
                    "count": problem.layers(run),
                    "compute": turns * sum(s.prices[n].forward + s.prices[n].backward for n in nodes),
                    "collectives": turns * (sum(s.prices[n].moved for n in nodes) + sum(sec for _, sec, _ in mine)),
                    "state": sum(s.prices[n].state for n in nodes),
                    "kept": sum(kept for m, _, kept in mine if m.times),
                }
            )
        return results

    def collectives(self) -> list[dict[str, Any]]:
        """What moves on tp, each: value, module, from, to, seconds there and back in one layer and microbatch."""
        rows = []
        for move, p, t, seconds, _ in self.solution.moves:
            if seconds or (p == R) != (t in (R, SUMMED)):
                forth, back = self.collective_words(move, p, t)
                readers = {e.node.module for e in move.readers if self.solution.strategies[e.node].ins[e.argument] == t}
                rows.append(
                    {
                        "value": move.value.producer.op,
                        "module": move.value.producer.module,
                        "to": sorted(readers),
                        "from": self.say(p),
                        "as": self.say(t),
                        "forward": forth,
                        "backward": back,
                        "seconds": seconds,
                    }
                )
        return rows

    @staticmethod
    def collective_words(move: Any, p: Label, t: Label) -> tuple[str, str]:
        """The collectives of a value made at ``p`` and wanted at ``t``, forward and backward; "" for none."""
        return there_and_back(move, p, t)

    def say(self, label: Label) -> str:
        return (
            {R: "R", SUMMED: "R", P: "sum"}.get(label, "")
            if not isinstance(label, int)
            else f"by {self.searched.problem.label(label)}"
        )

    # ---------------------------------------------------------------- reasons

    def explain(self, name: str, placements: Sequence[Any] | str | None = None) -> str:
        """Why parameter ``name`` (or the weight of module ``name``) is placed as it is on tp, and what another
        placement would cost.

        Args:
            name: in the whole model; or of a plan in :attr:`refused`.
            placements: of the rival: ``[Shard(0)]``, ``[Replicate()]`` or a word ("S(0)", "R"); None: all there are.

        Raises:
            ShardingError: no such parameter; a dimension it does not have.
        """
        if not isinstance(name, str):
            raise ShardingError(f"explain: name is {name!r}; the name of a parameter or of its module is expected")
        if name in self.refused:
            return f"{name} was not returned: {self.refused[name]}"
        parameter = self._parameter(name)
        if placements is None:
            return "\n".join(self.explain(name, w) for w in ("R", *(f"S({d})" for d in range(len(parameter.shape)))))
        word = _word(placements)
        d = parse_placement(word, "explain")
        if d is not None and not -len(parameter.shape) <= d < len(parameter.shape):
            raise ShardingError(f'explain: "{name}" of shape {tuple(parameter.shape)} has no dimension {d}')
        node, i = parameter.users[0]
        own = self.solution.strategies[node].ins[i]
        head = f"{name} {tuple(parameter.shape)} as {word} on tp"
        if self.layout.tp == 1:
            return f"{head}: {self._without_tp(parameter, word)}"
        if constraints.agrees(own, word, node.uses[i].value.dims):
            return f"{head}: chosen ({_ms(self.seconds)}, {self.memory / GiB:.1f} GiB)"
        allowed = constraints.placing(self.searched.problem, parameter.name, word)
        program = Program(self.searched.prices, self.layout, self.searched.memory, allowed)
        if not program.possible:
            size = parameter.shape[d] if d is not None else 0
            return f"{head}: not possible: no way to compute {node.op} so on {self.layout.tp} ranks" + (
                f" ({size} elements, heads or groups of them, do not divide)" if d is not None else ""
            )
        program.priced()
        result = program.solve(integral=True, seconds=5.0)
        if result is None:
            return f"{head}: does not fit in {self.searched.memory / GiB:.1f} GiB"
        return f"{head}: loses {self._against(program.evaluate(result[1], result[0]))}"

    def _without_tp(self, parameter: Any, word: str) -> str:
        """Against the best plan that has tp inside a machine, beside dp alone."""
        allowed, best, why = constraints.placing(self.searched.problem, parameter.name, word), None, ""
        settings = {k: v for k, v in self.searched.settings.items() if k != "fixed"}
        for tp in (n for n in divisors(self.searched.devices) if 2 <= n <= self.searched.prices.hw.node):
            fixed = {**dict.fromkeys(("pp", "cp", "ep"), 1), "tp": tp, "dp": self.searched.devices // tp}
            try:
                result = branch_and_bound(
                    self.searched.problem,
                    self.searched.prices.hw,
                    self.searched.devices,
                    self.searched.memory,
                    keep=1,
                    allowed=allowed,
                    fixed=fixed,
                    **settings,
                ).solutions[0]
            except ShardingError as e:
                why = why or str(e)
                continue
            best = result if best is None or result.seconds < best.seconds else best
        if best is None:
            return f"this plan has no tp, and none with it is possible: {why or 'the devices do not divide'}"
        return f"this plan has no tp; the best one that has ({best.layout}) loses {self._against(best)}"

    def _against(self, rival: Solution) -> str:
        """The difference in words: this plan against one that is slower."""
        parts = [(rival.parts[k] - self.solution.parts[k], k) for k in rival.parts]
        why = ", ".join(f"{k} {x * 1e3:+.1f} ms" for x, k in sorted(parts, key=lambda p: -abs(p[0])) if abs(x) > 5e-5)
        return (
            f"{_ms(rival.seconds - self.seconds)} of {_ms(self.seconds)}: {why or 'nothing differs'}; memory "
            f"{(rival.memory - self.memory) / GiB:+.1f} GiB"
        )

    def _parameter(self, name: str) -> Any:
        known = {}
        for p in self.searched.problem.parameters:
            node = p.users[0][0]
            head = self.searched.problem.runs[node.run] if node.run >= 0 else [""]
            for layer in head:
                full = layer + p.name[len(head[0]) :] if node.run >= 0 and p.name.startswith(f"{head[0]}.") else p.name
                known[full] = p
        if (own := next((n for n in known if fnmatch.fnmatchcase(name, n)), None)) is not None:
            return known[own]
        inside = [n for n in known if n.rpartition(".")[0] == name]
        weight = [n for n in inside if n.endswith(".weight")] or inside
        if not weight:
            raise ShardingError(
                "explain: no parameter or module with parameters is named "
                f'"{name}"{nearest(name, [*known, *{n.rpartition(".")[0] for n in known}])}'
            )
        return known[weight[0]]

    def price(self, other: Plan, sizes: dict[str, int] | None = None) -> Solution:
        """``other`` under the same model, on the same mesh or one of ``sizes``; what it leaves open (recompute,
        microbatches, ZeRO stage where it says nothing, attention on cp) is chosen best.

        Raises:
            ShardingError: it does not fit the devices or the memory.
        """
        if not isinstance(other, Plan):
            raise ShardingError(f"price: other is {other!r}; a Plan is expected")
        if sizes is not None:
            check_sizes("price", sizes)
        if isinstance(other, SearchedPlan):
            return other.solution
        fixed = {d: (sizes or self.sizes).get(d, 1) for d in ("pp", "dp", "cp", "ep", "tp")}
        zero = tuple(sorted({"zero2" if z == "zero1" else z for z in other.gather.values() if z != "never"})) or (
            "never",
        )
        result = branch_and_bound(
            self.searched.problem,
            self.searched.prices.hw,
            self.searched.devices,
            self.searched.memory,
            keep=1,
            fixed=fixed,
            zero=zero,
            allowed=constraints.following(other, self.searched.problem),
            **{k: v for k, v in self.searched.settings.items() if k not in ("fixed", "zero")},
        )
        return result.solutions[0]

    def diff(self, other: Plan) -> str:
        """As :meth:`Plan.diff`, below what the change costs under the same model."""
        try:
            rival = self.price(other)
            cost = (
                f"{self.name} -> {other.name}: {_ms(self.seconds)} -> {_ms(rival.seconds)}, "
                f"{self.memory / GiB:.1f} "
                f"-> {rival.memory / GiB:.1f} GiB; it loses {self._against(rival)}"
            )
        except ShardingError as e:
            cost = f"{self.name} -> {other.name}: {e}"
        return f"{cost}\n{super().diff(other)}"

    # ---------------------------------------------------------------- words out

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        o = self.searched.outcome
        return {
            "devices": self.searched.devices,
            "hardware": self.searched.prices.hw.name,
            "memory_limit": self.searched.memory,
            "modelled": True,
            "gap": self.gap,
            "layouts": o.layouts,
            "programs_solved": o.solved,
            "plans": [p.row() for p in self.alternatives],
            "layers": self.layers(),
            "collectives": self.collectives(),
            "notes": self.searched.problem.notes,
            "unsupported": self.unsupported,
            "refused": self.refused,
            "plan": self.as_dict(),
        }

    def row(self) -> dict[str, Any]:
        """One line of the table: sizes, time, memory, exposed communication."""
        L = self.layout
        data = L.dp * L.ep
        sequence = self.searched.problem.sequence
        sp = L.tp > 1 and any(isinstance(t, int) and t == sequence for _, _, t, _, _ in self.solution.moves)
        hows = sorted({p.how for n, p in self.solution.prices.items() if p.how and n.op in ATTENTIONS})
        return {
            "tp": L.tp,
            "sp": sp,
            "cp": L.cp,
            "attention": "+".join(hows),
            "dp": data,
            "ep": L.ep,
            "pp": L.pp,
            "microbatches": L.microbatches,
            "zero": L.zero,
            "recompute": L.recompute,
            "seconds": self.seconds,
            "interval": list(self.interval),
            "bytes": self.memory,
            "exposed_seconds": self.exposed,
            "parts": self.solution.parts,
            "executable": not self.unsupported,
            "runs": who_runs(self),
        }

    def __str__(self) -> str:
        return format_plan(self)

    def to_json(self) -> str:
        return json.dumps(self.summary(), indent=1)

    def save_picture(self, path: str) -> None:
        """Write one HTML page: modules colored by placement, collectives on the edges."""
        from mindspeed_fx.planning.search.search_svg import picture

        with open(path, "w") as file:
            file.write(picture(self))


def _word(placements: Any) -> str:
    if isinstance(placements, str):
        return placements
    arguments = list(placements) if isinstance(placements, (list, tuple)) else [placements]
    if len(arguments) != 1:
        raise ShardingError(
            f"explain: {len(arguments)} placements; one is expected, that on tp: the other dimensions have no choice "
            "of their own"
        )
    p = arguments[0]
    if not hasattr(p, "is_replicate"):
        return p
    return "R" if p.is_replicate() else f"S({p.dim})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
