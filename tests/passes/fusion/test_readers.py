"""That readers write nothing is watched by ``readers_do_not_write`` of tests/conftest.py; calls they ask for are built
by emitters.
"""

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.fusion import analysis
from mindspeed_fx.passes.fusion.analysis.moments import NEGLIGIBLE, RootMoment
from mindspeed_fx.passes.fusion.analysis.nll import _leads_to

aten = torch.ops.aten


def graph_of_one_product():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.randn(2, 3), "needs_grad": True, "mutated": False, "grad_enabled": True}
    y = graph.call_function(aten.mul.Tensor, (x, 2.0))
    y.meta = {**x.meta}
    graph.output(y)
    return fx.GraphModule({}, graph), x, y


def test_a_reader_that_writes_is_seen(readers_do_not_write):
    gm, x, _ = graph_of_one_product()
    names = {"graph": gm.graph, "x": x}
    exec(compile("graph.call_function(len, (x,))", analysis.__file__.replace("__init__", "reader"), "exec"), names)
    assert len(readers_do_not_write) == 1 and "create_node" in readers_do_not_write.pop()


def test_a_least_deviation_that_no_float_can_tell_from_an_eps_is_one():
    assert RootMoment(None, False, [], [], clamp_min=NEGLIGIBLE).differs is None
    assert "at least 1e-06" in RootMoment(None, False, [], [], clamp_min=1e-6).differs


def test_a_new_call_is_read_like_a_node_and_built_once():
    gm, x, y = graph_of_one_product()
    before = len(gm.graph.nodes)
    wide = NewCall(y, aten.to.dtype, NewCall(y, aten.neg.default, x), torch.double)
    assert match.value(wide).dtype == torch.double and wide.meta["needs_grad"]
    assert match.same(wide, NewCall(y, aten.to.dtype, NewCall(y, aten.neg.default, x), torch.double))
    assert not match.same(wide, NewCall(y, aten.to.dtype, x, torch.double))
    assert match.is_call(match.uncast(wide), aten.neg.default)
    assert len(gm.graph.nodes) == before and x.users == {y: None}, "reading has written"
    built = rewrite.build(wide)
    assert rewrite.build(wide) is built and len(gm.graph.nodes) == before + 2
    assert rewrite.build(x) is x and match.same(built.args[0].args[0], x)
    rewrite.substitute(gm, y, rewrite.insert(gm, y, aten.to.dtype, (built, torch.float32)))
    rewrite.finish(gm)
    assert torch.equal(gm(x.meta["val"]), -x.meta["val"])


def test_a_loss_is_followed_for_twelve_calls():
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(13):
        nodes.append(graph.call_function(aten.neg.default, (nodes[-1],)))
    for n in nodes:
        n.meta["val"] = torch.empty(2, device="meta")
    assert [_leads_to(n, {nodes[0]}) for n in nodes[12:]] == [True, False]
