"""Models as they are written: constants, parts without a gradient, graphs that break, dimensions flattened and parted
again, under plans.
"""

from __future__ import annotations

import functools
import itertools
import logging

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import mindspeed_fx
from mindspeed_fx.compat import dtensor, strided_shards
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from mindspeed_fx.sharding.spmd.redistribute import reshape

ROWS = Plan("rows", ("dp",), inputs={"*": {"dp": "S(0)"}})
POSITIONS = Plan("positions", ("cp",), inputs={"*": {"cp": "S(1)"}})
TWICE = Plan("twice", ("a", "b"), inputs={"*": {"a": "S(1)", "b": "S(1)"}})
MESHES = {"rows": {"dp": 2}, "positions": {"cp": 2}, "twice": {"a": 2, "b": 2}}

logger = logging.getLogger(__name__)
TABLE = torch.arange(8, dtype=torch.float64) / 8


@functools.lru_cache(None)
def once(message):
    logger.warning(message)


class Model(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.norm, self.linear, self.body = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), body
        self.register_buffer("table", torch.arange(8, dtype=torch.float64) / 8)
        self.double()

    def forward(self, x):
        return self.body(self, self.linear(x)).square().mean()


def unused_part(m, x):
    """One of two parts has no gradient: autograd makes zeros for it."""
    return x.split([2, 6], -1)[1]


def unused_parts_of_a_stack(m, x):
    return torch.stack((x, x * 2)).unbind(0)[1].chunk(4, -1)[2]


def constants(m, x):
    return torch.cat((x * TABLE, (x + m.table).sin(), torch.full_like(x, 0.5)), -1)


def new_tensors(m, x):
    return torch.cat((x, x.new_ones(x.shape[0], x.shape[1], 3) * x[..., :3]), -1) + torch.arange(11, dtype=x.dtype)


def padded(m, x):
    return F.pad(x, (1, 2), value=0.5) * torch.ones(11, dtype=x.dtype).cumsum(0)


def checkpointed(m, x):
    return torch.utils.checkpoint.checkpoint(
        lambda t: torch.cat((t * TABLE, t.split([2, 6], -1)[1]), -1).sin(), x, use_reentrant=False
    )


def flattened(m, x):
    """Tokens of batch and sequence in one dimension, normed, and parted again, as OPT does."""
    rows = m.norm(x.reshape(-1, 8))
    return (rows + x.reshape(-1, 8)).view(x.shape) + m.linear(rows).view(x.shape[0], -1, 8)


def cached(m, x):
    """A number made in the graph, and a cache that begins with nothing, as Hugging Face's models have them."""
    keys = torch.cat((torch.tensor([], dtype=x.dtype), x.sin()), -2) * torch.tensor(0.5, dtype=x.dtype)
    shifted = x.clone()
    shifted[:, :, 0] = 0.25
    return torch.cat((keys, shifted), -1)


BODIES = (cached, unused_part, unused_parts_of_a_stack, constants, new_tensors, padded, checkpointed, flattened)


