"""A solution -> a plan that ``parallelize`` takes, and what of it no program can do yet, in plain sentences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Iterable

from mindspeed_fx.planning.search.problem import Edge, Node, Parameter, Problem
from mindspeed_fx.planning.search.sayable import UNPERMUTE, called_as, comes_out, enters, expressible, owner
from mindspeed_fx.planning.search.stacked_experts import at_rest
from mindspeed_fx.planning.search.stage_loads import whole_sizes
from mindspeed_fx.planning.search.strategies import ATTENTIONS, EXPERTS, is_told_by_name
from mindspeed_fx.planning.search.strategy_space import SUMMED, Label, P, R
from mindspeed_fx.sharding.parallelized_graph import argument_name
from mindspeed_fx.sharding.plan import Boundary, parse_placement

DATA = ("dp", "cp", "ep")
"""Mesh dimensions that divide tokens; ZeRO divides what is no expert's over all of them."""


def emit(problem: Problem, solution: Any) -> tuple[dict[str, Any], list[str]]:
    """The parts of a :class:`Plan` (name, mesh, parameters ...), and the reasons why it cannot run; [] when it can."""
    return _Emitter(problem, solution).emit()


def names_of(problem: Problem, name: str, run: int) -> list[str]:
    """``name``, a parameter or module of the first layer of a run, in every layer of it; a glob where the run is a
    whole list.
    """
    if run < 0:
        return [name]
    layers = problem.runs[run]
    head = layers[0]
    if not (name == head or name.startswith(f"{head}.")):
        return [name]
    parent = head.rpartition(".")[0]
    if sum(m.rpartition(".")[0] == parent for m in problem.module_names) == len(layers):
        return [f"{parent}.*{name[len(head) :]}"]
    return [layer + name[len(head) :] for layer in layers]


