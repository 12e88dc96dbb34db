"""Packed documents become an attention that computes no score between two of them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels.npu import npu_graphs
from tests.models import function_agrees

ops = torch.ops.mindspeed
NAME, SEQ = "fusion.attention", 12
LIMITS = torch.tensor([0, 5, 5, 9, 12])
LENGTHS = LIMITS.diff()


def causal(seq=SEQ):
    return torch.ones(seq, seq, dtype=torch.bool).tril()


def searched():
    return torch.searchsorted(LIMITS, torch.arange(SEQ), right=True)


def bucketed():
    return torch.bucketize(torch.arange(SEQ), LIMITS[1:], right=True)[None]


def repeated():
    return torch.repeat_interleave(torch.arange(4), LENGTHS, output_size=SEQ)


def equal(d):
    return d.unsqueeze(-1) == d.unsqueeze(-2)


def by_fill(q, k, v):
    allowed = equal(searched()) & causal()
    return (q @ k.mT * 0.5).masked_fill(~allowed, float("-inf")).softmax(-1) @ v


def by_two_fills(q, k, v):
    d = bucketed()
    scores = (q @ k.mT * 0.5).masked_fill(torch.triu(torch.ones(SEQ, SEQ), 1).bool(), float("-inf"))
    return scores.masked_fill((d[:, None, :, None] != d[:, None, None, :]), float("-inf")).softmax(-1) @ v


def by_or(q, k, v):
    d = repeated()
    blocked = (d[:, None] != d[None]) | causal().logical_not()
    return torch.where(blocked, float("-inf"), q @ k.transpose(2, 3) * 0.5).softmax(-1) @ v


def by_addition(q, k, v):
    d = searched()
    apart = torch.zeros(SEQ, SEQ, dtype=q.dtype).masked_fill((d[:, None] - d[None, :]) != 0, -1e9)
    return (q @ k.mT * 0.5 + apart[None, None]).softmax(-1) @ v


def by_window(q, k, v):
    i = torch.arange(SEQ)
    near = (i[:, None] >= i) & (i[:, None] - i < 3)
    return F.scaled_dot_product_attention(q, k, v, near & equal(searched()), scale=0.5)


def by_scattered_numbers(q, k, v):
    d = torch.tensor([[1, 1, 2, 2, 1, 1, 3, 3, 2, 2, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]])
    return F.scaled_dot_product_attention(q, k, v, (d[:, None, :, None] == d[:, None, None]) & causal(), scale=0.5)


def chunked(q, k, v):
    d = torch.arange(SEQ) // 5
    return F.scaled_dot_product_attention(q, k, v, (d[:, None] == d) * causal(), scale=0.5)


FORMS = (by_fill, by_two_fills, by_or, by_addition, by_window, by_scattered_numbers, chunked)


@pytest.fixture
def calls(monkeypatch):
    """Counts how often the operator runs."""
    from mindspeed_fx.kernels import varlen_attention as file

    found, plain = [], file._pieces
    monkeypatch.setattr(file, "_pieces", lambda documents, batch: found.append(documents) or plain(documents, batch))
    return found


def qkv(batch=2, heads=4, kv=4, dim=8, dtype=torch.double):
    return [torch.randn(batch, n, SEQ, dim, dtype=dtype, requires_grad=True) for n in (heads, kv, kv)]


@pytest.mark.parametrize(
    "form", [pytest.param(f, id=f.__name__, marks=() if f is by_or else pytest.mark.slow) for f in FORMS]
)
def test_every_spelling(form, calls):
    report = function_agrees(form, *qkv())
    assert report.counts[NAME] == 1 and not report.skipped(NAME)
    assert len(calls) >= 2, "forward and backward did not run document by document"


@pytest.mark.parametrize(
    "form",
    [
        lambda q, k, v: (q @ k.mT * 0.5).masked_fill(equal(searched()), float("-inf")).softmax(-1) @ v,
        pytest.param(
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, equal(torch.tensor([[[0] * 6 + [1] * 6] * 4, [[0] * 3 + [1] * 9] * 4])), scale=0.5
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_masks_of_numbers_stay_masks(form, calls):
    assert function_agrees(form, *qkv()).counts[NAME] == 1 and not calls


def test_positions_that_count_on_are_one_document(calls):
    """Hugging Face numbers documents by where positions do not count on; positions made in the graph always do."""

    def one(q, k, v):
        p = torch.arange(SEQ)[None]
        d = (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        return F.scaled_dot_product_attention(q, k, v, (d[:, None, :, None] == d[:, None, None]) & causal(), scale=0.5)

    report = function_agrees(one, *qkv())
    assert report.counts[NAME] == 1 and not calls
    code = report.graphs[0].stages["forward"]
    assert "flash" in code and "cumsum" not in code and "attn_mask" not in code, "the mask is still computed"


def expected(q, k, v, documents, causal, scale, window):
    allowed = documents[:, None, :, None] == documents[:, None, None]
    i = torch.arange(q.shape[2])
    if causal:
        allowed = allowed & (i[:, None] >= i)
    if window:
        allowed = allowed & (i[:, None] - i < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (q @ k.mT * scale).masked_fill(~allowed, float("-inf")).softmax(-1) @ v


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([(4, 4, 8, 8), (4, 2, 8, 4), (2, 1, 4, 8)]),
    st.lists(st.integers(1, 90), min_size=1, max_size=6),
    st.sampled_from([0, 3, 70]),
    st.booleans(),
)
def test_the_operator(batch, shuffled, shape, lengths, window, causal):
    heads, kv, dim, v_dim = shape
    documents = (
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].expand(batch, -1).contiguous()
    )
    documents = torch.stack([row[torch.randperm(row.numel())] for row in documents]) if shuffled else documents[:1]
    seq, window = documents.shape[1], window if causal else 0
    q, k, v = (
        torch.randn(batch, n, seq, d, dtype=torch.double, requires_grad=True)
        for n, d in ((heads, dim), (kv, dim), (kv, v_dim))
    )
    out = ops.varlen_attention(q, k, v, documents, None, causal, 0.3, window)[0]
    wanted = expected(q, k, v, documents.expand(batch, -1), causal, 0.3, window)
    weight = torch.randn_like(out)
    for a, b in zip(
        (out, *torch.autograd.grad(out, (q, k, v), weight)), (wanted, *torch.autograd.grad(wanted, (q, k, v), weight))
    ):
        torch.testing.assert_close(a, b)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(10, 16), nn.Linear(16, 48)

    def forward(self, ids, limits):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        places = torch.arange(ids.shape[1]).expand(*limits.shape[:-1], -1).contiguous()
        d = torch.searchsorted(limits, places, right=True)
        same = d[..., :, None] == d[..., None, :]
        same = same[:, None] if limits.dim() == 2 else same
        return F.scaled_dot_product_attention(q, k, v, same & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()).sum(1)


@pytest.mark.parametrize(
    "shapes,words",
    [
        ([(1, 2, 6, 4), (1, 4, 6, 4), (1, 4, 6, 4)], "4 heads of keys"),
        ([(1, 4, 6, 4), (1, 4, 3, 4), (1, 4, 3, 4)], "k is"),
        ([(1, 4, 6, 4), (1, 4, 6, 4), (1, 2, 6, 4)], "v is"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, words):
    """ATen's kernel would divide by zero, which ends the process, or read past the end."""
    with pytest.raises(ValueError, match=words):
        torch.ops.mindspeed.varlen_attention(
            *(torch.randn(s) for s in shapes), torch.zeros(1, 6, dtype=torch.long), None, True, 0.3
        )


