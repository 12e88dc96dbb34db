"""Models that nobody named, of parts that no library has together, under every plan: one device's values, or whole."""

from __future__ import annotations

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.presets import named_plan
from tests import ranks
from tests.sharding import invented_ranks
from tests.sharding.invented import MaskedMixture, Mixture, Ranking, Speech, TwoEncoders, batch_of, model_of

MESHES = {
    "tp": {"tp": 2},
    "tp_sp": {"tp": 2},
    "tp_2d": {"tp_x": 2, "tp_y": 2},
    "ulysses": {"cp": 2},
    "kv_allgather": {"cp": 2},
    "ring": {"cp": 2},
    "hybrid": {"cp_ring": 2, "cp_ulysses": 2},
    "zero2": {"dp": 2},
    "zero3": {"dp": 2},
    "zero2+tp_sp": {"dp": 2, "tp": 2},
    "ep": {"ep": 2},
    "ep_alltoall": {"ep": 2},
    "search": {"dp": 2, "tp": 2},
    "pp2 x search": {"pp": 2, "tp": 2},
}
FAST = ((Speech, "ring"), (Ranking, "zero2"), (Ranking, "search"))
CASES = [
    pytest.param(kind, plan, marks=[] if (kind, plan) in FAST else pytest.mark.slow)
    for kind in (TwoEncoders, Speech, Mixture, MaskedMixture, Ranking)
    for plan in MESHES
    if not plan.startswith("ep") or issubclass(kind, Mixture)
    if kind is not Ranking or not plan.startswith(("tp", "zero2+", "pp"))
]


@pytest.mark.parametrize("kind, plan", CASES)
def test_equals_one_device(kind, plan):
    args, model, mesh = batch_of(kind), model_of(kind), MESHES[plan]
    loss = model(**args)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model = model_of(kind)
    if "search" in plan:
        made = mindspeed_fx.plan(model, (), args, mesh=mesh, hardware="ascend910b2")
    else:
        made = named_plan(plan, model, kwargs=args)
    result = simulate(model, mesh, made, **args)
    assert abs(result.outputs[0] - loss) <= 1e-12 * abs(loss)
    for name, wanted in gradients.items():
        if wanted is None:  # of a norm that a block without cross-attention does not use
            assert name not in result.gradients
            continue
        assert (result.gradients[name] - wanted).abs().max() <= 1e-9 * max(1e-3, wanted.abs().max()), name


@pytest.mark.parametrize("plan, says", [
    ("tp", "the graph has no columns and rows .*batch_norm.* needs its results whole"),
    ("pp2 x search", "Ranking has no repeated layers"),
])  # fmt: skip
def test_what_a_plan_cannot_divide_at_all_is_said(plan, says):
    args, model = batch_of(Ranking), model_of(Ranking)
    with pytest.raises(ShardingError, match=says):
        if plan == "tp":
            named_plan(plan, model, kwargs=args)
        else:
            mindspeed_fx.plan(model, (), args, mesh=MESHES[plan], hardware="ascend910b2")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [
    [("Speech", {"dp": 2}, "zero2"), ("TwoEncoders", {"dp": 2}, "zero3"), ("Ranking", {"dp": 2}, "zero2")],
    [("Mixture", {"ep": 2}, "ep_alltoall"), ("MaskedMixture", {"ep": 2}, "ep")],
])  # fmt: skip
def test_two_processes(cases, tmp_path):
    """Graphs that Dynamo ends (a recurrent layer) among them: two steps of an optimizer."""
    ranks.spawn(invented_ranks.worker, (str(tmp_path / "store"), cases, "eager"), nprocs=2)


def test_a_recurrent_layer_is_read_as_one_graph():
    """Dynamo ends a graph at ``nn.GRU`` unless it is told otherwise."""
    before = torch._dynamo.config.allow_rnn
    plan = named_plan("tp", model_of(Speech), kwargs=batch_of(Speech))
    assert plan.parameters["layers.0.ff.inner.weight"] == {"tp": "S(0)"}
    assert torch._dynamo.config.allow_rnn == before
