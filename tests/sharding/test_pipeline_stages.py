"""Stages of a pipeline, cut from an unmodified model: chained by hand, and under torch's schedules over gloo
processes.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import mindspeed_fx
from mindspeed_fx.planning.stage_module import stages
from mindspeed_fx.sharding.plan import ShardingError
from tests import ranks
from tests.sharding.llama import Llama

EAGER = {"codegen": "eager"}


def batch(rows=4, vocab=64):
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(0, vocab, (rows, 16), generator=generator) for name in ("ids", "labels")}


def chained(parts, given, microbatches):
    """The mean of the microbatches' losses."""
    total = 0.0
    for number in range(microbatches):
        mine = {name: value.chunk(microbatches)[number] for name, value in given.items()}
        received = ()
        for part in parts:
            received = tuple(tree_leaves(part(*received, **mine)))
        total = total + received[0] / microbatches
    return total


def agrees(model, parts, given, microbatches, tolerance=1e-10):
    expected = model(**given)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    loss = chained(parts, given, microbatches)
    loss.backward()
    assert loss.shape == (1,) and abs(loss - expected) <= tolerance * abs(expected)
    mine = [(n, p) for part in parts for n, p in part.named_parameters()]
    assert sorted(n for n, _ in mine) == sorted(gradients), "each parameter in one stage, under its name"
    for name, p in mine:
        assert (
            gradients[name].abs().max() > 0
            and (p.grad - gradients[name]).abs().max() <= tolerance * gradients[name].abs().max()
        ), name


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chained_stages_are_the_model(checkpointed):
    torch.manual_seed(0)
    model, given = Llama(layers=5).double(), batch()
    model.checkpointed = checkpointed
    parts = stages(model, 3, tuple(given.values()), microbatches=2, options=EAGER)
    assert [len(part.layers._modules) for part in parts] == [2, 2, 1]
    assert [[tuple(t.shape) for t in part.examples()[0]] for part in parts] == [[], [(2, 16, 32)], [(2, 16, 32)]], (
        "angles are computed again, not sent"
    )
    agrees(model, parts, given, 2)
    gone, stays = weakref.ref(model.embed.weight), weakref.ref(model.head.weight)
    del model, parts[:2]
    gc.collect()
    assert gone() is None and stays() is not None, "what other stages own is free"


def test_a_tied_weight_is_on_every_stage_that_reads_it():
    torch.manual_seed(0)
    model, given = Llama(layers=3, tied=True).double(), batch()
    parts = stages(model, 3, tuple(given.values()), microbatches=2, options=EAGER)
    assert [part.tied for part in parts] == [{"embed.weight": [0, 2]}, {}, {"embed.weight": [0, 2]}]
    expected = model(**given)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    chained(parts, given, 2).backward()
    for name, p in (pair for part in parts for pair in part.named_parameters()):
        assert (p.grad - gradients[name]).abs().max() <= 1e-10 * gradients[name].abs().max(), name


@pytest.mark.filterwarnings("error:The .grad attribute")  # of what a stage received: each has a graph of its own
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stages_in_one_process(tied):
    """Every rank of every stage, what they send to each other included."""
    from tests.sharding.test_simulated import checked

    torch.manual_seed(0)
    model, given = Llama(layers=3, tied=tied).double(), batch()
    result = checked(model, {"pp": 3, "tp": 2}, "tp_sp", *given.values())
    assert result.forward["reduce_scatter_tensor"] == 2 * 3 + 1 and not result.whole
    with pytest.raises(ShardingError, match='"layers" has 3 layers; valid: 2 to 3 stages'):
        mindspeed_fx.simulate(model, {"pp": 4, "tp": 2}, "tp", *given.values())


