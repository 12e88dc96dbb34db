"""Several stages of a pipeline on a rank, under torch's schedules over gloo processes, beside one device."""

from __future__ import annotations

import gc
import math
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import mindspeed_fx
from mindspeed_fx.partition.split import SplitError
from mindspeed_fx.planning.pipeline_stage import ranks_of_stage
from mindspeed_fx.planning.stage_module import stages
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.training import late_gradients
from tests import ranks
from tests.sharding import virtual_ranks
from tests.sharding.llama import Llama
from tests.sharding.virtual_ranks import Translation

LOOPS = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
VS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", *LOOPS, *VS)


def run(tmp_path, sizes, plan, kinds, options=virtual_ranks.EAGER):
    how = (str(tmp_path / "store"), sizes, plan, kinds, options)
    ranks.spawn(virtual_ranks.worker, how, nprocs=math.prod(sizes.values()))


def test_schedules_of_two_ranks(tmp_path):
    run(tmp_path, {"pp": 2}, None, [("ScheduleInterleavedZeroBubble", "small"), ("ScheduleDualPipeV", "small")])


def test_results_lengths_and_evaluation(tmp_path):
    ranks.spawn(virtual_ranks.used_worker, (str(tmp_path / "store"), "ScheduleZBVZeroBubble"), nprocs=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")])
def test_results_lengths_and_evaluation_of_other_schedules(schedule, tmp_path):
    ranks.spawn(virtual_ranks.used_worker, (str(tmp_path / "store"), schedule), nprocs=2)


def test_generation(tmp_path):
    how = (str(tmp_path / "store"), {"pp": 2}, None, "Schedule1F1B")
    ranks.spawn(virtual_ranks.generate_worker, how, nprocs=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "Schedule1F1B"])
def test_generation_under_other_schedules(schedule, tmp_path):
    ranks.spawn(virtual_ranks.generate_worker, (str(tmp_path / "store"), {"pp": 2}, None, schedule), nprocs=2)


@pytest.mark.slow
@pytest.mark.parametrize("dim,plan", [("tp", "tp_sp"), ("dp", "zero3")])
def test_generation_beside_other_dimensions(dim, plan, tmp_path):
    how = (str(tmp_path / "store"), {"pp": 2, dim: 2}, plan, "Schedule1F1B")
    ranks.spawn(virtual_ranks.generate_worker, how, nprocs=4)


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_backward_in_parts_is_the_whole(codegen):
    model, given = virtual_ranks.model_of("small"), virtual_ranks.batch(4)
    parts = stages(model, 2, (), given, options={"codegen": codegen})
    expected = model(**given)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for in_parts in (True, False, True):
        model.zero_grad()
        received = ()
        for part in parts:
            part.late.in_parts = in_parts
            received = tuple(tree_leaves(part(*received, **given)))
        received[0].backward()
        late = [part.late.take() for part in parts]
        assert [part.late.waiting for part in parts] == [deque(), deque()]
        assert all((p.grad is None) == in_parts for p in model.parameters())
        for run in late:
            run()
        for name, p in model.named_parameters():
            assert (p.grad - gradients[name]).abs().max() <= 1e-10 * gradients[name].abs().max() > 0, name


