"""recompute.pointwise: what the forward saves on cpu, exactly, and the same values with and without it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mindspeed_fx
from mindspeed_fx.compat import partitioner
from mindspeed_fx.passes.recompute import pointwise as file
from tests.models import Llama, tokens

NAME = file.NAME


@pytest.fixture
def saved(monkeypatch):
    """[(shape, operator) ...] of what forwards save, inputs left out, in the order of compilation."""
    found = []

    def partition(gm, inputs, *args, **kwargs):
        forward, backward = original(gm, inputs, *args, **kwargs)
        output = next(n for n in forward.graph.nodes if n.op == "output")
        kept = [
            n
            for n in output.args[0][kwargs["num_fwd_outputs"] :]
            if n.op != "placeholder" and isinstance(n.meta["val"], torch.Tensor)
        ]
        found.append([(tuple(n.meta["val"].shape), str(n.target)) for n in kept])
        return forward, backward

    original = partitioner.partition
    monkeypatch.setattr(partitioner, "partition", partition)
    return found


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 128, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def run(model, x, **options):
    """Loss and gradients of the compiled model, compiled anew."""
    torch._dynamo.reset()
    model.zero_grad()
    with torch._inductor.config.patch(force_disable_caches=True):
        loss = torch.compile(model, backend="mindspeed", options=options)(x).sum()
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_the_activation_is_made_again_from_the_product_that_made_it(saved):
    model, x = SwiGLU(), torch.randn(32, 16)
    results = run(model, x)
    assert saved[-1] == [((32, 128), "aten.mm.default")]
    without = run(model, x, disable=[NAME])
    assert sum(s[0] * s[1] for s, _ in saved[-1]) > 32 * 128
    for a, b in zip(results, without, strict=True):
        assert torch.equal(a, b)
    model.zero_grad()
    model(x).sum().backward()
    for a, p in zip(results[1:], model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_sites_name_what_is_made_again():
    report = mindspeed_fx.explain(SwiGLU(), torch.randn(32, 16))
    assert report.counts[NAME] == 1
    assert not mindspeed_fx.explain(SwiGLU(), torch.randn(32, 16), options={"codegen": "eager"}).counts.get(NAME)


class Residual(nn.Module):
    """A stream that many layers add to."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.silu(x))
        return x.square().sum()


def test_a_residual_stream_is_kept_not_summed_up_again(saved):
    run(Residual(), torch.randn(64, 16, requires_grad=True))
    # The last sum has one reader and is made again from the product before it.
    assert [op for _, op in saved[-1]] == ["aten.add.Tensor"] * 3 + ["aten.mm.default"]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.b(F.dropout(F.gelu(self.a(x)), 0.5, self.training))


def test_random_values_are_never_drawn_twice(saved):
    model, x = Dropped(), torch.randn(32, 16)
    results = []
    for options in ({}, {"disable": [NAME]}):
        torch.manual_seed(3)
        results.append(run(model, x, **options))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = SwiGLU(), SwiGLU()

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


def test_checkpointed_regions_are_recomputed_whole(saved):
    model, x = Checkpointed(), torch.randn(32, 16)
    results = run(model, x)
    assert saved[-1].count(((32, 128), "aten.mm.default")) == 1
    model.zero_grad()
    model(x).sum().backward()
    for a, p in zip(results[1:], model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_dynamic_sizes():
    model = SwiGLU()
    compiled = torch.compile(model, backend="mindspeed", dynamic=True)
    for rows in (8, 24, 40):
        x = torch.randn(rows, 16, requires_grad=True)
        (wanted,) = torch.autograd.grad(model(x).sum(), x)
        (got,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_llama_is_the_same(dtype):
    model, inputs = Llama(layers=1).to(dtype), tokens()
    results = []
    for options in ({}, {"disable": [NAME]}):
        torch._dynamo.reset()
        model.zero_grad()
        loss = torch.compile(model, backend="mindspeed", options=options)(*inputs)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(
            a, b, rtol=1e-12 if dtype == torch.float64 else 2e-2, atol=1e-12 if dtype == torch.float64 else 2e-2
        )


def summed_norm(x, r, w):
    s = x + r
    return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * w + s


def test_where_nothing_but_generated_code_runs_torch_decides_and_the_gradient_is_written_over_what_was_saved():
    """Measured: a buffer more costs as much as the kernel."""
    inputs = [
        torch.randn(1024, 512, requires_grad=True),
        torch.randn(1024, 512, requires_grad=True),
        torch.randn(512, requires_grad=True),
    ]
    report = mindspeed_fx.explain(summed_norm, *inputs)
    assert report.counts[NAME] == 0 and [
        r.report.notes for g in report.graphs for r in g.runs if r.report.name == NAME
    ] == [["all of it is generated code; torch's min-cut decides"]]
    torch._dynamo.reset()
    f = torch.compile(summed_norm, backend="mindspeed")
    with torch._inductor.config.patch(force_disable_caches=True):
        _, (_, backward) = torch._inductor.utils.run_and_get_code(lambda: torch.autograd.grad(f(*inputs).sum(), inputs))
    assert "# reuse" in backward and "empty_strided_cpu((1024, 512)" not in backward
