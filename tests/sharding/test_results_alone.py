"""What AOTAutograd asks of a program before it traces it is answered from the captured graph, where that knows it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import mindspeed_fx
from mindspeed_fx.capture import capture
from mindspeed_fx.compat.dtensor import one_of_fake_ranks, whole_of
from mindspeed_fx.sharding.spmd import program
from mindspeed_fx.sharding.spmd.results_alone import results_of


def captured(function, *inputs):
    graphs = []

    def backend(gm, _inputs):
        graphs.append(capture(gm))
        return gm

    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return graphs[0]


def two_of_one_memory(x):
    y = x * 2
    return y, y[:1]


@pytest.mark.parametrize(
    "function,known",
    [
        (lambda x: (x @ x).relu(), True),
        (lambda x: ((x @ x).sum(), x.argmax(-1)), True),
        (lambda x: torch.utils.checkpoint.checkpoint(lambda y: (y @ y).sin(), x, use_reentrant=False), True),
        (lambda x: x.mul_(2) + 1, False),
        (lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.mul_(2) + 1, x, use_reentrant=False), False),
        (lambda x: x.t(), False),
        (lambda x: (x @ x).t(), False),
        (two_of_one_memory, False),
    ],
    ids=["product", "two", "checkpoint", "writes", "checkpoint-writes", "view", "not-contiguous", "one-memory"],
)
def test_what_the_captured_graph_knows(function, known):
    results = results_of(captured(function, torch.ones(4, 4)))
    assert (results is not None) == known
    if known:
        assert all(n.meta["val"].is_contiguous() for n in results)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        return y.square().mean(), y, y.argmax(-1)


@contextlib.contextmanager
def one_rank():
    """A mesh of one whose messages arrive: before torch 2.13 those of fake ranks left memory unwritten."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def test_a_program_is_run_once_and_is_the_model(monkeypatch):
    torch.manual_seed(0)
    whole, x, runs = Model(), torch.randn(4, 8, requires_grad=True), []
    run = program._Planned.run
    monkeypatch.setattr(program._Planned, "run", lambda self, *args: (runs.append(1), run(self, *args))[1])
    with one_rank() as mesh:
        model = mindspeed_fx.parallelize(copy.deepcopy(whole), mesh, "tp")
        step = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
        results = step(x)
        (results[0] + results[1].sum()).backward()
        gradient, x.grad = x.grad, None
        expected = whole(x)
        (expected[0] + expected[1].sum()).backward()
        for a, b in zip((*results, gradient), (*expected, x.grad)):
            torch.testing.assert_close(a, b)
        for (name, p), q in zip(model.named_parameters(), whole.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
        assert [r.requires_grad for r in results] == [r.requires_grad for r in expected]
        with torch.no_grad():
            assert not step(x)[0].requires_grad
    assert len(runs) == 2  # with gradients, and without


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("flows", [True, False])
def test_a_fake_parameter_shown_whole_is_as_the_gathered_one(placement, flows):
    with one_of_fake_ranks({"tp": 2}) as mesh, FakeTensorMode():
        x = DTensor.from_local(torch.empty(4, 6), mesh, [placement], run_check=False).requires_grad_()
        with torch.set_grad_enabled(flows):
            a, b = whole_of(x), x.full_tensor()
        assert type(a) is type(b) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert (a.requires_grad, a.grad_fn is None) == (b.requires_grad, b.grad_fn is None) == (flows, not flows)
