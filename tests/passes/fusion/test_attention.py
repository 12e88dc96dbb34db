import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.kernels.cpu import attention_flash
from mindspeed_fx.passes.fusion.analysis.attention_scores import Miss
from mindspeed_fx.passes.fusion.emit import attention as attention_emit
from tests.models import explain, function_agrees

NAME = "fusion.attention"


def qkv(heads=4, kv_heads=4, seq=6, dim=8, batch=2, dtype=torch.double):
    return [torch.randn(batch, n, seq, dim, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def causal(s):
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def call_of(report):
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    return next(line for line in run.after.splitlines() if "mindspeed.attention" in line)


def positions_le(s):
    return torch.arange(s)[None, :] <= torch.arange(s)[:, None]


CAUSAL = {
    "triu, masked_fill": lambda a, s: a.masked_fill(causal(s), float("-inf")),
    "minus ten thousand": lambda a, s: a.masked_fill(torch.triu(torch.ones(s, s), diagonal=1).bool(), -10000.0),
    "additive": lambda a, s: a + torch.full((s, s), float("-inf"), dtype=a.dtype).triu(1),
    "tril, where": lambda a, s: torch.where(torch.ones(s, s).tril() == 1, a, torch.finfo(a.dtype).min),
    "tril, where, tensor": lambda a, s: torch.where(
        torch.ones(s, s).tril() == 1, a, torch.tensor(torch.finfo(a.dtype).min, dtype=a.dtype)
    ),
    "bounded from below": lambda a, s: torch.max(
        a + torch.full((s, s), torch.finfo(a.dtype).min, dtype=a.dtype).triu(1),
        torch.tensor(torch.finfo(a.dtype).min, dtype=a.dtype),
    ),
    "tril == 0": lambda a, s: a.masked_fill(torch.tril(torch.ones(s, s)) == 0, float("-inf")),
    "positions": lambda a, s: a.masked_fill(~positions_le(s), float("-inf")),
    "positions, additive": lambda a, s: a + torch.where(positions_le(s), 0.0, -1e9).to(a.dtype),
    "one minus": lambda a, s: a + (1.0 - torch.ones(s, s, dtype=a.dtype).tril()) * -1e9,
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_are_recognized(name):
    def f(q, k, v):
        return F.softmax(CAUSAL[name](q @ k.transpose(-1, -2) / math.sqrt(8), q.shape[-2]), -1) @ v

    report = function_agrees(f, *qkv())
    assert report.counts[NAME] == 1 and ", None, True," in call_of(report)


def test_a_bound_below_is_kept_where_a_row_may_have_no_key():
    hidden = torch.zeros(2, 1, 1, 6, dtype=torch.double)
    hidden[1] = -torch.inf

    def f(q, k, v):
        return F.softmax((q @ k.transpose(-1, -2) + hidden).clamp_min(torch.finfo(q.dtype).min), -1) @ v

    report = function_agrees(f, *qkv())
    assert report.counts[NAME] == 0 and [s.reason for s in report.skipped(NAME)] == [
        "the scores are bounded from below, and a mask may hide a whole row"
    ]


def test_few_rows_are_left_to_generated_code_with_the_reason():
    hidden = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    hidden[1, ..., -2:] = True

    def f(q, k, v):
        return F.softmax((q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf), -1) @ v

    given = qkv(dtype=torch.float32)
    report = explain(f, *given, codegen="inductor")
    assert [s.reason for s in report.skipped(NAME)] == [
        '6 rows with a mask: generated code is as fast below 256; put "fusion.attention" in enable to fuse all the same'
    ]
    assert explain(f, *given, codegen="inductor", enable=[NAME]).counts[NAME] == 1


@pytest.mark.parametrize("dtype, rows, masked, kept", [
    (torch.float32, 64, False, True), (torch.float32, 255, True, False), (torch.float32, 256, True, True),
    (torch.bfloat16, 767, False, False), (torch.float16, 768, True, True), (torch.float64, 8, False, True),
])  # fmt: skip
def test_from_how_many_rows_on(dtype, rows, masked, kept, monkeypatch):
    monkeypatch.setattr(attention_flash, "supports", lambda *_: "not on this processor")
    q = torch.empty(1, 1, rows, 8, dtype=dtype)
    if kept:
        return attention_emit._long_enough(q, masked)
    with pytest.raises(Miss, match=f"{rows} rows"):
        attention_emit._long_enough(q, masked)


@pytest.mark.parametrize("masked", [False, True])
def test_any_number_of_narrow_rows_where_our_own_kernel_runs(masked, monkeypatch):
    monkeypatch.setattr(attention_flash, "supports", lambda *_: None)
    monkeypatch.setattr(dispatcher, "multiplies_tiles", lambda _: False)
    attention_emit._long_enough(torch.empty(1, 1, 8, 8, dtype=torch.bfloat16), masked)


@pytest.mark.parametrize("most, has_tiles", [(None, True), ("AVX512_CORE_BF16", False), ("avx512_core_amx", True)])
def test_tiles_that_onednn_is_kept_from_are_none(most, has_tiles, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if most is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert dispatcher.multiplies_tiles.__wrapped__(torch.bfloat16) == has_tiles


def test_few_narrow_rows_with_a_mask_are_left_alone_where_products_are_of_tiles(monkeypatch):
    monkeypatch.setattr(attention_flash, "supports", lambda *_: None)
    monkeypatch.setattr(dispatcher, "multiplies_tiles", lambda _: True)
    q = torch.empty(1, 1, 255, 8, dtype=torch.bfloat16)
    attention_emit._long_enough(q, False)
    attention_emit._long_enough(torch.empty(1, 1, 256, 8, dtype=torch.bfloat16), True)
    with pytest.raises(Miss, match="255 rows in bfloat16"):
        attention_emit._long_enough(q, True)


NOT_CAUSAL = {
    "diagonal masked too": lambda s: torch.ones(s, s, dtype=torch.bool).triu(2),
    "anti-causal": lambda s: torch.ones(s, s, dtype=torch.bool).tril(-1),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_other_masks_stay_masks(name):
    def f(q, k, v):
        return F.softmax((q @ k.transpose(-1, -2)).masked_fill(NOT_CAUSAL[name](q.shape[-2]), float("-inf")), -1) @ v

    report = function_agrees(f, *qkv())
    assert report.counts[NAME] == 1 and ", None, True," not in call_of(report)


WINDOWS = {
    "two comparisons": lambda s: (
        ~((torch.arange(s)[None] <= torch.arange(s)[:, None]) & (torch.arange(s)[None] > torch.arange(s)[:, None] - 3))
    ),
    "tril and triu": lambda s: ~torch.ones(s, s, dtype=torch.bool).tril().triu(-2),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows_are_recognized(name):
    def f(q, k, v):
        return F.softmax((q @ k.transpose(-1, -2)).masked_fill(WINDOWS[name](q.shape[-2]), float("-inf")), -1) @ v

    report = function_agrees(f, *qkv())
    assert report.counts[NAME] == 1 and ", None, True, 1.0, 3)" in call_of(report)
    torch._dynamo.reset()
    report = function_agrees(f, *qkv(seq=3))  # the window reaches every key
    assert ", None, True, 1.0)" in call_of(report)


def test_causal_mask_and_window_are_one_window():
    def f(q, k, v):
        scores = (q @ k.transpose(-1, -2)).masked_fill(causal(q.shape[-2]), float("-inf"))
        return F.softmax(scores.masked_fill(WINDOWS["tril and triu"](q.shape[-2]), float("-inf")), -1) @ v

    assert ", None, True, 1.0, 3)" in call_of(function_agrees(f, *qkv()))


@pytest.mark.parametrize("by", ["causal first", "causal last"])
def test_half_a_plane_from_one_mask_and_half_from_another_are_a_window(by):
    def f(q, k, v):
        recent = torch.ones(6, 6, dtype=torch.bool).triu(-2)
        if by == "causal last":
            return (
                F.softmax((q @ k.mT).masked_fill(~recent, float("-inf")).masked_fill(causal(6), float("-inf")), -1) @ v
            )
        return F.softmax((q @ k.mT).masked_fill(causal(6), float("-inf")).masked_fill(~recent, float("-inf")), -1) @ v

    assert ", None, True, 1.0, 3)" in call_of(function_agrees(f, *qkv()))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_softcap(kv_heads):
    def f(q, k, v):
        k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
        scores = torch.tanh(q @ k.transpose(-1, -2) * 0.5 / 2.0) * 2.0
        return F.softmax(scores.masked_fill(causal(q.shape[-2]), float("-inf")), -1) @ v

    report = function_agrees(f, *qkv(kv_heads=kv_heads))
    assert report.counts[NAME] == 1 and ", None, True, 0.5, 0, 2.0)" in call_of(report)


@pytest.mark.parametrize("cap", [0.0, -2.0])
def test_a_cap_is_positive(cap):
    report = function_agrees(lambda q, k, v: (torch.tanh(q @ k.transpose(-1, -2)) * cap).softmax(-1) @ v, *qkv())
    assert report.counts[NAME] == 0


def test_scale_after_softcap_is_skipped_with_the_reason():
    report = function_agrees(lambda q, k, v: (2 * (3 + torch.tanh(q @ k.transpose(-1, -2)))).softmax(-1) @ v, *qkv())
    assert report.counts[NAME] == 0
    torch._dynamo.reset()
    report = function_agrees(
        lambda q, k, v: (torch.relu(torch.tanh(q @ k.transpose(-1, -2))) * 2).softmax(-1) @ v, *qkv()
    )
    assert report.counts[NAME] == 0 and "aten.relu" in report.skipped(NAME)[0].reason


def with_sinks(q, k, v, sinks, subtract):
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(causal(q.shape[-2]), float("-inf"))
    joined = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)], -1)
    if subtract:
        joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, -1)[..., :-1] @ v


@pytest.mark.parametrize("lead", ["all", "one"])
@pytest.mark.parametrize("seen", ["3", "4"])
def test_additive_bias_of_a_batched_product(lead, seen):
    """ALiBi as Bloom adds it: the input of baddbmm, batch and heads in one dimension."""
    bias = torch.randn(8 if lead == "all" else 1, 1, 6, dtype=torch.double)

    def f(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(
            bias.expand(8, 1, 6) if lead == "all" else bias, q, k.transpose(1, 2), beta=1.0, alpha=0.5
        )
        weights = F.softmax(scores, -1) if seen == "3" else F.softmax(scores.view(2, 4, 6, 6), -1).view(8, 6, 6)
        return (weights @ v).view(2, 4, 6, 8)

    assert function_agrees(f, *qkv()).counts[NAME] == 1


def test_product_of_batched_queries_with_zeros_added_and_values_by_head():
    def f(q, k, v):
        zeros = torch.zeros(8, 6, 6, dtype=q.dtype)
        scores = torch.baddbmm(zeros, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=1.0, alpha=0.5).view(
            2, 4, 6, 6
        )
        return F.softmax(scores.masked_fill(causal(6), float("-inf")), -1) @ v

    report = function_agrees(f, *qkv())
    assert report.counts[NAME] == 1 and ", None, True, 0.5)" in call_of(report)


def test_boolean_mask_of_a_batched_product():
    keep = torch.rand(8, 6, 6) < 0.7
    keep |= torch.eye(6, dtype=torch.bool)

    def f(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return F.softmax(torch.bmm(q, k.transpose(1, 2)).masked_fill(~keep, float("-inf")), -1) @ v

    assert function_agrees(f, *qkv()).counts[NAME] == 1


@pytest.mark.parametrize("late", [False, True])
def test_keys_written_in_pieces(late):
    """Multi-head latent attention fills its keys part by part; one that is changed after it was read must not be read
    late.
    """

    def f(q, k, v, rest):
        keys = k.new_empty(*k.shape[:-1], 8)
        keys[..., :4] = k
        if not late:
            keys[..., 4:] = rest
        else:
            keys[..., 4:] = rest * 2
        weights = F.softmax(q @ keys.transpose(-1, -2), -1)
        if late:
            keys[..., 4:] = 0 * rest
            return weights @ v, keys
        return weights @ v

    q, k, v = qkv()
    q, v = (x.requires_grad_(not late) for x in (q, v))
    k, rest = (torch.randn(2, 4, 6, 4, dtype=torch.double, requires_grad=not late) for _ in range(2))
    report = function_agrees(f, q, k, v, rest)
    assert report.counts[NAME] == (0 if late else 1)
    assert not late or "changed in place" in report.skipped(NAME)[0].reason


def test_one_head_of_keys_for_all():
    report = function_agrees(lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) / 3, -1) @ v, *qkv(kv_heads=1))
    assert report.counts[NAME] == 1


@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_sinks(subtract, frozen):
    sinks = torch.randn(4, dtype=torch.double, requires_grad=not frozen)
    report = function_agrees(lambda q, k, v, s: with_sinks(q, k, v, s, subtract), *qkv(), sinks)
    assert report.counts[NAME] == 1 and ", None, True, 0.5, 0, 0.0, l_" in call_of(report)


def test_a_column_that_is_no_sink_is_skipped_with_the_reason():
    report = function_agrees(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1)[..., :-1] @ v[:, :, 1:], *qkv())
    assert report.counts[NAME] == 0 and "not a sink" in report.skipped(NAME)[0].reason


@pytest.mark.parametrize(
    "scale",
    [
        lambda q, k: (q * 0.3) @ k.transpose(-1, -2),
        lambda q, k: q @ (k.transpose(-1, -2) * 0.3),
        lambda q, k: 0.3 * (q @ k.transpose(-1, -2)),
        lambda q, k: torch.matmul(q / 2, k.transpose(2, 3)) * 0.6,
        lambda q, k: torch.matmul(q, k.mT).mul(0.3),
    ],
)
def test_scales(scale):
    report = function_agrees(lambda q, k, v: scale(q, k).softmax(-1) @ v, *qkv())
    assert report.counts[NAME] == 1 and "0.3" in call_of(report)


REPEATS = {
    "repeat_interleave": lambda k, n: k.repeat_interleave(n, dim=1),
    "expand": lambda k, n: (
        k[:, :, None]
        .expand(k.shape[0], k.shape[1], n, k.shape[2], k.shape[3])
        .reshape(k.shape[0], -1, k.shape[2], k.shape[3])
    ),
}


@pytest.mark.parametrize("name", REPEATS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_not_repeated(name, kv_heads):
    def f(q, k, v):
        k, v = (REPEATS[name](t, 4 // kv_heads) for t in (k, v))
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    report = function_agrees(f, *qkv(4, kv_heads))
    assert report.counts[NAME] == 1
    shapes = report.graphs[0].runs[[r.report.name for r in report.graphs[0].runs].index(NAME)].after
    assert f"f64[2, {kv_heads}, 6, 8]" in shapes and "repeat_interleave" not in shapes and "expand" not in shapes


def test_tiled_heads_are_another_order_and_stay_repeated():
    report = function_agrees(
        lambda q, k, v: (q @ k.repeat(1, 2, 1, 1).transpose(-1, -2)).softmax(-1) @ v.repeat(1, 2, 1, 1), *qkv(4, 2)
    )
    assert report.counts[NAME] == 1 and "repeat" in report.graphs[0].runs[1].after


def megatron(q, k, v, mask):
    """[seq, batch, heads, dim] in, as Megatron-core's DotProductAttention spells it."""
    s, b, n, d = q.shape
    k, v = (t.repeat_interleave(n // t.shape[2], dim=2) for t in (k, v))
    q, k = q.reshape(s, b * n, d), k.view(s, b * n, d)
    scores = torch.baddbmm(
        torch.empty(b * n, s, s, dtype=q.dtype),
        q.transpose(0, 1),
        k.transpose(0, 1).transpose(1, 2),
        beta=0.0,
        alpha=0.5,
    )
    weights = torch.softmax(mask(scores.view(b, n, s, s), s), -1).view(b * n, s, s)
    context = torch.bmm(weights, v.view(s, b * n, d).transpose(0, 1)).view(b, n, s, d)
    return context.permute(2, 0, 1, 3).contiguous().view(s, b, n * d)


def test_megatron_core_attention():
    q, k, v = (torch.randn(6, 2, n, 8, dtype=torch.double, requires_grad=True) for n in (4, 2, 2))
    report = function_agrees(lambda q, k, v: megatron(q, k, v, CAUSAL["minus ten thousand"]), q, k, v)
    assert report.counts[NAME] == 1 and ", None, True, 0.5)" in call_of(report)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"scale": 0.2}, {"enable_gqa": True}])
def test_scaled_dot_product_attention(arguments):
    report = function_agrees(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **arguments),
        *qkv(4, 2 if "enable_gqa" in arguments else 4),
    )
    assert report.counts[NAME] == 1


def test_sdpa_with_a_causal_mask_and_with_a_padding_mask():
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[0, ..., 4:] = False
    report = function_agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, ~causal(6)), *qkv())
    assert ", None, True," in call_of(report)
    torch._dynamo.reset()
    assert function_agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, keep), *qkv()).counts[NAME] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_a_float32_softmax(dtype):
    def f(q, k, v):
        return (
            F.softmax(
                CAUSAL["triu, masked_fill"]((q @ k.transpose(-1, -2)).float() * 0.35, q.shape[-2]),
                -1,
                dtype=torch.float32,
            ).to(q.dtype)
            @ v
        )

    assert function_agrees(f, *[t.detach().to(dtype).requires_grad_() for t in qkv()], tolerance=5e-2).counts[NAME] == 1


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda q, k, v: ((w := (q @ k.mT).softmax(-1)) @ v, w), "leave the graph"),
        (lambda q, k, v: ((w := (q @ k.mT).softmax(-1)) @ v, w.sum(-1)), "used elsewhere"),
        (
            lambda q, k, v: torch.tensordot((q[0, 0] @ k[0, 0].mT).softmax(-1), v[0, 0], ([1], [0])),
            "no product of matrices with v on the right",
        ),
        (
            lambda q, k, v: (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1).softmax(-1) @ v,
            "summed over products of single elements",
        ),
        (
            lambda q, k, v: ((q @ k.mT).softmax(-1) * q[..., :1, :1].sigmoid()) @ v,
            "changed before the product with v: aten.mul",
        ),
        (
            lambda q, k, v: (
                ((q @ k.mT) * q.mean((0, 2, 3)).view(4, 1, 1) + causal(6) * q.mean()).mul(q.mean()).softmax(-1) @ v
            ),
            "after a mask; scale them before",
        ),
        (
            lambda q, k, v: torch.tanh((q @ k.mT) - (q @ k.mT).amax(-1, True)).softmax(-1) @ v,
            "subtracted from the scores before a soft-cap",
        ),
    ],
)
def test_near_misses_say_why(f, reason):
    import mindspeed_fx

    report = mindspeed_fx.explain(f, *qkv(), options={"codegen": "eager"})
    assert report.counts[NAME] == 0 and any(reason in s.reason for s in report.skipped(NAME)), report.skipped(NAME)


