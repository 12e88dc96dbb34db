"""in_parts: rows in independent parts of one graph; experts without a capacity, whose all_to_all has sizes known at run
time, and attention before them.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

import mindspeed_fx
from mindspeed_fx.graph.collectives import is_start
from mindspeed_fx.passes.overlap import schedule
from tests import ranks


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out, given):
        ctx.sizes = (out, given)
        return functional.wait_tensor(functional.all_to_all_single(x, out, given, dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):
        out, given = ctx.sizes
        return (
            functional.wait_tensor(functional.all_to_all_single(grad.contiguous(), given, out, dist.group.WORLD)),
            None,
            None,
        )


class Experts(torch.nn.Module):
    """One expert for each rank and no capacity: [tokens, hidden]; each token goes to its best expert."""

    def __init__(self, rank, hidden=8, ffn=12):
        super().__init__()
        own = torch.Generator().manual_seed(rank)
        make = lambda *shape, generator: torch.nn.Parameter(
            torch.randn(*shape, generator=generator, dtype=torch.float64) / 4
        )
        self.gate = make(hidden, dist.get_world_size(), generator=torch.Generator().manual_seed(99))
        self.up, self.down = make(hidden, ffn, generator=own), make(ffn, hidden, generator=own)

    def forward(self, x):
        weight, expert = torch.softmax(x @ self.gate, -1).max(-1)
        order = torch.argsort(expert, stable=True)
        counts = torch.zeros(dist.get_world_size(), dtype=torch.int64).scatter_add(0, expert, torch.ones_like(expert))
        theirs = functional.wait_tensor(functional.all_to_all_single(counts, None, None, dist.group.WORLD))
        given, out = counts.tolist(), theirs.tolist()
        for n in (*given, *out):
            torch._check(n >= 0)
        here = Exchange.apply(x[order], out, given)
        back = Exchange.apply(torch.tanh(here @ self.up) @ self.down, given, out)
        return x + torch.zeros_like(x).index_copy(0, order, back) * weight[:, None]


class Layer(torch.nn.Module):
    """Attention and experts: [batch, seq, hidden]."""

    def __init__(self, rank):
        super().__init__()
        self.experts = Experts(rank)
        self.qkv = torch.nn.Parameter(
            torch.randn(24, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64) / 3
        )

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.experts(x.flatten(0, 1)).view(x.shape)


@pytest.fixture
def sizes_in_graphs():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def gradients(run, module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def agrees(module, x, parts, **options):
    """Compiled in parts it is the module itself, forward and backward, in one graph."""
    torch._dynamo.reset()
    run = torch.compile(
        mindspeed_fx.in_parts(module, parts),
        backend="mindspeed",
        fullgraph=True,
        options={"codegen": "eager", "hardware": "h100", "overlap_memory": "1MiB", **options},
    )
    for k in range(2):  # other sizes, the same graph
        given = (k + 1) * x.roll(k, 0)
        for a, b in zip(gradients(run, module, given), gradients(module, module, given), strict=True):
            assert b.abs().sum() > 0 or dist.get_world_size() > 1 or b.shape[-1] == 1
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def work(gm, hardware, fused):
    return lambda node: (
        (1.5e-3, "wire")
        if is_start(node)
        else (1e-3 if "mm" in str(node.target) or "attention" in str(node.target) else 0.0, "")
    )


def test_unequal_shares_run_under_other_parts(lone_world, sizes_in_graphs, monkeypatch):
    for module in ("schedule", "chunking.chunk_search", "bucket"):
        monkeypatch.setattr(f"mindspeed_fx.passes.overlap.{module}.cost_of", work)
    seen, tell = [], schedule._tell
    monkeypatch.setattr(
        schedule,
        "_tell",
        lambda report, work, before, after: seen.append((before, after)) or tell(report, work, before, after),
    )
    agrees(Layer(0), torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64), 2)
    (before, after), backward = seen  # one graph
    assert (
        before.exposed_seconds == pytest.approx(6 * 1.5e-3) and after.exposed_seconds <= 2 * 1.5e-3
    )  # whole, everything comes before the collectives or waits for them


def test_what_is_refused():
    double = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="parts is 1; valid: 2"):
        mindspeed_fx.in_parts(double, 1)
    run = mindspeed_fx.in_parts(double, 3)
    torch.testing.assert_close(run(torch.ones(7, 4)), double(torch.ones(7, 4)))  # 3, 2 and 2 rows
    with pytest.raises(ValueError, match="argument 0 has 2 rows along dimension 0; valid: at least 3"):
        run(torch.ones(2, 4))
    with pytest.raises(ValueError, match="argument 'mask' is None; valid: a tensor with rows along dimension 0"):
        mindspeed_fx.in_parts(double, 2, arguments=(0, "mask"))(torch.ones(4, 4))

    class Loss(torch.nn.Module):
        def forward(self, x, y):
            return x * y, x.sum()

    with pytest.raises(ValueError, match="argument 1 has 2 rows along dimension 0, another 4"):
        mindspeed_fx.in_parts(Loss(), 2, arguments=(0, 1))(torch.ones(4), torch.ones(2))
    with pytest.raises(
        ValueError, match=r"a part of 2 rows returned a tensor of shape \[\]; valid: tensors with as many rows"
    ):
        mindspeed_fx.in_parts(Loss(), 2)(torch.ones(4), torch.ones(1))


def two_ranks(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch._dynamo.config.capture_scalar_outputs = True
    tokens = torch.randn(14, 8, generator=torch.Generator().manual_seed(5 + rank), dtype=torch.float64)
    agrees(Experts(rank), tokens, 2)
    agrees(Experts(rank), tokens, 3)
    agrees(Layer(rank), tokens.view(2, 7, 8), 2)
    same = Experts(rank)
    with torch.no_grad():
        same.gate.copy_(torch.tensor([[3.0, 0.0]] * 8))
    agrees(same, tokens.abs(), 2)  # all tokens to rank 0: rank 1 gets none
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_with_unequal_shares(tmp_path):
    ranks.spawn(two_ranks, (str(tmp_path / "store"),), nprocs=2)
