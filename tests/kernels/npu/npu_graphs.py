"""Compiling for the target "npu" on CPU tensors, where the lowered graphs run through emulated operators: what was
called, whether it computes what the model computes, and whether any gradient got lost."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter

import torch

from mindspeed_fx import backend

OPTIONS = {"target": "npu", "codegen": "eager"}


class Graphs(list):
    """(side, Counter of calls, rows of the lowering report) per lowered graph."""

    def npu(self, side: str | None = None) -> dict[str, int]:
        """Calls of ``npu::`` operators in the graphs of ``side``, or in all."""
        counts: Counter[str] = Counter()
        for own, calls, _ in self:
            if side is None or own == side:
                counts.update({name.removeprefix("npu."): n for name, n in calls.items() if name.startswith("npu.")})
        return dict(counts)

    def rows(self) -> list[dict]:
        return [row for *_, rows in self for row in rows]

    def unlowered(self) -> list[str]:
        """Fused operators that no kernel of the target runs, and why."""
        return [
            f"{r['operator']}: {r['reason']}" for r in self.rows() if r["kernel"].startswith(("reference", "its own"))
        ]

    def left(self) -> list[str]:
        """``mindspeed::`` calls in the final graphs that are no kernels."""
        return [n for _, calls, _ in self for n in calls if n.startswith("mindspeed.") and not n.endswith("_triton")]

    def triton(self, side: str) -> dict[str, int]:
        """Calls of Triton kernels in the graphs of ``side``."""
        counts: Counter[str] = Counter()
        for own, calls, _ in self:
            if own == side:
                counts.update({n.removeprefix("mindspeed."): k for n, k in calls.items() if n.endswith("_triton")})
        return dict(counts)


@contextlib.contextmanager
def lowered():
    """Collects the graphs that are compiled inside."""
    graphs, original = Graphs(), backend.Compilation.finish_side

    def finish(self, gm, side):
        before = len(self.record.lowered)
        original(self, gm, side)
        calls = Counter(
            str(n.target).removesuffix(".default")
            for n in gm.graph.nodes
            if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
        )
        graphs.append((side, calls, self.record.lowered[before:]))

    backend.Compilation.finish_side = finish
    try:
        yield graphs
    finally:
        backend.Compilation.finish_side = original


def step(run, model, args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step of ``model``, called as ``run``; a parameter or input without a gradient is an
    error.
    """
    model.zero_grad(set_to_none=True)
    given = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    out = run(*given)
    out = getattr(out, "loss", out)
    if out.dim():
        out = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    out.backward()
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
    wanted.update({f"input {i}": a for i, a in enumerate(given) if isinstance(a, torch.Tensor) and a.requires_grad})
    return out.detach(), {n: p.grad for n, p in wanted.items()}


def assert_no_gradient_vanished(expected: dict, have: dict) -> None:
    """Whatever has a gradient in the eager model has one here, not all zeros where that is not, and finite."""
    for name, grad in expected.items():
        assert (have[name] is None) == (grad is None), (
            f"the gradient of {name} {'disappeared' if have[name] is None else 'appeared'}"
        )
        if grad is not None and grad.any():
            assert have[name].any(), f"the gradient of {name} is zero"
            assert have[name].isfinite().all(), f"the gradient of {name} is not finite"


def distance(have: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, relative to the largest element of ``truth``."""
    return ((have.double() - truth.double()).abs().max() / truth.double().abs().max().clamp_min(1e-30)).item()


def trains_alike(model, *args, dtype=torch.float32, tolerance=1e-5, **options) -> Graphs:
    """One step of ``model`` compiled for "npu" against the eager one: float32 to ``tolerance``, 16-bit types to twice
    the eager model's own error, which a float64 copy of the model shows. Returns the lowered graphs."""
    model = model.to(dtype)
    args = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    truth_args = [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    truth_model = copy.deepcopy(model).double()
    truth_loss, truth = step(truth_model, truth_model, truth_args)
    loss, expected = step(model, model, args)
    torch._dynamo.reset()
    with lowered() as graphs:
        have_loss, have = step(
            torch.compile(model, backend="mindspeed", fullgraph=True, options={**OPTIONS, **options}), model, args
        )
    assert_no_gradient_vanished(expected, have)
    floor = 1e-3 * max(g.abs().max().item() for g in truth.values() if g is not None)
    for name, a, b, c in [
        ("loss", have_loss, loss, truth_loss),
        *((n, have[n], expected[n], truth[n]) for n in truth if truth[n] is not None),
    ]:
        if c.abs().max() < floor and name != "loss":
            assert a.abs().max() <= max(2 * b.abs().max(), 2 * floor), name  # everything cancels: rounding
            continue
        own = distance(b, c)
        limit = tolerance + own if dtype == torch.float32 else max(2 * own, 4 * torch.finfo(dtype).eps)
        assert distance(a, c) <= limit, f"{name}: off by {distance(a, c):.3g}, the eager model by {own:.3g}"
    return graphs
