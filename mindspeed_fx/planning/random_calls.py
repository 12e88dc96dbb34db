"""Which calls of a Dynamo graph draw random numbers.

Names of functions and methods do not tell it (``gumbel_softmax``, ``scaled_dot_product_attention`` with dropout,
``geometric_``); the operators that they call do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import dispatcher, fake, fx_graph, tracing
from mindspeed_fx.graph.annotate import is_transform
from mindspeed_fx.graph.op_sets import is_random
from mindspeed_fx.sharding.constraint import operands

NAMES = ("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "poisson")
"""In names of what draws numbers, for calls that cannot be made on fake values."""


def draws_numbers(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether ``node`` of ``gm`` draws random numbers, as it is called on copies of its fake arguments."""
    if node.op not in ("call_function", "call_method") or is_transform(node):
        return False
    if tracing.is_higher_order(node.target):
        return any(draws_numbers(body, n) for body, _ in operands(gm, node) for n in body.graph.nodes)
    try:
        return _calls_random(node)
    except Exception:  # values that data decide, results without a fake value, levels of a transform
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return any(word in name for word in NAMES)


def _calls_random(node: fx.Node) -> bool:
    values = fx.map_arg((node.args, node.kwargs), fx_graph.example_value_of)
    mode = fake.fake_like(values) if any(map(fake.is_fake, pytree.tree_leaves(values))) else fake.new_mode()
    answers: list[bool] = []
    with tracing.symbols_given_up(mode, on_error=False), mode, torch.no_grad():
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), values)
        with dispatcher.Watch(lambda operator, *_: answers.append(is_random(operator))):
            _call(node, args, kwargs)
    return any(answers)


def _call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return (
        getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else node.target(*args, **kwargs)
    )
