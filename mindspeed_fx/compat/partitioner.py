"""Part of :mod:`mindspeed_fx.compat`: what torch's partitioner knows about a joint graph, and the one choice we take
over.

``min_cut_rematerialization_partition`` does a dozen things beside choosing what to save (random state, checkpointed
regions, symbolic sizes, order of the backward, agreement of ranks). :func:`partition` leaves them to it and replaces
the choice alone, a module-level function with one signature from torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.fx as fx

from mindspeed_fx.compat import fx_graph

Choose = Callable[[fx.Graph, Any], "list[fx.Node] | None"]
"""(joint graph, torch's classification of its nodes) -> the nodes to save, or None to leave that to torch's min-cut."""

MinimumCut = Callable[[Any, str, str], "tuple[float, tuple[set[str], set[str]]] | None"]
"""(networkx graph, source, sink) -> capacity and the two sides of a minimum cut, or None to leave it to networkx."""


def partition(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    choose: Choose,
    memory_budget: float | None = None,
    cut: MinimumCut | None = None,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph.

    Args:
        choose: says what the forward saves.
        memory_budget: where ``choose`` leaves that to torch, the fraction of the activations' bytes to keep; None: what
            pays.
        cut: asked for torch's minimum cut before networkx is.
        kwargs: what AOTAutograd hands to a partitioner; arguments that this version does not know are refused, not
            dropped.
    """
    import torch._functorch.partitioners as partitioners
    import torch._inductor.config as inductor_config
    from torch._functorch import compile_utils

    own = partitioners.choose_saved_values_set

    @functools.wraps(own)
    def decide(graph: fx.Graph, info: Any, **settings: Any) -> list[fx.Node]:
        chosen = choose(graph, info)
        return own(graph, info, **settings) if chosen is None else chosen

    settings: dict[str, Any] = {} if memory_budget is None else {"activation_memory_budget": float(memory_budget)}
    # Torch's generators for checkpointed regions on cuda are seeded once, when the function first runs: later draws
    # would follow neither torch.manual_seed nor a checkpoint's random state. CUDA graphs can do with nothing else.
    settings["graphsafe_rng_functionalization"] = inductor_config.triton.cudagraphs
    with (
        functorch_config.patch(**settings),
        mock.patch.object(partitioners, "choose_saved_values_set", decide),
        mock.patch.object(compile_utils, "rand_ops", _Drawing()),
        _standing_in_for_networkx(cut),
        fx_graph.code_when_called(),  # of the joint graph, which torch makes anew twice on the way and nobody calls
    ):
        return partitioners.min_cut_rematerialization_partition(gm, inputs, **kwargs)


@contextlib.contextmanager
def _standing_in_for_networkx(cut: MinimumCut | None) -> Iterator[None]:
    """Meanwhile ``networkx.minimum_cut(graph, source, sink)`` is ``cut``'s, where that has one."""
    if cut is None:
        yield
        return
    import networkx

    own = networkx.minimum_cut

    @functools.wraps(own)
    def minimum_cut(graph: Any, source: str, sink: str, *args: Any, **kwargs: Any) -> Any:
        result = cut(graph, source, sink) if not args and not kwargs else None
        return own(graph, source, sink, *args, **kwargs) if result is None else result

    with mock.patch.object(networkx, "minimum_cut", minimum_cut):
        yield


class _Drawing:
    """The operators that draw, overloads left out, by their tags: calls of them are never made one. Torch's list (2.11
    to 2.13) has no randn_like, uniform, exponential or normal_functional, nor operators of other namespaces, and two
    equal calls of those would have the same numbers.
    """

    def __contains__(self, packet: Any) -> bool:
        return isinstance(packet, torch._ops.OpOverloadPacket) and _draws(packet)


@functools.cache
def _draws(packet: torch._ops.OpOverloadPacket) -> bool:
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in packet.overloads())


def keep_unchecked(node: fx.Node) -> None:
    """Where ``node`` of a joint graph is saved for the backward, save it without autograd's check of versions."""
    node.meta["saved_tensor_with_no_vc_check"] = True


