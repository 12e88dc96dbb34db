"""Which compiled graphs torch takes for a second module or function."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import utils
from torch._dynamo.utils import counters

from mindspeed_fx.compat import dynamo, tracing

SETTINGS = {"backend": "mindspeed", "fullgraph": True, "options": {"codegen": "eager"}}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.fixture(autouse=True)
def fresh_counters():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("alone, graphs", [(False, 1), (True, 10)])
def test_modules_alike_share_a_graph_unless_they_are_compiled_alone(alone, graphs):
    """Ten are more than torch compiles of one code object."""
    modules = [Layer() for _ in range(10)]
    for module in modules:
        if alone:
            dynamo.compile_alone(module, **SETTINGS)
        else:
            module.compile(**SETTINGS)
    x = torch.randn(2, 4)
    for module in modules:
        result = module(x)
        assert torch.equal(result, module.forward(x))
        result.sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_fresh_callable_is_compiled_again_however_often():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    for _ in range(10):
        torch.compile(dynamo.fresh_callable(function), **SETTINGS)(torch.randn(2))
    assert counters["stats"]["unique_graphs"] == 10


@pytest.mark.parametrize("breaks", [False, True])
def test_a_condition_at_the_end_of_a_loop_ends_no_context(breaks):
    """Python 3.13 has no entry for its jump in the table of exceptions, by which Dynamo knows contexts."""

    def function(x, scales):
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16):
            for scale in scales:
                x = (x @ x) * scale
                if breaks and scale == 3:
                    torch._dynamo.graph_break()
                if scale > 2:
                    x = x + 1
            x = x @ x
        return x @ x.float().to(x.dtype), x

    x = torch.eye(4) / 3
    step = torch.compile(function, **{**SETTINGS, "fullgraph": not breaks})
    for result, expected in zip(step(x, [2, 3, 4]), function(x, [2, 3, 4])):
        assert result.dtype == expected.dtype == torch.float16
        torch.testing.assert_close(result, expected)


class Calls(Layer):
    """As Megatron's modules are."""

    def __call__(self, x):
        return super().__call__(x)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Calls(), Calls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_hooks_that_come_later_compile_nothing_anew():
    """As those of Megatron's gathers of parameters do, after the first step."""
    model = Two()
    model.compile(**SETTINGS)
    x = torch.randn(2, 4)
    expected = model(x)
    for module in (model.first, model.second, model.second.linear):
        module.register_forward_pre_hook(lambda module, args: None)
    assert torch.equal(model(x), expected) and counters["stats"]["unique_graphs"] == 1


def test_a_capture_without_calls_of_loggers_has_its_record():
    """What torch 2.11 cannot describe would be an error in the log, at each graph."""
    with tracing.in_one_graph(RuntimeError, "this"):
        utils.clear_compilation_metrics()
        torch.compile(torch.sin, backend="eager")(torch.ones(2))
    assert len(utils.get_compilation_metrics()) == 1


def test_a_compilation_is_no_export():
    """transformers has loops for exports in the place of scans; Dynamo of torch 2.11 and 2.12 knew no difference."""

    class Told(torch.nn.Module):
        def forward(self, x):
            return x + 1 if torch.compiler.is_exporting() else x - 1

    x = torch.zeros(2)
    assert torch.compile(Told(), backend="mindspeed", options={"codegen": "eager"})(x).tolist() == [-1, -1]
    assert torch.export.export(Told(), (x,), strict=True).module()(x).tolist() == [1, 1]
