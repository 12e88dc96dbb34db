"""``parallelize`` and ``torch.compile`` in two gloo processes: the scenarios of two_ranks.py."""

from __future__ import annotations

import pytest

from tests import ranks


def worker(rank, store, scenarios):
    import torch
    import torch.distributed as dist

    from tests.sharding import two_ranks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, two_ranks.RANKS), rank=rank, world_size=two_ranks.RANKS)
    for scenario in scenarios:
        getattr(two_ranks, scenario)()
        torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "scenarios",
    [
        pytest.param("checkpoints meta eagerly explained".split(), id="parallelize", marks=pytest.mark.slow),
        pytest.param(["draws"], id="draws"),
        pytest.param(["uneven_gradients"], id="uneven_gradients"),
        pytest.param(["functions"], id="functions"),
        pytest.param(["several_graphs"], id="several_graphs"),
        pytest.param(["recomputed"], id="recomputed", marks=pytest.mark.slow),
        pytest.param(["plans"], id="plans", marks=pytest.mark.slow),
        pytest.param(["searched"], id="searched", marks=pytest.mark.slow),
        pytest.param("uneven uneven_checkpoints".split(), id="uneven", marks=pytest.mark.slow),
        # a process group remembers the order of collectives of a graph: one model by two code generators needs two
        *[
            pytest.param([name], id=name, marks=pytest.mark.slow)
            for name in (
                "divided_loss",
                "divided_loss_in_generated_code",
                "many_layers_in_generated_code",
                "uneven_in_generated_code",
                "two_rings_in_generated_code",
                "masks",
                "masks_in_generated_code",
                "experts",
                "experts_in_generated_code",
                "travelling",
                "travelling_is_verified",
                "travelling_in_generated_code",
                "travelling_in_fixed_splits",
            )
        ],
        pytest.param(["generated_code"], id="codegen", marks=pytest.mark.slow),
    ],
)
def test_scenarios(scenarios, tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), scenarios), nprocs=2)
