"""What a rank of tests/sharding/test_virtual_stages.py does: a step of one of torch's schedules, beside one device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mindspeed_fx
import mindspeed_fx.training.late_gradients
from mindspeed_fx.sharding.plan import ShardingError
from tests.sharding.llama import Llama

EAGER = {"codegen": "eager"}
STYLE = {"ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v"}
LATE = (*STYLE, "ScheduleInterleavedZeroBubble")
SINGLE = ("Schedule1F1B", "ScheduleGPipe")


class Cross(nn.Module):
    """A layer of a decoder that reads what the encoder made."""

    def __init__(self, width: int):
        super().__init__()
        self.own, self.other, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x, memory):
        scores = torch.softmax(self.other(x) @ memory.transpose(1, 2), -1)
        return x + torch.tanh(self.own(self.norm(x))) + scores @ memory


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Translation(nn.Module):
    """Encoder and decoder, one embedding for both and for the output layer."""

    def __init__(self, layers: int = 2, width: int = 16):
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.encoder = nn.ModuleList(Block(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Cross(width) for _ in range(layers))

    def forward(self, ids, labels):
        memory, x = self.table(ids), self.table(labels)
        for block in self.encoder:
            memory = block(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy((x @ self.table.weight.T).flatten(0, 1), ids.flatten())


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "experts":
        from tests.sharding.mixtral import Mixtral

        return Mixtral(4).double()
    if kind == "translation":
        return Translation().double()
    if kind == "small":
        return Translation(2, 8).double()
    return Llama(layers=4, tied=kind == "tied").double()


def batch(rows: int = 8, length: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(0, 60, (rows, length), generator=generator) for name in ("ids", "labels")}


def worker(rank: int, store: str, sizes: dict[str, int], plan: Any, kinds: list, options: dict) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    world = math.prod(sizes.values())
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for schedule, model in kinds:
        step_equals_one_device(mesh, plan, schedule, model, options, getattr(plan, "microbatches", None) or 4)
        dist.barrier()
    dist.destroy_process_group()


def step_equals_one_device(mesh, plan, kind: str, model: str, options: dict, microbatches: int = 4) -> None:
    from torch.distributed.pipelining import schedules

    model, given = model_of(model), batch()
    whole = copy.deepcopy(model)
    expected = whole(**given)
    expected.backward()
    how = {"virtual": 1} if kind in SINGLE else {"virtual": 2, "style": STYLE.get(kind, "loop")}
    if getattr(plan, "schedule", None):
        how = {}
    stages = mindspeed_fx.pipeline_stages(
        model, mesh, plan, kwargs=given, microbatches=microbatches, options=options, **how
    )
    schedule = getattr(schedules, kind)(
        stages[0] if kind in SINGLE else stages, microbatches, loss_fn=lambda loss, _: loss.sum()
    )
    late, take = [], mindspeed_fx.training.late_gradients.Queue.take
    for stage in stages:
        stage.submod.late.take = lambda q=stage.submod.late: late.append(take(q)) or late[-1]
    for _ in range(2):
        stages.module.zero_grad()
        losses = []
        schedule.step(**given, target=given["labels"], losses=losses)
    if stages[-1].is_last or stages[0].is_last:
        assert abs(sum(losses) / microbatches - expected) <= 1e-9 * abs(expected)
    assert bool(late) == (kind in LATE), "gradients of weights that the schedule made later"
    equal_gradients(stages, whole)


def equal_gradients(stages, whole: nn.Module) -> None:
    gradients, found = {n: p.grad for n, p in whole.named_parameters()}, dict(stages.module.named_parameters())
    assert found and found.keys() <= gradients.keys()
    for name, p in found.items():
        own = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        assert (own - gradients[name]).abs().max() <= 1e-9 * gradients[name].abs().max() > 0, name


class TwoResults(Translation):
    """Loss and, beside it, scores of every row; dropout in training."""

    def forward(self, ids, labels):
        memory, x = self.table(ids), self.table(labels)
        for block in self.encoder:
            memory = block(memory)
        for layer in self.decoder:
            x = layer(F.dropout(x, 0.5, self.training), memory)
        scores = x @ self.table.weight.T
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten()), scores


def used_worker(rank: int, store: str, kind: str) -> None:
    """Results beside the loss, lengths that change, evaluation between two steps; one V of four stages on two ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import schedules

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model = TwoResults(2, 8).double()
    whole, given = copy.deepcopy(model).eval(), batch(4, 6)
    model.eval()
    how = {"virtual": 1} if kind in SINGLE else {"style": STYLE.get(kind, "loop"), "virtual": 2}
    stages = mindspeed_fx.pipeline_stages(
        model, mesh, None, kwargs=given, microbatches=2, layers=[1, 3] if kind in SINGLE else None, options=EAGER, **how
    )
    held = stages[0] if kind in SINGLE else stages
    schedule = mindspeed_fx.follow_shapes(
        getattr(schedules, kind)(held, 2, loss_fn=lambda out, _: out[0].sum() + out[1].square().mean())
    )
    for length in (6, 9, 6):
        given = batch(4, length)
        loss, scores = whole(**given)
        whole.zero_grad()
        (loss + scores.square().mean()).backward()
        stages.module.zero_grad()
        out = schedule.step(**given, target=given["labels"])
        if out is not None:
            assert out[0].shape == (2,) and (out[0].mean() - loss).abs() <= 1e-9 * loss
            assert (out[1] - scores).abs().max() <= 1e-9 * scores.abs().max()
        equal_gradients(stages, whole)
        with torch.no_grad():
            out = schedule.eval(**given, target=given["labels"])
        assert out is None or (out[1] - scores).abs().max() <= 1e-9 * scores.abs().max()
        equal_gradients(stages, whole)  # which evaluation leaves alone
    assert len(stages[0].submod._programs) == 2, "a length is traced once"
    for stage in stages:
        stage.submod.train()
    out = schedule.eval(**given, target=given["labels"])
    assert out is None or (out[1] - scores).abs().max() > 1e-3, "dropout"
    dist.barrier()
    dist.destroy_process_group()


