"""The graphs of all ranks differ in numbers alone, so that every rank saves, fuses and orders alike: each comes to its
own decisions, and one that orders its collectives otherwise would hang the others.
"""

from __future__ import annotations

import math

import pytest

from tests import ranks
from tests.sharding import alike_ranks


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "kind,mesh,plan,dynamic",
    [
        # of more than two ranks, for with two there is one step, and no part is taken twice
        ("llama", {"cp": 3}, "ring", False),
        slow("layers", {"cp": 4}, "ring", False),
        slow("llama", {"cp": 3}, "ring", True),
        slow("llama", {"cp": 4}, "ring:2", False),
        slow("dropping", {"cp": 4}, "ring", False),
        slow("masked", {"cp": 4}, "ring", False),
        slow("llama", {"cp_ring": 3, "cp_ulysses": 2}, "hybrid", False),
        slow("llama", {"cp": 4}, "ulysses", False),
        slow("llama", {"cp": 4}, "kv_allgather", False),
        slow("llama", {"tp": 4}, "tp_sp", False),
        slow("llama", {"tp_x": 2, "tp_y": 2}, "tp_2d", False),
        slow("llama", {"dp": 2, "tp": 2}, "zero2+tp_sp", False),
        slow("llama", {"dp": 4}, "zero3", False),
        slow("mixtral", {"ep": 4}, "ep", False),
        slow("mixtral", {"ep": 4}, "ep_alltoall", False),
        slow("mixtral", {"ep": 2, "dp": 2}, "ep_alltoall+zero2", False),
    ],
)
def test_graphs_differ_in_numbers_alone(kind, mesh, plan, dynamic, tmp_path):
    arguments = (str(tmp_path / "store"), kind, mesh, plan, dynamic)
    ranks.spawn(alike_ranks.worker, arguments, nprocs=math.prod(mesh.values()))
