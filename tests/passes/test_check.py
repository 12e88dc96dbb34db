"""The numeric check runs a pass's graph on values laid out as the graph's own."""

import pytest
import torch

from mindspeed_fx.passes.base import Pass
from mindspeed_fx.passes.check import _real, check_pass
from tests.models import Llama, captured_records, tokens


def test_a_backward_that_views_a_saved_transpose_can_be_checked():
    """Under a budget the result of attention is saved as it lies, and the backward reads it by a view."""
    options = {"codegen": "eager", "check": "each", "memory_budget": "24GiB"}
    torch.compile(Llama(layers=1), backend="mindspeed", options=options)(*tokens()).backward()


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(2, 3, 4).transpose(0, 2),
        torch.empty(2, 3, 4),
        torch.empty(5).expand(3, 5),
        torch.empty(8, 8)[:, ::2],
    ],
    ids=["transposed", "contiguous", "expanded", "sliced"],
)
def test_real_values_lie_as_the_fake_ones(value):
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = value
    made = _real(node)
    assert made.shape == value.shape and made.isfinite().all() and made.std() > 0
    if value.is_contiguous() or value.transpose(0, -1).is_contiguous():
        assert made.stride() == value.stride() and made.clone().stride() == value.stride()


def test_a_graph_whose_weights_are_its_own_has_no_inputs_to_differentiate():
    graph = torch.fx.Graph()
    ids = graph.placeholder("ids")
    ids.meta["val"] = torch.zeros(4, dtype=torch.int64)
    graph.output((graph.call_function(torch.ops.aten.embedding.default, (graph.get_attr("weight"), ids)),))
    gm = torch.fx.GraphModule({"weight": torch.nn.Parameter(torch.randn(2, 3))}, graph)
    nothing = Pass("nothing", "joint", 1, True, (), (), lambda gm, context: None)
    assert check_pass(nothing, gm, gm, differentiable=True) == "1 results, worst relative error 0"


def test_checked_on_values_is_not_proved():
    def norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    options = {"codegen": "eager", "check": "each", "target": "cpu"}
    graphs = captured_records(norm, {"x": torch.randn(2, 16, requires_grad=True)}, options)
    rewritten = [run for g in graphs for run in g.runs if run.report.rewrites]
    assert rewritten and all("worst relative error" in run.check and not run.proofs for run in rewritten)
