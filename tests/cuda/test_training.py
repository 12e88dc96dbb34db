"""Training steps on a CUDA device, against eager PyTorch in a wider type on the same device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, HEADS, VOCAB = 256, 4, 1000


class Layer(nn.Module):
    """A norm, attention of heads of 64 and a gated product, with dropout; ``checkpointed`` recomputes it whole."""

    def __init__(self, drop: float, checkpointed: bool, sdpa: bool):
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop, self.checkpointed, self.sdpa = drop, checkpointed, sdpa

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def body(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        if self.sdpa:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.drop, self.training)
        gate, up = self.gate(self.second(x)).chunk(2, -1)
        return x + F.dropout(self.down(F.silu(gate) * up), self.drop, self.training)


class Model(nn.Module):
    def __init__(self, drop: float = 0.0, checkpointed: bool = False, sdpa: bool = True, layers: int = 2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(drop, checkpointed, sdpa) for _ in range(layers))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids.roll(-1, 1).flatten())


def made(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return Model(**settings).to("cuda", dtype)


def ids(batch=2, tokens=128):
    return torch.randint(VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1)).cuda()


def gradients(model, run, *args):
    model.zero_grad(set_to_none=True)
    run(*args).backward()
    assert all(p.grad is not None for p in model.parameters())
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def off(have, want):
    return ((have - want).norm() / want.norm()).item()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("sdpa", [True, False], ids=["sdpa", "by hand"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients(dtype, checkpointed, sdpa, codegen):
    model = made(dtype, checkpointed=checkpointed, sdpa=sdpa)
    exact = made(torch.float64, sdpa=sdpa)
    exact.load_state_dict(model.state_dict())
    want, unfused = gradients(exact, exact, ids()), gradients(model, model, ids())
    have = gradients(model, torch.compile(model, backend="mindspeed", options={"codegen": codegen}), ids())
    assert off(have, want) < max(1e-5, 1.5 * off(unfused, want))


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_sizes_that_change(codegen):
    model, exact = made(), made(torch.float64)
    run = torch.compile(model, backend="mindspeed", options={"codegen": codegen}, dynamic=True)
    for tokens in (128, 96, 33, 128):
        assert off(gradients(model, run, ids(2, tokens)), gradients(exact, exact, ids(2, tokens))) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_wide_weights(dtype):
    def under(model):
        def run(x):
            with torch.autocast("cuda", dtype):
                return model(x)

        return run

    model, exact = made(), made(torch.float64)
    want, unfused = gradients(exact, exact, ids()), gradients(model, under(model), ids())
    have = gradients(model, torch.compile(under(model), backend="mindspeed"), ids())
    assert off(have, want) < 1.5 * off(unfused, want)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_dropout_is_drawn_once_and_from_the_seed(checkpointed):
    """Along a direction of the weights the loss changes as the gradients say, with the same draws."""
    model = made(torch.float64, drop=0.2, checkpointed=checkpointed)
    run = torch.compile(model, backend="mindspeed", options={"codegen": "eager"})

    def loss():
        torch.manual_seed(5)
        return run(ids())

    model.zero_grad()
    loss().backward()
    assert loss().item() == loss().item()
    directions = [torch.randn_like(p) for p in model.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), directions)).item()
    step = 1e-5
    with torch.no_grad():
        for sign in (step, -2 * step):
            for p, d in zip(model.parameters(), directions):
                p.add_(sign * d)
            if sign > 0:
                above = loss().item()
        below = loss().item()
    assert abs((above - below) / (2 * step) - slope) < 1e-4 * abs(slope)


def test_a_training_run_ends_where_the_eager_one_does():
    """Thirty steps with AdamW, clipped, in bfloat16 with float32 main weights by autocast."""
    losses = {}
    for backend in (None, "mindspeed"):
        model = made()
        run = torch.compile(model, backend=backend) if backend else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses[backend] = []
        for i in range(30):
            with torch.autocast("cuda", torch.bfloat16):
                loss = run((ids(4, 64) + i % 3) % VOCAB)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[backend].append(loss.item())
    assert losses["mindspeed"][-1] < 0.7 * losses["mindspeed"][0]
    torch.testing.assert_close(losses["mindspeed"], losses[None], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("offload", [False, True])
def test_a_memory_budget_holds_and_changes_no_bit(offload):
    settings = dict(layers=6)
    tokens = ids(8, 512)
    results, peaks = [], []
    for options in ({}, {"memory_budget": "min", "offload": offload}):
        torch._dynamo.reset()
        model = made(torch.bfloat16, **settings)
        run = torch.compile(model, backend="mindspeed", options={"codegen": "eager", **options})
        gradients(model, run, tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.zero_grad(set_to_none=True)
        loss = run(tokens)
        peaks.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert peaks[1] < 0.6 * peaks[0], peaks
    assert torch.equal(*results)


def test_cuda_graphs():
    model, exact = made(), made(torch.float64)
    run = torch.compile(model, backend="mindspeed", options={"inductor": {"triton.cudagraphs": True}})
    want = gradients(exact, exact, ids())
    for _ in range(4):
        assert off(gradients(model, run, ids()), want) < 1e-5


def test_eight_bits():
    """A linear layer whose products are of 8-bit numbers is near the one of 16."""
    from mindspeed_fx.kernels import linear_fp8

    x, w = torch.randn(256, 512).cuda().bfloat16(), torch.randn(384, 512).cuda().bfloat16()
    grad = torch.randn(256, 384).cuda().bfloat16()
    for recipe in ("row", "tensor"):
        y = linear_fp8.forward_by(linear_fp8.scaled_mm)(x, w, recipe)
        gradients = linear_fp8.backward_by(linear_fp8.scaled_mm)(grad, x, w, recipe, [True, True])
        emulated = torch.ops.mindspeed.linear_fp8(x, w, recipe)
        assert off(y.double(), emulated.double()) < 5e-3
        wide = [t.double() for t in (x, w, grad)]
        for have, want in zip((y, *gradients), (wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0])):
            assert off(have.double(), want) < 0.06
