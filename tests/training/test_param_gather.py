"""Where a forward graph waits for gathered parameters."""

import torch
import torch.fx as fx

from mindspeed_fx.training import param_gather


def test_views_of_views_follow_the_wait_in_their_order():
    """A view of a view was left at the head of the graph, before what it is a view of."""
    weight, calls = torch.nn.Parameter(torch.randn(2, 2, 3)), []
    param_gather.listen([weight], lambda: calls.append(weight.detach().sum().item()))
    graph = fx.Graph()
    parameter, x = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    parameter.meta["val"] = weight
    view = graph.call_function(torch.ops.aten.view.default, (parameter, [4, 3]))
    turned = graph.call_function(torch.ops.aten.t.default, (view,))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output(graph.call_function(torch.ops.aten.mm.default, (doubled, turned)))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    param_gather.Gathers([weight, torch.randn(5, 3)]).insert(gm)
    nodes = list(gm.graph.nodes)
    wait = next(n for n in nodes if n.target is torch.ops.mindspeed.await_parameters.default)
    assert nodes.index(doubled) < nodes.index(wait) < nodes.index(view) < nodes.index(turned)
    value = torch.randn(5, 3)
    with torch.no_grad():
        assert torch.equal(gm(weight, value), value * 2 @ weight.view(4, 3).t()) and len(calls) == 1
