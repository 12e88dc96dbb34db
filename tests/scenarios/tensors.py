"""Tensors of other kinds: complex, jagged, sparse gradients, views, subclasses, numpy, and programs of one function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.scenarios.hooks import Stack
from tests.scenarios.steps import train
from tests.scenarios.table import scenario


def step(run: Any, function: Any, *inputs: torch.Tensor, **how: Any) -> Any:
    """Outputs of a function, and gradients of its inputs."""
    leaves = [x.requires_grad_() if x.is_floating_point() or x.is_complex() else x for x in inputs]
    out = run.compile(function, **how)(*leaves)
    outs = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    wanted = [t for t in outs if t.requires_grad]
    if wanted:
        total = sum((t.abs().square() if t.is_complex() else t.square()).sum() for t in wanted)
        total.backward()
    return {"outputs": outs, "gradients": [x.grad for x in leaves]}


@scenario("tensors/complex/{}", ("fft", "rotation", "product", "einsum", "spectral_conv"))
def run_complex(run: Any, kind: str) -> Any:
    torch.set_default_dtype(torch.float64)
    x, y = torch.randn(4, 8), torch.randn(8, 8, dtype=torch.complex128)
    steps = {
        "fft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2.0, n=8), x),
        "rotation": (
            lambda x: torch.view_as_real(
                torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(4), torch.arange(4.0))
            ).flatten(-2),
            x,
        ),
        "product": (lambda x, y: (x.to(y.dtype) @ y).abs() + torch.angle(x.to(y.dtype) @ y), x, y),
        "einsum": (lambda x, y: torch.einsum("bi,io->bo", x.to(y.dtype), y).real, x, y),
        "spectral_conv": (
            lambda x, y: torch.fft.irfft(torch.einsum("bi,ij->bj", torch.fft.rfft(x), y[:5, :5]), n=8),
            x,
            y,
        ),
    }
    return step(run, *steps[kind])


@scenario("tensors/jagged/{}", ("linear", "attention", "norm", "residual"))
def run_jagged(run: Any, kind: str) -> Any:
    pieces = [torch.randn(n, 16) for n in (3, 5, 2)]
    nested = torch.nested.nested_tensor(pieces, layout=torch.jagged, requires_grad=True)
    linear, norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = linear(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2)

    steps = {
        "linear": lambda x: F.silu(linear(x)) * 2,
        "attention": attend,
        "norm": lambda x: norm(x) + x,
        "residual": lambda x: x + linear(x).relu(),
    }
    out = run.compile(steps[kind])(nested)
    out.values().square().sum().backward()
    return {"out": out.values(), "gradient": nested.grad.values(), "weight": linear.weight.grad}


@scenario("tensors/sparse_embedding")
def run_sparse_embedding(run: Any) -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = torch.nn.Embedding(32, 8, sparse=True), torch.nn.Linear(8, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(ids).mean(1))

    model, ids = Model(), torch.randint(0, 32, (4, 5))
    compiled = run.compile(model)
    sparse, dense = torch.optim.SparseAdam([model.words.weight], 0.01), torch.optim.SGD(model.head.parameters(), 0.1)
    losses = []
    for _ in range(2):
        loss = compiled(ids).square().mean()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss)
        model.zero_grad()
    return {"losses": losses, "weights": dict(model.named_parameters())}


@scenario("tensors/embedding/{}", ("padding", "max_norm", "bag_sum", "bag_max", "bag_weights", "scaled_by_frequency"))
def run_embedding(run: Any, kind: str) -> Any:
    ids = torch.randint(0, 16, (3, 5))
    how: dict[str, Any] = {"padding": dict(padding_idx=2), "max_norm": dict(max_norm=1.0)}.get(kind, {})
    how |= dict(scale_grad_by_freq=True) if kind == "scaled_by_frequency" else {}
    if kind.startswith("bag"):
        bag = torch.nn.EmbeddingBag(16, 8, mode="max" if kind == "bag_max" else "sum")
        inputs = (ids, None, torch.rand(3, 5)) if kind == "bag_weights" else (ids,)
        return train(run, bag, inputs)
    return train(run, torch.nn.Sequential(torch.nn.Embedding(16, 8, **how), torch.nn.Linear(8, 4)), (ids,))


@scenario(
    "tensors/program/{}",
    (
        *(
            "in_place_views",
            "index_put",
            "scatter_reduce",
            "sort_topk",
            "cumulative",
            "unfold",
            "grid_sample",
            "nonzero",
        ),
        *(
            "masked_select",
            "item",
            "as_strided",
            "bool_index",
            "histogram",
            "unique",
            "einsum",
            "interpolate",
            "pooling",
        ),
        *(
            "linalg",
            "cdist",
            "searchsorted",
            "numpy",
            "list_of_tensors",
            "dataclass",
            "mutated_input",
            "aliased_outputs",
        ),
        *("integer", "clone_detach", "set_grad", "print_break", "data_dependent", "repeat_interleave", "bincount"),
    ),
)
def run_program(run: Any, kind: str) -> Any:
    return PROGRAMS[kind](run)


def in_place_views(x: torch.Tensor) -> Any:
    y = x * 1
    y[:, ::2].mul_(2)
    y.view(-1)[3:9] += 1
    y.T[0].sigmoid_()
    return y, y[1:].sum(0)


def index_put(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.index_put_((torch.tensor([0, 1, 1]),), x[:3], accumulate=True)
    y[torch.tensor([2, 3]), 1] = x[0, :2]
    return y.index_add(0, torch.tensor([0, 0]), x[:2], alpha=0.5)


def scatter_reduce(x: torch.Tensor) -> Any:
    at = torch.tensor([[0, 1, 1, 2, 0, 0, 3, 1]]).expand(4, 8)
    return tuple(torch.ones(4, 8).scatter_reduce(0, at % 4, x, r) for r in ("sum", "mean", "amax", "prod"))


def sort_topk(x: torch.Tensor) -> Any:
    values, at = x.sort(stable=True, dim=-1, descending=True)
    top = x.topk(3, -1)
    return values, at, top.values, top.indices, x.kthvalue(2, -1).values, x.median(-1).values, x.argmax(-1)


def cumulative(x: torch.Tensor) -> Any:
    return x.cumsum(0), x.cumprod(-1), x.cummax(-1).values, x.logcumsumexp(-1), x.diff(dim=-1)


def integer(x: torch.Tensor) -> Any:
    i = (x * 100).to(torch.int32)
    return i // 7, i % 7, i >> 1, i & 12, torch.div(i, 3, rounding_mode="trunc"), i.remainder(-5), i.float() / 3


def data_dependent(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 100:
        return x * 2
    for _ in range(int(x.abs().max()) + 1):
        x = x.sin()
    return x


def print_break(x: torch.Tensor) -> torch.Tensor:
    y = F.gelu(x)
    print(y.shape)
    return F.layer_norm(y, (8,)) * 2


def nonzero(x: torch.Tensor) -> Any:
    rows = (x > 0.3).nonzero()
    return rows, x[rows[:, 0], rows[:, 1]].square()


def bool_index(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 0] = 0.5
    return y + torch.where(x > 0.2, x, -x)


def set_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
    with torch.enable_grad():
        return x / (scale + 1) + x.detach() * x


def linalg(x: torch.Tensor) -> Any:
    a = x @ x.T + 4 * torch.eye(4)
    return (
        torch.linalg.cholesky(a),
        torch.linalg.solve(a, x),
        torch.logdet(a),
        torch.linalg.norm(x, 2),
        torch.inverse(a),
    )


def repeat_interleave(x: torch.Tensor) -> Any:
    return x.repeat_interleave(torch.tensor([1, 2, 0, 3]), 0), x.roll((1, 2), (0, 1)), x.tile(2, 1), x.flip(0)


def alias(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y.view(8, 4), y[0], x, x.T


def list_of_tensors(x: torch.Tensor) -> Any:
    pieces = {"a": [x[:1] * i for i in range(3)], "b": torch.split(x, [1, 3])}
    pieces["a"].append(torch.cat(pieces["a"]).mean(0, keepdim=True))
    return pieces


def mutate(run: Any) -> Any:
    x = torch.randn(4, 8)

    def program(x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["count"] += 1
        x.add_(state["count"])
        return x * 2

    state = {"count": torch.zeros(())}
    compiled = run.compile(program)
    outputs = [compiled(x, state).clone() for _ in range(3)]
    return {"outputs": outputs, "x": x, "count": state["count"]}


def numpy_program(run: Any) -> Any:
    import numpy as np

    def program(x: Any) -> Any:
        return np.tanh(x) @ np.ones((8, 2)) + np.sum(x**2, axis=1, keepdims=True)

    return torch.from_numpy(run.compile(program)(torch.randn(4, 8).double().numpy()))


def dataclass_program(run: Any) -> Any:
    import dataclasses

    @dataclasses.dataclass
    class Pair:
        a: torch.Tensor
        b: torch.Tensor | None = None

    def program(x: torch.Tensor) -> Pair:
        pair = Pair(x.sin())
        pair.b = pair.a.softmax(-1)
        return pair

    out = run.compile(program)(torch.randn(4, 8))
    return [out.a, out.b]


def _of(function: Any, *sizes: int, **how: Any) -> Any:
    return lambda run: step(run, function, torch.randn(*(sizes or (4, 8))), **how)


PROGRAMS: dict[str, Any] = {
    **{f.__name__: _of(f) for f in (in_place_views, index_put, scatter_reduce, sort_topk, cumulative, integer)},
    **{f.__name__: _of(f) for f in (data_dependent, print_break, nonzero, bool_index, set_grad, linalg)},
    **{f.__name__: _of(f) for f in (repeat_interleave, list_of_tensors)},
    "aliased_outputs": _of(alias),
    "unfold": _of(
        lambda x: F.fold(F.unfold(x, 2), (6, 6), 2) + x.unfold(2, 6, 1).sum((-1, -2))[..., :1, None], 1, 2, 6, 6
    ),
    "grid_sample": _of(
        lambda x: F.grid_sample(x, F.affine_grid(torch.eye(2, 3)[None] * 0.9, (1, 2, 4, 4))), 1, 2, 6, 6
    ),
    "masked_select": _of(lambda x: x.masked_select(x > 0) * 2),
    "item": _of(lambda x: x * x.detach().sum().item()),
    "as_strided": _of(lambda x: (x * 2).as_strided((3, 4), (8, 2)) + 1),
    "histogram": _of(
        lambda x: (torch.histc(x.detach(), 4, -2, 2), torch.bucketize(x.detach(), torch.linspace(-1, 1, 5)))
    ),
    "unique": _of(lambda x: torch.unique((x.detach() * 2).int(), return_inverse=True, return_counts=True)),
    "einsum": _of(lambda x: torch.einsum("ij,kj,kl->il", x, x, x.sin())),
    "interpolate": _of(
        lambda x: tuple(F.interpolate(x, scale_factor=1.5, mode=m) for m in ("nearest", "bilinear", "bicubic", "area")),
        1,
        2,
        6,
        6,
    ),
    "pooling": _of(
        lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, ceil_mode=True), F.adaptive_avg_pool2d(x, 5)),
        1,
        2,
        7,
        7,
    ),
    "cdist": _of(lambda x: torch.cdist(x, x[:2]) + F.pairwise_distance(x[:2], x[2:]).sum()),
    "searchsorted": _of(lambda x: torch.searchsorted(torch.linspace(-1, 1, 6), x.detach())),
    "clone_detach": _of(lambda x: x.clone().detach().add_(1) * x),
    "bincount": _of(lambda x: torch.bincount((x.detach().flatten() * 2).abs().long(), minlength=10)),
    "mutated_input": mutate,
    "numpy": numpy_program,
    "dataclass": dataclass_program,
}


@scenario("tensors/subclass/{}", ("logging", "two_tensors", "parameter"))
def run_subclass(run: Any, kind: str) -> Any:
    if kind == "two_tensors":
        from torch.testing._internal.two_tensor import TwoTensor

        x = TwoTensor(torch.randn(4, 8), torch.randn(4, 8)).requires_grad_()
        out = run.compile(lambda x: F.silu(x) @ torch.ones(8, 2))(x)
        out.sum().backward()
        return [out.a, out.b, x.grad.a, x.grad.b]
    if kind == "parameter":

        class Named(torch.nn.Parameter):
            pass

        model = Stack(1)
        model.head.weight = Named(model.head.weight.data)
        return train(run, model, (torch.randn(2, 8, 32),))

    class Tagged(torch.Tensor):
        pass

    return run.compile(lambda x: (x.sin() + 1).sum(-1))(torch.randn(4, 8).as_subclass(Tagged)).as_subclass(torch.Tensor)
