"""Cosines and sines of rotations are written once, and generated code does not compute them where they are read."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx import explain
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering import angle_tables

NAME = angle_tables.NAME
HEADS, SEQ, DIM = 4, 8, 16


def angles():
    return torch.arange(SEQ)[:, None] * torch.rand(DIM, dtype=torch.float64)


def rewritten(f, *args, codegen="inductor"):
    gm = make_fx(f, tracing_mode="fake")(*args)
    report = angle_tables.angle_tables(gm, Context(Options.parse({"codegen": codegen}).resolve("cpu"), "forward"))
    gm.graph.lint()
    return gm, report


def turned(x, angle):
    cos = (angle.cos() * 0.5).to(x.dtype)[None, None]
    return x * cos + x.flip(-1) * angle.sin().to(x.dtype)[None, None]


def test_the_last_value_of_the_same_size_is_written():
    x, angle = torch.randn(2, HEADS, SEQ, DIM).bfloat16(), angles()
    gm, report = rewritten(turned, x, angle)
    assert [(s.operator, len(s.nodes)) for s in report.rewrites] == [("table", 5), ("table", 4)]
    assert torch.equal(gm(x, angle), turned(x, angle))


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda x, angle: x[0, 0] * angle.cos(), f"reads its {SEQ * DIM} elements is 2 times as large"),
        (lambda x, angle: angle.sin(), f"reads its {SEQ * DIM} elements is 2 times as large"),
        (lambda x, angle: x.cos() * 2, f"reads its {2 * HEADS * SEQ * DIM} elements is 2 times as large"),
    ],
)
def test_what_nothing_larger_reads_stays(f, reason):
    _, report = rewritten(f, torch.randn(2, HEADS, SEQ, DIM), angles())
    assert not report.rewrites and reason in report.skipped[0].reason


def test_without_generated_code_nothing_is_to_do():
    _, report = rewritten(turned, torch.randn(2, HEADS, SEQ, DIM), angles(), codegen="eager")
    assert not report.rewrites and "every value is written" in report.notes[0]


class Turns(nn.Module):
    """Two layers that turn by the same angles."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, dtype=dtype) for _ in range(2))

    def forward(self, x, angle):
        for layer in self.layers:
            x = turned(layer(x), angle)
        return x.square().sum()


def trained(model, x, angle, **settings):
    """Gradients of a compiled step, and the generated code of both directions."""
    model.zero_grad()
    step = torch.compile(model, backend="mindspeed", **settings)
    _, codes = run_and_get_code(lambda: step(x, angle).backward())
    return [p.grad.clone() for p in model.parameters()], "".join(codes)


def test_each_direction_computes_a_cosine_once():
    model, x, angle = Turns(), torch.randn(2, HEADS, SEQ, DIM, dtype=torch.float64), angles()
    have, code = trained(model, x, angle, dynamic=False)
    torch._dynamo.reset()
    want, again = trained(model, x, angle, dynamic=False, options={"disable": [NAME]})
    assert all((h - w).norm() <= 1e-12 * w.norm() for h, w in zip(have, want, strict=True))
    assert 0 < 2 * cosines(code) <= cosines(again)  # two layers read them


def cosines(code):
    return code.count(".cos()") + code.count("std::cos(")


def test_gradients_in_16_bits_and_sizes_that_change():
    model = Turns(torch.bfloat16)
    for batch in (2, 3):
        x, angle = torch.randn(batch, HEADS, SEQ, DIM).bfloat16(), angles()
        model.zero_grad()
        model(x, angle).backward()
        want = [p.grad.clone() for p in model.parameters()]
        have, _ = trained(model, x, angle, dynamic=True)
        assert all((h - w).norm() <= 2e-2 * w.norm() for h, w in zip(have, want, strict=True))


def test_of_a_llama_both_tables_forward_and_backward():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model, ids = LlamaForCausalLM(config), torch.randint(64, (2, 16))
    report = explain(model, input_ids=ids, labels=ids, use_cache=False)
    saved = " @ " in inspect.getsource(LlamaRotaryEmbedding)  # transformers 4: no backward computes a matmul again
    assert report.counts[NAME] == (2 if saved else 4) and not report.skipped(NAME)
