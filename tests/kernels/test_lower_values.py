"""A reference inlined where nodes share values: the trace must know the operands apart, and a kept trace must fit its
next call.
"""

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import mindspeed_fx  # noqa: F401  registers the operators
from mindspeed_fx.kernels.lower import lower
from mindspeed_fx.planning.verify_device.operators import calls
from tests.models import function_agrees

swiglu = torch.ops.mindspeed.swiglu.default
X, Y = (torch.randn(4, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))


def graph_of(*calls, shared=False):
    """``swiglu`` of inputs 0 and 1, as pairs of their numbers; ``shared``: both nodes have the very same fake value."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    with FakeTensorMode():
        values = [torch.empty(4, 8, dtype=torch.float64) for _ in nodes]
    for node, value in zip(nodes, values):
        node.meta["val"] = values[0] if shared else value
    results = [graph.call_function(swiglu, tuple(nodes[i] for i in pair)) for pair in calls]
    for n in results:
        n.meta["val"] = values[0]
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    "calls, shared", [([(0, 1)], True), ([(0, 0), (0, 1), (1, 0)], False), ([(0, 1), (1, 1)], True)]
)
def test_operands_stay_apart(calls, shared):
    gm = graph_of(*calls, shared=shared)
    lower(gm, "cpu", "forward", inline_references=True)
    assert all(n.target is not swiglu for n in gm.graph.nodes)
    for got, pair in zip(gm(X, Y), calls):
        a, b = ((X, Y)[i] for i in pair)
        torch.testing.assert_close(got, torch.nn.functional.silu(a) * b)


def test_calls_of_equal_shapes_with_other_arguments_missing():
    """A norm with a bias alone and one with a weight alone are two traces."""
    bias, weight = torch.rand(16).double(), torch.rand(16).double() + 0.5

    def f(x):
        y = torch.nn.functional.layer_norm(x, (16,), None, bias)
        return torch.nn.functional.layer_norm(y * 2, (16,), weight, None)

    function_agrees(f, torch.randn(3, 5, 16, dtype=torch.double, requires_grad=True))


def test_no_reference_writes_into_an_empty_tensor():
    """A reference is inlined where functions are pure: of two empty tensors that are alike generated code makes one,
    and the second call's results would stand where the first one's are kept."""
    written, seen = set(), set()
    for operator, args in calls(2, 8, 4, 2, 8, 32, torch.float32):
        if operator.opaque:
            continue
        leaves, spec = pytree.tree_flatten(args)

        def run(*values, leaves=leaves, spec=spec, operator=operator):
            rest = iter(values)
            whole = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
            return operator.reference(*pytree.tree_unflatten(whole, spec))

        gm = make_fx(run, tracing_mode="fake")(*[x for x in leaves if isinstance(x, torch.Tensor)])
        seen.add(operator.name)
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                written.add((operator.name, str(node.target)))
    assert not written and len(seen) > 40, (written, len(seen))