def paddings(problem: Problem, solution: Any) -> list[str]:
    """What ranks cannot share evenly and is padded, and how much that adds."""
    L, sizes, results = solution.layout, problem.axes.size, []
    divided: dict[tuple[int, str], int] = {}
    for atom, ranks, dim in ((problem.batch, L.dp * L.ep, "dp x ep"), (problem.sequence, L.cp, "cp")):
        if atom is not None and ranks > 1:
            divided[atom, dim] = ranks
    for strategy in solution.strategies.values():
        divided.update({(x, "tp"): L.tp for x in (*strategy.ins, *strategy.outs) if isinstance(x, int)})
    for (atom, dim), ranks in divided.items():
        outer = {problem.batch: L.dp * L.ep * L.microbatches, problem.sequence: L.cp}.get(atom, 1) if dim == "tp" else 1
        size = -(-sizes[atom] // outer)
        if more := -size % ranks:
            what = {problem.batch: "batch of ", problem.sequence: "sequence of "}.get(atom, "")
            results.append(f"{what}{size} padded to {size + more} for {ranks} ranks of {dim} (+{more / size:.1%})")
    return list(dict.fromkeys(results))


def _schedule(problem: Problem, solution: Any) -> str:
    """A plan's words: name, stages on a rank, and layers of each stage where they are dealt by time."""
    words = f"{solution.layout.schedule}:{solution.layout.virtual}"
    return f"{words}:{'+'.join(map(str, whole_sizes(problem, solution.layers)))}" if solution.layers else words


class _Emitter:
    def __init__(self, problem: Problem, solution: Any):
        self.problem, self.solution, self.layout = problem, solution, solution.layout
        self.parameters: dict[str, dict[str, str]] = {}
        self.modules: dict[str, dict[str, dict[str, str]]] = {}
        self.operators: dict[str, dict[tuple[str, int], Boundary]] = {}
        """Operators -> who calls them, of which run of layers -> what is said of the call."""
        self.experts: list[str] = []
        """Names of parameters that are experts'."""
        self.wrong: list[str] = []

    def emit(self) -> tuple[dict[str, Any], list[str]]:
        L = self.layout
        if L.tp > 1:
            self._edges()
        self._parameters()
        self._sequence()
        inputs = {}
        for name, _, dims in self.problem.inputs:
            placed = {
                d: f"S({i})"
                for d, atom in (("dp", self.problem.batch), ("ep", self.problem.batch), ("cp", self.problem.sequence))
                if getattr(L, d) > 1
                for i, atoms in enumerate(dims)
                if atom in atoms
            }
            if (word := self._input(name, dims)) is not None:
                placed["tp"] = word
            if placed and (argument := argument_name(SimpleNamespace(name=name))) is not None:
                inputs[argument] = placed
        edges = [d for d in ("pp", "dp", "cp", "ep", "tp") if getattr(L, d) > 1] or ["dp"]
        gather = {
            d: L.zero
            for d in DATA
            if getattr(L, d) > 1 and L.zero != "never" and any(d in placed for placed in self.parameters.values())
        }
        results = {
            "mesh": tuple(edges),
            "parameters": self.parameters,
            "inputs": inputs,
            "experts": self._mixtures(),
            "modules": {name: Boundary(**parts) for name, parts in self.modules.items()},
            "operators": self._called(),
            "gather": gather,
            "recompute": L.recompute if L.recompute != "none" else None,
            "microbatches": L.microbatches,
            "schedule": _schedule(self.problem, self.solution) if L.pp > 1 else None,
            "keep_whole": bool(paddings(self.problem, self.solution)),
        }
        return results, list(dict.fromkeys(self.wrong))

    def _mixtures(self) -> dict[str, Any]:
        """Tokens travel: that is what is modelled."""
        if self.layout.devices == 1 or not any(n.op == "moe_permute" for n in self.problem.nodes):
            return {}
        return {"dispatch": "all_to_all", **({"parameters": self.experts} if self.experts else {})}

    def _input(self, name: str, dims: list) -> str | None:
        """Placement of an input on tp, where all its readers want it in the same parts; where not, it is whole, and
        modules take their parts of it."""
        readers = [
            (n, u, self.solution.strategies[n].ins[i])
            for n in self.problem.nodes
            for i, u in enumerate(n.uses)
            if u.value.free and u.value.name == name
        ]
        wanted = {
            next((f"S({d})" for d, atoms in enumerate(dims) if label in atoms[:1]), "R")
            if isinstance(label, int)
            else "R"
            for _, _, label in readers
        }
        if len(wanted) == 1:
            return next(iter(wanted - {"R"}), None)
        for node, use, label in readers:
            if isinstance(label, int) and owner(node):
                self._place(owner(node), "input", use.dims, label, node.run)
            elif isinstance(label, int):
                self.wrong.append(f'input "{name}" is wanted whole by one operator and in parts by another')
        return None

    # ---------------------------------------------------------------- parameters

    def _parameters(self) -> None:
        L = self.layout
        for parameter in self.problem.parameters:
            node, i = parameter.users[0]
            label = self.solution.strategies[node].ins[i]
            placed: dict[str, str] = {}
            remaining = list(parameter.shape)
            expert = next(
                (
                    d
                    for d, atoms in enumerate(node.uses[i].value.dims)
                    if any(a in self.problem.experts.values() for a in atoms)
                ),
                None,
            )
            own = (parameter.name, *parameter.tied)
            names = [word for name in own for word in names_of(self.problem, name, node.run)]
            if parameter.stacked:
                self._stacked(parameter, node, label, names)
                continue
            if expert is not None:
                self.experts += names
                if L.ep > 1:
                    placed["ep"] = f"S({expert})"
                    remaining[expert] //= L.ep
            if isinstance(label, int) and expert is not None and label not in self.problem.experts.values():
                self.wrong.append(
                    f'parameter "{parameter.name}": ep={L.ep} tp={L.tp} are too many ranks for '
                    f"{parameter.shape[expert]} experts, which are modelled as divided inside; no program is made for "
                    "that yet"
                )
            if isinstance(label, int):
                d = self._dimension(node, i, label, parameter)
                placed["tp"] = f"S({d})"
                remaining[d] //= L.tp
            kept = {parse_placement(w, parameter.name) for w in placed.values()}
            for dim in DATA if L.zero != "never" else ():
                ranks = getattr(L, dim)
                if ranks > 1 and dim not in placed:
                    # A dimension that computes in parts is not divided further: its parts would not be of one piece.
                    free = next(
                        (d for d, n in enumerate(remaining) if d not in kept and n > 1 and n % ranks == 0), None
                    )
                    if free is not None:
                        placed[dim] = f"S({free})"
                        remaining[free] //= ranks
                        kept |= {free} & {expert}  # tokens are sent over one mesh dimension
            if placed:
                self.parameters.update(dict.fromkeys(names, placed))

    def _stacked(self, parameter: Parameter, node: Node, label: Label, names: list[str]) -> None:
        """Parts of each expert's own parameter at rest, and whole experts before their product."""
        by_tp = isinstance(label, int)
        if by_tp and label not in self.problem.experts.values():
            self.wrong.append(f'parameter "{parameter.name}" would be divided inside each expert of a list')
        self.experts += names
        placed = at_rest(parameter, self.layout, by_tp)
        if placed:
            self.parameters.update(dict.fromkeys(names, {dim: f"S({d})" for dim, d in placed.items()}))
        for dim, word in (("ep", "S(0)"), ("tp", "S(0)" if by_tp else "R")):
            if getattr(self.layout, dim) > 1:
                self._operator(node, "mindspeed.grouped_matmul", "weight", word, dim)

    def _dimension(self, node: Node, i: int, label: int, parameter: Parameter) -> int:
        result = next((d for d, atoms in enumerate(node.uses[i].value.dims) if label in atoms[:1]), None)
        if result is None:
            self.wrong.append(f'parameter "{parameter.name}" would be divided inside a dimension')
            return 0
        return result

    # ---------------------------------------------------------------- activations on tp

    def _edges(self) -> None:
        """Each value that moves: at its producer where all readers want one placement, else at each reader."""
        by_value: dict[Any, list] = {}
        for move, p, t, _, _ in self.solution.moves:
            by_value.setdefault(move.value, []).append((move, p, t))
        for value, result in by_value.items():
            if not value.shape:
                continue  # a number: the program's end sums it
            wanted = [(R if t == SUMMED else t, t, move) for move, _, t in result]
            p = result[0][1]
            if all(t == p for _, _, t in result):
                continue
            bare = {word for word, t, move in wanted for e in self._readers(move, t) if not expressible(e)}
            output = p
            if comes_out(move for _, _, move in wanted) and (p == P or bare - {p}):
                # Readers without parameters take what the module gives; the others may have it placed again.
                output = next(iter(bare), wanted[0][0])
                if value.producer.op == UNPERMUTE:
                    self._operator(
                        value.producer, f"mindspeed.{UNPERMUTE}", None, self._word(value.dims, output, value.producer)
                    )
                else:
                    self._place(owner(value.producer), "output", value.dims, output, value.producer.run)
            for word, t, move in wanted:
                for edge in self._readers(move, t):
                    if word != output or (t == SUMMED and p == R):
                        self._reader(edge, word, output)

    def _readers(self, move: Any, t: Label) -> list[Edge]:
        return [e for e in move.readers if self.solution.strategies[e.node].ins[e.argument] == t]

    def _reader(self, edge: Edge, t: Label, p: Label) -> None:
        use = edge.node.uses[edge.argument]
        if enters(edge):
            self._place(owner(edge.node), "input", use.dims, t, edge.node.run)
        elif expressible(edge):
            pattern, arguments = called_as(edge.node)
            self._operator(edge.node, pattern, arguments[edge.argument], self._word(use.dims, t, edge.node))
        elif (
            p != t and not (p == P and t == R) and edge.node.op not in EXPERTS
        ):  # choices and their weights go where the rows are
            self.wrong.append(
                f'module "{edge.node.module}": {edge.node.op} takes {edge.value.producer.op} as {self._say(t)}, made '
                f"as {self._say(p)}; a plan can say that of modules with parameters, of operators of "
                "its own and of attention alone"
            )

    def _operator(self, node: Node, pattern: str, argument: str | None, word: str, dim: str = "tp") -> None:
        """An edge of what ``node`` calls: of an argument, or of the result."""
        edge = self.operators.setdefault(pattern, {}).setdefault((node.module, node.run), Boundary({}, {}, {}))
        placed = edge.output if argument is None else edge.arguments.setdefault(argument, {})
        if placed.setdefault(dim, word) != word:
            self.wrong.append(
                f'module "{node.module}": calls of {node.op} that are placed differently cannot be told apart in a plan'
            )

    def _called(self) -> dict[str, Boundary]:
        """By operator where nothing contradicts that is said of its calls, else by the modules that call it."""
        results: dict[str, Boundary] = {}
        for pattern, calls in self.operators.items():
            if (edge := _agreed(calls.values())) is not None:
                results[pattern] = edge
                continue
            for (module, run), edge in calls.items():
                results |= {f"{name}/{pattern}": edge for name in names_of(self.problem, module, run)}
        return results

    def _place(self, module: str, side: str, dims: list, t: Label, run: int) -> None:
        word = self._word(dims, t, None)
        for name in names_of(self.problem, module, run):
            mine = self.modules.setdefault(name, {}).setdefault(side, {})
            if mine.setdefault("tp", word) != word:
                self.wrong.append(f'module "{module}": its {side} would be placed in two ways')

    def _word(self, dims: list, t: Label, node: Node | None) -> str:
        if not isinstance(t, int):
            return "R"
        result = next((i for i, atoms in enumerate(dims) if t in atoms), None)
        if result is None or dims[result][0] != t:
            self.wrong.append(
                f"a value would be divided along its {self.problem.label(t)}, which is no dimension of it"
                + (f' at module "{node.module}"' if node else "")
            )
            return "R"
        return f"S({result})"

    def _say(self, t: Label) -> str:
        return (
            {R: "whole", SUMMED: "whole", P: "a sum over ranks"}.get(t, "")
            if not isinstance(t, int)
            else f"divided by {self.problem.label(t)}"
        )

    # ---------------------------------------------------------------- what does not take the sequence in parts

    def _sequence(self) -> None:
        """What an operator reads is whole then, which a program does unasked, or is divided otherwise; of the result of
        one of ours each rank goes on with its part of the sequence."""
        sequence = self.problem.sequence
        for node, price in self.solution.prices.items():
            if not price.how or not is_told_by_name(node):
                continue
            arguments, results = price.around
            pattern, names = called_as(node)
            for use, label, name in zip(node.uses, arguments, names):
                moves = isinstance(label, int) or any(sequence in atoms for atoms in use.dims)
                if moves and (node.op in ATTENTIONS or results[0] != R):
                    self._operator(node, pattern, name, self._word(use.dims, label, node), "cp")
            if any(sequence in atoms for atoms in node.outs[0].dims):
                self._operator(node, pattern, None, self._word(node.outs[0].dims, sequence, node), "cp")


def _agreed(edges: Iterable[Boundary]) -> Boundary | None:
    """All that is said of the calls of one operator; None where two contradict each other."""
    result = Boundary({}, {}, {})
    for edge in edges:
        for argument, placed in ((None, edge.output), *edge.arguments.items()):
            mine = result.output if argument is None else result.arguments.setdefault(argument, {})
            if any(mine.setdefault(dim, word) != word for dim, word in placed.items()):
                return None
    return result
