"""Constants: recurrent layers captured whole, weights frozen by Inductor, reports of tensors without dimensions."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mindspeed_fx
from tests.torch_suites.torch_programs import OPTIONS, assert_same, leaves


@pytest.mark.parametrize(
    "kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow), pytest.param(nn.RNN, marks=pytest.mark.slow)]
)
def test_recurrent_layers_learn(kind):
    with torch._dynamo.config.patch(allow_rnn=True):
        model = kind(3, 4, num_layers=2, batch_first=True).double()
        other = copy.deepcopy(model)
        compiled = torch.compile(other, backend="mindspeed", options=OPTIONS)
        x = torch.randn(2, 5, 3).double()
        for _m, run in ((model, model), (other, compiled)):
            out, _ = run(x)
            out.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(q.grad, p.grad, msg=name)


def test_a_recurrent_layer_infers():
    model, x = nn.LSTM(3, 4), torch.randn(2, 5, 3)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        torch.testing.assert_close(torch.compile(model, backend="mindspeed", options=OPTIONS)(x), model(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.register_buffer("table", torch.arange(4.0))
        self.plain = torch.full((4,), 2.0)

    def forward(self, x):
        return self.norm(self.down(nn.functional.silu(self.up(x)))) * self.plain + self.table * torch.tensor(3.0)


@pytest.mark.parametrize("make", [Block, lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4))])
def test_frozen_weights(make):
    model = make().eval()
    x = torch.randn(2, 5, 4) if isinstance(model, Block) else torch.randn(2, 3, 6)
    expected = model(x)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(model, backend="mindspeed", options={"level": 2, "codegen": "inductor"})
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_frozen_recurrent_layer():
    model, x = nn.LSTM(3, 4).eval(), torch.randn(2, 5, 3)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True), torch._dynamo.config.patch(allow_rnn=True):
        torch.testing.assert_close(torch.compile(model, backend="mindspeed")(x), model(x))


ZERO_DIMENSIONAL = {
    "sum": lambda: torch.tensor(3.0).sum(),
    "mean": lambda: torch.tensor(3.0).mean(),
    "max": lambda: torch.tensor([1.0, 2.0]).max() + torch.tensor(3.0).max(),
    "softmax": lambda: torch.tensor(3.0).softmax(0),
    "loss": lambda: nn.functional.mse_loss(torch.tensor(3.0), torch.tensor(1.0)),
    "norm": lambda: (
        torch.tensor(3.0).norm()
        + torch.tensor(2.0).prod()
        + torch.tensor(2.0).amax()
        + torch.tensor(2.0).var(unbiased=False)
    ),
}


@pytest.mark.parametrize("name", sorted(ZERO_DIMENSIONAL))
def test_reductions_without_dimensions_are_explained_and_written(name, tmp_path):
    f = ZERO_DIMENSIONAL[name]
    torch.testing.assert_close(torch.compile(f, backend="mindspeed", options={**OPTIONS, "dump": str(tmp_path)})(), f())
    assert list(tmp_path.rglob("report.html"))
    assert mindspeed_fx.explain(f, options={"codegen": "eager"}).graph_count == 1


def test_reductions_of_an_input_without_dimensions(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_fx.compat.structured_trace.structured_tracing", lambda: True)

    def f(x):
        return x.sum() * x.mean() + x.logsumexp(0) + x.std(unbiased=False) * 0

    x = torch.tensor(3.0, requires_grad=True)
    assert mindspeed_fx.explain(f, x, options={"codegen": "eager", "dump": str(tmp_path)}).graph_count == 1
    assert list(tmp_path.rglob("report.html"))


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keep):
        ctx.save_for_backward(keep)
        return torch.where(keep, x.exp(), torch.tensor([0.5], dtype=x.dtype))

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return grad.masked_fill(~keep, torch.tensor(0.25, dtype=grad.dtype)), None


def weigh(x):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: Clip.apply(x, x > 0),
        lambda x: checkpoint(lambda y: Clip.apply(weigh(y.sin()), y > 0), x, use_reentrant=False),
        lambda x: torch.vmap(weigh)(x).cos(),
        lambda x: torch.cond(x.sum() > 0, lambda y: weigh(y).sin(), lambda y: weigh(y).cos(), (x,)),
    ],
    ids=["function", "checkpoint", "vmap", "cond"],
)
def test_constants_of_nested_graphs(program):
    """A tensor made of numbers inside a nested graph is no input of it."""
    assert_same(program, leaves((3, 4)))