@pytest.mark.parametrize("rows, limits", [(1, LIMITS), (3, LIMITS), (2, torch.stack([LIMITS, LIMITS // 2]))])
def test_on_npu_the_kernel_takes_the_lengths(rows, limits):
    ids = torch.arange(rows * SEQ).view(rows, SEQ) % 10
    graphs = npu_graphs.trains_alike(Packed(), ids, limits, dtype=torch.bfloat16)
    assert (
        graphs.npu() == {"npu_fusion_attention_v3": 1, "npu_fusion_attention_grad_v3": 1} and graphs.unlowered() == []
    )
    assert sorted(row["kernel"] for row in graphs.rows()) == [
        "npu_fusion_attention_grad_v3 in TND",
        "npu_fusion_attention_v3 in TND",
    ]


class Varlen(nn.Module):
    """As an outside user calls torch's own function, which has no kernel for CPU."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, limits):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (t.unflatten(-1, (4, 4)) for t in self.qkv(x).chunk(3, -1))
        return varlen_attn(q, k, v, limits, limits, 5, 5, scale=0.4, window_size=(-1, 0))


def test_varlen_attn_of_torch_runs_on_cpu():
    pytest.importorskip("torch.nn.attention.varlen")
    model, x = Varlen(), torch.randn(SEQ, 16)
    out = torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})(x, LIMITS.int())
    q, k, v = (t.unflatten(-1, (4, 4)).transpose(0, 1)[None] for t in model.qkv(x).chunk(3, -1))
    wanted = expected(q, k, v, searched()[None], True, 0.4, 0)[0].transpose(0, 1)
    torch.testing.assert_close(out, wanted)
    grads = [torch.autograd.grad((o * torch.arange(4.0)).sum(), model.qkv.weight)[0] for o in (out, wanted)]
    torch.testing.assert_close(*grads)
    torch._dynamo.reset()


def test_another_attention_behind_documents_under_a_budget():
    """What the kernel of documents asks of their values, a measurement of its memory left as sizes of no graph."""

    def f(q, k, v):
        return F.scaled_dot_product_attention(by_fill(q, k, v), k, v, is_causal=True)

    args = [torch.randn(2, 2, SEQ, 4, dtype=torch.double, requires_grad=True) for _ in "qkv"]
    report = function_agrees(f, *args, level=1, memory_budget="min")
    assert report.counts[NAME] == 2
