"""From the captured graph of the shortened model (``layer_dedup.py``) to a ``Problem``.

Views, constants and inputs make no choices: views carry axes on, and what is whole on every rank anyway can be taken in
parts for nothing. The second traced layer of a run is checked against the first and then dropped: its edges say what
lies between two layers of the run.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import tracing
from mindspeed_fx.cost.read import Call, read
from mindspeed_fx.graph.liveness import live_nodes
from mindspeed_fx.graph.op_sets import REARRANGEMENTS, RESHAPES, UNIT_DIMENSIONS, names, order_of
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.planning.search.axes import Axes, Dim
from mindspeed_fx.planning.search.layer_dedup import Repetition
from mindspeed_fx.planning.search.problem import Edge, Node, NotRepeated, Parameter, Problem, Use, Value
from mindspeed_fx.planning.search.sorted_tables import price_as_gather, with_sorted_tables
from mindspeed_fx.planning.search.stacked_experts import name_of_all
from mindspeed_fx.planning.search.strategies import BY_EXPERT, name_of, strategy_rows, tensor_arguments
from mindspeed_fx.report.source import source_line
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.plan_names import names_of_parameters
from mindspeed_fx.sharding.spmd.rows_by_expert import rows_by_expert

CARRY_AXES = names(REARRANGEMENTS) | frozenset(("expand", "chunk", "slice", "select", "narrow"))
"""Operators of one tensor that make no choice: the axes of their input are those of their result."""


def build_problem(gm: fx.GraphModule, names: list[str | None], model: nn.Module, repeated: Repetition) -> Problem:
    """The search's view of a captured graph.

    Args:
        gm: captured and fused, with fake values.
        names: for each placeholder the parameter it is, in the traced model, "" for a buffer, None for an input.
        model: the traced one.

    Raises:
        NotRepeated: two layers of a run became different graphs.
        ShardingError: the graph has no input with a batch.
    """
    return _Builder(with_sorted_tables(gm), names, model, repeated).build()


class _Builder:
    def __init__(self, gm: fx.GraphModule, names: list[str | None], model: nn.Module, repeated: Repetition):
        self.gm, self.model, self.repeated, self.axes = gm, model, repeated, Axes()
        self.calls = {c.name: c for c in read(gm).calls}
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.names = dict(zip(placeholders, names, strict=True))
        self.values: dict[fx.Node, Any] = {}
        self.nodes: list[Node] = []
        self.problem = Problem(
            self.axes, [], [], [], [whole for whole, _ in repeated.runs], None, None, [], notes=list(repeated.notes)
        )
        self.parameters: dict[str, Parameter] = {}
        self.trained = {n: p.requires_grad for n, p in model.named_parameters(remove_duplicate=False)}
        self.every = names_of_parameters(model)
        self.unknown: dict[str, str] = {}
        self.layer_of = {
            name: (run, i) for run, (_, traced) in enumerate(repeated.runs) for i, name in enumerate(traced)
        }

    def build(self) -> Problem:
        live = live_nodes(self.gm.graph)
        for node in self.gm.graph.nodes:
            if node not in live and node.op != "placeholder":
                continue
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self.values[node] = self._fresh(node.name, node.meta.get("val"))
            elif node.op == "call_function":
                self._function(node)
        for op, where in self.unknown.items():
            self.problem.notes.append(f"{op} has no sharding rule: computed whole on every rank ({where})")
        inputs = [
            v
            for v, n in self.names.items()
            if n is None and isinstance(self.values.get(v), Use) and len(self.values[v].shape) >= 1
        ]
        if not inputs:
            raise ShardingError("the model has no tensor input whose batch could be divided")
        self.problem.inputs = [
            (n.name, self.values[n].shape, [self.axes.atoms(d) for d in self.values[n].dims]) for n in inputs
        ]
        first = max((self.values[n] for n in inputs), key=lambda u: len(u.shape) >= 2)
        self.problem.batch = next(iter(self.axes.atoms(first.dims[0])), None)
        self.problem.sequence = next(iter(self.axes.atoms(first.dims[1])), None) if len(first.shape) >= 2 else None
        self.problem.parameters = list(self.parameters.values())
        self.problem.module_names = self.repeated.module_names or [n for n, _ in self.model.named_modules()]
        self._experts()
        self._fold()
        self._settle()
        return self.problem

    def _settle(self) -> None:
        """Every dimension in the atoms that are left: nothing is split from here on."""
        for node in self.problem.nodes:
            for thing in (*node.uses, *(u.value for u in node.uses), *node.outs):
                thing.dims = [self.axes.atoms(d) for d in thing.dims]

    # ---------------------------------------------------------------- values

    def _fresh(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = tuple(int(n) for n in value.shape)
            dims = [self.axes.new(n) for n in shape]
            return Use(Value(name, shape, dims, value.dtype.itemsize, value.dtype.is_floating_point), dims, shape)
        if isinstance(value, (tuple, list)):
            return tuple(self._fresh(name, v) for v in value)
        return value

    def _placeholder(self, node: fx.Node) -> None:
        use = self.values[node] = self._fresh(node.name, node.meta.get("val", node.meta.get("example_value")))
        name = self.names[node]
        if name and isinstance(use, Use):
            whole = self.repeated.whole_name(name)
            trained = self.trained[name]
            parameter = Parameter(whole, use.shape, use.value.itemsize, trained)
            parameter.tied = tuple(self.repeated.whole_name(n) for n in self.every[name] if n != name)
            use.value.parameter = self.parameters[whole] = parameter

    def _stacked(self, node: fx.Node, name: str) -> None:
        """Parameters of all experts of a list become one."""
        use = self.values[node] = self._fresh(node.name, node.meta["val"])
        own = [self.values[n].value.parameter for n in node.args[0]]
        for parameter in own:
            self.parameters.pop(parameter.name, None)
        whole = self.repeated.whole_name(name)
        trained = any(parameter.trained for parameter in own)
        use.value.parameter = self.parameters[whole] = Parameter(whole, use.shape, use.value.itemsize, trained, True)

    def _function(self, node: fx.Node) -> None:
        value, name = node.meta.get("val"), name_of(node)
        if node.target is operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]
            return
        if not any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(value)):
            self.values[node] = value
            return
        if tracing.is_higher_order(node.target) and not tracing.is_autograd_function(node.target):
            raise ShardingError(
                f'module "{module_path(node)}": {node.target} cannot be searched; plan the model without checkpointed '
                "regions, the plan says what to recompute"
            )
        if (experts := name_of_all(node, self.names)) is not None:
            self._stacked(node, experts)
            return
        uses = [self.values[a] for a in tensor_arguments(node)]
        if name in CARRY_AXES and isinstance(value, torch.Tensor) and len(uses) == 1:
            self.values[node] = Use(
                uses[0].value, self._viewed(node, name, uses[0], value), tuple(int(n) for n in value.shape)
            )
            return
        if all(u.value.free for u in uses):
            self._constant(node, uses, value)
            return
        self._operator(node, name, uses, value)

    def _viewed(self, node: fx.Node, name: str, use: Use, value: torch.Tensor) -> list[Dim]:
        shape, dims = [int(n) for n in value.shape], list(use.dims)
        if (order := order_of(node)) is not None:
            return [dims[d] for d in order]
        if list(use.shape) == shape:
            return dims
        if node.target in (*RESHAPES, *UNIT_DIMENSIONS):
            return self.axes.reshape(dims, shape)
        if name == "select":
            del dims[node.args[1] % len(dims)]
            return dims
        lead = len(shape) - len(dims)
        return [
            self.axes.new(n) if i < lead or use.shape[i - lead] != n else dims[i - lead] for i, n in enumerate(shape)
        ]

    def _constant(self, node: fx.Node, uses: list[Use], value: Any) -> None:
        """Made from inputs and constants alone, without a gradient: every rank makes what it needs."""
        result = self.values[node] = self._fresh(node.name, value)
        if isinstance(result, Use):
            self._tie(node, uses, [result.value], [result])

    def _operator(self, node: fx.Node, name: str, uses: list[Use], value: Any) -> None:
        result = self._fresh(node.name, value)
        outs = [result] if isinstance(result, Use) else [u for u in result if isinstance(u, Use)]
        call = self.calls.get(node.name)
        layer = self._layer(node)
        here = Node(
            node.name,
            name,
            self.repeated.whole_name(module_path(node)),
            source_line(node),
            layer[0],
            call or Call(node.name, name, "free", None, (), {}),
            (),
            uses,
            [u.value for u in outs],
            strategy_rows(node),
        )
        here.args = fx.map_arg(tuple(node.args), lambda a: self.values.get(a))
        if node.target is rows_by_expert:
            price_as_gather(here)
        if here.rows is None:
            self.unknown.setdefault(name, f'module "{here.module}"')
        for i, u in enumerate(outs):
            u.value.producer, u.value.index = here, i
        self.values[node] = result
        self._tie(node, uses, here.outs, outs)
        here.copy = layer[1]  # type: ignore[attr-defined]
        for i, u in enumerate(uses):
            if u.value.parameter is not None:
                u.value.parameter.users.append((here, i))
        self.nodes.append(here)

    def _layer(self, node: fx.Node) -> tuple[int, int]:
        """Run and number in it; an operator outside of every layer that only layers' code could reach is around
        them.
        """
        path = self.repeated.whole_name(module_path(node))
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            if (result := self.layer_of.get(".".join(parts[:end]))) is not None:
                return result
        return -1, 0

    # ---------------------------------------------------------------- axes

    def _tie(self, node: fx.Node, uses: list[Use], outs: list[Value], outputs: list[Use]) -> None:
        name = name_of(node)
        if name == "moe_permute":
            tokens, choices = uses[0], outputs[0].shape[0] // uses[0].shape[0]
            chosen = self.axes.new(choices)
            self.problem.choices.update(chosen)
            outputs[0].dims[0] = outs[0].dims[0] = (*tokens.dims[0], *chosen)
            outputs[0].dims[1] = outs[0].dims[1] = tokens.dims[1]
            outputs[1].dims[0] = outs[1].dims[0] = outputs[0].dims[0]
            return
        if name == "moe_unpermute":
            dims = self.axes.atoms(uses[0].dims[0])
            if dims and dims[-1] in {a for c in self.problem.choices for a in self.axes.atoms((c,))}:
                self.axes.unify(outputs[0].dims[0], dims[:-1])
                self.axes.unify(outputs[0].dims[1], uses[0].dims[1])
            return
        sized = list(uses)
        for results, inputs in strategy_rows(node) or []:
            tied = [(outputs[i], int(p)) for i, p in enumerate(results) if i < len(outputs) and not isinstance(p, str)]
            arguments = [(sized[i], int(p)) for i, p in enumerate(inputs) if i < len(sized) and not isinstance(p, str)]
            if name in BY_EXPERT and inputs[:2] == [0, 0]:
                continue
            members = arguments + tied
            for other, d in members[1:]:
                first, e = members[0]
                if first.shape[e] == other.shape[d]:
                    self.axes.unify(first.dims[e], other.dims[d])

    def _experts(self) -> None:
        """Which rows sorted by expert belong to which experts."""
        sorted_by: dict[int, Dim] = {}
        for node in self.nodes:
            if node.op in BY_EXPERT:
                rows_, experts = self.axes.atoms(node.uses[0].dims[0]), node.uses[1].dims[0]
                if rows_ and rows_[-1] in {a for c in self.problem.choices for a in self.axes.atoms((c,))}:
                    self.axes.unify(sorted_by.setdefault(rows_[-1], experts), experts)
        self.problem.experts = {
            rows_: atoms[0] for rows_, experts in sorted_by.items() if (atoms := self.axes.atoms(experts))
        }

    # ---------------------------------------------------------------- one of each kind

    def _fold(self) -> None:
        """Drop all but the first traced layer of each run, after checking that they are alike."""
        by_layer: dict[tuple[int, int], list[Node]] = {}
        for n in self.nodes:
            by_layer.setdefault((n.run, n.copy), []).append(n)
        first: dict[Node, Node] = {}
        for run, (_, traced) in enumerate(self.repeated.runs):
            mine = by_layer.get((run, 0), [])
            if not mine:
                raise NotRepeated(f"no operator was traced in {traced[0]}")
            for copy in range(1, len(traced)):
                theirs = by_layer.get((run, copy), [])
                if [self._sign(n) for n in mine] != [self._sign(n) for n in theirs]:
                    raise NotRepeated(f"{traced[0]} and {traced[copy]} became different graphs")
                first.update(zip(theirs, mine))
        self._same_wiring(first)
        values = {o: first[n].outs[i] for n in first for i, o in enumerate(n.outs)}
        self.problem.nodes = [n for n in self.nodes if n not in first]
        seen: set[tuple] = set()
        for n in self.nodes:
            for i, use in enumerate(n.uses):
                if use.value.producer is None:
                    continue
                edge = self._edge(use.value, values.get(use.value, use.value), n, first.get(n, n), i)
                if edge is not None and (key := (edge.value, edge.node, edge.argument, edge.where)) not in seen:
                    seen.add(key)
                    self.problem.edges.append(edge)
        kept = {id(u.value.parameter) for n in self.problem.nodes for u in n.uses if u.value.parameter}
        self.problem.parameters = [p for p in self.problem.parameters if id(p) in kept]
        for p in self.problem.parameters:
            p.users = [(n, i) for n, i in p.users if n not in first]

    def _edge(self, value: Value, kept: Value, node: Node, reader: Node, argument: int) -> Edge | None:
        result, used = value.producer, node
        same = result.run == used.run
        if same and result.run >= 0 and result.copy == used.copy:
            return Edge(kept, reader, argument, ("inside",), (result.run, 0)) if result.copy == 0 else None
        if same and result.run >= 0:
            return Edge(kept, reader, argument, ("between",), (result.run, -1))
        if used.run >= 0 and used.copy > 0 and result.run < 0:
            return Edge(kept, reader, argument, ("in", used.run), (-1, 1))
        last = len(self.repeated.runs[result.run][1]) - 1 if result.run >= 0 else 0
        if result.run >= 0 and result.copy < last and used.run < 0:
            return Edge(kept, reader, argument, ("every",), (result.run, 0))
        return Edge(kept, reader, argument, ("out", used.run), (-1, 1))

    def _sign(self, n: Node) -> tuple:
        others = tuple(str(a) for a in n.args if not isinstance(a, (Use, tuple, list)))
        return (
            n.op,
            tuple(u.shape for u in n.uses),
            tuple(o.shape for o in n.outs),
            others,
            tuple(u.value.parameter is not None for u in n.uses),
        )

    def _same_wiring(self, first: dict[Node, Node]) -> None:
        """Inside a layer, arguments come from the same places; from outside, from the layer before or from what all
        share.
        """
        for theirs, mine in first.items():
            for a, b in zip(theirs.uses, mine.uses):
                p, q = a.value.producer, b.value.producer
                if p is None or q is None:
                    if (p is None) != (q is None):
                        raise NotRepeated(f"{theirs.name} and {mine.name} read different things")
                elif (
                    first.get(p) is not q
                    and p is not q
                    and not (
                        p.run == theirs.run and p.copy == theirs.copy - 1 and (q.run, q.copy) != (mine.run, mine.copy)
                    )
                ):
                    raise NotRepeated(f"{theirs.name} is not fed by the layer before it")
