"""What two gloo processes check of a parallelized model; run by test_two_processes.py, one scenario after the other."""

from __future__ import annotations

import copy
import dataclasses
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import mindspeed_fx
from mindspeed_fx.sharding.presets import named_plan
from tests.sharding.estimated import PLACEMENTS, Routed
from tests.sharding.llama import Llama

RANKS = 2


def batch(rows=4, seq=16):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 64, (rows, seq), generator=generator), torch.randint(
        0, 64, (rows, seq), generator=generator
    )


def whole_model(**settings) -> Llama:
    torch.manual_seed(0)
    return Llama(**{"layers": 1, **settings}).double()


def compiled(model, dim, plan, dynamic=None, fullgraph=True, **options):
    model = mindspeed_fx.parallelize(model, init_device_mesh("cpu", (RANKS,), mesh_dim_names=(dim,)), plan)
    options = {"codegen": "eager", **options}
    return model, torch.compile(model, backend="mindspeed", fullgraph=fullgraph, dynamic=dynamic, options=options)


def trains_alike(dim, plan, checkpointed=False, tolerance=1e-10, settings=None, sizes=(4, 16), **options):
    """Two steps of AdamW with clipping: losses, norms and weights of the single device."""
    reference = whole_model(**(settings or {}))
    reference.checkpointed = checkpointed
    model, step = compiled(copy.deepcopy(reference), dim, plan, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (reference, model)]
    for _ in range(2):
        losses, norms = [], []
        for m, run, optimizer in ((reference, reference, optimizers[0]), (model, step, optimizers[1])):
            optimizer.zero_grad()
            loss = run(*(x % reference.embed.num_embeddings for x in batch(*sizes)))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            losses.append(loss.detach())
            optimizer.step()
        assert abs(losses[0] - losses[1]) <= tolerance * abs(losses[0]), (plan, losses)
        assert abs(norms[0] - norms[1]) <= tolerance * abs(norms[0]), (plan, norms)
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
        assert (p.full_tensor() - expected[name]).abs().max() <= 1e-7, (plan, name)


def plans():
    for dim, plan in (
        ("tp", "tp"),
        ("tp", "tp_sp"),
        ("cp", "ulysses"),
        ("cp", "ring"),
        ("dp", "zero1"),
        ("dp", "zero2"),
        ("dp", "zero3"),
    ):
        trains_alike(dim, plan)
    trains_alike("tp", "tp_sp", checkpointed=True)


def searched():
    """Plans that the search found for large models of the same modules."""
    from tests.sharding.searched_problems import large

    for dim in ("tp", "dp", "cp"):
        found = mindspeed_fx.plan(*large(layers=4, batch=2), mesh={dim: RANKS}, hardware="ascend910b2")
        assert not found.unsupported and (found.parameters or dim == "cp")
        trains_alike(dim, found)


def divided_loss(codegen="eager"):
    """The fused loss of a divided vocabulary, two steps."""
    trains_alike("tp", "tp_sp", codegen=codegen, enable=["fusion.linear_cross_entropy"], strict=True)


def divided_loss_in_generated_code():
    divided_loss("inductor")


def generated_code():
    """Inductor's code for the local program; the options that are in force say what caches do."""
    for dim, plan, settings in (("tp", "tp", {}), ("tp", "tp_sp", {"level": 1}), ("cp", "ring", {})):
        trains_alike(dim, plan, codegen="inductor", **settings)
    report = mindspeed_fx.explain(compiled(whole_model(), "tp", "tp")[0], *batch(), options={"codegen": "inductor"})
    assert report.effective_options["codegen"] == "inductor" and report.effective_options["caches"].startswith(
        "off: explain is collecting"
    )


def many_layers_in_generated_code():
    """So many layers that code is made of one of them, or of what lies between two collectives of it."""
    plans = ("dp", "zero1"), ("dp", "zero2"), ("dp", "zero3"), ("tp", "tp_sp"), ("cp", "ulysses"), ("cp", "ring")
    for dim, plan in plans:
        trains_alike(dim, plan, settings={"layers": 8}, sizes=(4, 32), codegen="inductor")
        torch._dynamo.reset()


