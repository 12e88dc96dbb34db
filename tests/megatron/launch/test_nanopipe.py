"""Nano-pipe in Megatron-LM's interleaved schedule: losses of the run without it, and the order of what ranks run."""

from __future__ import annotations

import pytest

from tests.megatron.launch.test_pretrain import COMPILED, train
from tests.megatron.test_nanopipe import events

STAGES = """--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2
    --no-gradient-accumulation-fusion"""
RECORD = "tests.megatron.launch.test_nanopipe:record"
pytestmark = pytest.mark.slow


def record(rank: int) -> None:
    """Prints what a rank runs: forwards, gradients of inputs, gradients of weights."""
    from megatron.core.pipeline_parallel import schedules

    from mindspeed_fx.megatron.nanopipe import Run
    from mindspeed_fx.training.late_gradients import Queue

    def told(name, function):
        def tell(*args, **kwargs):
            print(f"event: {name}", flush=True)
            return function(*args, **kwargs)

        return tell

    schedules.forward_step = told("F", schedules.forward_step)
    Run.end_backward, Queue.run_one = told("D", Run.end_backward), told("W", Queue.run_one)


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --bf16 --accumulate-allreduce-grads-in-fp32"])
def test_the_losses_of_the_run_without_it(flags):
    words = f"{STAGES} {flags}"
    plain, late = train(words, 2, COMPILED), train(f"{words} --use-nanopipe", 2, COMPILED, setup=RECORD)
    assert late.losses == plain.losses and late.grad_norms == plain.grad_norms
    assert len(late.grad_norms) == 3
    for rank in range(2):
        lines = [x.removeprefix("event: ") for x in late.output[rank].splitlines() if x.startswith("event: ")]
        order = [kind for kind, _, _ in events(2, rank, 2, 4, True)]
        kinds = "".join(lines)
        assert kinds.count("W") == kinds.count("D") == kinds.count("F") == 3 * 8
        assert kinds == "".join(order) * 3