def is_unchecked(node: fx.Node) -> bool:
    """Whether ``node`` of a forward is saved without that check."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check"))


def knapsack(graph: fx.Graph, info: Any, budget: float, solver: str) -> list[fx.Node]:
    """What torch itself would save, asked from within a ``choose``.

    Args:
        budget: fraction of the activations' bytes, in (0, 1].
        solver: "dp", "greedy" or "ilp" (needs scipy).
    """
    import torch._functorch.partitioners as partitioners

    with functorch_config.patch(activation_memory_budget_solver=solver):
        return inspect.unwrap(partitioners.choose_saved_values_set)(graph, info, memory_budget=budget)


def is_input(node: fx.Node) -> bool:
    """True for what the forward gets from outside: parameters, inputs, random seeds."""
    return node.op == "placeholder" and "tangents" not in str(node.target)


def inputs_with_gradient(graph: fx.Graph) -> set[fx.Node]:
    """The inputs whose gradients a joint graph returns: its last outputs are those of its inputs, one each."""
    inputs = [n for n in graph.nodes if is_input(n)]
    outputs = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    return {n for n, gradient in zip(inputs, outputs[len(outputs) - len(inputs) :]) if isinstance(gradient, fx.Node)}


def backward_nodes(info: Any) -> set[fx.Node]:
    """The nodes that can only run in the backward, because they depend on its inputs."""
    return set(info.tangents_closure)


def needed_by_backward(info: Any) -> set[fx.Node]:
    """Nodes outside :func:`backward_nodes` whose value the backward must have."""
    closure = info.tangents_closure
    needed = {n for n in info.required_bw_nodes if n not in closure and n.op != "output"}
    for node in closure:
        needed.update(n for n in node.all_input_nodes if n not in closure)
    return needed


@functools.cache
def _types() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def is_fusible(node: fx.Node) -> bool:
    """True when generated code fuses ``node`` with its neighbours: pointwise work, views, small reductions."""
    return node.op == "call_function" and _types().is_fusible(node)


def is_random(node: fx.Node) -> bool:
    target = node.target
    return _types().is_random(node) or (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    )


def must_recompute(node: fx.Node) -> bool:
    """True inside a checkpointed region."""
    from torch._functorch.partitioners import must_recompute

    return must_recompute(node)


def mark_recompute(node: fx.Node) -> None:
    """Have the backward make ``node`` again, as in a checkpointed region; without a region's number, which would order
    it among regions.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def mark_save(node: fx.Node) -> None:
    """Have the backward read what the forward made, where it needs ``node``."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def must_save(node: fx.Node) -> bool:
    """True for what a checkpoint policy, a side effect or a collective keeps from being recomputed."""
    from torch.utils.checkpoint import CheckpointPolicy

    return node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE


def is_collective(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in (
        "_c10d_functional",
        "_c10d_functional_autograd",
        "c10d",
    )


def is_pure(node: fx.Node) -> bool:
    """True when calling ``node`` again gives the same value and changes nothing: no randomness, mutation, side effect,
    collective, or size that only the data knows."""
    import operator

    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return not isinstance(node.target, torch._ops.HigherOrderOperator)  # arithmetic on sizes
    if node.target._schema.is_mutable or is_random(node) or is_collective(node):
        return False
    return not ({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(node.target.tags))


def flops(node: fx.Node) -> int:
    """Floating-point operations of a call that ``torch.utils.flop_counter`` has a formula for; 0 for others."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _concrete(n.meta["val"]))
    return int(formula(*args, **kwargs, out_val=torch.utils._pytree.tree_map(_concrete, node.meta["val"])))


def _concrete(value: Any) -> Any:
    """A tensor of the hinted sizes on the meta device; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(
        [s if isinstance(s, int) else s.node.hint for s in value.shape], dtype=value.dtype, device="meta"
    )


def checkpoint_policy(body: fx.GraphModule) -> str | None:
    """What a checkpointed region's ``context_fn`` is known by to compile caches; None where it has none.

    Raises:
        TypeError: it has no ``cache_hash``, as torch asks for.
    """
    function = body.meta.get("_checkpoint_context_fn")
    if function is None:
        return None
    if not hasattr(function, "cache_hash"):
        raise TypeError(f"context_fn {function!r} has no cache_hash")
    return repr(function.cache_hash)
