"""What two gloo processes check of what callers pass to a parallelized model; run by test_input_ranks.py."""

from __future__ import annotations

import copy
import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from mindspeed_fx.sharding import inputs as inputs_module
from mindspeed_fx.sharding.plan import ShardingError
from tests.sharding.llama import Llama

RANKS = 2
OPTIONS = {"codegen": "eager", "level": 1}


def batch(rows=4, seq=16):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (rows, seq), generator=generator) for _ in range(2)]


class Small(torch.nn.Module):
    """A training step that compiles in a second, of layers with names that plans know."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)
        self.up_proj, self.down_proj = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, ids, labels):
        x = self.embed(ids) * torch.arange(1, ids.shape[1] + 1, device=ids.device).unsqueeze(-1)
        x = x + self.down_proj(torch.nn.functional.silu(self.up_proj(x)))
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=3)


def whole_model(dtype=torch.float64, kind=Llama):
    torch.manual_seed(0)
    return (kind(layers=1) if kind is Llama else kind()).to(dtype)


def compiled(model, dim, plan, **settings):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(dim,))
    model = mindspeed_fx.parallelize(copy.deepcopy(model), mesh, plan, **settings)
    return model, torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False, options=OPTIONS)


def own(x, dim):
    """This rank's part."""
    return x.chunk(RANKS, dim)[dist.get_rank()]


def same_training(step, model, reference, args, tolerance=1e-10, given=None):
    """Loss and gradients of ``step(*given)`` are those of ``reference(*args)``."""
    reference.zero_grad(), model.zero_grad()
    expected, loss = reference(*args), step(*(given or args))
    expected.backward(), loss.backward()
    assert (loss - expected).abs() <= tolerance * expected.abs(), (loss, expected)
    whole = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert p.grad is None
            continue
        gradient = whole[name].grad
        assert p.grad.dtype == gradient.dtype and gradient.abs().max() > 0
        assert (p.grad.full_tensor() - gradient).abs().max() <= tolerance * gradient.abs().max(), name


def parts():
    """Every rank passes its part: loss and gradients of the whole batch; by position, by name, without compilation."""
    reference = whole_model(kind=Small)
    for dim, plan, divided in (("dp", "zero2", 0), ("cp", "ulysses", 1), ("tp", "tp_sp", None)):
        model, step = compiled(reference, dim, plan, inputs="local")
        given = [x if divided is None else own(x, divided) for x in batch()]
        same_training(step, model, reference, batch(), given=given)
        same_training(lambda ids, labels: step(labels=labels, ids=ids), model, reference, batch(), given=given)
        same_training(model, model, reference, batch(), given=given)


class Nested(torch.nn.Module):
    """Takes a dictionary with a list, and a number; its input needs a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, data, scale=1.0):
        return (self.linear(data["x"]) * scale - data["targets"][0]).square().mean()


def nested():
    """Tensors in containers; the gradient of an input is that of this rank's part."""
    torch.manual_seed(0)
    reference = Nested().double()
    x, target = torch.randn(4, 8, dtype=torch.float64, requires_grad=True), torch.randn(4, 8, dtype=torch.float64)
    expected = reference({"x": x, "targets": [target]}, scale=2.0)
    expected.backward()
    for compiling in (True, False):
        model, step = compiled(reference, "dp", "zero1", inputs="local")
        mine = own(x.detach(), 0).clone().requires_grad_()
        loss = (step if compiling else model)({"x": mine, "targets": [own(target, 0)]}, scale=2.0)
        loss.backward()
        assert (loss - expected).abs() <= 1e-10 * expected
        assert (mine.grad - own(x.grad, 0)).abs().max() <= 1e-10 * x.grad.abs().max()
        gradient = reference.linear.weight.grad
        assert (
            model.linear._parameters["weight"].grad.full_tensor() - gradient
        ).abs().max() <= 1e-10 * gradient.abs().max()


def refused(step, given, *says):
    with pytest.raises(Exception) as error:
        step(*given)
    assert isinstance(error.value, ShardingError) or "ShardingError: " in str(error.value), (
        error.value
    )  # Dynamo wraps what a backend raises
    for text in says:
        assert text in str(error.value), error.value


