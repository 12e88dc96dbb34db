"""A small model whose loss is a function of its values, compared under a plan with one device, and the table of such
functions, which loss_cases.py fills.

A case takes ``v``: h [4, 8, 8] and logits [4, 8, 16] with gradients, labels [4, 8] of 16 classes, y [4, 8, 8], and keep
[4, 8], a mask of tokens.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor, nn

from mindspeed_fx.planning.simulate import simulate

ROWS, SEQ, WIDTH, CLASSES = 4, 8, 8, 16
PLANS = {
    "tp": {"tp": 2},
    "tp_sp": {"tp": 2},
    "tp_2d": {"tp_x": 2, "tp_y": 2},
    "ulysses": {"cp": 2},
    "kv_allgather": {"cp": 2},
    "ring": {"cp": 2},
    "hybrid": {"cp_ring": 2, "cp_ulysses": 2},
    "zero1": {"dp": 2},
    "zero2": {"dp": 4},
    "zero3": {"dp": 2},
    "zero2+tp_sp": {"dp": 2, "tp": 2},
    "zero2+ulysses": {"dp": 2, "cp": 2},
}
CASES: dict[str, Callable[[Any], Any]] = {}
MODULES: dict[str, Callable[[], nn.Module]] = {}


class Values(NamedTuple):
    h: Tensor
    logits: Tensor
    labels: Tensor
    y: Tensor
    keep: Tensor
    module: nn.Module


class Small(nn.Module):
    """An embedding, a column and a row layer, and a head whose classes are as many as the embedding has rows."""

    def __init__(self, names: Sequence[str]):
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cases = [CASES[n] for n in names]
        self.modules_of = nn.ModuleList(MODULES.get(n, nn.Identity)() for n in names)

    def forward(self, ids: Tensor, labels: Tensor, y: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        h = self.o_proj(self.q_proj(self.embed(ids)).tanh())
        out: list[Tensor] = []
        for case, module in zip(self.cases, self.modules_of):
            made = case(Values(h, self.head(h), labels, y, keep, module))
            out += made if isinstance(made, tuple) else (made,)
        # an element's gradient tells which element it is
        return *(_weighted(o) for o in out), h.square().sum()


def _weighted(x: Tensor) -> Tensor:
    if not x.is_floating_point() or not x.ndim:
        return x
    return x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)


def batch() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, CLASSES, (ROWS, SEQ), generator=g) for _ in range(2))
    labels[0, :3], labels[2, 6] = -100, -100
    y = torch.randn(ROWS, SEQ, WIDTH, generator=g, dtype=torch.double)
    return ids, labels, y, torch.rand(ROWS, SEQ, generator=g) < 0.6


def error(names: Sequence[str], plan: str) -> float:
    """Largest difference of a result of these cases, or of a gradient of their sum, from one device's, relative to its
    largest element.

    Raises:
        ShardingError: the plan does not take a case.
    """
    torch.manual_seed(0)
    model = Small(names).double()
    before = {n: b.clone() for n, b in model.named_buffers()}
    result = simulate(model, PLANS[plan], plan, *batch())
    for n, b in model.named_buffers():
        b.copy_(before[n])
    outputs = model(*batch())
    torch.autograd.backward([o.sum() for o in outputs if o.requires_grad])
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert result.gradients.keys() == expected.keys(), "a gradient appeared or disappeared"
    assert len(result.outputs) == len(outputs)
    pairs = [*zip(result.outputs, outputs), *((result.gradients[n], g) for n, g in expected.items())]
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs), "a shape or type changed"
    return max(map(_error, *zip(*pairs)))


def _error(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.detach().double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    difference, scale = (a - b).nan_to_num().abs(), b.nan_to_num().abs()
    return float(difference.max() / scale.max().clamp(min=1e-300)) if difference.numel() and difference.max() else 0.0


def case(name: str, module: Callable[[], nn.Module] | None = None) -> Callable:
    """Adds a case, and what makes the module that it calls."""

    def add(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        assert name not in CASES, name
        CASES[name] = f
        if module is not None:
            MODULES[name] = module
        return f

    return add


def _each(name: str, f: Callable, *reductions: str) -> None:
    for reduction in reductions or ("mean", "sum", "none"):
        case(f"{name}, {reduction}")(lambda v, r=reduction: f(v, r))


def flat(v: Any) -> tuple[Tensor, Tensor]:
    return v.logits.flatten(0, 1), v.labels.flatten()


def weights(v: Any) -> Tensor:
    return torch.linspace(0.5, 2, CLASSES, dtype=v.h.dtype)


def valid(v: Any) -> Tensor:
    return v.labels.clamp(min=0)


def sign(v: Any) -> Tensor:
    return torch.where(v.y > 0, 1.0, -1.0).to(v.y.dtype)
