"""A few architectures, chosen for their spellings; ``python -m tests.zoo.table`` runs them all."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs Hugging Face transformers")
from tests.transformers_parts import need_grouped_products
from tests.zoo import architectures, neutral, sites, table

QUICK = {
    "gpt_oss": {"fusion.attention": 2, "fusion.rms_norm": 5, "fusion.rope": 4},  # sinks
    "deepseek_v3": {"fusion.attention": 2, "fusion.rope": 4},  # latent attention, reordered pairs
    "vision/vit": {"fusion.attention": 2, "fusion.layer_norm": 5},  # no mask
}
MORE = [
    "audio/wav2vec2",
    "masked/modernbert",
    "multimodal/exaone4_5",
    "multimodal/gemma3",
    "multimodal/qwen2_5_vl",
    "seq2seq/t5",
    "zamba2",
    "bloom",
    "codegen",
    "cohere",
    "deepseek_v2",
    "falcon",
    "gemma2",
    "glm4",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
]


def check(name, **settings):
    model, inputs = architectures.made(name, {})
    inputs |= settings
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        need_grouped_products()
    row = table.check(name, model, inputs)
    assert {p: row.fused[p] for p in table.PASSES} == {p: row.sites[p] for p in table.PASSES}, row.reasons
    assert row.error < 1e-5
    return row


@pytest.mark.parametrize("name", QUICK)
def test_every_site_is_fused(name):
    row = check(name)
    assert {p: n for p, n in row.sites.items() if n and p != "fusion.cross_entropy"}.items() >= QUICK[name].items()


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_site_is_fused_in_more_models(name):
    check(name)


@pytest.mark.parametrize(
    "name", ["mamba", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lfm2", *MORE) if "/" not in n)]
)
def test_every_site_is_fused_where_a_cache_is_kept(name):
    """As transformers does where it is told nothing, in training, too: keys and states are copied into a cache."""
    check(name, use_cache=True)


@pytest.mark.parametrize("name", [pytest.param("gemma2", marks=pytest.mark.slow), "gpt_oss"])
def test_bfloat16_is_as_close_to_float64_as_the_unfused_model_is(name):
    assert table.in_bfloat16(*architectures.build(name)) <= 2


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt_oss", "jetmoe", "xlstm", *MORE) if n != "llama"),
    ],
)
def test_memory_plans_leave_every_bit_dropout_included(name):
    model, inputs = architectures.build(name)
    found = neutral.decisions(neutral.with_dropout(model), inputs)
    assert found["recomputed"] > 10 and found["moved"] > 10


def test_a_bit_that_differs_is_seen(monkeypatch):
    model, inputs = architectures.build("llama")
    monkeypatch.setattr(neutral, "PLANS", {"another": {"disable": ["fusion.*"]}})
    with pytest.raises(AssertionError, match="results differ"):
        neutral.decisions(model, inputs)


def test_sites_are_counted_by_meaning():
    x, w = torch.randn(2, 4, 6, 8), torch.randn(8)
    with sites.CountSites() as counted:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w
        F.rms_norm(normed, (8,), w)
        centered = x - x.mean(-1, keepdim=True)
        F.layer_norm(centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5), (8,))
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        F.softmax(x @ x.transpose(-1, -2), -1).to(x.dtype) @ x
        (
            torch.einsum("bnij,bnjd->bnid", (F.softmax(x @ x.mT, -1), x)),
            torch.einsum("bnjd,bnij->bnid", x, F.softmax(x @ x.mT, -1)),
        )
        F.nll_loss(F.log_softmax(x.flatten(0, -2), -1), torch.zeros(48, dtype=torch.long))
        x * w + torch.cat((-x[..., 4:], x[..., :4]), -1) * w
        torch.cat((x[..., :4] * w[:4] - x[..., 4:] * w[4:], x[..., 4:] * w[:4] + x[..., :4] * w[4:]), -1)
        torch.view_as_real(torch.view_as_complex(x.reshape(2, 4, 6, 4, 2)) * torch.ones(4, dtype=torch.cfloat)).flatten(
            -2
        )
        F.silu(x) * x, F.gelu(x) * x, x * torch.sigmoid(x) * x, x * torch.sigmoid(1.702 * x) * (x + 1)
        F.silu(x) * 2, x.softmax(-1) + x, torch.rsqrt(x.abs().mean(-1))  # none of these is a site
    assert dict(counted.counts) == {
        "fusion.rms_norm": 2,
        "fusion.layer_norm": 3,
        "fusion.attention": 3,
        "fusion.cross_entropy": 1,
        "fusion.rope": 3,
        "fusion.swiglu": 3,
        "fusion.glu": 1,
    }