def checked():
    """Inputs that differ are refused on all ranks, by name; ranks are compared with new sizes and in no other step."""
    reference = whole_model(kind=Small)
    ids, labels = batch()
    model, step = compiled(reference, "dp", "zero2")
    refused(
        step,
        [own(ids, 0), own(labels, 0)],
        'argument "ids" (here (2, 16), torch.int64) has other values',
        'inputs="local"',
    )
    refused(step, [ids, labels + dist.get_rank()], 'argument "labels"', "has other values", '"zero2"')
    refused(step, [ids[:, : 8 + 4 * dist.get_rank()].contiguous()] * 2, 'argument "ids"', "has another shape or dtype")
    counted, compare = [], inputs_module.InputCheck._unlike
    inputs_module.InputCheck._unlike = lambda *args: counted.append(1) or compare(*args)
    for _ in range(3):
        same_training(step, model, reference, (ids, labels))
    assert len(counted) == 1
    same_training(step, model, reference, (ids[:2], labels[:2]))
    assert len(counted) == 2
    with torch.no_grad():
        step(ids, labels)
    assert len(counted) == 2
    inputs_module.InputCheck._unlike = compare
    _, unchecked = compiled(reference, "dp", "zero2", check_inputs=False)
    assert unchecked(own(ids, 0), own(labels, 0)).isfinite()


def alone():
    """Sizes that are new to one rank alone are refused there within seconds; new on both, one later, they are not."""
    reference = whole_model(kind=Small)
    ids, labels = batch()
    model, step = compiled(reference, "dp", "zero2")
    same_training(step, model, reference, (ids, labels))
    inputs_module.ALONE_AFTER = 20.0
    if dist.get_rank() == 1:
        time.sleep(1.0)
    same_training(step, model, reference, (ids[:2], labels[:2]))
    inputs_module.ALONE_AFTER = 0.3
    if dist.get_rank() == 0:
        says = ("rank 0 got arguments of new sizes (", "ids (2, 8) torch.int64", "new to rank 1:", '"zero2"')
        started = time.monotonic()
        refused(step, [ids[:2, :8].contiguous(), labels[:2, :8].contiguous()], *says)
        assert time.monotonic() - started < 60
    dist.barrier()
    inputs_module.ALONE_AFTER = 30.0


class Drops(Small):
    def forward(self, ids, labels):
        return super().forward(ids, labels) + torch.nn.functional.dropout(self.embed.weight, 0.5, self.training).mean()


def seeds():
    """Ranks that would draw other random numbers are refused; of a model that does not draw they are not."""
    model, step = compiled(whole_model(kind=Drops), "dp", "zero2")
    torch.manual_seed(dist.get_rank())
    refused(
        step, batch(), "aten.dropout.default, ", "the generators of the ranks differ", '"zero2"', "torch.manual_seed"
    )
    torch.manual_seed(0)
    assert step(*batch()).isfinite()
    torch.manual_seed(dist.get_rank())
    model.eval()
    assert step(*batch()).isfinite()


def copied():
    """A copy of a parallelized model (a moving average) outlives the model, and is its own."""
    reference = whole_model(kind=Small)
    model = compiled(reference, "dp", "zero2")[0]
    average = copy.deepcopy(model)
    assert all(hasattr(p, "_mindspeed_fx_plan") for p in average.parameters()), "optimizers that cannot step it"
    with torch.no_grad():
        for p, q in zip(average.parameters(), model.parameters()):
            q.mul_(3.0)
            p.lerp_(q, 0.5)
        for p in reference.parameters():
            p.mul_(2.0)
    del model
    gc.collect()
    step = torch.compile(average, backend="mindspeed", fullgraph=True, dynamic=False, options=OPTIONS)
    same_training(step, average, reference, batch())


def uneven():
    """Parts of other sizes, and parts that differ where ranks share one."""
    reference = whole_model(kind=Small)
    rank = dist.get_rank()
    _, step = compiled(reference, "dp", "zero2", inputs="local")
    says = ("parts are uneven", 'with inputs="local" all ranks pass parts of one size')
    rows = [x[: 2 + rank] for x in batch()]
    refused(step, rows, f'argument "ids" (here ({2 + rank}, 16), torch.int64)', '"zero2"', *says)
    assert step(*(own(x, 0) for x in batch())).isfinite()  # a refused step leaves nothing behind
    refused(step, rows if rank else [x[:2, :9].contiguous() for x in batch()], '"zero2"', *says)
    _, step = compiled(reference, "cp", "ulysses", inputs="local")
    refused(step, [x[:, : 8 + rank].contiguous() for x in batch()], '"ulysses"', *says)
    last_batch_of_one_rank(reference)
    _, step = compiled(reference, "tp", "tp_sp", inputs="local")
    refused(step, [own(x, 0) for x in batch()], 'argument "ids"', "does not divide it")


