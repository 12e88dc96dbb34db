"""Bytes alive in a graph, on graphs small enough to count by hand."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.graph import live_memory
from mindspeed_fx.kernels.lower import lower


def test_a_chain():
    def f(x):  # x [256] float32: 1 KiB
        a = x * 2.0
        b = a + 1.0
        del a
        return (b.view(16, 16).sum(0) * 3.0,)

    gm = make_fx(f, tracing_mode="fake")(torch.empty(256))
    found = live_memory.peak(gm)
    # At the addition x, a and b are alive; the view is b's memory.
    assert (found["inputs"], found["outputs"], found["peak"], found["node"]) == (1024, 64, 3072, "add")


def test_what_is_saved_counts_each_memory_once_and_no_inputs():
    def forward(x):
        a = x.exp()
        return a.sum(), a, a.view(16, 16), x

    gm = make_fx(forward, tracing_mode="fake")(torch.empty(256))
    output = next(n for n in gm.graph.nodes if n.op == "output")
    names = [n.name for n in output.args[0]]
    backward = torch.fx.Graph()
    for name in names[1:]:
        backward.placeholder(name)
    backward.output(())
    assert live_memory.saved_bytes(gm, torch.fx.GraphModule(torch.nn.Module(), backward)) == 1024


def test_layers_that_are_lowered_alike_have_memory_of_their_own():
    """A kernel is traced once for equal calls, whose values then share their fake memory."""

    def f(x):
        for _ in range(3):
            x = torch.ops.mindspeed.activation(x, "squared_relu")
        return x.view(16, 16)

    gm = make_fx(f, tracing_mode="fake")(torch.empty(256))
    lower(gm, "npu", "forward", inline_references=False)
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert calls == ["aten.relu.default", "aten.mul.Tensor"] * 3 + ["aten.view.default"]
    assert list(live_memory.allocated_bytes(gm).values()) == [1024] * 6 + [0]
    found = live_memory.peak(gm)
    assert (found["peak"], found["inputs"], found["outputs"]) == (3072, 1024, 1024)