class Masked(torch.nn.Module):
    """Attention in a window, in documents that are known by their numbers, and in a prefix; checkpointed."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 8, 8, dtype=torch.float64))

    def attend(self, x, documents):
        q, k, v = (torch.einsum("bsh,hd->bsd", x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in self.weight)
        row, column = torch.arange(x.shape[1]).unsqueeze(1), torch.arange(x.shape[1])
        masks = [
            (column <= row) & (row - column < 5),
            (column <= row) | (column < 5),
            (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1) & (column <= row),
        ]
        return (
            sum(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m) for m in masks)
            .transpose(1, 2)
            .flatten(2)
        )

    def forward(self, x, documents):
        x = torch.utils.checkpoint.checkpoint(self.attend, x, documents, use_reentrant=False)
        return self.attend(x, documents).square().mean()


def masks(codegen="eager"):
    """A ring by blocks, compiled: windows, documents, prefixes; checkpointed regions."""
    torch.manual_seed(0)
    reference = Masked()
    x, documents = (
        torch.randn(2, 16, 8, dtype=torch.float64),
        torch.arange(16).div(6, rounding_mode="floor").repeat(2, 1),
    )
    expected = reference(x, documents)
    expected.backward()
    model, step = compiled(copy.deepcopy(reference), "cp", "ring", codegen=codegen)
    model.zero_grad()
    loss = step(x, documents)
    loss.backward()
    assert abs(loss - expected) <= 1e-10 * abs(expected)
    worst = (
        model._parameters["weight"].grad.full_tensor() - reference.weight.grad
    ).abs().max() / reference.weight.grad.abs().max()
    assert worst <= 1e-10, worst


def masks_in_generated_code():
    masks("inductor")


def experts(codegen="eager"):
    """Mixtral with experts on both ranks, compiled."""
    from tests.sharding.test_experts import hugging_face

    reference = hugging_face("Mixtral", "batched_mm")
    ids = torch.arange(32).view(4, 8) * 7 % 32
    expected = reference(ids)
    expected.backward()
    model, step = compiled(copy.deepcopy(reference), "ep", "ep", codegen=codegen)
    model.zero_grad()
    loss = step(ids)
    loss.backward()
    assert abs(loss - expected) <= 1e-7 * abs(expected)
    for (name, p), whole in zip(model.named_parameters(), reference.parameters()):
        assert (p.grad.full_tensor() - whole.grad).abs().max() <= 1e-6 * whole.grad.abs().max(), name


def experts_in_generated_code():
    experts("inductor")


def travelling(codegen="eager", capacity=None):
    """Tokens that travel to their experts, compiled, by counts or in fixed splits; two steps, with tokens for one
    rank's experts alone in the second.
    """
    from tests.sharding.test_dispatch import Mixture

    torch.manual_seed(0)
    reference = Mixture()
    plan = dataclasses.replace(
        named_plan("ep_alltoall", reference),
        experts={"dispatch": "all_to_all", **({"capacity": capacity} if capacity else {})},
    )
    model, step = compiled(copy.deepcopy(reference), "ep", plan, codegen=codegen)
    for ids in (torch.arange(24).view(4, 6), torch.full((4, 6), 5)):
        reference.zero_grad(), model.zero_grad()
        expected, loss = reference(ids), step(ids)
        expected.backward(), loss.backward()
        assert abs(loss - expected) <= 1e-10 * abs(expected)
        for (name, p), whole in zip(model.named_parameters(), reference.parameters()):
            assert (p.grad.full_tensor() - whole.grad).abs().max() <= 1e-10 * reference.experts.down.grad.abs().max(), (
                name
            )


def travelling_is_verified():
    """No collective beyond what the plan needs, and nothing computed whole, the gradient of the mean at the end
    included.
    """
    from tests.sharding.test_dispatch import Mixture

    report = mindspeed_fx.explain(
        compiled(Mixture(), "ep", "ep_alltoall")[0], torch.arange(24).view(4, 6), options={"codegen": "eager"}
    )
    assert [(s.operator, s.reason) for s in report.skipped("sharding.verify")] == []
    assert [s.operator for s in report.sites("sharding.token_dispatch")] == ["tokens sent to experts by all-to-all"]


def travelling_in_generated_code():
    travelling("inductor")


def travelling_in_fixed_splits():
    travelling("inductor", 2.0)


def recomputed():
    """Plans that say what is made again, collectives included, and microbatches: loss and gradients of one device."""
    reference = whole_model()
    loss = reference(*batch())
    loss.backward()
    for dim, name, word, parts in (
        ("tp", "tp_sp", "full", 1),
        ("dp", "zero3", "full", 2),
        ("tp", "tp_sp", "norm+activation_function", 1),
    ):
        plan = dataclasses.replace(named_plan(name, reference), recompute=word, microbatches=parts)
        torch._dynamo.reset()  # or the other size of the batch would be a symbol
        model, step = compiled(whole_model(), dim, plan, level=1)
        mean = mindspeed_fx.accumulate(step, *batch(), microbatches=plan.microbatches)
        assert abs(mean - loss) <= 1e-10 * abs(loss) and not mean.requires_grad, (name, word)
        for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (
                q.grad.abs().max() > 0 and (p.grad.full_tensor() - q.grad).abs().max() <= 1e-10 * q.grad.abs().max()
            ), (name, word, n)
        print(name, word, "agrees", flush=True)


def draws():
    """Dropout of every layout, alone, before an addition and in regions that are run again, draws in a compiled step
    what it draws on one device."""
    from tests.sharding import loss_model, test_random

    names = ["dropout before an addition", "dropout of a transposed value", "checkpointed"]
    torch.manual_seed(0)
    reference = test_random.Drawing(names).double()
    model, step = compiled(copy.deepcopy(reference), "dp", "zero2")
    for run in (torch.compile(reference, backend="mindspeed", options={"codegen": "eager"}), step):
        torch.manual_seed(1)
        outputs = run(*loss_model.batch())
        sum(o.sum() for o in outputs).backward()
        values = [*outputs, torch.rand(1)]
        if run is not step:
            expected = values
    for name, value, right in zip([*names, "sum", "generator"], values, expected, strict=True):
        assert torch.allclose(value, right, 1e-10, 1e-10), name
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert q.grad is None or torch.allclose(p.grad.full_tensor(), q.grad, 1e-9, 1e-10), name


def checkpoints():
    """Saved under one plan, loaded under another, and by a whole model."""
    reference = whole_model()
    model, _ = compiled(copy.deepcopy(reference), "tp", "tp_sp")
    assert model.state_dict().keys() == reference.state_dict().keys()
    directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(directory)
    dcp.save(model.state_dict(), checkpoint_id=directory[0])
    torch.manual_seed(1)
    other, _ = compiled(Llama(layers=1).double(), "dp", "zero3")
    loaded = other.state_dict()
    dcp.load(loaded, checkpoint_id=directory[0])
    other.load_state_dict(loaded)
    for name, p in other.named_parameters():
        assert torch.equal(p.full_tensor(), dict(reference.named_parameters())[name]), name


def meta():
    """Initialized shard by shard: the same values under every plan, and trainable."""

    def init(module):
        for p in module.parameters(recurse=False):
            torch.nn.init.normal_(p, std=0.1)

    values = []
    for dim, plan in (("tp", "tp_sp"), ("dp", "zero3")):
        with torch.device("meta"):
            model = Llama(layers=1, tied=True)
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(dim,))
        mindspeed_fx.parallelize(model, mesh, plan, init=init, seed=3)
        assert model.head._parameters["weight"] is model.embed._parameters["weight"]
        values.append({n: p.full_tensor() for n, p in model.named_parameters()})
        loss = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})(*batch())
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        assert torch.equal(value, values[1][name]) and value.std() > 0.05, name


def eagerly():
    """Without compilation the model is whole on every rank."""
    reference = whole_model()
    model = mindspeed_fx.parallelize(
        copy.deepcopy(reference), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)), "tp"
    )
    for m in (reference, model):
        m(*batch()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), dict(reference.named_parameters())[name].grad)


def explained():
    """The report lists every edge with module and line, and says that caches are off."""
    report = mindspeed_fx.explain(compiled(whole_model(), "tp", "tp_sp")[0], *batch(), options={"codegen": "eager"})
    sites = report.sites("sharding.constraint")
    assert {s.module for s in sites} >= {"layers.0.attention.q_proj", "layers.0.mlp.down_proj", "head"}
    assert all("llama.py" in s.source for s in sites if s.module.startswith("layers"))


UNEVEN = dict(vocab=61, ffn=63, hidden=24, heads=3, kv_heads=3)


def uneven():
    """Vocabulary, widths, heads, batch and sequence that two ranks cannot share evenly: two steps as one device."""
    for dim, plan in (("tp", "tp_sp"), ("cp", "ulysses"), ("cp", "ring"), ("dp", "zero2")):
        trains_alike(dim, plan, settings=UNEVEN, sizes=(3, 17))


class Modulated(torch.nn.Module):
    """Layers of a diffusion transformer: shifts, scales and gates of every row come from one vector of it."""

    def __init__(self, width=48, heads=4, layers=2):
        super().__init__()
        self.heads = heads
        self.time = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.SiLU(), torch.nn.Linear(width, width))
        linear = lambda out: torch.nn.ModuleList(torch.nn.Linear(width, out) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(layers))
        self.modulate, self.qkv, self.out = linear(3 * width), linear(3 * width), linear(width)

    def forward(self, x, t):
        rows = torch.nn.functional.silu(self.time(t))
        for norm, modulate, qkv, out in zip(self.norms, self.modulate, self.qkv, self.out):
            shift, scale, gate = modulate(rows).unsqueeze(1).chunk(3, -1)
            y = norm(x) * (1 + scale) + shift
            q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in qkv(y).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + gate * out(y)
        return x.square().mean()


def uneven_gradients():
    """Three rows that every rank has whole, whose gradients are summed and shared unevenly: the graphs of two ranks
    have other slices, and their collectives one order."""
    _trains_modulated()


def functions():
    """A backward that an ``autograd.Function`` brings."""
    for name, placed in PLACEMENTS.items():
        reference = Routed().double()
        model, step = compiled(copy.deepcopy(reference), "tp", mindspeed_fx.Plan(name, ("tp",), placed))
        ids = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(0))
        reference(ids).backward()
        step(ids).backward()
        for (parameter, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert (q.grad.full_tensor() - p.grad).abs().max() <= 1e-10 * p.grad.abs().max(), (name, parameter)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class Patches(torch.nn.Module):
    """Two layers, between which rows are split by lengths that data decide, as images' patches are before attention
    (Qwen2-VL): Dynamo ends its graph there."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x, lengths):
        x = self.first(self.norm(x))
        parts = torch.split(x, lengths.tolist(), 1)
        x = torch.cat([p + (p.softmax(1) * p).sum(1, keepdim=True) for p in parts], 1)
        return self.head(self.second(x)).square().mean()


