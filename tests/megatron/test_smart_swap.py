"""``--smart-swap``: bytes that a chunk's graph may hold, by hand, and forwards in flight, by the schedule played."""

from __future__ import annotations

import os
from argparse import Namespace

import pytest

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import smart_swap
from mindspeed_fx.megatron.smart_swap import GIB, RESERVED, Part
from mindspeed_fx.planning.predict import stages
from mindspeed_fx.planning.predict.settings import Settings

BF16 = Part(numel=1000, nbytes=2000, ranks=4)
ADAM = {"use_distributed_optimizer": True, "accumulate_allreduce_grads_in_fp32": True, "optimizer": "adam"}


@pytest.mark.parametrize(
    "values, gradients, states",
    [
        (ADAM, 4000, 12 * 1000 / 4),
        ({**ADAM, "use_distributed_optimizer": False}, 4000, 12 * 1000),
        ({**ADAM, "accumulate_allreduce_grads_in_fp32": False}, 2000, 12 * 1000 / 4),
        ({**ADAM, "reuse_fp32_param": True}, 4000, 10 * 1000 / 4),
        ({**ADAM, "o2_optimizer": True}, 4000, 8 * 1000 / 4),
        ({**ADAM, "optimizer": "sgd"}, 4000, 8 * 1000 / 4),
        ({**ADAM, "swap_optimizer": True}, 4000, 0),
        ({**ADAM, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}, 4000, 3 * 1000 / 4),
    ],
)
def test_states_of_a_weight_in_sixteen_bits(values, gradients, states):
    args = Namespace(**values)
    assert smart_swap.gradient_bytes(args, BF16) == gradients
    assert smart_swap.states_bytes(args, BF16) == states


def test_a_float32_weight_is_its_own_main_weight():
    args = Namespace(optimizer="adam")
    part = Part(numel=1000, nbytes=4000, ranks=4)
    assert (smart_swap.gradient_bytes(args, part), smart_swap.states_bytes(args, part)) == (4000, 8000)


def test_what_the_graph_of_a_chunk_may_hold():
    """Two chunks on the rank, three forwards in flight."""
    other, device = Part(500, 1000, 1), RESERVED + 300_000
    for is_added in (False, True):
        args = Namespace(**ADAM, gradient_accumulation_fusion=is_added)
        left = 300_000 - (2000 + 1000) - (4000 + 2000) - (3000 + 6000)
        budget = smart_swap.graph_bytes(args, [BF16], [BF16, other], 3, device)
        assert budget == 2000 + 4000 * is_added + left / 3
    with pytest.raises(OptionError, match="the device has 2.00 GiB.*nothing is left for activations"):
        smart_swap.graph_bytes(args, [BF16], [BF16, other], 3, RESERVED + 10_000)


@pytest.mark.parametrize("p, v", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 3)])
def test_forwards_in_flight_are_those_of_the_schedule(p, v):
    """Never fewer than the schedule has, and no more where there are as many micro-batches as it needs."""
    args = Namespace(pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v if v > 1 else None)
    for m in (p, 2 * p, 8 * p):
        run = Settings(devices=p, sequence=8, pp=p, vpp=v, batch=m)
        for rank in range(p):
            played = stages.most_alive(run, rank, [1.0] * v)
            bound = smart_swap.most_alive(args, rank, m)
            assert bound >= played
            assert m < 8 * p or bound == played, (rank, m)


def test_schedules_whose_chunks_stay_longer():
    args = Namespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, use_nanopipe=True)
    assert smart_swap.most_alive(args, 0, 3) == 6 and smart_swap.most_alive(args, 3, 100) == 16


def test_the_memory_of_a_device(monkeypatch):
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", '{"hardware": "ascend910b2"}')
    assert smart_swap.device_bytes() == int(hardware("ascend910b2").memory) > 60 * GIB
    monkeypatch.delenv("MINDSPEED_FX_OPTIONS")
    monkeypatch.setattr(smart_swap.groups, "kind", lambda: "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert smart_swap.device_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
