"""Nano-pipe in Megatron-LM's interleaved schedule: losses of the run without it, and the order of what ranks run."""

from __future__ import annotations

import pytest

from tests.megatron.launch.test_pretrain import COMPILED, told, train
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

    schedules.forward_step = told("F", schedules.forward_step)
    Run.end_backward, Queue.run_one = told("D", Run.end_backward), told("W", Queue.run_one)


def record_swaps(rank: int) -> None:
    """Swaps tensors of 1 KiB already, and prints how many bytes each entry has in host memory."""
    from mindspeed_fx.training import late_gradients_swap

    late_gradients_swap.SMALLEST = 1024
    take = late_gradients_swap.Entry.take

    def tell(self):
        self.leave()
        print(f"swapped: {sum(host.nbytes for host, _ in self.hosts.values())}", flush=True)
        return take(self)

    late_gradients_swap.Entry.take = tell


def test_what_waits_in_host_memory():
    plain = train(STAGES, 2, COMPILED)
    words = f"{STAGES} --use-nanopipe --use-nanopipe-swap"
    late = train(words, 2, COMPILED, setup="tests.megatron.launch.test_nanopipe:record_swaps")
    assert late.losses == plain.losses and late.grad_norms == plain.grad_norms
    for lines in late.output:
        sizes = [int(x.removeprefix("swapped: ")) for x in lines.splitlines() if x.startswith("swapped: ")]
        assert len(sizes) == 3 * 8 and min(sizes) > 10 * 32 * 2 * 64 * 4  # more than ten tensors of hidden states


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
