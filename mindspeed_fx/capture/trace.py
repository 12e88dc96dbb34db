"""Dynamo graph -> pre-autograd ATen graph, whatever the spelling.

``make_fx(pre_dispatch=True)`` gives one operator per meaning (method, function and operator spellings meet), before
autograd and before decomposition. Two things need care, both done here:

* A higher-order operator (``autograd.Function``, checkpoint, wrap ...) must stay one node with its bodies: tracing
  through ``autograd_function_apply`` would record its forward under ``no_grad`` and lose the gradient silently.
  Its bodies are captured on their own, so matchers read them in the same spelling.
* Values are the fake tensors that Dynamo already made (``meta["example_value"]``), under their own fake mode and the
  Python dispatcher; otherwise symbolic sizes turn into constants or into symbols without a source.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.capture import chosen_rows
from mindspeed_fx.compat import autocast, symbols, tracing
from mindspeed_fx.graph.annotate import is_isolated_body
from mindspeed_fx.graph.match import aten


class CaptureError(RuntimeError):
    """The graph could not be brought into canonical form; the message says at which node."""


def trace(gm: fx.GraphModule, values: list[Any] | None = None) -> fx.GraphModule:
    """The pre-autograd ATen graph of ``gm``; inputs, outputs and attributes keep their order and names.

    Args:
        gm: a graph as Dynamo makes it; every placeholder has ``meta["example_value"]`` unless ``values`` is given.
        values: fake tensors and symbolic numbers for the placeholders.

    Returns:
        A new graph module. ``meta["val"]`` holds the fake value of every node, ``meta["stack_trace"]`` and
        ``meta["nn_module_stack"]`` say where it came from.
    """
    if values is None:
        values = [example_value(n) for n in gm.graph.nodes if n.op == "placeholder"]
    chosen_rows.check_sizes_unread(gm)
    bodies: dict[str, fx.GraphModule] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and tracing.is_higher_order(node.target):
            bodies.update(_capture_bodies(gm, node))
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    with tracing.tracing_fake([*values, *(n.meta.get("example_value") for n in gm.graph.nodes)]):
        captured = tracing.make_fx_pre_dispatch(_Recorder(gm, bodies).run, values, names=[n.name for n in inputs])
    for node in captured.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        if _decides_sizes(node.args[0]) and isinstance(symbols.size_expression(node.meta["val"]), int):
            node.target = _SIZE
    captured.meta.update(gm.meta)  # where a checkpointed region has its policy
    for node, value in zip(captured.graph.nodes, values):
        node.meta["requires_grad"] = isinstance(value, torch.Tensor) and value.requires_grad
    return captured


def example_value(node: fx.Node) -> Any:
    """The fake tensor or symbolic number that Dynamo, or an earlier trace, recorded for ``node``."""
    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    raise CaptureError(
        f"graph input {node.name} carries no example value; the mindspeed backend must be called by torch.compile"
    )


def _capture_bodies(gm: fx.GraphModule, node: fx.Node) -> dict[str, fx.GraphModule]:
    """The captured form of the bodies of one higher-order operator whose inputs are known, by their names in ``gm``."""
    bodies = [
        a
        for a in node.args
        if isinstance(a, fx.Node) and a.op == "get_attr" and isinstance(_attribute(gm, a.target), fx.GraphModule)
    ]
    operands = [a for a in node.args if a not in bodies]
    captured: dict[str, fx.GraphModule] = {}
    if any(isinstance(a, (tuple, list, dict)) for a in operands):
        return captured  # cond, map, scan, flex_attention ...: what a body gets is not what the operator is given
    # An autograd.Function's backward takes gradients, not the operands: only its forward body is captured.
    for body in bodies[:1] if tracing.is_autograd_function(node.target) else bodies:
        module = _attribute(gm, body.target)
        if is_isolated_body(module):
            continue
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        values = [example_value(a) if isinstance(a, fx.Node) else a for a in operands]
        if len(inputs) == len(values):
            captured[body.target] = trace(module, values)
            if tracing.is_autograd_function(node.target):
                _tell_results_apart(captured[body.target].graph)
    return captured


def _tell_results_apart(graph: fx.Graph) -> None:
    """A result that a body returns again becomes a view of itself: torch 2.11 returns what lies between, too, and of
    one tensor in two places autograd takes the last, which has no gradient. Two results that Dynamo told apart are one
    here where a cast between them changes nothing."""
    output = graph.output_node()
    seen: set[fx.Node] = set()

    def apart(result: fx.Node) -> fx.Node:
        if result not in seen or not isinstance(result.meta.get("val"), torch.Tensor):
            seen.add(result)
            return result
        with graph.inserting_before(output):
            view = graph.call_function(torch.ops.aten.alias.default, (result,))
        view.meta = dict(result.meta)
        return view

    (results, *others) = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    if isinstance(results, (tuple, list)):
        output.args = ((fx.map_arg(tuple(results), apart), *others),)


_SIZE = torch.Tensor.size
"""How a size of data that is known only for an assertion is read: of ``sym_size.int`` AOTAutograd makes a number."""


class _Recorder(fx.Interpreter):
    """Runs the Dynamo graph on fake values while ``make_fx`` records; keeps higher-order operators whole."""

    def __init__(self, gm: fx.GraphModule, bodies: dict[str, fx.GraphModule]):
        super().__init__(gm, garbage_collect_values=False)
        self.bodies = bodies
        self.node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        result = super().run_node(n)
        if n.meta.get("unbacked_bindings"):
            symbols.bind_again(n, result)
        return result

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> Any:
        value = self.bodies[target] if target in self.bodies else super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor):
            return tracing.record_attribute(value)
        return value

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if autocast.is_autocast_switch(target):
            return autocast.switch_autocast(target, args)
        if target is chosen_rows.CHOSEN:
            return chosen_rows.choose_bounded(*args)
        if tracing.is_data(target):
            return args[0].detach()  # what ``.data`` gives is a tensor that no tracer has seen made
        if target is aten._assert_scalar.default and args[0] is True:
            return self.record_assertion(*args)
        if target is torch.autograd.grad:
            # Before autograd there are no operators for it: recorded, the engine's calls would be differentiable where
            # eager's are not, and the results that it saved would be constants.
            raise CaptureError(f"{self.node.name} takes gradients inside the graph (torch.autograd.grad)")
        if tracing.is_higher_order(target):
            return tracing.record_opaque(target, args, kwargs, example_value(self.node))
        recorded = tracing.count_recorded()
        result = super().call_function(target, args, kwargs)
        if result is None and tracing.count_recorded() == recorded and not _may_be_dropped(target):
            raise CaptureError(f"{self.node.name} changes a state that operators do not show")
        return result

    def record_assertion(self, _: bool, message: str) -> None:
        """An assertion whose condition fake values say holds. Where data decides a size of which it is known only for
        that, the condition is recorded as Dynamo has it, with the size that the tensor will have."""
        condition = self.node.args[0]
        if isinstance(condition, fx.Node):
            condition = self.recorded_condition(condition)
        if isinstance(condition, fx.Proxy):
            tracing.record_number(aten._assert_scalar.default, (condition, message), None)

    def recorded_condition(self, n: fx.Node) -> Any:
        """The proxy of a number of Dynamo's graph that a size of data takes part in, the number itself of any other."""
        value = self.env[n]
        if not isinstance(value, (bool, int, float)):
            return value
        if n.target is aten.sym_size.int and _decides_sizes(n.args[0]):
            return tracing.record_number(_SIZE, (self.env[n.args[0]], n.args[1]), value)
        if n.target == "item" and _decides_sizes(n):
            return tracing.record_number(aten.item.default, (self.env[n.args[0]],), value)
        if n.op == "call_function" and _is_of_numbers(n.target):
            operands = tuple(self.recorded_condition(a) if isinstance(a, fx.Node) else a for a in n.args)
            if any(isinstance(a, fx.Proxy) for a in operands):
                return tracing.record_number(n.target, operands, value)
        return value


_DROPPED = ("_check", "_assert", "_constrain", "sym_constrain", "_log_api", "_saved_tensors_hooks_", "_sdpa_kernel")
"""How the names of functions without a result begin that say something about sizes, which their symbols remember, count
uses, forbid hooks, or choose among attention kernels."""


def _may_be_dropped(target: Any) -> bool:
    if _is_of_numbers(target):  # an attribute that is None is read, not changed
        return True
    return str(getattr(target, "__name__", "")).startswith(_DROPPED)


def _is_of_numbers(target: Any) -> bool:
    """Whether a function is one of Python's own, comparisons and arithmetic among them."""
    return getattr(target, "__module__", None) in ("builtins", "_operator")


def _decides_sizes(n: fx.Node) -> bool:
    """Whether values decide a size of the result, which is not bounded instead (:mod:`.chosen_rows`)."""
    return bool(n.meta.get("unbacked_bindings")) and n.target is not chosen_rows.CHOSEN


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value