def last_batch_of_one_rank(reference):
    """A part that is shorter on one rank alone, where the others' sizes are known."""
    _, step = compiled(reference, "dp", "zero2", inputs="local")
    parts = [own(x, 0) for x in batch()]
    assert step(*parts).isfinite()
    inputs_module.ALONE_AFTER = 0.3
    if dist.get_rank() == 1:
        refused(step, [x[:1] for x in parts], "rank 1 got arguments of new sizes (", 'with inputs="local" all ranks')
    dist.barrier()
    inputs_module.ALONE_AFTER = 30.0


def misused():
    """What inputs="local" cannot take is refused by name."""
    model, _ = compiled(whole_model(kind=Small), "dp", "zero2", inputs="local")
    ids, labels = (own(x, 0) for x in batch())
    options = dict(backend="mindspeed", fullgraph=True, dynamic=False, options=OPTIONS)
    refused(
        torch.compile(lambda a, b: model(a + 0, b), **options),
        [ids, labels],
        'argument "ids" is computed in front of the model',
    )
    torch._dynamo.reset()
    refused(
        torch.compile(lambda a, b: model(a, b) + b.sum(), **options),
        [ids, labels],
        'argument "labels" is read outside of the model',
    )


PLANS = (("tp", "tp"), ("tp", "tp_sp"), ("cp", "ulysses"), ("dp", "zero1"), ("dp", "zero2"), ("dp", "zero3"))


def grad_modes(plans=PLANS):
    """Without gradients, for inference, for evaluation, with frozen parameters; and training again after each."""
    reference = whole_model(kind=Small)
    args = batch()
    expected = reference(*args).detach()
    for dim, plan in plans:
        model, step = compiled(reference, dim, plan)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss = step(*args)
            assert not loss.requires_grad and (loss - expected).abs() <= 1e-10 * expected, (plan, mode)
            same_training(step, model, reference, args)
        model.eval()
        same_training(step, model, reference, args)
        model.train()
        frozen = [n for n, _ in model.named_parameters() if "bias" in n or "up_proj" in n or n.startswith("embed")]
        for m in (model, reference):
            for n, p in m.named_parameters():
                p.requires_grad_(n not in frozen)
                p.grad = None
        same_training(step, model, reference, args)
        for m in (model, reference):
            m.requires_grad_(True)
        same_training(step, model, reference, args)
        torch._dynamo.reset()


def grad_modes_fast():
    """One plan."""
    grad_modes((("dp", "zero2"),))


def autocast(plans=PLANS, dtype=torch.bfloat16, kind=Small):
    """With and without autocast in turn, outside of the compiled model; gradients of float32 weights are float32."""
    reference = whole_model(torch.float32, kind)
    args = batch()
    for dim, plan in plans:
        model, step = compiled(reference, dim, plan)
        for enabled in (True, False, True):
            loss, apart = [], 0.0
            for m, run in ((reference, reference), (model, step)):
                m.zero_grad()
                with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                    out = run(*args)
                out.backward()
                loss.append(out.detach())
            whole = dict(reference.named_parameters())
            for name, p in model.named_parameters():
                assert p.grad.dtype == torch.float32
                apart = max(apart, ((p.grad.full_tensor() - whole[name].grad).norm() / whole[name].grad.norm()).item())
            assert (loss[0] - loss[1]).abs() <= (2e-3 if enabled else 1e-5) * loss[0], (plan, enabled, loss)
            assert apart <= (2e-2 if enabled else 1e-4), (plan, enabled, apart)
        torch._dynamo.reset()


def autocast_attention():
    """Layers with attention."""
    autocast((("dp", "zero2"), ("tp", "tp_sp"), ("cp", "ring")), kind=Llama)


def worker(rank, store, scenarios):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    for scenario in scenarios:
        globals()[scenario]()
        torch._dynamo.reset()
    dist.destroy_process_group()
