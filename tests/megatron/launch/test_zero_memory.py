"""``--moe-zero-memory`` in Megatron-LM's training with experts on two ranks: the losses of the run without it."""

from __future__ import annotations

import pytest

from tests.megatron.launch import runner
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2
    --moe-ffn-hidden-size 32 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --ddp-bucket-size 20000 --n-shared-experts 1"""
COUNT = "tests.megatron.launch.test_zero_memory:count_exchanges"


def count_exchanges(rank: int) -> None:
    """Prints a line for every exchange of rows."""
    import torch.distributed._functional_collectives as functional

    exchange = functional.all_to_all_single

    def counted(x, *args):
        if x.dim() == 2:
            print("event: exchange", flush=True)
        return exchange(x, *args)

    functional.all_to_all_single = counted


def check_same(plain: runner.Run, lean: runner.Run) -> None:
    assert set(lean.losses) == set(plain.losses) == {1, 2, 3}
    for iteration, losses in plain.losses.items():
        assert lean.losses[iteration] == pytest.approx(losses, rel=1e-6)
        assert lean.grad_norms[iteration] == pytest.approx(plain.grad_norms[iteration], rel=1e-6)


@pytest.mark.slow
def test_rows_are_exchanged_again_at_level_1():
    """2 layers, 2 micro-batches, 3 iterations: there and back, both ways, and there again in layers of level 1."""
    plain = train(EXPERTS, 2, EAGER)
    for words, layers in (("level0", 0), ("level1 --moe-zero-memory-num-layers 1", 1)):
        lean = train(f"{EXPERTS} --moe-zero-memory {words}", 2, EAGER, setup=COUNT)
        check_same(plain, lean)
        assert lean.output[0].count("event: exchange") == 3 * 2 * (2 * 4 + layers)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["level0", "level1", "level1 --moe-expert-capacity-factor 1"])
def test_compiled_chunks(words):
    flags = f"{EXPERTS} {words.partition(' ')[2]}"
    plain, lean = train(flags, 2), train(f"{EXPERTS} --moe-zero-memory {words}", 2, COMPILED)
    check_same(plain, lean)
    assert lean.graphs == plain.graphs == [1, 1]
