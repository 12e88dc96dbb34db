"""Projections in which several tensors are packed: divided so that each rank has its part of every one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import mindspeed_fx
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from tests.sharding.test_any_model import equal


class Packed(nn.Module):
    """Queries, keys and values of grouped heads in one weight, gate and up in another."""

    def __init__(self, heads=4, kv=2, take="slices", width=16):
        super().__init__()
        self.heads, self.kv, self.take, self.d = heads, kv, take, 4
        self.norm = nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, (heads + 2 * kv) * 4), nn.Linear(heads * 4, width)
        self.gate_up, self.down = nn.Linear(width, 24), nn.Linear(12, width)
        self.double()

    def forward(self, x):
        b, s, _ = x.shape
        qkv = self.qkv(self.norm(x))
        h, kv, d = self.heads, self.kv, self.d
        if self.take == "slices":
            q, k, v = qkv[..., : h * d], qkv[..., h * d : (h + kv) * d], qkv[..., (h + kv) * d :]
            q, k, v = (t.view(b, s, -1, d) for t in (q, k, v))
        elif self.take == "split":
            q, k, v = (t.view(b, s, -1, d) for t in qkv.split([h * d, kv * d, kv * d], -1))
        elif self.take == "unbind":
            q, k, v = qkv.view(b, s, 3, h, d).unbind(2)
        elif self.take == "permuted":
            q, k, v = (t.transpose(1, 2) for t in qkv.view(b, s, 3, h, d).permute(2, 0, 3, 1, 4))
        else:
            heads = qkv.view(b, s, h + 2 * kv, d)
            q, k, v = heads[..., : -2 * kv, :], heads[..., [-2], :], heads[..., [-1], :]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)).square().mean()


def test_packing_follows_from_the_graph():
    for take, heads in CASES.items():
        model, x = Packed(*heads, take), torch.randn(2, 8, 16, dtype=torch.float64)
        plan, written = named_plan("tp", model, args=(x,)), plan_of(model)
        for n in ("qkv.weight", "qkv.bias", "gate_up.weight", "gate_up.bias"):
            expected = written.parameters[n.partition(".")[0] + ".*"]
            assert plan.parameters[n] == expected, take


CASES = {
    "slices": (4, 2),
    "split": (4, 2),
    "unbind": (4, 4),
    "permuted": (4, 4),
    "heads": (4, 1),
}


def plan_of(model):
    d = model.d
    sizes = f"{model.heads * d}+{model.kv * d}+{model.kv * d}"
    return Plan(
        "packed",
        ("tp",),
        {
            "qkv.*": {"tp": f"S(0:{sizes})"},
            "o.weight": {"tp": "S(1)"},
            "gate_up.*": {"tp": "S(0:12+12)"},
            "down.weight": {"tp": "S(1)"},
        },
        modules={"o": Boundary(output={"tp": "R"}), "down": Boundary(output={"tp": "R"})},
    )


def equal_to_one_device(model, args, result):
    loss = model(*args)
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(result.outputs[0], loss, rtol=1e-9, atol=1e-12)
    assert set(result.gradients) == set(gradients)
    for n, g in gradients.items():
        torch.testing.assert_close(result.gradients[n], g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("take", CASES)
def test_a_packed_projection_is_divided_piece_by_piece(take):
    torch.manual_seed(0)
    model, x = Packed(*CASES[take], take), torch.randn(2, 8, 16, dtype=torch.float64)
    result = simulate(model, {"tp": 2}, plan_of(model), x)
    equal_to_one_device(model, (x,), result)
    gathers = 0 if CASES[take][1] > 1 else 2  # keys and values of one head are gathered
    assert result.forward == {"all_reduce": 2} | ({"all_gather_into_tensor": gathers} if gathers else {})
    assert result.whole == []


def test_parts_of_parameters_have_no_symbols(ranks):
    """Rank 0 of two alone, as a user compiles it: AOTAutograd had made a symbol of what only a part's size is."""
    ranks(2)
    model = Packed()
    model = mindspeed_fx.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan_of(model))
    options = {"codegen": "eager"}
    step = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False, options=options)
    step(torch.randn(2, 8, 16, dtype=torch.float64)).backward()
    assert dict(model.named_parameters())["o.weight"].grad.placements == (Shard(1),)


