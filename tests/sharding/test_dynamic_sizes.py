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
BATCHES = [(rows, n) for rows, n in ((4, 16), (6, 18), (5, 17), (3, 40), (8, 33), (7, 21))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dim,plan,sizes,dynamic,compiles",
    [
        ("tp", "tp_sp", LENGTHS, True, 2),  # lengths that ranks share evenly, and others
        ("tp", "tp_sp", LENGTHS, None, 3),  # and the first, which is compiled as it is
        ("tp", "tp", LENGTHS, True, 1),
        ("cp", "ulysses", LENGTHS, True, 2),
        ("dp", "zero1", BATCHES, True, 2),
        ("dp", "zero2", BATCHES, True, 2),
        ("dp", "zero3", BATCHES, True, 2),
    ],
)
def test_each_loss_and_gradient_is_one_devices(dim, plan, sizes, dynamic, compiles, tmp_path):
    arguments = (str(tmp_path / "store"), dim, plan, sizes, dynamic, compiles, "eager")
    ranks.spawn(dynamic_ranks.worker, arguments, nprocs=dynamic_ranks.RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("dim,plan,sizes", [("tp", "tp_sp", LENGTHS[:4]), ("dp", "zero3", BATCHES[:4])])
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


@pytest.mark.parametrize("plan,what", [("ring", "divides the sequence"), ("kv_allgather", "divides the sequence")])
def test_other_plans_are_refused(compiled, plan, what):
    with pytest.raises(Exception, match=rf'plan "{plan}": .*{what}, which takes fixed sizes: .*dynamic=False'):
        compiled("cp", plan)(*dynamic_ranks.batch(4, 16))


def test_parts_of_arguments_are_refused(compiled):
    with pytest.raises(Exception, match='inputs="local" passes parts, which takes fixed sizes'):
        compiled("dp", "zero2", inputs="local")(*dynamic_ranks.batch(2, 16))