def test_without_gradient():
    q, k, v = (t.detach() for t in qkv())
    assert function_agrees(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, v).counts[NAME] == 1


def test_softmax_of_something_else_is_left():
    report = function_agrees(lambda q, k, v: q.tanh().softmax(-1) @ k.mT.softmax(-1) @ v, *qkv())
    assert report.counts[NAME] == 0


def test_multihead_attention_module():
    attention = nn.MultiheadAttention(16, 4, batch_first=True, bias=False).double()
    report = function_agrees(
        lambda x: attention(x, x, x, need_weights=False)[0],
        torch.randn(2, 5, 16, dtype=torch.double, requires_grad=True),
    )
    assert report.counts[NAME] == 1


@pytest.mark.parametrize("f, reason", [
    (lambda q, k, v: torch.softmax(q @ k.mT * 0.3, -1) * 1.5 @ v, "changed before the product with v: aten.mul.Tensor"),
    (lambda q, k, v: torch.softmax(q @ k.mT * 0.3, -2) @ v, "the softmax is over dimension -2"),
])  # fmt: skip
def test_what_is_nearly_attention_says_why_not(f, reason):
    report = function_agrees(f, *qkv())
    assert report.counts["fusion.attention"] == 0
    assert any(reason in s.reason for s in report.skipped("fusion.attention")), report.skipped("fusion.attention")


@pytest.mark.parametrize("rows, belongs", [(1, True), (4, True), (3, False)])
def test_ids_of_packed_sequences_are_one_row_for_all_or_one_for_each_of_the_batch(rows, belongs):
    ids = torch.fx.Graph().placeholder("ids")
    ids.meta["val"] = torch.zeros(rows, 8, dtype=torch.long)
    assert attention_emit._belongs(ids, [], 4) is belongs