class Learned(nn.Module):
    """Positions that every layer reads are made of a parameter, and sent along; so is a norm between the layers."""

    def __init__(self, count=4, width=8):
        super().__init__()
        self.table, self.positions = nn.Embedding(64, width), nn.Parameter(torch.randn(16, width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, ids, labels):
        x, positions = self.table(ids), self.positions.sin()
        for layer in self.layers:
            x = torch.tanh(layer(x) + positions) * x.norm()
        return (x.sum(-1) - labels).square().mean()


def test_values_of_the_first_stage_travel_to_the_last():
    torch.manual_seed(0)
    model, given = Learned().double(), batch(4)
    parts = stages(model, 4, (), given, options=EAGER)
    assert [len(part.examples()[0]) for part in parts] == [0, 3, 3, 3], "what a layer gave, its norm, positions"
    agrees(model, parts, given, 1)


class Early(Learned):
    """What the first layer gives is a result beside the loss."""

    def forward(self, ids, labels):
        first = self.layers[0](self.table(ids))
        return (self.layers[1](first).sum(-1) - labels).square().mean(), first.sin()


def test_results_of_the_first_stage_travel_to_the_last():
    model, given = Early(count=2).double(), batch(4)
    parts = stages(model, 2, (), given, options=EAGER)
    have = tree_leaves(parts[1](*tree_leaves(parts[0](**given)), **given))
    for one, other in zip(have, model(**given), strict=True):
        torch.testing.assert_close(one.squeeze(), other)


@pytest.mark.slow
def test_hugging_face():
    transformers = pytest.importorskip("transformers")

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=3,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    vocab_size=64,
                )
            ).double()

        def forward(self, ids, labels):
            return self.model(input_ids=ids, labels=labels, use_cache=False).loss

    torch.manual_seed(0)
    model, given = Step(), batch()
    agrees(
        model, stages(model, 2, (), given, microbatches=2, options=EAGER), given, 2, tolerance=1e-5
    )  # its norms compute in float32


class Writes(Learned):
    """Writes to what each layer reads."""

    def forward(self, ids, labels):
        x, mask = self.table(ids), self.table(ids) * 2
        for i, layer in enumerate(self.layers):
            mask[i:] = 0.5
            x = layer(x) * mask
        return x.mean()


class Placed(Learned):
    """Fills what all layers read with what its arguments alone give, as T5 shifts labels and counts distances."""

    def forward(self, ids, labels):
        shifted = torch.zeros_like(ids)
        shifted[:, 1:] = ids[:, :-1]
        scale = (shifted > 8) * 0.5
        scale += 0.25
        x = self.table(shifted)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale.unsqueeze(-1)
        return (x.sum(-1) + self.positions.sum(-1) - labels).square().mean()


def test_what_is_written_of_the_arguments_alone_every_stage_makes_anew():
    given, model = batch(), Placed().double()
    agrees(model, stages(model, 2, (), given, microbatches=1, options=EAGER), given, 1)


class Scaled(nn.Module):
    """All layers read what ``scale_of`` makes of the arguments alone."""

    def __init__(self, scale_of):
        super().__init__()
        self.scale_of, self.table = scale_of, nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, ids, labels):
        scale = self.scale_of((ids.double() - 30) / 30)
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale.unsqueeze(-1)
        return (x.sum(-1) - labels).square().mean()


class Rescaled(nn.Module):
    """What leaves each layer is changed in place as the last thing, as Gemma 4's; ``late``: read again behind it."""

    def __init__(self, late=False):
        super().__init__()
        self.late, self.table = late, nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = before = x + torch.tanh(layer(x))
            x *= 0.5
            if self.late:
                x = x + before
        return (x.sum(-1) - labels).square().mean()


@pytest.mark.parametrize("late", [False, True])
def test_what_a_stage_changes_in_place_before_it_sends_it(late):
    torch.manual_seed(0)
    given, model = batch(), Rescaled(late).double()
    agrees(model, stages(model, 2, (), given, microbatches=1, options=EAGER), given, 1)


def changed(change):
    """What is changed in place, and read by its first name."""

    def scale_of(x):
        change(x)
        return x

    return scale_of


