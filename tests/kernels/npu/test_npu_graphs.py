"""Models compiled for the target "npu": which kernels their graphs call, that nothing is left unlowered, and that the
lowered graphs, run through emulated operators, train as the models do."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import models
from tests.kernels.npu import npu_graphs

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])


@TYPES
def test_llama(dtype):
    graphs = npu_graphs.trains_alike(models.Llama(), *models.tokens(), dtype=dtype)
    assert graphs.npu("forward") == {
        "npu_rms_norm": 1,
        "npu_add_rms_norm": 4,
        "npu_fusion_attention_v3": 2,
        "npu_swiglu": 2,
        "npu_cross_entropy_loss": 1,
    }
    assert graphs.npu("backward") == {
        "npu_rms_norm_backward": 5,
        "npu_fusion_attention_grad_v3": 2,
        "npu_swiglu_backward": 2,
        "npu_cross_entropy_loss_backward": 1,
    }
    assert graphs.triton("forward") == {"rope_pair_triton": 2, "attention_lse_triton": 2}
    assert graphs.triton("backward") == {"rope_pair_triton": 2}
    assert graphs.unlowered() == [] and graphs.left() == []
    masks = [sum(calls.get("aten.triu", 0) for side, calls, _ in graphs if side == s) for s in ("forward", "backward")]
    assert masks == [1, 1], "each layer makes its own mask"


def test_llama_of_any_length():
    model, options = models.Llama(), npu_graphs.OPTIONS
    compiled = torch.compile(model, backend="mindspeed", dynamic=True, options=options)
    with npu_graphs.lowered() as graphs:
        for seq in (8, 16, 11):
            args = models.tokens(seq=seq)
            loss, expected = npu_graphs.step(model, model, args)
            have_loss, have = npu_graphs.step(compiled, model, args)
            npu_graphs.assert_no_gradient_vanished(expected, have)
            assert (
                all(npu_graphs.distance(have[n], expected[n]) < 1e-4 for n in expected) and abs(loss - have_loss) < 1e-5
            )
    assert len(graphs) == 2 and graphs.unlowered() == [] and graphs.npu()["npu_fusion_attention_v3"] == 2


class QueriesAndKeys(nn.Module):
    """Attention of Qwen3: queries and keys are normalized, then turned; of OLMo 2 with a norm over all heads."""

    def __init__(self, hidden=32, heads=4, kv_heads=2, whole=False):
        super().__init__()
        self.dim, self.counts, self.whole = hidden // heads, (heads, kv_heads, kv_heads), whole
        self.qkv = nn.ModuleList(nn.Linear(hidden, n * self.dim, bias=False) for n in self.counts)
        self.norms, self.out = (
            nn.ModuleList(models.RMSNorm(n * self.dim if whole else self.dim) for n in self.counts[:2]),
            nn.Linear(hidden, hidden, bias=False),
        )

    def forward(self, x):
        b, s, _ = x.shape
        angles = torch.outer(
            torch.arange(s, device=x.device).float(), torch.tensor([1.0, 0.3, 0.1, 0.03], device=x.device)
        ).repeat(1, 2)
        q, k, v = (layer(x) for layer in self.qkv)
        if self.whole:
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k)))
        q, k, v = (t.view(b, s, n, self.dim) for t, n in zip((q, k, v), self.counts))
        if not self.whole:
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k)))
        q, k = (models.rotate(t.transpose(1, 2), angles.cos().to(x.dtype), angles.sin().to(x.dtype)) for t in (q, k))
        return self.out(
            F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


@TYPES
def test_norms_of_queries_and_keys(dtype):
    graphs = npu_graphs.trains_alike(QueriesAndKeys(), torch.randn(2, 9, 32, requires_grad=True), dtype=dtype)
    ours = [(r["operator"], r["side"]) for r in graphs.rows() if r["kernel"].startswith("triton, ")]
    assert sorted(ours) == sorted(
        [("mindspeed.qk_norm_rope", "forward"), ("mindspeed.qk_norm_rope_backward", "backward")] * 2
    )
    assert not {"npu_rms_norm", "npu_rotary_mul"} & {*graphs.npu()} and graphs.unlowered() == []


def test_a_norm_over_all_heads_stays_an_operator_of_its_own():
    graphs = npu_graphs.trains_alike(QueriesAndKeys(whole=True), torch.randn(2, 9, 32, requires_grad=True))
    assert graphs.npu("forward")["npu_rms_norm"] == 2 and graphs.triton("forward")["rope_pair_triton"] == 1
    assert graphs.unlowered() == []


class Gpt2(nn.Module):
    def __init__(self, hidden=32, heads=4, vocab=64):
        super().__init__()
        self.heads, self.embed, self.positions = heads, nn.Embedding(vocab, hidden), nn.Embedding(64, hidden)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(hidden) for _ in range(3))
        self.qkv, self.proj, self.up, self.down = (
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, ids, labels):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return F.cross_entropy((self.norm3(x) @ self.embed.weight.t()).flatten(0, 1).float(), labels.flatten())


@TYPES
def test_gpt2(dtype):
    graphs = npu_graphs.trains_alike(Gpt2(), *models.tokens(), dtype=dtype)
    assert graphs.npu() == {
        "npu_add_layer_norm": 2,
        "npu_fusion_attention_v3": 1,
        "npu_fusion_attention_grad_v3": 1,
        "npu_cross_entropy_loss": 1,
        "npu_cross_entropy_loss_backward": 1,
    }
    assert graphs.unlowered() == []


class Experts(nn.Module):
    """Two of four experts for each token, by torch's own grouped product."""

    def __init__(self, hidden=16, ffn=24, experts=4, k=2):
        super().__init__()
        self.k, self.router = k, nn.Linear(hidden, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, hidden, 2 * ffn) / 4),
            nn.Parameter(torch.randn(experts, ffn, hidden) / 5),
        )

    def forward(self, x):
        probs, chosen = self.router(x).softmax(-1).topk(self.k, -1)
        permuted, order = torch.ops.mindspeed.moe_permute(x, chosen)
        ends = torch.bincount(chosen.flatten(), minlength=self.up.shape[0]).cumsum(0)
        hidden = torch.ops.mindspeed.grouped_matmul(permuted, self.up, ends)
        out = torch.ops.mindspeed.grouped_matmul(torch.ops.mindspeed.swiglu(hidden), self.down, ends)
        return torch.ops.mindspeed.moe_unpermute(out, order, probs, self.k)


