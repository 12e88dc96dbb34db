import math

import pytest
import torch

from tests.models import double, function_agrees

NAME = "canonicalize.gelu"
ROOT = math.sqrt(2 / math.pi)


FORMS = {
    "gpt2": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "half last": lambda x: x * (torch.tanh(ROOT * (x + 0.044715 * x * x * x)) + 1) / 2,
    "megatron": lambda x: x * 0.5 * (1.0 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf 1.41421": lambda x: 0.5 * (x * (1.0 + torch.erf(x / 1.41421356))),
    "erfc": lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2.0)),
    "1 - erf": lambda x: x / 2 * (1 - torch.erf(-x * math.sqrt(0.5))),
    "ndtr": lambda x: x * torch.special.ndtr(x),
    "distribution": lambda x: x * torch.distributions.Normal(0, 1, validate_args=False).cdf(x),
    "sigmoid": lambda x: x * torch.sigmoid(2 * ROOT * (x + 0.044715 * x**3)),
    "factored": lambda x: x * 0.5 * (1 + torch.tanh(x * (ROOT + ROOT * 0.044715 * x * x))),
    "sum with a factor": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * torch.add(x, x**3, alpha=0.044715))),
    "gating": lambda x: 0.5 * (x * x.sin()) * (1 + torch.erf(x / math.sqrt(2.0))),
    "written out": lambda x: 0.5 * x + 0.5 * x * torch.erf(x / math.sqrt(2.0)),
    "written out, tanh": lambda x: (h := x / 2) * torch.tanh(ROOT * (x + 0.044715 * x**3)) + h,
    "written out, scaled after": lambda x: 0.5 * (x + x * torch.erf(x * math.sqrt(0.5))),
    "written out, gating": lambda x: (0.5 * x + torch.erf(x / math.sqrt(2.0)) * x * 0.5) * x.sin(),
    "another factor": lambda x: 0.4 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
}
OTHERS = {
    "another constant": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * torch.pow(x, 3.0)))),
    "no constant": lambda x: 0.5 * x * (1.0 + torch.erf(x)),
    "written out, unequal": lambda x: 0.5 * x + 0.4 * x * torch.erf(x / math.sqrt(2.0)),
    "written out, no constant": lambda x: 0.5 * x + 0.5 * x * torch.erf(x),
    "another tensor": lambda x: 0.5 * x * (1.0 + torch.erf((x + 1) / math.sqrt(2.0))),
}


def test_written_out():
    report = function_agrees(lambda x: tuple(f(x) for f in FORMS.values()), double(3, 8))
    assert report.counts[NAME] == len(FORMS) and not report.skipped(NAME)


@pytest.mark.parametrize("name", OTHERS)
def test_not_a_gelu(name):
    report = function_agrees(OTHERS[name], double(3, 8))
    assert report.counts.get(NAME, 0) == 0 and [s.reason.split()[0] for s in report.skipped(NAME)] == {
        "another constant": ["tanh"],
        "no constant": ["erf"],
        "written out, no constant": ["erf"],
    }.get(name, [])


class Bloom(torch.autograd.Function):
    """GELU with a gradient by hand, as BLOOM has it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return grad * (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t))


def test_a_gradient_by_hand():
    assert function_agrees(Bloom.apply, double(3, 8), tolerance=1e-7).counts[NAME] == 1


def test_half_precision():
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    assert function_agrees(FORMS["gpt2"], x, tolerance=3e-2).counts[NAME] == 1
