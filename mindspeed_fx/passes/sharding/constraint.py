"""A plan's edges -> ``constrain`` calls in the captured graph.

``constrain(x, (("tp", "S(1)"),))`` is the identity on whole tensors. Run on DTensors (``program.py``) it redistributes
``x``, and its gradient back to the placement ``x`` had: an edge fixes both directions, also where nothing moves forward
(the input of a column-parallel linear is whole, and the parts of its gradient are summed there, once for all its
users).

Placing whole a value that went through views is moved before the views: to flatten batch and a divided sequence would
leave parts that are not contiguous in the whole.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.capture import capture_backwards
from mindspeed_fx.compat import tracing
from mindspeed_fx.errors import nearest
from mindspeed_fx.graph.annotate import bodies
from mindspeed_fx.graph.functional_writes import make_writes_functional
from mindspeed_fx.graph.op_sets import REARRANGEMENTS
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.passes.base import Context, PassReport, register, site
from mindspeed_fx.report.records import Skip
from mindspeed_fx.sharding.constraint import constrain, operands
from mindspeed_fx.sharding.patterns import matching_alternatives, matching_operators
from mindspeed_fx.sharding.plan import Boundary, Placed, ShardingError
from mindspeed_fx.sharding.plan_names import module_meant

aten = torch.ops.aten

NAME = "sharding.constraint"


@register(NAME)
def place_edges(gm: fx.GraphModule, context: Context) -> PassReport:
    """Marks where a plan of ``parallelize`` moves activations between ranks."""
    report = PassReport(NAME)
    sharding = context.sharding
    if sharding is None:
        return report.note_reason("the model is not parallelized (mindspeed_fx.parallelize)")
    parameters = {
        n: [name.rpartition(".")[0] for name in sharding.tied.get(n.name, [sharding.inputs[n.name]])]
        for n in gm.graph.nodes
        if n.op == "placeholder" and n.name in sharding.inputs
    }
    capture_backwards(gm)
    for graph in (gm, *bodies(gm)):  # an edge right behind a value that is filled later would place it unfilled
        make_writes_functional(graph)
    _Edges(gm, sharding, report).insert(parameters)
    recompile(gm)
    return report


class _Edges:
    """Inserts the edges of one plan into a graph and the checkpointed regions in it."""

    def __init__(self, gm: fx.GraphModule, sharding: Any, report: PassReport):
        self.gm, self.plan, self.prefix, self.report = gm, sharding.plan, sharding.prefix, report
        self.boundaries = {
            name: edge
            for name in sharding.modules
            if (edge := _together(self.plan.modules, matching_alternatives(self.plan.modules, name))) is not None
        }
        self.number = {name: k for k, name in enumerate(self.boundaries)}
        self.seen: set[tuple[str, str]] = set()
        """Operators, and the modules that call them."""

    def insert(self, parameters: dict[fx.Node, list[str]]) -> None:
        self._graph(self.gm, parameters)
        self._operators_found()

    def _operators_found(self) -> None:
        """Each operator pattern has to be met once in the graph, unless one of its alternatives is ("a|b")."""
        for pattern in self.plan.operators:
            if not any(matching_operators((pattern,), *call) for call in self.seen):
                self.report.skipped.append(
                    Skip(
                        pattern,
                        f'plan "{self.plan.name}" places the edges of "{pattern}", which this graph does not '
                        f"call{nearest(pattern, {name for name, _ in self.seen})}",
                    )
                )

    def _graph(self, gm: fx.GraphModule, parameters: dict[fx.Node, list[str]]) -> None:
        self.constraints: dict[tuple[fx.Node, Any], fx.Node] = {}
        for node in reversed(gm.graph.nodes):
            # Its tag says that it draws random numbers, so that nobody else removes what fusion left behind.
            if (
                node.target is aten.scaled_dot_product_attention.default
                and not node.users
                and not argument(node, "dropout_p")
            ):
                gm.graph.erase_node(node)
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            if tracing.is_higher_order(node.target):
                result, self.constraints = self.constraints, {}
                for body, inputs in operands(gm, node):
                    self._graph(body, {p: parameters[a] for p, a in inputs.items() if a in parameters})
                    recompile(body)
                self.constraints = result
                continue
            self._operator(gm, node, parameters)
            for module in self._around(node, parameters):
                self._module(gm, node, module, parameters)

    def _around(self, node: fx.Node, parameters: dict[fx.Node, list[str]]) -> list[str]:
        """Modules with an edge that ``node`` is part of: by where its code is, or because it uses their parameters."""
        inside = lambda reader, module: module in self._outer(reader)
        used = {module_meant(node, parameters[a], a.users, inside) for a in node.all_input_nodes if a in parameters}
        return sorted(self.number.keys() & (used | self._outer(node)), key=self.number.__getitem__)

    def _outer(self, node: fx.Node) -> set[str]:
        """The modules that ``node``'s code is in, the outermost too."""
        if node.op != "call_function":
            return set()
        parts = module_path(node).removeprefix(self.prefix).split(".")
        return {".".join(parts[:k]) for k in range(1, len(parts) + 1)}

    def _inside(self, node: fx.Node, module: str) -> bool:
        path = module_path(node).removeprefix(self.prefix)
        return node.op == "call_function" and (path == module or path.startswith(module + "."))

    def _module(self, gm: fx.GraphModule, node: fx.Node, module: str, parameters: dict[fx.Node, list[str]]) -> None:
        edge = self.boundaries[module]
        if edge.input:
            for a in node.all_input_nodes:
                if (
                    _is_activation(a)
                    and a not in parameters
                    and not self._inside(a, module)
                    and not (a.target is constrain and a.args[1] == _key(edge.input))
                ):
                    self._before(gm, node, a, edge.input)
        if edge.output and isinstance(node.meta.get("val"), torch.Tensor):
            outer = [u for u in node.users if not self._inside(u, module)]
            if outer:
                self._after(gm, node, outer, edge.output)

    def _operator(self, gm: fx.GraphModule, node: fx.Node, parameters: dict[fx.Node, list[str]]) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        name = str(node.target).removesuffix(".default")
        module = module_path(node).removeprefix(self.prefix)
        self.seen.add((name, module))
        edge = _together(self.plan.operators, matching_operators(tuple(self.plan.operators), name, module))
        if edge is None:
            return
        names = [a.name for a in node.target._schema.arguments]
        for pattern in edge.arguments:
            if not set(pattern.split("|")) & set(names):
                raise ShardingError(
                    f'plan "{self.plan.name}" names no argument of {name}: "{pattern}"{nearest(pattern, names)}; '
                    f"valid: {', '.join(names)}"
                )
        for i, a in enumerate(list(node.args)):
            placed = next((p for pattern, p in edge.arguments.items() if names[i] in pattern.split("|")), None) or (
                edge.input if isinstance(a, fx.Node) and _is_activation(a) and a not in parameters else None
            )
            if isinstance(a, fx.Node) and placed:
                self._before(gm, node, a, placed)
        if edge.output:
            tensor = (
                node
                if isinstance(node.meta.get("val"), torch.Tensor)
                else next((u for u in node.users if u.args[1:] == (0,)), None)
            )
            if tensor is not None:
                self._after(gm, tensor, list(tensor.users), edge.output)

    def _before(self, gm: fx.GraphModule, node: fx.Node, source: fx.Node, placed: Placed) -> None:
        key = _key(placed)
        if all(word == "R" for word in placed.values()):
            while (
                source.op == "call_function"
                and source.target in REARRANGEMENTS
                and len(source.users) == 1
                and isinstance(source.args[0], fx.Node)
            ):
                node, source = source, source.args[0]
        if source.meta.get("mutated"):  # it may be written between here and there
            node.replace_input_with(source, self._insert(gm, source, key, node, at=node))
            return
        if (source, key) not in self.constraints:
            self.constraints[source, key] = self._insert(gm, source, key, node)
        node.replace_input_with(source, self.constraints[source, key])

    def _after(self, gm: fx.GraphModule, node: fx.Node, users: list[fx.Node], placed: Placed) -> None:
        new = self._insert(gm, node, _key(placed), node)
        for user in users:
            user.replace_input_with(node, new)

    def _insert(
        self, gm: fx.GraphModule, source: fx.Node, key: tuple, origin: fx.Node, at: fx.Node | None = None
    ) -> fx.Node:
        """A placement behind ``source``, or before ``at``."""
        if at is None and source.op == "placeholder":
            at = next(n for n in gm.graph.nodes if n.op != "placeholder")
        with gm.graph.inserting_after(source) if at is None else gm.graph.inserting_before(at):
            new = gm.graph.call_function(constrain, (source, key))
        new.meta = {k: v for k, v in origin.meta.items() if k in ("stack_trace", "nn_module_stack", "grad_enabled")}
        new.meta.update({k: source.meta[k] for k in ("val", "needs_grad") if k in source.meta}, mutated=False)
        self.report.rewrites.append(site(", ".join(f"{dim}: {word}" for dim, word in key), new, [source]))
        return new


def _together(section: Mapping[str, Boundary], patterns: Sequence[str]) -> Boundary | None:
    """What ``patterns`` say together; None without any."""
    results = [section[pattern] for pattern in patterns]
    if not results:
        return None
    arguments = {k: v for edge in results for k, v in edge.arguments.items()}
    return Boundary(
        {k: v for e in results for k, v in e.input.items()},
        {k: v for e in results for k, v in e.output.items()},
        arguments,
    )


def _key(placed: Placed) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(placed.items()))


def _is_activation(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 1
