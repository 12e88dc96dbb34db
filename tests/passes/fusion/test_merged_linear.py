"""Layers of one input as one product, where the cost model says that it pays: values, gradients per parameter, and
reasons.
"""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.passes.fusion import merged_linear
from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder
from tests.models import Llama, assert_same_training, double, explain, function_agrees, tokens

NAME = "fusion.merged_linear"
ON = {"target": "cuda", "hardware": "h100", "enable": [NAME]}


def attention(x, q, k, v, o):
    q, k, v = (F.linear(x, w).view(*x.shape[:-1], -1, 4).transpose(1, 2) for w in (q, k, v))
    return F.linear(
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2), o
    )


def test_queries_keys_and_values():
    """Each parameter keeps a gradient of its own; the output projection reads something else and stays."""
    report = function_agrees(attention, double(2, 5, 8), double(16, 8), double(8, 8), double(8, 8), double(8, 16), **ON)
    assert report.counts[NAME] == 1 and len(report.sites(NAME)[0].nodes) == 3 and not report.skipped(NAME)


def test_gate_and_up_become_the_packed_form():
    report = function_agrees(
        lambda x, g, u, a, b: F.silu(F.linear(x, g, a)) * F.linear(x, u, b),
        double(3, 8),
        double(6, 8),
        double(6, 8),
        double(6),
        double(6),
        **ON,
    )
    assert report.counts[NAME] == report.counts["fusion.swiglu"] == 1


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from(["all", "x", "weights"]),
    st.integers(1, 3),
)
def test_variants(widths, biased, trained, dims):
    x, ws = double(*[2] * dims, 6, grad=trained != "weights"), [double(n, 6, grad=trained != "x") for n in widths]
    biases = [double(n) for n in widths] if biased else []
    f = lambda x, *p: torch.cat(
        [F.linear(x, w, b).tanh() for w, b in zip(p, p[len(ws) :] if biased else [None] * len(ws))], -1
    )  # noqa: E731
    with patch.object(merged_linear, "_unpaid", lambda group, device: None):
        assert function_agrees(f, x, *ws, *biases, **ON).counts[NAME] == 1


@pytest.mark.parametrize("f, reason", [
    (lambda x, a, b, c: F.linear(x, a, c) + F.linear(x, b), "some have a bias and some none"),
    (lambda x, a, b, c: F.linear(x, a) + F.linear(x, b.detach()), "some weights are trained and some are not"),
    (lambda x, a, b, c: F.linear(x, a) + F.linear(x, b * 2), "a weight is computed in the graph"),
    (lambda x, a, b, c: F.linear(x, a).view(-1) + F.linear(x, b).view(-1), "reads linear as it lies in memory"),
])  # fmt: skip
def test_near_misses_say_why(f, reason):
    report = explain(f, double(2, 3, 8), double(6, 8), double(6, 8), double(6), **ON)
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


def test_wide_layers_of_few_tokens_do_not_pay():
    x, ws = torch.randn(8, 1024), [torch.randn(3072, 1024, requires_grad=True) for _ in range(2)]
    report = explain(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), x, *ws, **ON)
    assert report.counts[NAME] == 0 and "modelled on h100: " in report.skipped(NAME)[0].reason


@pytest.mark.parametrize(
    "options, note",
    [
        ({"enable": [NAME]}, "measured no faster"),
        ({"target": "cuda", "enable": [NAME]}, "asked of the cost model"),
        ({"target": "cuda", "hardware": "h100"}, None),
    ],
)
def test_only_on_request_and_where_a_model_can_be_asked(options, note):
    report = explain(
        lambda x, a, b: F.linear(x, a) * F.linear(x, b), double(2, 8), double(6, 8), double(6, 8), **options
    )
    notes = [n for run in report.graphs[0].runs if run.report.name == NAME for n in run.report.notes]
    assert report.counts.get(NAME, 0) == 0 and (any(note in n for n in notes) if note else not notes)


@pytest.mark.slow
def test_a_llama_for_npu():
    """Emulated: per layer queries, keys and values are one product; the loss and every gradient of the model."""
    model = Llama()
    report = explain(model, *tokens(), target="npu", hardware="ascend910b2", enable=[NAME])
    assert report.counts[NAME] == 2
    assert_same_training(model, *tokens(), tolerance=1e-4, target="npu", hardware="ascend910b2", enable=[NAME])


class Padded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(8, 6, bias=False).double() for _ in range(2))

    def forward(self, x):
        rows = F.pad(self.gate(x) * self.up(x), (0, 0, 0, 8 - x.shape[0]))
        return F.linear(rows, self.up.weight.t()).reshape(4, 2, -1).sum(1)


def agrees_dynamically(f, *inputs):
    torch._dynamo.reset()
    with recorder.collecting() as graphs:
        compiled = torch.compile(
            f, backend="mindspeed", dynamic=True, fullgraph=True, options={"codegen": "eager", **ON}
        )
        for args in inputs:
            assert torch.allclose(compiled(*args), f(*args), rtol=0, atol=1e-12)
    return Report(list(graphs), [])


def test_pads_of_a_length_that_changes_stand_behind_it():
    """Their C++ kernel takes no symbol."""
    assert agrees_dynamically(Padded(), (double(5, 8),), (double(7, 8),)).counts[NAME] == 1


def test_weights_whose_sizes_change_stay():
    def f(x, g, u):
        return F.linear(x, g) * F.linear(x, u)

    report = agrees_dynamically(f, *((double(5, n), double(6, n), double(6, n)) for n in (8, 10)))
    assert "size changes from call to call" in report.skipped(NAME)[0].reason