def several_graphs():
    """What a graph leaves to the next is whole."""
    torch.manual_seed(0)
    reference, x = Patches().double(), torch.randn(4, 12, 16, dtype=torch.float64)
    for dim, plan in (("dp", "zero3"), ("tp", "tp_sp")):
        torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
        model, step = compiled(copy.deepcopy(reference), dim, plan, fullgraph=False)
        # torch 2.11 has no proxy for the strides of a size that is 12 less another
        for lengths in ([5, 7], [8, 4])[: None if torch.__version__ >= "2.13" else 1]:
            reference.zero_grad(), model.zero_grad()
            reference(x, torch.tensor(lengths)).backward()
            step(x, torch.tensor(lengths)).backward()
            for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
                assert (q.grad.full_tensor() - p.grad).abs().max() <= 1e-10 * p.grad.abs().max(), (plan, name)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1
        assert any(isinstance(p, DTensor) and p.placements[0].is_shard() for p in model.first.fc1.parameters()), plan


def two_rings_in_generated_code():
    """Each layer keeps what its own ring came to."""
    _trains_modulated(codegen="inductor")


def _trains_modulated(**options):
    torch.manual_seed(0)
    reference = Modulated().double()
    model, step = compiled(copy.deepcopy(reference), "cp", "ring", dynamic=False, **options)
    x, t = torch.randn(3, 16, 48, dtype=torch.float64), torch.randn(3, 32, dtype=torch.float64)
    reference(x, t).backward()
    step(x, t).backward()
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert (q.grad.full_tensor() - p.grad).abs().max() <= 1e-12 * p.grad.abs().max(), name


