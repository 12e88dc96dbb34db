"""Sizes that change under plans: symbolic sizes in a rank's program, which is compiled a few times for all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from tests import ranks
from tests.sharding import dynamic_ranks
from tests.sharding.llama import Llama

LENGTHS = [(4, n) for n in (100, 101, 500, 237, 352, 499)]
BATCHES = [(4, 16), (4, 18), (6, 20), (4, 17), (5, 33), (3, 64)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dim,plan,sizes,dynamic,compiles",
    [
        ("tp", "tp_sp", LENGTHS, True, 2),  # lengths that ranks share evenly, and others
        ("tp", "tp_sp", LENGTHS, None, 3),  # and the first, which is compiled as it is
        ("tp", "tp", BATCHES, True, 1),
        ("tp", "tp_sp", BATCHES, True, 2),
    ],
)
def test_each_loss_and_gradient_is_one_devices(dim, plan, sizes, dynamic, compiles, tmp_path):
    arguments = (str(tmp_path / "store"), dim, plan, sizes, dynamic, compiles, "eager")
    ranks.spawn(dynamic_ranks.worker, arguments, nprocs=dynamic_ranks.RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("dim,plan,sizes", [("tp", "tp_sp", LENGTHS[:4])])
def test_in_generated_code(dim, plan, sizes, tmp_path):
    arguments = (str(tmp_path / "store"), dim, plan, sizes, True, 2, "inductor")
    ranks.spawn(dynamic_ranks.worker, arguments, nprocs=dynamic_ranks.RANKS)


@pytest.fixture
def compiled():
    """``compiled(dim, plan, **settings)``: a step as rank 0 of two whose messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def run(dim, plan, **settings):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dim,))
        torch.manual_seed(0)
        model = mindspeed_fx.parallelize(Llama(1).double(), mesh, plan, **settings)
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(
            model, backend="mindspeed", fullgraph=True, dynamic=True, options={"codegen": "eager", "level": 1}
        )

    yield run
    dist.destroy_process_group()


def test_lengths_that_ranks_share_evenly_are_one_program(compiled):
    step = compiled("tp", "tp_sp")
    for n in (16, 18, 64):
        step(*dynamic_ranks.batch(4, n)).backward()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "dim,plan,inputs",
    [("cp", "ring", "whole"), ("cp", "ulysses", "whole"), ("dp", "zero2", "whole"), ("dp", "zero2", "local")],
)
def test_plans_that_divide_arguments_are_refused(compiled, dim, plan, inputs):
    with pytest.raises(Exception, match=rf'plan "{plan}" divides arguments, and takes fixed sizes: .*dynamic=False'):
        compiled(dim, plan, inputs=inputs)(*dynamic_ranks.batch(4, 16))