def test_a_backward_that_cannot_be_taken_apart_makes_all_at_once(monkeypatch):
    def refuse(backward, weights):
        raise SplitError("the backward cannot be split: add_ (aten.add_) writes in place")

    monkeypatch.setattr(late_gradients, "split", refuse)
    model, given = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))).double(), torch.randn(3, 4).double()
    parts = stages(model, 2, (given,), options=virtual_ranks.EAGER)
    for part in parts:
        part.late.in_parts = True
    parts[1](parts[0](given)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(given).sum().backward()
    assert not any(part.late.waiting for part in parts)
    assert all((p.grad - g).abs().max() <= 1e-10 for p, g in zip(model.parameters(), gradients))


@pytest.mark.slow
def test_encoder_and_decoder_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.T5ForConditionalGeneration(config).double()

        def forward(self, ids, labels):
            return self.model(input_ids=ids, labels=labels, use_cache=False).loss

    torch.manual_seed(0)
    model, given = Step(), virtual_ranks.batch(4)
    parts = stages(model, 4, (), given, options=virtual_ranks.EAGER)
    assert [any("encoder.block" in n for n, _ in part.named_parameters()) for part in parts] == [
        True,
        True,
        False,
        False,
    ]
    expected = model(**given)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    received = ()
    for part in parts:
        received = tuple(tree_leaves(part(*received, **given)))
    received[0].backward()
    assert (received[0] - expected).abs() <= 1e-6 * expected.abs()
    for name, p in model.named_parameters():  # its norms compute in float32
        assert (p.grad - gradients[name]).abs().max() <= 1e-5 * gradients[name].abs().max(), name


def test_layers_of_each_stage():
    given, model = virtual_ranks.batch(4), virtual_ranks.model_of("small")
    first, second = stages(model, 2, (), given, layers=[3, 1], options=virtual_ranks.EAGER)
    assert {n.partition(".weight")[0] for n, _ in second.named_parameters() if "norm.weight" in n} == {"decoder.1.norm"}
    assert first.tied == second.tied == {"table.weight": [0, 1]}
    for wrong in ([4], [2, 1], [1, 1, 2]):
        with pytest.raises(ShardingError, match=r"valid: 2 numbers from 1, 4 together, one for each stage"):
            stages(model, 2, (), given, layers=wrong, options=virtual_ranks.EAGER)


def test_stages_whose_model_is_gone_say_so():
    given = virtual_ranks.batch(4)
    first, _ = stages(virtual_ranks.model_of("small"), 2, (), given, options=virtual_ranks.EAGER)
    gc.collect()
    with pytest.raises(ShardingError, match="the model that these stages were cut from is gone"):
        first.select(virtual_ranks.batch(4, 5))
    with pytest.raises(ShardingError, match=r"arguments labels are missing"):
        first.select({"ids": given["ids"]})


class Frozen(torch.nn.Module):
    """Dropout in both layers; scales that come in a list, or as they are."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(2)
        )

    def forward(self, x, scale):
        for layer in self.layers:
            x = layer(x) * (scale[0] if isinstance(scale, list) else scale)
        return x.sum()


def test_modules_keep_their_modes_and_arguments_are_told_apart():
    model, x, scale = Frozen().double(), torch.rand(3, 4).double(), torch.rand(3, 4).double()
    for layer in model.layers:
        layer.eval()
    parts = stages(model, 2, (x, x), options=virtual_ranks.EAGER)  # one tensor for both
    assert model.training and not any(layer.training for layer in model.layers)
    found = parts[1](parts[0](x=x, scale=scale), x=x, scale=scale)
    assert (found - model(x, scale)).abs() <= 1e-10 * found.abs()
    with pytest.raises(ShardingError, match='argument "scale" is a list that holds tensors'):
        stages(model, 2, (x, [x]), options=virtual_ranks.EAGER)


class Numbered(Translation):
    """Layers in a dictionary, as torchtitan's."""

    def __init__(self):
        super().__init__(2, 8)
        self.decoder = torch.nn.ModuleDict({str(i): layer for i, layer in enumerate(self.decoder)})

    def forward(self, ids, labels):
        x = memory = self.table(ids)
        for layer in self.decoder.values():
            x = layer(x, memory)
        for block in self.encoder:
            x = block(x)
        return x.square().mean()


def test_lists_of_layers_are_counted_in_the_order_in_which_they_run():
    model, given = Numbered().double(), virtual_ranks.batch(4)
    parts = stages(model, 4, (), given, options=virtual_ranks.EAGER)
    names = [{".".join(n.split(".")[:2]) for n, _ in part.named_parameters() if "table" not in n} for part in parts]
    assert names == [{"decoder.0"}, {"decoder.1"}, {"encoder.0"}, {"encoder.1"}]


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "dim,plan,length,shape",
    [("tp", "tp_sp", 16, (2, 8, 32)), ("dp", "zero2", 16, (1, 16, 32)), ("tp", "tp", 15, (2, 15, 32))],
)
def test_ranks_send_their_parts(dim, plan, length, shape, four_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", dim))
    model, given = Llama(layers=2), virtual_ranks.batch(8, length)
    stage = mindspeed_fx.pipeline_stage(model, mesh, plan, kwargs=given, microbatches=4, options=virtual_ranks.EAGER)
    (sent,) = stage.submod.examples()[1]
    assert sent.shape == shape
    assert stage.submod(**{n: x[:2] for n, x in given.items()}).shape == shape


@pytest.mark.parametrize(
    "plan,layers,expected",
    [("tp", None, 3), ("tp", "balanced", 5), (Plan("uneven", ("pp", "tp"), schedule="1F1B:1:2+4"), None, 2)],
)
def test_layers_of_a_plan_and_balanced_ones(plan, layers, expected, four_ranks):
    """The output layer takes longer than some layers."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), Llama(layers=6, vocab=16384)
    how = {"kwargs": virtual_ranks.batch(4, 8), "microbatches": 2, "options": virtual_ranks.EAGER, "layers": layers}
    stages = mindspeed_fx.pipeline_stages(model, mesh, plan, **how)
    names = {n.split(".")[1] for n, _ in stages.module.named_parameters() if n.startswith("layers.")}
    assert names == {str(i) for i in range(expected)}


@pytest.mark.parametrize("style,expected", [("loop", [0, 1, 2, 0, 1, 2]), ("v", [0, 1, 2, 2, 1, 0])])
def test_the_rank_of_each_stage(style, expected):
    assert [ranks_of_stage(s, 3, style) for s in range(6)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "tied", "translation"])
def test_every_schedule(model, tmp_path):
    run(tmp_path, {"pp": 2}, None, [(schedule, model) for schedule in SCHEDULES])


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [SCHEDULES[:2], LOOPS, VS], ids=["one", "loop", "v"])
def test_every_schedule_beside_experts(schedules, tmp_path):
    run(tmp_path, {"pp": 2, "ep": 2}, "ep_alltoall", [(schedule, "experts") for schedule in schedules])


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims,plan", [(("tp",), "tp_sp"), (("dp",), "zero2"), (("dp",), "zero3"), (("cp",), "ulysses")]
)
def test_schedules_beside_other_dimensions(dims, plan, tmp_path):
    kinds = [(s, "tied" if plan == "tp_sp" else "dense") for s in ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")]
    run(tmp_path, {"pp": 2, **dict.fromkeys(dims, 2)}, plan, kinds)
