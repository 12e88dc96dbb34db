"""Scheduling and bucketing change no bit of any rank's results (all ranks in one process)."""

import pytest
import torch

from mindspeed_fx.compat import fx_graph
from mindspeed_fx.options import Options
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap.bucket import overlap_bucket
from mindspeed_fx.passes.overlap.schedule import overlap_schedule
from tests.passes.overlap import parallel_layers as layers


def data_parallel(x, norm, up, down):
    """Gradients of two layers, reduced one by one; parameters gathered one by one."""
    whole = [layers.all_gather(w) for w in (up, down.t())]
    out, *gradients = layers.training(layers.mlp)(x, norm, up, down)
    return (
        out,
        *map(layers.all_reduce, gradients),
        *(layers.reduce_scatter(g.sin()) for g in gradients[2:]),
        *(w.cos() for w in whole),
    )


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("program", [data_parallel, layers.training(layers.mlp_whole), layers.exchange])
def test_every_bit_of_every_rank(program, dtype, ranks):
    mode = ranks(4)
    gm = layers.graph(program, dtype=dtype)
    moved = fx_graph.copy_graph(gm)
    context = Context(
        Options(target="npu", codegen="eager", hardware="ascend910b2", overlap_memory="1GiB"), "inference"
    )
    buckets = overlap_bucket(moved, context)
    overlap_schedule(moved, context)
    if program is data_parallel:
        assert buckets.rewrites
    assert [n.name for n in moved.graph.nodes] != [n.name for n in gm.graph.nodes]
    for a, b in zip(
        layers.on_every_rank(moved, mode, dtype=dtype), layers.on_every_rank(gm, mode, dtype=dtype), strict=True
    ):
        assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))