def uneven_in_generated_code():
    trains_alike("tp", "tp_sp", settings=UNEVEN, sizes=(3, 17), codegen="inductor", level=1)
    trains_alike("cp", "ring", settings=UNEVEN, sizes=(3, 17), codegen="inductor")


def uneven_checkpoints():
    """Parts of unequal sizes saved, and loaded by a whole model; and the other way round."""
    reference = whole_model(**UNEVEN)
    model, _ = compiled(copy.deepcopy(reference), "tp", "tp_sp")
    weight = model.embed._parameters["weight"]
    assert weight.shape == (61, 24) and weight.to_local().shape[0] == (31, 30)[dist.get_rank()]
    directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(directory)
    dcp.save(model.state_dict(), checkpoint_id=directory[0])
    torch.manual_seed(1)
    single = Llama(layers=1, **UNEVEN).double()
    loaded = single.state_dict()
    dcp.load(loaded, checkpoint_id=directory[0])
    for name, value in reference.state_dict().items():
        assert torch.equal(loaded[name], value), name
    dcp.save(loaded, checkpoint_id=directory[0] + "/whole")
    torch.manual_seed(2)
    other, _ = compiled(Llama(layers=1, **UNEVEN).double(), "tp", "tp")
    parts = other.state_dict()
    dcp.load(parts, checkpoint_id=directory[0] + "/whole")
    other.load_state_dict(parts)
    for name, p in other.named_parameters():
        assert torch.equal(p.full_tensor(), dict(reference.named_parameters())[name]), name