@pytest.mark.parametrize(
    "change",
    [
        lambda x: F.relu(x, inplace=True),
        lambda x: F.silu(x, True),
        lambda x: torch.sigmoid(x, out=x),
        lambda x: torch.lerp(x, 2 * x, 0.5, out=x),
        lambda x: x.__ipow__(2),
        lambda x: torch._foreach_mul_([x], 2.0),
    ],
    ids=["inplace", "positional", "out", "out of several", "power", "foreach"],
)
def test_what_is_changed_in_place_without_a_name_that_says_so_every_stage_makes_anew(change):
    """Before, such calls were dropped, and stages read the values of before."""
    torch.manual_seed(0)
    given, model = batch(), Scaled(changed(change)).double()
    agrees(model, stages(model, 2, (), given, microbatches=1, options=EAGER), given, 1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.gumbel_softmax(x, -1),
        lambda x: F.rrelu(x - 0.5, training=True),
        lambda x: torch.binomial(x.round() + 3, x.clamp(0, 1)),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
        lambda x: checkpoint(lambda x: F.rrelu(x - 0.5, training=True), x, use_reentrant=False),
        lambda x: torch.func.vmap(torch.exp)(torch.rand_like(x)),
    ],
    ids=["gumbel", "rrelu", "binomial", "attention", "checkpointed", "vmap"],
)
def test_what_is_drawn_for_all_layers_is_drawn_once(draw):
    """Before, each stage drew numbers of its own for it, where no name said that it is random."""
    torch.manual_seed(0)
    given, model = batch(), Scaled(draw).double()
    parts = stages(model, 2, (), given, microbatches=1, options=EAGER)
    torch.manual_seed(7)
    expected = model(**given)
    torch.manual_seed(7)
    assert torch.allclose(chained(parts, given, 1), expected, rtol=1e-10)
    assert len(parts[1].examples()[0]) == 2, "the numbers are sent, beside the hidden states"


@pytest.mark.parametrize("change", [lambda x: x.geometric_(0.5), lambda x: F.dropout(x, 0.5, True, True)])
def test_numbers_that_are_written_into_what_stages_share_are_refused(change):
    given = batch()
    with pytest.raises(ShardingError, match="writes in place to what stages 0 and 1 read"):
        stages(Scaled(changed(change)).double(), 2, (), given, microbatches=1, options=EAGER)


class Shared(nn.Module):
    """One layer that runs twice, as ALBERT's."""

    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        return self.groups[0](self.groups[0](x)).mean()


def test_what_has_no_stages():
    given = batch()
    for model, count, microbatches, says in (
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 2, 1, "Sequential has no repeated layers"),
        (Shared(), 2, 1, 'no repeated layers: "groups" has one, and what runs it several times shares its weights'),
        (Llama(), 3, 1, '"layers" has 2 layers; valid: 2 to 2 stages'),
        (Llama(), 2, 3, r'argument "ids" of shape \(4, 16\) cannot be split into 3 microbatches'),
        (Writes().double(), 2, 1, "module .*writes in place"),
    ):
        with pytest.raises(ShardingError, match=says):
            stages(model, count, tuple(given.values()), microbatches=microbatches, options=EAGER)


def test_meshes_that_do_not_fit():
    for names, plan, says in (
        (("dp", "tp"), "tp", 'needs a mesh dimension "pp"; the mesh has dp, tp'),
        (("pp",), "tp_sp", 'needs mesh dimension "tp"'),
        (("pp", "tpp"), "tp_sp", 'did you mean "tpp"'),
    ):
        with pytest.raises(ShardingError, match=says):
            mindspeed_fx.pipeline_stage(Llama(), SimpleNamespace(mesh_dim_names=names), plan, kwargs=batch())


def test_a_stage_says_what_it_misses():
    given = batch()
    _, part = stages(Learned().double(), 2, (), given, options=EAGER)
    received = [torch.zeros(t.shape, dtype=t.dtype) for t in part.examples()[0]]
    with pytest.raises(ShardingError, match='argument "labels", which is missing'):
        part(*received)
    with pytest.raises(ShardingError, match="same batch and number of microbatches"):
        part(*received, labels=given["labels"][:2])


