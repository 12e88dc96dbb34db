"""Muon for Megatron-core's ``--optimizer muon`` where emerging_optimizers, the package it needs, is not installed
(Jordan et al. 2024, "Muon: an optimizer for hidden layers"; Liu et al. 2025, arXiv 2502.16982).

With g the gradient of a matrix, b = m b + (1 - m) g its average, and u = b, or (1 - m) g + m b by Nesterov's rule, a
step is w = w - lr d w - lr s O(u): O(u) is u with its singular values near one, by Newton-Schulz's iteration

    X = u / |u|,    A = X X^T,    X = a X + (b A + c A A) X     for each (a, b, c)

on the wider of u and u^T, and s a scale by its shape. Where tensor-parallel ranks divide a matrix, "blockwise" takes
each part by itself, "duplicated" puts it together on every rank, "distributed" sums A over ranks.

Coefficients: Jordan's "simple" and "quintic" (Megatron's), "polar_express" (Amsel et al. 2025, arXiv 2505.16932) and
"aol", as MindSpeed lists them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from typing import Any, Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_fx.megatron import collectives
from mindspeed_fx.megatron.groups import size
from mindspeed_fx.megatron.patches import EVERYWHERE, WITHOUT_ACCELERATOR, Patch
from mindspeed_fx.megatron.run_arguments import training_arguments

COEFFICIENTS = {
    "simple": [(3.4445, -4.7750, 2.0315)],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    "polar_express": [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ],
    "aol": [
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ],
}
SMALLEST = 1e-7
"""Of a norm that is divided by."""


def table(with_accelerator: bool) -> list[Patch]:
    """The replacements: of the package's class where it is not there, and of a collective that gloo has not."""
    module, gathers = "optimizer.muon", "optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.allgather_params"
    patches = []
    if importlib.util.find_spec("emerging_optimizers") is None:
        reason = "Megatron's Muon is a class of emerging_optimizers, which is not installed"
        patches += [
            Patch(f"{module}:TensorParallelMuon", Muon, reason, EVERYWHERE, copies=False),
            Patch(f"{module}:HAVE_EMERGING_OPTIMIZERS", True, reason, EVERYWHERE),
        ]
    if not with_accelerator:
        reason = "gathers parts of different length, which gloo cannot"
        patches.append(Patch(gathers, send_weights, reason, WITHOUT_ACCELERATOR))
    return patches


@torch.no_grad()
def send_weights(self: Any) -> None:
    """``LayerWiseDistributedOptimizer.allgather_params``: every rank sends the weights that it stepped."""
    if self.pg_collection is None:
        return
    pairs = ((self.dp_cp_params_list, "dp_cp"), (self.expt_dp_params_list, "expt_dp"))
    for lists, name in pairs:
        for rank, weights in enumerate(lists or ()):
            group = getattr(self.pg_collection, name)
            for weight in weights:
                dist.broadcast(weight.data, dist.get_global_rank(group, rank), group)


