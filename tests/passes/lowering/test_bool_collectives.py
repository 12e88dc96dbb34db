"""Truth values that are sent keep their type in generated code."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import mindspeed_fx
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.lowering import bool_collectives


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def gathered_mask(documents, group):
    mask = documents.unsqueeze(1) == documents.unsqueeze(0)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(mask, 2, group)
    return torch.ops._c10d_functional.wait_tensor(gathered)


def test_sent_as_bytes(group):
    documents = torch.arange(8) // 3
    report = mindspeed_fx.explain(lambda d: gathered_mask(d, group), documents, options={"codegen": "eager"})
    assert report.sites(bool_collectives.NAME) == []
    gm = make_fx(lambda d: gathered_mask(d, group), tracing_mode="fake")(documents)
    report = bool_collectives.bool_collectives(
        gm, Context(Options.parse({"codegen": "inductor"}).resolve("cpu"), "inference")
    )
    assert len(report.rewrites) == 1
    start = next(n for n in gm.graph.nodes if "all_gather" in str(n.target))
    assert (
        start.args[0].meta["val"].dtype == torch.uint8
        and next(n for n in gm.graph.nodes if n.op == "output").args[0].meta["val"].dtype == torch.bool
    )
    assert gm(documents).dtype == torch.bool


@pytest.mark.slow
def test_generated_code_has_the_type_of_the_graph(group):
    documents = torch.arange(8) // 3
    found = torch.compile(lambda d: gathered_mask(d, group), backend="mindspeed", fullgraph=True)(documents)
    assert found.dtype == torch.bool and found.shape == (16, 8)
