"""The graph that Dynamo made stays as it was: a backend that keeps it and calls this one finds it again."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.backend import mindspeed


def scale(x, weight):
    return torch.nn.functional.rms_norm(x.sin(), x.shape[-1:], weight)


def program(x, weight):
    y = checkpoint(scale, x, weight, use_reentrant=False)
    return torch.vmap(lambda row: row * row.sum())(y)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_dynamo_graph_is_as_it_was(codegen):
    kept = []

    def backend(gm, inputs):
        before = texts(gm)
        compiled = mindspeed(gm, inputs, options={"level": 2, "codegen": codegen})
        kept.append((gm, before))
        return compiled

    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    result = torch.compile(program, backend=backend, fullgraph=True)(x, weight)
    result.sum().backward()
    ((gm, before),) = kept
    assert texts(gm) == before
    assert len(before) > 1 and any("checkpoint" in text for text in before)
    torch.testing.assert_close(copy.deepcopy(gm)(x, weight)[0], result)


def texts(gm):
    return [module.code for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
