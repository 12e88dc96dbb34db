"""ALiBi in Megatron's own layers, against the formula; over a divided sequence see test_context_parallel.py."""

from __future__ import annotations

import math

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.megatron import alibi

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
pytestmark = pytest.mark.usefixtures("on_one_rank")


def test_slopes_of_the_paper():
    assert alibi.slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi.slopes(16)[:2] == [2**-0.5, 2**-1.0]
    twelve = alibi.slopes(12)  # those of 8, and every other one of those of 16
    assert twelve[:8] == alibi.slopes(8) and twelve[8:] == alibi.slopes(16)[0:8:2] and alibi.slopes(1) == [2.0**-8]


def attention(dtype, mask="causal", **config):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=3,
        hidden_size=24,
        num_attention_heads=6,
        num_query_groups=2,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        masked_softmax_fusion=False,
        **config,
    )
    layer = DotProductAttention(config, 2, AttnMaskType[mask], "self")
    alibi.add_bias(layer)
    return layer


def formula(q, k, v):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2)))
    i = torch.arange(q.shape[2], dtype=q.dtype)
    scores = q @ k.mT / math.sqrt(4) + torch.tensor(alibi.slopes(6), dtype=q.dtype).view(-1, 1, 1) * (i - i[:, None])
    scores = scores.masked_fill(torch.ones(len(i), len(i), dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def inputs(dtype):
    torch.manual_seed(0)
    return [torch.randn(20, 2, heads, 4, dtype=dtype, requires_grad=True) for heads in (6, 2, 2)]


@pytest.mark.parametrize("config", [{}, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_is_that_of_the_formula(is_compiled, config):
    torch._dynamo.reset()
    layer, wholes = attention(torch.float64, **config), inputs(torch.float64)
    call = layer
    if is_compiled:
        report = mindspeed_fx.explain(layer, *wholes, None, options={"codegen": "eager"})
        assert report.graph_count == 1 and report.counts["fusion.attention"] == 1, report.skipped("fusion.attention")
        call = torch.compile(layer, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
        torch._dynamo.reset()
    values = []
    for function in (lambda *x: call(*x, None), formula):
        out = function(*wholes)
        values.append([out, *torch.autograd.grad(out.square().sum(), wholes)])
    # Softmaxes by Megatron's float32 rounding where it asks for float32, and else in float64.
    tolerance = 1e-5 if config else 1e-12
    for a, b in zip(*values, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_wide", [True, False])
def test_sixteen_bits_do_not_round_distances(is_wide):
    """Far from the first key neighbours differ by one distance, which 16 bits of the position do not have."""
    layer = attention(torch.bfloat16, attention_softmax_in_fp32=is_wide)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1024, 1, heads, 4) for heads in (6, 2, 2))
    out = layer(*(x.bfloat16() for x in (q, k, v)), None)
    right = formula(*(x.bfloat16().float() for x in (q, k, v)))
    assert out.dtype == torch.bfloat16 and (out - right).abs().max() < 0.05


def test_other_attention_is_refused():
    with pytest.raises(
        ValueError, match="--position-embedding-type alibi: attention that is not causal; valid: causal"
    ):
        attention(torch.float64, mask="padding")
