"""autograd.Functions: inlined where the backward is the derivative, left whole otherwise, never a gradient lost."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

from tests import ranks
from tests.models import function_agrees

NAME = "canonicalize.autograd_function"


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.silu(x) * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * w * s * (1 + x * (1 - s)), grad * x * s


class Scaled(torch.autograd.Function):
    """Forward identity, gradient scaled: not a derivative."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Dropped(torch.autograd.Function):
    """Forgets the gradient of its second input."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Rounded(torch.autograd.Function):
    """Straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def inputs():
    return torch.randn(3, 8, dtype=torch.double, requires_grad=True), torch.randn(
        3, 8, dtype=torch.double, requires_grad=True
    )


def test_a_derivative_is_inlined_and_then_fused():
    report = function_agrees(lambda x, w: SwiGLU.apply(x, w) * 2, *inputs())
    assert report.counts[NAME] == 1 and report.counts["fusion.swiglu"] == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: Scaled.apply(x, 0.5) * w,
        lambda x, w: Dropped.apply(x, w) + w * x,
        lambda x, w: Rounded.apply(x) * w,
    ],
)
def test_anything_else_stays_whole_with_the_reason(f):
    report = function_agrees(f, *inputs())
    assert report.counts[NAME] == 0
    assert [s.reason for s in report.skipped(NAME)] == ["its backward is not the derivative of its forward"]


def test_random_numbers_are_not_evaluated():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + F.dropout(torch.ones_like(x))

        @staticmethod
        def backward(ctx, grad):
            return grad

    import mindspeed_fx

    report = mindspeed_fx.explain(lambda x: Noisy.apply(x), inputs()[0], options={"codegen": "eager"})
    assert report.counts[NAME] == 0 and "cannot be evaluated" in report.skipped(NAME)[0].reason


class Averaged(torch.autograd.Function):
    """Forward a copy, the mean over ranks in the backward alone."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        whole = functional.wait_tensor(functional.all_reduce(grad.contiguous(), "sum", ctx.group))
        return whole / ctx.group.size(), None


def average(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    x = torch.ones(3, dtype=torch.double, requires_grad=True)
    call = torch.compile(
        lambda x: (Averaged.apply(x, dist.group.WORLD) * (rank + 1)).sum(),
        backend="mindspeed",
        fullgraph=True,
        options={"codegen": "eager"},
    )
    call(x).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.5))
    dist.destroy_process_group()


def test_a_mean_over_ranks_in_the_backward_stays(tmp_path):
    """Every rank evaluated it on the same random numbers, whose mean they are: it was taken for nothing."""
    ranks.spawn(average, (str(tmp_path / "store"),))