class Generator(Llama):
    """Losses in training, logits in evaluation; two layers of each rank."""

    def forward(self, ids, labels):
        if self.training:
            return super().forward(ids, labels)
        return self.head(self.norm(self.run_layers(ids)))


def generate_worker(rank: int, store: str, sizes: dict[str, int], plan: Any, kind: str) -> None:
    """A step, then tokens: the likeliest, and drawn ones, equal to those of one device; no graph is kept."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import schedules

    torch.set_num_threads(1)
    world = math.prod(sizes.values())
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model, given = Generator(layers=2 if kind in SINGLE else 4).double(), batch(4, 8)
    whole = copy.deepcopy(model).eval()
    how = {"virtual": 1} if kind in SINGLE else {"style": STYLE.get(kind, "loop"), "virtual": 2}
    number = 4 if kind == "ScheduleDualPipeV" else 2  # as many as it has stages, at least
    stages = mindspeed_fx.pipeline_stages(model, mesh, plan, kwargs=given, microbatches=number, options=EAGER, **how)
    schedule = getattr(schedules, kind)(stages[0] if kind in SINGLE else stages, number, loss_fn=lambda x, _: x.sum())
    schedule.step(**given, target=given["labels"])
    for stage in stages:
        stage.submod.eval()
    out = schedule.eval(**given, target=given["labels"])
    assert out is None or (not out.requires_grad and out.shape == (4, 8, 64))
    assert not any(t.requires_grad for s in stages for outputs, _ in s.fwd_cache.values() for t in outputs)
    for temperature in (0.0, 0.7):
        generator = torch.Generator().manual_seed(3)
        found = mindspeed_fx.generate(
            schedule, given["ids"][:, :5], 3, name="ids", labels=given["labels"], temperature=temperature,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        ids = given["ids"].clone()
        for end in range(5, 8):
            logits = whole(ids, given["labels"])[:, end - 1]
            drawn = torch.multinomial(torch.softmax(logits.float() / 0.7, -1), 1, generator=generator)[:, 0]
            ids[:, end] = drawn if temperature else logits.argmax(-1)
        assert torch.equal(found, ids), (temperature, found, ids)
        assert (found[:, 5:] != given["ids"][:, 5:]).any()
    for stage in stages:
        stage.submod.train()
    losses: list = []
    schedule.step(**given, target=given["labels"], losses=losses)
    assert len(losses) == (number if any(s.is_last for s in stages) else 0)
    with pytest.raises(ShardingError, match="logits of every position"):
        mindspeed_fx.generate(schedule, given["ids"][:, :7], 1, name="ids", labels=given["labels"])
    dist.barrier()
    dist.destroy_process_group()