class Muon(torch.optim.Optimizer):
    """``TensorParallelMuon`` of Megatron-core, with its arguments; parameters are matrices [out, in], float32."""

    def __init__(
        self,
        params: Any,
        lr: float = 3e-4,
        momentum_beta: float = 0.95,
        use_nesterov: bool = True,
        weight_decay: float = 0.01,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: tuple[int, int, int] | None = None,
        fp32_matmul_prec: str = "medium",
        coefficient_type: str | None = None,
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: Any = None,
        mode: str = "duplicated",
    ) -> None:
        if num_ns_steps < 1:
            raise ValueError(f"num_ns_steps is {num_ns_steps}; give 1 or more")
        super().__init__(params, dict(lr=lr, momentum_beta=momentum_beta, weight_decay=weight_decay))
        asked = getattr(training_arguments(), "muon_coefficient_type", None)
        self.coefficients, self.steps = coefficient_type or asked or "quintic", num_ns_steps
        self.is_nesterov, self.precision = use_nesterov, fp32_matmul_prec
        self.scale_mode, self.extra_scale = scale_mode, extra_scale_factor
        self.groups, self.mode = pg_collection, mode
        self.is_qkv, self.qkv_sizes = is_qkv_fn if split_qkv else None, qkv_split_shapes

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, beta = group["lr"], group["momentum_beta"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                p.mul_(1 - lr * group["weight_decay"])
                average = state["momentum_buffer"].lerp_(p.grad, 1 - beta)
                update = p.grad.lerp(average, beta) if self.is_nesterov else average
                with _precision(self.precision):
                    p.add_(self._orthogonal(p, update), alpha=-lr)
        return loss

    def _orthogonal(self, p: Tensor, update: Tensor) -> Tensor:
        """The step of a weight; queries, keys and values of a fused one each by themselves."""
        if self.is_qkv is None or not self.is_qkv(p):
            return self._scaled(p, update)
        by_group = update.view(-1, sum(self.qkv_sizes), update.shape[-1]).split(self.qkv_sizes, 1)
        steps = [self._scaled(p, x.reshape(-1, update.shape[-1])) for x in by_group]
        parts = [s.view(-1, rows, update.shape[-1]) for s, rows in zip(steps, self.qkv_sizes, strict=True)]
        return torch.cat(parts, 1).view_as(update)

    def _scaled(self, p: Tensor, x: Tensor) -> Tensor:
        group, dim = None, None
        if self.groups is not None:
            group = self.groups.expt_tp if getattr(p, "expert_tp", False) else self.groups.tp
        divided = getattr(p, "partition_dim", -1)
        if self.mode != "blockwise" and divided != -1 and size(group) > 1:
            dim = divided
        shape = list(x.shape)
        if dim is not None:
            shape[dim] *= size(group)
        return orthogonalize(x, self.steps, self.coefficients, group, dim, self.mode) * (
            scale_of(*shape, self.scale_mode) * self.extra_scale
        )


def orthogonalize(
    x: Tensor, steps: int, coefficients: str, group: Any = None, dim: int | None = None, mode: str = "duplicated"
) -> Tensor:
    """``x`` [out, in] with singular values near one, of the same type.

    Args:
        coefficients: one of ``COEFFICIENTS``.
        group: ranks that hold parts of the matrix along ``dim``; None for ``dim``: ``x`` is whole.
        mode: "duplicated" or "distributed".

    Raises:
        ValueError: no such coefficients.
    """
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients {coefficients!r}; there are {', '.join(COEFFICIENTS)}")
    if dim is None:
        return newton_schulz(x, steps, coefficients, x.shape[0] > x.shape[1])
    if mode == "distributed":
        return newton_schulz(x, steps, coefficients, dim == 0, lambda a: collectives.all_reduce(a, group))
    parts = collectives.gather(x, group).chunk(size(group))
    whole = newton_schulz(torch.cat(parts, dim), steps, coefficients, _is_taller(x, dim, size(group)))
    return whole.chunk(size(group), dim)[group.rank()]


def _is_taller(x: Tensor, dim: int, ranks: int) -> bool:
    shape = list(x.shape)
    shape[dim] *= ranks
    return shape[0] > shape[1]


def newton_schulz(
    x: Tensor, steps: int, coefficients: str, transposes: bool, reduce: Callable[[Tensor], Tensor] = lambda a: a
) -> Tensor:
    """The iteration; ``reduce`` adds up over ranks, where columns of ``x`` (rows, with ``transposes``) are divided."""
    dtype, x = x.dtype, x.mT if transposes else x
    x = x / reduce(x.square().sum()).sqrt().clamp_min(SMALLEST)
    if torch.get_float32_matmul_precision() == "medium":
        x = x.to(torch.bfloat16)
    for a, b, c in itertools.islice(_each(coefficients), steps):
        square = reduce(x @ x.mT)
        # a x + (b S + c S S) x: each product adds to what it is added to
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    x = x.to(dtype)
    return x.mT if transposes else x


def _each(coefficients: str) -> Iterator[tuple[float, float, float]]:
    """Those of every step: again from the first one, of "polar_express" the last one again."""
    row: Iterable = COEFFICIENTS[coefficients]
    if coefficients == "polar_express":
        return itertools.chain(row, itertools.repeat(COEFFICIENTS[coefficients][-1]))
    return itertools.cycle(row)


def scale_of(rows: int, columns: int, mode: str) -> float:
    """The scale of a step.

    Raises:
        ValueError: no such mode.
    """
    scales = {
        "spectral": max(rows, columns) ** 0.5,
        "shape_scaling": max(1.0, rows / columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
    }
    if mode not in scales:
        raise ValueError(f"scale mode {mode!r}; there are {', '.join(scales)}")
    return scales[mode]


@contextlib.contextmanager
def _precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
