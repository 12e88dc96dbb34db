"""What four gloo processes find of parts that are gathered and scattered by views, as those of many ranks are; run by
test_many_ranks.py."""

from __future__ import annotations

import copy
import json
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from mindspeed_fx.sharding.spmd import many_ranks
from tests.sharding.llama import Llama

RANKS = 4
PLANS = {"zero3+tp_sp": "tp", "zero2+tp_sp": "tp", "zero2+kv_allgather": "cp"}
"""Plan -> mesh dimension of its second part; two ranks of each part. Ulysses and experts move nothing so: they exchange
parts, and gather along the first dimension."""


def step(plan: str, dim: str, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Loss and gradients, as DTensors where they are divided."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", dim))
    model = mindspeed_fx.parallelize(copy.deepcopy(model), mesh, plan)
    run = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    loss = run(*inputs)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def worker(rank: int, store: str, results: str, plan: str) -> None:
    """Moves by views, how far values by views are from DTensor's, and from one device's (relative)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Llama(layers=1).double()
    inputs = tuple(torch.randint(0, 64, (4, 16)) for _ in range(2))
    loss = copy.deepcopy(model)
    expected = {"loss": loss(*inputs).detach()}
    loss(*inputs).backward()
    expected |= {n: p.grad for n, p in loss.named_parameters()}
    few = step(plan, PLANS[plan], model, inputs)
    move, calls = many_ranks.move, []
    many_ranks.MANY, many_ranks.move = 1, lambda *args: calls.append(args) or move(*args)
    many = step(plan, PLANS[plan], model, inputs)
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t  # noqa: E731
    found = {"moves": len(calls), "layouts": 0.0, "ways": 0.0, "device": 0.0}
    for name, value in expected.items():
        one, other = whole(few[name]), whole(many[name])
        found["layouts"] += getattr(few[name], "placements", None) != getattr(many[name], "placements", None)
        found["ways"] = max(found["ways"], ((one - other).abs().max() / value.abs().max()).item())
        found["device"] = max(found["device"], ((other - value).abs().max() / value.abs().max()).item())
    (pathlib.Path(results) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
