"""Models for tests: a Llama written out in the spelling a plain PyTorch user would choose, and what compares two
models.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import mindspeed_fx
from mindspeed_fx.backend import Compilation
from mindspeed_fx.compat import dynamo, graph_inputs
from mindspeed_fx.options import Options
from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder


class RMSNorm(nn.Module):
    def __init__(self, hidden, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(hidden) + 0.5), eps

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self, hidden=32, heads=4, kv_heads=2, ffn=64):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.dim, bias=False) for _ in range(2))
        self.gate_up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(b, s, n, self.dim).transpose(1, 2)
            for layer, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.dim**0.5
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = F.softmax(
            scores.masked_fill(mask, float("-inf")), dim=-1, dtype=torch.float32 if x.dtype != torch.float64 else None
        ).to(x.dtype)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class Llama(nn.Module):
    """Per layer: 2 norms, 2 rotations, 1 attention, 1 SwiGLU; plus a last norm and a cross-entropy."""

    def __init__(self, layers=2, vocab=64, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.checkpointed = False

    def forward(self, ids, labels):
        x = self.embed(ids)
        angles = torch.outer(
            torch.arange(ids.shape[1], device=ids.device).float(),
            1.0 / 100.0 ** (torch.arange(0, 8, 2, device=ids.device) / 8),
        )
        cos, sin = (torch.cat((f(angles), f(angles)), -1).to(x.dtype) for f in (torch.cos, torch.sin))
        for block in self.blocks:
            x = (
                torch.utils.checkpoint.checkpoint(block, x, cos, sin, use_reentrant=False)
                if self.checkpointed
                else block(x, cos, sin)
            )
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


LLAMA_COUNTS = {
    "fusion.add_rms_norm": 4,
    "fusion.attention": 2,
    "fusion.cross_entropy": 1,
    "fusion.rms_norm": 5,
    "fusion.rope": 4,
    "fusion.swiglu": 2,
}


def double(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.double, requires_grad=grad)


def tokens(batch=2, seq=16, vocab=64):
    return torch.randint(0, vocab, (batch, seq)), torch.randint(0, vocab, (batch, seq))


def fusion_counts(report) -> dict[str, int]:
    return {name: n for name, n in report.counts.items() if name.startswith("fusion.") and n}


def explain(model, *args, **options):
    return mindspeed_fx.explain(model, *args, options={"codegen": "eager", **options})


def gradients(model, *args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"no gradient for {missing}"
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_same_training(model, *args, tolerance: float, **options):
    """One step of the compiled model gives the eager model's loss and every one of its gradients."""
    loss, expected = gradients(copy.deepcopy(model), *args)
    compiled = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager", **options})
    model.zero_grad()
    actual_loss = compiled(*args)
    actual_loss.backward()
    assert (actual_loss - loss).abs() <= tolerance * loss.abs().clamp_min(1e-6)
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, f"the gradient of {name} disappeared"
            assert (p.grad - expected[name]).abs().max() <= tolerance * expected[name].abs().max(), name
        else:
            assert p.grad is None, name


def function_agrees(f, *inputs, tolerance=1e-9, **options):
    """Outputs and gradients of a function of tensors, compiled and eager; returns the report of that compilation."""

    def run(g):
        given = [i.detach().clone().requires_grad_(i.requires_grad) for i in inputs]
        out = g(*given)
        outs = out if isinstance(out, tuple) else (out,)
        wanted = [o for o in outs if o.requires_grad]
        leaves = [i for i in given if i.requires_grad]
        weights = [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view_as(o) for o in wanted]
        grads = torch.autograd.grad(wanted, leaves, weights, allow_unused=True) if wanted and leaves else ()
        return [o.detach() for o in outs], grads

    expected = run(f)
    torch._dynamo.reset()
    with recorder.collecting() as graphs, dynamo.recompiling():
        compiled = run(torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager", **options}))
    for a, b in zip((*expected[0], *expected[1]), (*compiled[0], *compiled[1]), strict=True):
        assert (a is None) == (b is None), "a gradient appeared or disappeared"
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert (a - b).abs().max() <= tolerance * a.abs().max().clamp_min(1e-12)
    torch._dynamo.reset()
    return Report(list(graphs), [])


def captured_records(model, inputs, options):
    """What passes do to the graphs of ``model(**inputs)`` in training, up to where a backward would be made: nothing is
    compiled, the model runs as it is."""
    results = []

    def backend(gm, _):
        compilation = Compilation(Options.parse(options).resolve("cpu"))
        copied = graph_inputs.copy_dynamo_graph(gm)
        try:
            compilation.capture(copied)
        finally:
            recorder.discard(compilation.record)
            graph_inputs.drop_owner(copied)
        results.append(compilation.record)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**inputs)
    return results