def worker(rank, store, sizes, plan, kind):
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh

    from tests.sharding.searched_problems import large

    torch.set_num_threads(1)
    world = 2 * len(sizes)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model, given = Llama(layers=3).double(), batch(8)
    whole = copy.deepcopy(model)
    expected = whole(**given)
    expected.backward()
    if plan == "searched":
        plan = mindspeed_fx.plan(*large(batch=8), mesh=sizes, hardware="ascend910b2")
        assert not plan.unsupported and plan.modules
    stage = mindspeed_fx.pipeline_stage(model, mesh, plan, kwargs=given, microbatches=4, options=EAGER)
    schedule = getattr(pipelining, kind)(
        [stage] if "Interleaved" in kind else stage, 4, loss_fn=lambda loss, _: loss.sum()
    )
    for _ in range(2):
        stage.submod.zero_grad()
        losses = []
        out = schedule.step(**given, target=given["labels"], losses=losses)
    if stage.is_last:
        assert out.shape == (4,) and abs(sum(losses) / 4 - expected) <= 1e-10 * abs(expected)
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    mine = dict(stage.submod.named_parameters())
    assert ("embed.weight" in mine) == stage.is_first and ("head.weight" in mine) == stage.is_last
    for name, p in mine.items():
        found = p.grad.full_tensor() if len(sizes) > 1 else p.grad
        assert (found - gradients[name]).abs().max() <= 1e-10 * gradients[name].abs().max(), name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes,plan,kind",
    [
        ({"pp": 2}, None, "Schedule1F1B"),
        ({"pp": 2}, None, "ScheduleGPipe"),
        ({"pp": 2}, None, "ScheduleInterleavedZeroBubble"),
        ({"pp": 2, "tp": 2}, "tp_sp", "Schedule1F1B"),
        ({"pp": 2, "dp": 2}, "zero2", "Schedule1F1B"),
        ({"pp": 2, "cp": 2}, "ulysses", "Schedule1F1B"),
        ({"pp": 2, "tp": 2}, "searched", "Schedule1F1B"),
    ],
)
def test_schedules_over_processes(sizes, plan, kind, tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), sizes, plan, kind), nprocs=2 * len(sizes))


def tied_worker(rank, store, sizes, plan, kind):
    """Optimizer steps, each of two steps of the schedule, of a model whose first and last stage share a weight; ranks
    begin with other weights, of which those of the first stage count."""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    world = math.prod(sizes.values())
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model, given = Llama(layers=3, tied=True).double(), batch(8)
    whole = copy.deepcopy(model)
    if mesh.get_local_rank("pp"):
        torch.nn.init.normal_(model.embed.weight)
    stage = mindspeed_fx.pipeline_stage(model, mesh, plan, kwargs=given, microbatches=4, options=EAGER)
    loss = lambda loss, _: loss.sum() / 8  # noqa: E731
    schedule = getattr(pipelining, kind)(
        [stage] if "Interleaved" in kind else stage, 4, loss_fn=loss, scale_grads=False
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, stage.submod)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(**given).backward()
        for _ in range(2):
            schedule.step(**given, target=given["labels"])
        for optimizer in optimizers:
            optimizer.step()
    expected, mine = dict(whole.named_parameters()), dict(stage.submod.named_parameters())
    assert ("embed.weight" in mine) == (stage.is_first or stage.is_last)
    for name, p in mine.items():
        found = p.full_tensor() if len(sizes) > 1 else p
        assert (found - expected[name]).abs().max() <= 1e-10 * expected[name].abs().max(), name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "sizes,plan,kind",
    [
        ({"pp": 2}, None, "Schedule1F1B"),
        pytest.param({"pp": 3}, None, "Schedule1F1B", marks=pytest.mark.slow),
        pytest.param({"pp": 2}, None, "ScheduleInterleavedZeroBubble", marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, "tp_sp", "ScheduleInterleaved1F1B", marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, "zero2", "ScheduleGPipe", marks=pytest.mark.slow),
    ],
)
def test_tied_weights_over_processes(sizes, plan, kind, tmp_path):
    ranks.spawn(tied_worker, (str(tmp_path / "store"), sizes, plan, kind), nprocs=math.prod(sizes.values()))


def test_a_stage_without_experts_beside_one_that_sends_tokens():
    """DeepSeek's first layers are dense."""
    from tests.sharding.llama import MLP
    from tests.sharding.mixtral import Mixtral

    model = Mixtral(2)
    model.layers[0].mlp = MLP(32, 64, False)
    model, given = model.double(), batch(vocab=60)
    model(**given).backward()
    result = mindspeed_fx.simulate(model, {"pp": 2, "ep": 2}, "ep_alltoall", **given)
    for name, p in model.named_parameters():
        assert (result.gradients[name] - p.grad).abs().max() <= 1e-10 * p.grad.abs().max() > 0, name
