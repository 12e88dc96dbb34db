"""``autograd.Function`` -> plain operators, where its backward is nothing but the derivative of its forward.

Dynamo keeps an ``autograd.Function`` as one node with a forward and a backward body, which no matcher sees into. A
handwritten backward usually is the derivative (a fused SwiGLU, an RMSNorm, a mapping over a group of one rank) and
sometimes is not (straight-through estimators, gradient scaling or reversal, all-reduce in the backward only). The two
are told apart by evaluating: both bodies are run on random float64 values, and the forward is inlined only where
autograd gives the same gradients and the backward does nothing besides; anything else stays whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.capture.normalize import normalize
from mindspeed_fx.compat import fake as fake_compat
from mindspeed_fx.compat import tracing
from mindspeed_fx.graph.edit import stand_in
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip

NAME = "canonicalize.autograd_function"
MOST_ELEMENTS = 2**22
"""Bodies whose inputs have more elements than this are left whole: evaluating them would cost compile time."""
TOLERANCE = 1e-5
"""Relative; a body may cast to float32 on the way, and a wrong formula is wrong in the first digits."""


@register(NAME)
def autograd_function(gm: fx.GraphModule, context: Context) -> PassReport:
    """autograd.Functions whose backward is the derivative of their forward become plain operators."""
    report = PassReport(NAME)
    verdicts: dict[Any, str | None] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not tracing.is_autograd_function(node.target):
            continue
        forward, backward = (getattr(gm, str(a.target)) for a in node.args[:2])
        operands = node.args[2:]
        # torch 2.11 returns intermediate results of the body too, for nobody; their gradient is zero.
        used = tuple(sorted({user.args[1] for user in node.users}))
        key = (
            forward.code,
            backward.code,
            used,
            tuple(fake_compat.layout_key(a.meta["val"]) if isinstance(a, fx.Node) else repr(a) for a in operands),
        )
        if key not in verdicts:
            reason = _not_inlinable(node, forward, backward)
            verdicts[key] = reason or _not_derivative(forward, backward, operands, used)
        if verdicts[key]:
            report.skipped.append(skip("plain operators", node, verdicts[key]))
        else:
            report.rewrites.append(site("plain operators", node))
            _inline(gm, node, forward, operands)
    if report.rewrites:
        normalize(gm)
    return report


def _not_inlinable(node: fx.Node, forward: fx.GraphModule, backward: fx.GraphModule) -> str | None:
    if node.kwargs.get("non_differentiable_idx"):
        return "it marks outputs as non-differentiable"
    if node.kwargs.get("dirty_idx"):
        return "it changes an input in place"
    held = [getattr(backward, n.target, None) for n in backward.graph.nodes if n.op == "get_attr"]
    if any(isinstance(value, torch.Tensor) for value in held):
        return "its backward holds a tensor of its own, which it may change"
    for n in forward.graph.nodes:
        if n.op == "get_attr":
            return "its forward holds a constant tensor"
        if (
            n.op == "call_function"
            and not tracing.is_grad_mode_switch(n.target)
            and getattr(n.target, "__name__", "") != "getitem"
        ):
            plain = (
                isinstance(n.target, torch._ops.OpOverload)
                and n.target.namespace == "aten"
                and not n.target._schema.is_mutable
            )
            if not plain or torch.Tag.nondeterministic_seeded in n.target.tags:
                return f"its forward calls {n.target}, which cannot be evaluated at compile time"
    if talks := [n for n in backward.graph.nodes if _is_collective(n)]:
        # a mean over ranks of the same numbers is those numbers: evaluating them would not tell it from nothing
        return f"its backward calls {talks[0].target}, whose result other ranks decide"
    values = [a.meta["val"] for a in node.args[2:] if isinstance(a, fx.Node)]
    if not all(isinstance(v, torch.Tensor) for v in values):
        return "it takes symbolic numbers"
    total = sum(_elements(v) for v in values)
    return f"its inputs have {total} elements, too many to evaluate at compile time" if total > MOST_ELEMENTS else None


def _is_collective(node: fx.Node) -> bool:
    """In Dynamo's words too, where a call may be an operator without its overload, or one of torch.distributed's own
    functions."""
    name = f"{getattr(node.target, '__module__', '')}.{node.target}"
    return node.op == "call_function" and any(word in name for word in ("c10d", "torch.distributed", "symm_mem"))


def _elements(value: torch.Tensor) -> int:
    total = 1
    for size in value.shape:
        total *= fake_compat.hint(size)
    return total


def _not_derivative(
    forward: fx.GraphModule, backward: fx.GraphModule, operands: tuple, used: tuple[int, ...]
) -> str | None:
    try:
        with tracing.without_fake_mode(), tracing.outside_tracing(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _compare(forward, backward, [_value(a) for a in operands], used)
    except Exception as e:  # whole is always right
        return f"it could not be evaluated in float64: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


def _value(operand: Any) -> Any:
    if not isinstance(operand, fx.Node):
        return operand
    fake = operand.meta["val"]
    shape = [fake_compat.hint(s) for s in fake.shape]
    if fake.is_floating_point():
        return torch.randn(shape, dtype=torch.float64).to(fake.device)
    return torch.randint(0, 2, shape).to(fake.dtype).to(fake.device)


def _compare(forward: fx.GraphModule, backward: fx.GraphModule, values: list[Any], used: tuple[int, ...]) -> str | None:
    """What keeps the backward from being the derivative of the forward and nothing else; None where it is."""
    other = "its backward is not the derivative of its forward"
    leaves = [v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
    with torch.enable_grad():
        outputs, saved = _GradModeIgnored(forward).run(*leaves)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    if not all(isinstance(outputs[i], torch.Tensor) and outputs[i].requires_grad for i in used):
        return other
    weights = [
        torch.randn_like(o) if i in used else torch.zeros_like(o)
        for i, o in enumerate(outputs)
        if isinstance(o, torch.Tensor)
    ]
    outputs = [o for o in outputs if isinstance(o, torch.Tensor)]
    inputs = [v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad]
    followed = [(o, w) for o, w in zip(outputs, weights) if o.requires_grad]
    expected = torch.autograd.grad([o for o, _ in followed], inputs, [w for _, w in followed], allow_unused=True)
    saved = [s.detach() if isinstance(s, torch.Tensor) else s for s in saved]
    watched = [t for t in (*weights, *saved) if isinstance(t, torch.Tensor)]
    versions, random = [t._version for t in watched], torch.get_rng_state()
    with torch.no_grad():
        arg = fx.Interpreter(backward).run(*weights, *saved)
    if [t._version for t in watched] != versions:
        return "its backward changes a tensor in place"
    if not torch.equal(torch.get_rng_state(), random):
        return "its backward draws random numbers"
    arg = arg if isinstance(arg, (tuple, list)) else [arg]
    have_all = [g for g, v in zip(arg, leaves) if isinstance(v, torch.Tensor) and v.requires_grad]
    for have, want in zip(have_all, expected, strict=True):
        if (have is None) != (want is None):
            return other
        if want is not None and not (have.double() - want).abs().max() <= TOLERANCE * want.abs().max().clamp_min(1e-12):
            return other
    return None


class _GradModeIgnored(fx.Interpreter):
    """The body runs under ``no_grad`` in a Function; here autograd watches it."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        return None if tracing.is_grad_mode_switch(target) else super().call_function(target, args, kwargs)


def _inline(gm: fx.GraphModule, node: fx.Node, forward: fx.GraphModule, operands: tuple) -> None:
    inputs = iter(operands)
    env: dict[fx.Node, Any] = {}
    with gm.graph.inserting_before(node):
        for n in forward.graph.nodes:
            if n.op == "placeholder":
                env[n] = next(inputs)
            elif n.op == "output":
                outputs = fx.map_arg(n.args[0][0], env.__getitem__)
            elif not tracing.is_grad_mode_switch(n.target):
                env[n] = gm.graph.node_copy(n, env.__getitem__)
                for key in ("nn_module_stack", "stack_trace"):
                    if key in node.meta and not n.meta.get(key):
                        env[n].meta[key] = node.meta[key]
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    stand_in(node, outputs)
    recompile(gm)