def equal(model, mesh, plan, *args, options=None):
    loss = model(*args)
    model.zero_grad()
    loss.backward()
    result = simulate(model, mesh, plan, *args, options=options)
    assert (result.outputs[0] - loss).abs() <= 1e-10 * loss.abs()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert result.gradients.keys() == expected.keys(), "a gradient appeared or disappeared"
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        assert (result.gradients[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name
    return result


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "plan", [POSITIONS, *(pytest.param(p, marks=pytest.mark.slow) for p in (ROWS, TWICE))], ids=lambda p: p.name
)
def test_equals_one_device(body, plan):
    equal(Model(body), MESHES[plan.name], plan, torch.randn(4, 8, 8, dtype=torch.float64))


def written_transposed(m, x):
    y = x.clone()
    part = y.transpose(1, 2)
    part[:, 0] = 0.5
    return y.sin() + part.transpose(1, 2).cos()


def written_viewed(m, x):
    y = x.clone()
    y.unflatten(-1, (2, 4)).transpose(1, 2)[:, 1, :, 1:3].copy_(x[..., :2])
    y.flatten(1)[:, :9].mul_(2.0)
    y.unsqueeze(0)[0, :, 1] = 0.25
    return y.sin() + x


@pytest.mark.parametrize("body", [written_transposed, written_viewed])
def test_writes_through_views_reach_the_value(body):
    equal(Model(body), {"dp": 2}, ROWS, torch.randn(4, 8, 8, dtype=torch.float64))


def test_a_mean_over_what_ranks_share_beside_its_elements():
    equal(Model(lambda m, x: x + x.mean((0, 1))), {"dp": 2}, ROWS, torch.randn(4, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    "plan",
    [TWICE, Plan("width", ("a", "b"), inputs={"*": {"a": "S(1)"}}, modules={"norm": Boundary(input={"b": "S(1)"})})],
    ids=lambda p: p.name,
)
def test_tokens_that_two_dimensions_divide(plan):
    equal(Model(flattened), {"a": 2, "b": 2}, plan, torch.randn(4, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_redistribution_of_strided_shards(every):
    """Of 16 rows flattened from [4, 4], on a mesh of 2 by 2: what a rank has after it is what it has when all is
    divided from the whole.
    """
    rows = torch.arange(64.0).view(16, 4)
    strided_shards.redistribute_strided_shards_in_order()
    with dtensor.all_ranks({"a": 2, "b": 2}) as mesh:
        flat = DTensor.from_local(dtensor.on_every_rank(rows.view(4, 4, 4)), mesh, [Replicate()] * 2, run_check=False)
        placements = itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=2)
        ways = [reshape(flat.redistribute(placements=p), (16, 4)) for p in placements]
        assert any(sum(map(dtensor.is_strided, x.placements)) == 2 for x in ways)
        for given, wanted in list(itertools.product(ways, ways))[::every]:
            x = given.redistribute(placements=wanted.placements)
            expected = wanted.to_local()._local_tensors
            assert all(torch.equal(t, expected[rank]) for rank, t in x.to_local()._local_tensors.items()), (
                given.placements,
                wanted.placements,
            )
            assert torch.equal(x.redistribute(placements=[Replicate()] * 2).to_local().reconcile(), rows), (
                given.placements,
                wanted.placements,
            )


def test_calls_of_loggers_break_nothing():
    def body(m, x):
        logger.warning("a layer runs")
        once("once")
        return x.sin()

    equal(Model(body), {"dp": 2}, ROWS, torch.randn(4, 8, 8, dtype=torch.float64))


def broken(m, x):
    torch._dynamo.graph_break()
    return x.sin()


def split_by_data(m, x):
    """As vision attention takes the patches of each image (Qwen2-VL)."""
    rows = x.isfinite().sum((1, 2))[:2] // 32
    ends = torch.nn.functional.pad(torch.repeat_interleave(rows, rows // 2).cumsum(0), (1, 0))
    return torch.cat([part.sin() for part in torch.split(x, torch.diff(ends).tolist(), 0)])


@pytest.mark.parametrize("body", [broken, split_by_data])
def test_a_graph_that_breaks_is_refused_by_what_needs_one_graph(body):
    x = torch.randn(4, 8, 8, dtype=torch.float64)
    for call in (
        lambda: simulate(Model(body), {"dp": 2}, ROWS, x),
        lambda: mindspeed_fx.plan(Model(body), (x,), mesh={"dp": 2}, hardware="ascend910b2"),
    ):
        with pytest.raises(
            ShardingError, match=r"one graph, and Dynamo breaks this one at .*test_any_model.py:\d+"
        ) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="whose Dynamo makes one graph of it")
def test_a_number_that_dynamo_loses_is_refused_in_one_line():
    def body(m, x):
        torch._check_tensor_all(x.isfinite())
        return x.sin()

    with pytest.raises(ShardingError, match="simulate takes a model that is one graph") as error:
        simulate(Model(body), {"dp": 2}, ROWS, torch.randn(4, 8, 8, dtype=torch.float64))
    assert "\n" not in str(error.value)


class Layers(Model):
    """Of layers alike, of which a search reads two."""

    def __init__(self, body):
        super().__init__(body)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


@pytest.mark.parametrize("body", [broken, split_by_data])
def test_who_takes_several_graphs_is_said(body):
    model, x = Layers(body), torch.randn(4, 8, 8, dtype=torch.float64)
    with pytest.raises(ShardingError, match="plan takes a model .* one graph.*or give parallelize a plan by name"):
        mindspeed_fx.plan(model, (x,), mesh={"dp": 2}, hardware="ascend910b2")
    with pytest.raises(ShardingError, match="parallelize takes a model .* one graph.*or leave args and kwargs out"):
        named_plan("tp", model, args=(x,))


def test_a_gradient_that_cannot_be_divided_names_module_and_line(monkeypatch):
    from mindspeed_fx.sharding.spmd import program

    class Failing(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.sin())

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no such rule\nand more")

    monkeypatch.setitem(program.HANDLERS, torch.ops.aten.sin.default, Failing.apply)
    with pytest.raises(
        ShardingError,
        match=r'plan "rows", module .*test_any_model.py:\d+: .*the gradient of aten.sin.default cannot be computed in '
        r"parts \(no such rule\)",
    ):
        simulate(Model(lambda m, x: x.sin()), {"dp": 2}, ROWS, torch.randn(4, 8, 8, dtype=torch.float64))
