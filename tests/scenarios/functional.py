"""torch.func and autograd's functions of higher order, around and inside what is compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

from tests.scenarios.hooks import Stack
from tests.scenarios.steps import train
from tests.scenarios.table import scenario


def parts() -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    model = Stack(1)
    return model, {n: p.detach() for n, p in model.named_parameters()}, torch.randn(4, 8, 32)


@scenario("torch.func/functional_call")
def run_functional_call(run: Any) -> Any:
    model, weights, x = parts()
    weights = {n: w.requires_grad_() for n, w in weights.items()}
    out = run.compile(lambda w, x: functional_call(model, w, (x,)).square().mean())(weights, x)
    return [out, *torch.autograd.grad(out, list(weights.values()))]


@scenario("torch.func/grad")
def run_grad(run: Any) -> Any:
    model, weights, x = parts()
    return run.compile(lambda w, x: grad(lambda w: functional_call(model, w, (x,)).square().mean())(w))(weights, x)


@scenario("torch.func/grad_and_value")
def run_grad_and_value(run: Any) -> Any:
    model, weights, x = parts()

    def loss(w: Any, x: torch.Tensor) -> Any:
        out = functional_call(model, w, (x,))
        return out.square().mean(), out

    return run.compile(lambda w, x: grad_and_value(loss, has_aux=True)(w, x))(weights, x)


@scenario("torch.func/per_sample_gradients")
def run_per_sample(run: Any) -> Any:
    model, weights, x = parts()

    def loss(w: Any, one: torch.Tensor) -> torch.Tensor:
        return functional_call(model, w, (one[None],)).square().mean()

    return run.compile(lambda w, x: vmap(grad(loss), (None, 0))(w, x))(weights, x)


@scenario("torch.func/ensemble")
def run_ensemble(run: Any) -> Any:
    models = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)) for _ in range(3)]
    weights, buffers = stack_module_state(models)
    base, x = models[0], torch.randn(5, 8)
    call = lambda w, b, x: vmap(lambda w, b: functional_call(base, (w, b), (x,)))(w, b)
    out = run.compile(call)(weights, buffers, x)
    return [out, *torch.autograd.grad(out.square().mean(), list(weights.values()))]


@scenario("torch.func/vmap_of_compiled_inside")
def run_vmap(run: Any) -> Any:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    one = lambda x, y: F.softmax(x, -1) @ y + F.layer_norm(x, (8,)).sum()
    return run.compile(lambda x, y: vmap(one)(x, y))(x, y)


@scenario("torch.func/jacobians")
def run_jacobians(run: Any) -> Any:
    w, x = torch.randn(6, 6), torch.randn(6)
    f = lambda x: torch.tanh(w @ x) * x
    return run.compile(lambda x: (jacrev(f)(x), jacfwd(f)(x)))(x)


@scenario("torch.func/hessian")
def run_hessian(run: Any) -> Any:
    w, x = torch.randn(6, 6), torch.randn(6)
    return run.compile(lambda x: hessian(lambda x: torch.tanh(w @ x).square().sum())(x))(x)


@scenario("torch.func/jvp")
def run_jvp(run: Any) -> Any:
    w, x, t = torch.randn(6, 6), torch.randn(6), torch.randn(6)
    return run.compile(lambda x, t: jvp(lambda x: F.silu(w @ x), (x,), (t,)))(x, t)


@scenario("torch.func/vjp")
def run_vjp(run: Any) -> Any:
    w, x, t = torch.randn(6, 6), torch.randn(6), torch.randn(6)

    def pull(x: torch.Tensor, t: torch.Tensor) -> Any:
        out, back = vjp(lambda x: F.rms_norm(w @ x, (6,)), x)
        return out, back(t)

    return run.compile(pull)(x, t)


@scenario("torch.autograd/grad_inside")
def run_inner_grad(run: Any) -> Any:
    """A penalty on gradients: the loss holds a gradient."""
    w1, w2, x = torch.randn(8, 8), torch.randn(8), torch.randn(4, 8)

    def penalty(w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        slope = grad(lambda x: (torch.tanh(x @ w1) @ w2).sum())(x)
        return (slope.norm(dim=-1) - 1).square().mean()

    return run.compile(lambda *a: grad(penalty, (0, 1))(*a))(w1, w2, x)


@scenario("torch.autograd/function")
def run_function(run: Any) -> Any:
    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, bound: float) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.bound = bound
            return x.clamp(-bound, bound)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return g * (x.abs() <= ctx.bound) + 0.1 * g, None

    class Model(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Clip.apply(super().forward(x), 0.5)

    return train(run, Model(), (torch.randn(2, 8, 32),))


@scenario("torch.autograd/custom_op")
def run_custom_op(run: Any) -> Any:
    @torch.library.custom_op("scenarios::scaled_tanh", mutates_args=())
    def scaled_tanh(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.tanh(x) * scale

    scaled_tanh.register_fake(lambda x, scale: torch.empty_like(x))

    def setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    scaled_tanh.register_autograd(
        lambda ctx, g: (g * ctx.scale * (1 - torch.tanh(ctx.saved_tensors[0]) ** 2), None), setup_context=setup
    )

    class Model(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled_tanh(super().forward(x), 1.5)

    return train(run, Model(), (torch.randn(2, 8, 32),))


@scenario("torch.autograd/custom_op_mutates")
def run_mutating_op(run: Any) -> Any:
    @torch.library.custom_op("scenarios::add_rows_", mutates_args=("out",))
    def add_rows_(out: torch.Tensor, x: torch.Tensor) -> None:
        out.add_(x.sum(0))

    def step(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        add_rows_(out, x * 2)
        return out * 3

    out = torch.zeros(4)
    return [run.compile(step)(out, torch.randn(3, 4)), out]


@scenario("torch.autograd/{}", ("cond", "while_loop", "scan", "map"))
def run_control_flow(run: Any, kind: str) -> Any:
    from torch._higher_order_ops import map as torch_map
    from torch._higher_order_ops import scan, while_loop

    x = torch.randn(5, 4)
    if kind == "cond":
        step = lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))
        compiled = run.compile(step)
        return [compiled(x), compiled(x.abs()), compiled(-x.abs())]
    if kind == "while_loop":
        step = lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), x))
        return run.compile(step)(x) if run.name else [torch.tensor(3), x * 1.5**3]
    if kind == "scan":
        step = lambda x: scan(lambda c, y: (c + y, c * y), torch.zeros(4), x)
        if run.name:
            return run.compile(step)(x)
        carry, rows = torch.zeros(4), []
        for row in x:
            rows.append(carry * row)
            carry = carry + row
        return [carry, torch.stack(rows)]
    step = lambda x: torch_map(lambda row: F.softmax(row, -1), x)
    return run.compile(step)(x) if run.name else F.softmax(x, -1)


@scenario("torch.autograd/flex_attention")
def run_flex(run: Any) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    with torch.no_grad():
        return run.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))(q, k, v)