def test_experts():
    graphs = npu_graphs.trains_alike(Experts(), torch.randn(13, 16, requires_grad=True))
    assert graphs.npu("forward") == {
        "npu_moe_gating_top_k": 1,
        "npu_moe_token_permute": 1,
        "npu_grouped_matmul": 2,
        "npu_swiglu": 1,
        "npu_moe_token_unpermute": 1,
    }
    assert graphs.npu("backward") == {
        "npu_moe_token_unpermute_grad_v2": 1,
        "npu_grouped_matmul": 4,
        "npu_swiglu_backward": 1,
        "npu_moe_token_permute_grad_v2": 1,
    }
    assert graphs.unlowered() == []


class ExpertsOfHuggingFace(nn.Module):
    """The spelling of its models: choices sorted, counted as sorted, weights stored as [experts, out, in]."""

    def __init__(self, hidden=16, ffn=24, experts=4, k=2):
        super().__init__()
        self.k, self.router = k, nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * ffn, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, ffn) / 5)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.k, -1)
        experts, order = chosen.reshape(-1).sort()
        counts = torch.histc(experts.float(), bins=self.up.shape[0], min=0, max=self.up.shape[0] - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        product = torch.ops.mindspeed.grouped_matmul if x.dtype == torch.float64 else torch._grouped_mm
        rows = product(x[order // self.k], self.up.transpose(-2, -1), ends)
        gate, up = rows.chunk(2, -1)
        rows = product(F.silu(gate) * up, self.down.transpose(-2, -1), ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return (rows * weights.reshape(-1)[order].unsqueeze(-1))[back].view(-1, self.k, x.shape[1]).sum(1)


def test_experts_start_nothing_for_rows_without_one_nor_to_store_gradients():
    model = ExpertsOfHuggingFace()
    graphs = npu_graphs.trains_alike(model, torch.randn(13, 16, requires_grad=True), dtype=torch.bfloat16)
    assert graphs.npu()["npu_grouped_matmul"] == 6 and graphs.unlowered() == []
    calls = {side: calls for side, calls, _ in graphs}
    for side, names in (("forward", ("aten.sort", "aten.masked_fill")), ("backward", ("aten.masked_fill",))):
        assert not [n for n in names if n in calls[side]], calls[side]
    assert calls["backward"].get("aten.clone", 0) == 0


class Head(nn.Module):
    def __init__(self, reduction, vocab=150, hidden=16):
        super().__init__()
        self.reduction, self.head = reduction, nn.Linear(hidden, vocab, bias=False)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(x).float(), labels, ignore_index=-1, reduction=self.reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction):
    labels = torch.randint(0, 150, (11,))
    labels[3], labels[7] = -1, 149
    graphs = npu_graphs.trains_alike(
        Head(reduction),
        torch.randn(11, 16, requires_grad=True),
        labels,
        dtype=torch.bfloat16,
        enable=["fusion.linear_cross_entropy"],
    )
    assert graphs.npu()["npu_fused_linear_cross_entropy_loss_with_max_sum_backward"] == 1
    assert graphs.npu()["npu_fused_linear_online_max_sum"] == (2 if reduction == "none" else 1)
    assert graphs.unlowered() == []


class ZLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, x, labels):
        logits = self.head(x).float()
        return F.cross_entropy(logits, labels, ignore_index=-1) + 0.1 * logits.logsumexp(-1).square().mean()


@TYPES
def test_z_loss(dtype):
    labels = torch.randint(0, 40, (11,))
    labels[3] = -1
    graphs = npu_graphs.trains_alike(ZLoss(), torch.randn(11, 16, requires_grad=True), labels, dtype=dtype)
    assert (
        graphs.npu() == {"npu_cross_entropy_loss": 1, "npu_cross_entropy_loss_backward": 1} and graphs.unlowered() == []
    )


def test_frozen_parameters_and_no_gradient():
    model = models.Llama()
    for parameter in (model.norm.weight, model.embed.weight, model.blocks[0].q.weight):
        parameter.requires_grad_(False)
    assert npu_graphs.trains_alike(model, *models.tokens()).unlowered() == []
    torch._dynamo.reset()
    args = models.tokens()
    with torch.no_grad(), npu_graphs.lowered() as graphs:
        have = torch.compile(model, backend="mindspeed", options=npu_graphs.OPTIONS)(*args)
        assert (have - model(*args)).abs() < 1e-5
    assert [side for side, *_ in graphs] == ["inference"] and graphs.unlowered() == []


def test_trained_angles_keep_their_gradient():
    """npu_rotary_mul_backward would lose it, so it is not called."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.cos, self.sin = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(6, 16))

        def forward(self, x):
            return torch.ops.mindspeed.rope(x, self.cos, self.sin, False)

    graphs = npu_graphs.trains_alike(Rotary(), torch.randn(2, 4, 6, 16, requires_grad=True))
    assert graphs.npu() == {"npu_rotary_mul": 1} and "the angles need gradients" in graphs.unlowered()[0]


class HuggingFace(nn.Module):
    """A small model of ``transformers`` and its loss."""

    def __init__(self, name):
        super().__init__()
        pytest.importorskip("transformers")
        from tests.zoo import architectures

        model, inputs = architectures.build(name, "sdpa" if name != "gpt_oss" else "eager")
        self.model, self.ids, self.name = model.float(), inputs["input_ids"], name
        self.model.loss_type = "ForCausalLM"  # unset for GPT-2, about which it would warn, once and outside any graph

    def __deepcopy__(self, memo):
        """In float64 torch has no grouped product for the experts: a copy calls them one by one."""
        made = HuggingFace(self.name)
        made.load_state_dict(self.state_dict())
        made.model.set_experts_implementation("eager")
        return made

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt2", "gpt_oss"])
def test_hugging_face(name):
    torch._dynamo.reset()
    with npu_graphs.lowered() as graphs:
        run = HuggingFace(name)
        loss, expected = npu_graphs.step(run, run, (run.ids,))
        have_loss, have = npu_graphs.step(
            torch.compile(run, backend="mindspeed", options=npu_graphs.OPTIONS), run, (run.ids,)
        )
    npu_graphs.assert_no_gradient_vanished(expected, have)
    floor = 1e-3 * max(g.abs().max() for g in expected.values() if g is not None)
    for n, g in itertools.chain([("loss", loss)], expected.items()):
        if g is not None and (n == "loss" or g.abs().max() > floor):
            assert npu_graphs.distance(have_loss if n == "loss" else have[n], g) < 2e-5, n
    assert graphs.npu()["npu_fusion_attention_v3"] == 2 and graphs.npu()["npu_fusion_attention_grad_v3"] == 2
    assert graphs.unlowered() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt2"])
def test_hugging_face_in_bfloat16(name):
    run = HuggingFace(name)
    graphs = npu_graphs.trains_alike(run, run.ids, dtype=torch.bfloat16)
    assert graphs.unlowered() == [] and graphs.npu()["npu_fusion_attention_grad_v3"] == 2
