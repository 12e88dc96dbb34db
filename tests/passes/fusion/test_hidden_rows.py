"""Rows that a mask hides whole: the model's weights are uniform there when hidden scores are a number, and the fused
row is the mean of the values.
"""

import pytest
import torch

from tests.models import explain, function_agrees

NAME, SEQ = "fusion.attention", 6
LATER = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
PADDED = torch.zeros(2, 1, 1, SEQ, dtype=torch.bool)
PADDED[1, ..., :3] = True  # to the left: the first three rows of the second sequence keep no key
DISTANCES = (torch.arange(SEQ)[:, None] - torch.arange(SEQ)).abs()
BIAS = torch.randn(1, 4, SEQ, SEQ, generator=torch.Generator().manual_seed(3))

FUSED = {
    "one mask": lambda s, padded: s.masked_fill(LATER | padded, -1e4),
    "two masks": lambda s, padded: s.masked_fill(LATER, -1e9).masked_fill(padded, -1e9),
    "where": lambda s, padded: torch.where(LATER | padded, torch.full_like(s, torch.finfo(s.dtype).min), s),
    "a trained bias before": lambda s, padded: (s + s.mean(0, keepdim=True)).masked_fill(LATER | padded, -1e9),
    "distances times a number for each head before": lambda s, padded: (
        s - torch.tensor([0.5, 0.25, 0.125, 0.0625]).to(s.dtype)[:, None, None] * DISTANCES
    ).masked_fill(LATER | padded, -1e4),
    "gated": lambda s, padded: s * (m := (~(LATER | padded)).to(s.dtype)) - 1e4 * (1 - m),
}
OTHER = {
    "two numbers": (
        lambda s, padded: s.masked_fill(LATER, -float("inf")).masked_fill(padded, -1e9),
        "hidden scores to -1000000000.0 and -inf,",
    ),
    "one is added before": (
        lambda s, padded: (s + torch.zeros(SEQ, SEQ, dtype=s.dtype).masked_fill(LATER, -float("inf"))).masked_fill(
            padded, -1e9
        ),
        "a row that keeps only keys which the added mask hides has no weight on the others, which the model sets "
        "to -1000000000.0 too",
    ),
    "one is added after": (
        lambda s, padded: s.masked_fill(LATER | padded, -1e4) + BIAS.to(s.dtype),
        "and adds another mask",
    ),
}


def inputs(dtype=torch.float64, kv_heads=4):
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, SEQ, 4, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]


def made(masked, repeat=1, padded=PADDED):
    def f(q, k, v):
        k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
        return masked(q @ k.mT * 0.5, padded).softmax(-1) @ v

    return f


def test_the_mean_of_the_values():
    report = function_agrees(lambda *qkv: tuple(made(f)(*qkv) for f in FUSED.values()), *inputs())
    assert report.counts[NAME] == len(FUSED), report.skipped(NAME)


def test_bfloat16():
    assert function_agrees(made(FUSED["one mask"]), *inputs(torch.bfloat16), tolerance=0.05).counts[NAME] == 1


def test_heads_in_groups():
    assert function_agrees(made(FUSED["one mask"], repeat=2), *inputs(kv_heads=2)).counts[NAME] == 1


@pytest.mark.parametrize("name", OTHER)
def test_other_weights_are_noted(name):
    """Rows that keep a key are the model's, and the report says that the others are zero."""
    masked, note = OTHER[name]
    f = made(masked)
    whole = torch.ones(2, 1, SEQ, 1, dtype=torch.bool)
    whole[1, :, :3] = False
    report = function_agrees(lambda q, k, v: f(q, k, v).masked_fill(~whole, 0.0), *inputs())
    assert report.counts[NAME] == 1
    (notes,) = [run.report.notes for run in report.graphs[0].runs if run.report.name == NAME]
    assert len(notes) == 1 and note in notes[0]


@pytest.mark.parametrize(
    "masked",
    [
        lambda s, padded: s.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -1e4),
        lambda s, padded: s.masked_fill(~padded, -float("inf")),
    ],
)
def test_nothing_is_added_where_it_is_not_needed(masked, tmp_path):
    """Where every row keeps its own key, and where hidden scores are minus infinity."""
    assert explain(made(masked), *inputs(), dump=tmp_path).counts[NAME] == 1
    assert "aten.any" not in _after(tmp_path)


@pytest.mark.parametrize("target", ["cuda", "npu"])
def test_other_targets(target, tmp_path):
    """The operator never sees a row without keys: a kernel may return NaN for it."""
    report = explain(made(FUSED["one mask"]), *inputs(torch.bfloat16), target=target, dump=tmp_path)
    assert report.counts.get(NAME, 0) == 1, report.skipped(NAME)
    assert all(name in _after(tmp_path) for name in ("aten.any", "aten.logical_or", "aten.where", "aten.mean.dim"))


def _after(folder):
    return "".join(p.read_text() for p in folder.rglob("*attention*after*"))
