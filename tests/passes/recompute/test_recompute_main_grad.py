"""Weight gradients that are added to buffers where these lie take no memory of their own, modelled as measured."""

import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.compat.memory_meter import _Meter
from mindspeed_fx.megatron import main_grad  # noqa: F401  the operators

LAYERS, HIDDEN, TOKENS = 4, 128, 16
WEIGHT = HIDDEN * HIDDEN * 4
OPTIONS = {"codegen": "eager", "memory_budget": 1.0}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(LAYERS))
        for n in range(LAYERS):
            self.register_buffer(f"buffer_{n}", torch.zeros(HIDDEN, HIDDEN))

    def forward(self, x):
        for n, weight in enumerate(self.weights):
            buffer = getattr(self, f"buffer_{n}")
            x = torch.tanh(torch.ops.mindspeed.linear_main_grad(x, weight, buffer, False, -1))
        return x.square().sum()


class _Held(_Meter):
    @classmethod
    def is_infra_mode(cls):
        return True  # else Dynamo runs the model as it is


def test_the_modelled_peak_is_the_measured_one():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    report = mindspeed_fx.explain(model, x, options=OPTIONS)
    (run,) = [r.report for r in report.graphs[0].runs if r.report.name == "recompute.budget"]
    held = [x, *model.parameters(), *model.buffers()]
    modelled = run.curves["this plan"].peak - sum(t.nbytes for t in held)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mindspeed", options=OPTIONS)
    compiled(x).backward()
    first = [b.clone() for b in model.buffers()]
    assert all(b.abs().sum() > 0 for b in first)
    with _Held(held) as meter:
        compiled(x).backward()
    assert all(torch.equal(b, 2 * a) for a, b in zip(first, model.buffers(), strict=True))
    assert meter.peak < LAYERS * WEIGHT / 2
    assert modelled == meter.peak
