import math

import pytest
import torch
from models import double, function_agrees

NAME = "fusion.gelu"
ROOT = math.sqrt(2 / math.pi)


FORMS = {
    "gpt2": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "half last": lambda x: x * (torch.tanh(ROOT * (x + 0.044715 * x * x * x)) + 1) / 2,
    "megatron": lambda x: x * 0.5 * (1.0 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf 1.41421": lambda x: 0.5 * (x * (1.0 + torch.erf(x / 1.41421356))),
}
OTHERS = {
    "another constant": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * torch.pow(x, 3.0)))),
    "another factor": lambda x: 0.4 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "another tensor": lambda x: 0.5 * x * (1.0 + torch.erf((x + 1) / math.sqrt(2.0))),
}


@pytest.mark.parametrize("name", FORMS)
def test_written_out(name):
    assert function_agrees(FORMS[name], double(3, 8)).counts[NAME] == 1


@pytest.mark.parametrize("name", OTHERS)
def test_not_a_gelu(name):
    assert function_agrees(OTHERS[name], double(3, 8)).counts.get(NAME, 0) == 0


def test_half_precision():
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    assert function_agrees(FORMS["gpt2"], x, tolerance=3e-2).counts[NAME] == 1