def test_pieces_that_ranks_cannot_share_are_refused():
    model, x = Packed(), torch.randn(2, 8, 16, dtype=torch.float64)
    plan = Plan("packed", ("tp",), {"qkv.*": {"tp": "S(0:30+1+1)"}})
    with pytest.raises(
        ShardingError, match=r"pieces of 30, 1, 1 elements, which 2 ranks of \"tp\" cannot share evenly"
    ):
        simulate(model, {"tp": 2}, plan, x)
    with pytest.raises(ShardingError, match=r"dimension 0 has 32 elements, not 16 \+ 8"):
        simulate(model, {"tp": 2}, Plan("packed", ("tp",), {"qkv.weight": {"tp": "S(0:16+8)"}}), x)


def test_pieces_are_of_parameters():
    with pytest.raises(ShardingError, match="is for parameters"):
        Plan("packed", ("tp",), modules={"qkv": Boundary(output={"tp": "S(0:16+8)"})})


@pytest.mark.parametrize(
    "use", [lambda y: y.softmax(-1), lambda y: y.roll(1, -1), lambda y: y[..., 3:9], lambda y: y.flip(-1)]
)
def test_what_asks_for_another_order_gets_the_whole(use):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 12), nn.Parameter(torch.randn(12))
            self.double()

        def forward(self, x):
            y = torch.tanh(self.a(x) * self.b) + torch.arange(12)
            return (use(y) ** 2).mean()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 8, 16, dtype=torch.float64)
    plan = Plan("packed", ("tp",), {"a.weight": {"tp": "S(0:4+8)"}})
    equal_to_one_device(model, (x,), simulate(model, {"tp": 2}, plan, x))


def trains_alike_and_loads_anywhere(rank, store, folder):
    """Two steps of AdamW with clipping as one device, whose checkpoint loads under a plan of other parts."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import mindspeed_fx

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    reference = Packed()
    model = mindspeed_fx.parallelize(copy.deepcopy(reference), mesh, plan_of(reference))
    assert model.qkv._parameters["weight"].to_local().shape == (16, 16)
    options = {
        "codegen": "eager",
        "disable": ["overlap.split"],
    }  # which takes a local size that is a symbol for another
    run = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False, options=options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (reference, model)]
    for _ in range(2):
        x = torch.randn(2, 8, 16, dtype=torch.float64)
        losses, norms = [], []
        for m, call, optimizer in ((reference, reference, optimizers[0]), (model, run, optimizers[1])):
            optimizer.zero_grad()
            loss = call(x)
            loss.backward()
            norms.append(whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)))
            losses.append(loss.detach())
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-9, atol=1e-12)
    saved = {"model": model.state_dict(), "optimizer": optimizers[1].state_dict()}
    dcp.save(saved, checkpoint_id=folder)
    for parts in ("S(0)", "S(1)", "S(0:16+8+8)", "R"):
        plan = Plan("other", ("tp",), {"qkv.weight": {"tp": parts}})
        other = mindspeed_fx.parallelize(Packed(), mesh, plan)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        for (n, p), q in zip(other.named_parameters(), reference.parameters()):
            torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-8, atol=1e-10, msg=f"{parts} {n}")
    moments = {"optimizer": copy.deepcopy(saved["optimizer"])}
    for state in moments["optimizer"]["state"].values():
        state["exp_avg"].zero_()
    dcp.load(moments, checkpoint_id=folder)
    for state, expected in zip(moments["optimizer"]["state"].values(), optimizers[0].state.values()):
        torch.testing.assert_close(whole(state["exp_avg"]), expected["exp_avg"], rtol=1e-8, atol=1e-12)
    dist.destroy_process_group()


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def test_two_processes_train_and_a_checkpoint_loads_under_other_plans(tmp_path):
    from tests import ranks

    ranks.spawn(trains_alike_and_loads_anywhere, (str(tmp_path / "store"), str(tmp_path / "saved")), nprocs=2)


@pytest.mark.parametrize("take", ["slices", "unbind", *(pytest.param(t, marks=pytest.mark.slow) for t in CASES)])
def test_packed_projections_of_a_batch_that_is_padded(take):
    """Each of the pieces has a product of its own; nothing is gathered."""
    model, x = Packed(*CASES[take], take), torch.randn(3, 9, 16, dtype=torch.float64)
    result = equal(model, {"dp": 2, "tp": 2}, named_plan("zero2+tp_sp", model, args=(x,)), x)
    assert len(result.padded) == 2
    assert result.whole == [] or take == "heads"
