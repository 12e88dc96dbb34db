"""``--moe-fb-overlap`` in Megatron's own schedules: compiled chunks of two micro-batches by turns, and the losses of
the run without."""

from __future__ import annotations

import pytest

from tests.megatron.launch.test_pretrain import COMPILED, told, train

EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2
    --moe-ffn-hidden-size 32 --use-distributed-optimizer --moe-router-dtype fp32 --global-batch-size 16"""
NARROW = "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STAGES = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
RECORD = "tests.megatron.launch.test_fb_overlap:record"
pytestmark = pytest.mark.slow


def record(rank: int) -> None:
    """Prints which passes run together, and when they hand over."""
    from mindspeed_fx.megatron import forward_beside_backward
    from mindspeed_fx.training import turns

    forward_beside_backward.run = told("pair", forward_beside_backward.run)
    turns._Pair.hand_over = told("turn", turns._Pair.hand_over)


@pytest.mark.parametrize("flags, world", [(EXPERTS, 2), (f"{EXPERTS} {NARROW}", 2), (f"{EXPERTS} {STAGES}", 4)])
def test_two_micro_batches_at_once(flags, world):
    plain = train(flags, world, COMPILED)
    both = train(f"{flags} --moe-fb-overlap", world, COMPILED, setup=RECORD)
    assert both.losses == plain.losses and both.grad_norms == plain.grad_norms
    output = both.output[0]
    # one rank of a stage: 4 micro-batches, whose first forward and last backward are alone; rank 0 of two stages: 8
    # forwards of chunks of 4 micro-batches, of which 5 are made before the first backward
    pairs = 3 * 3 if world == 2 else 3 * (8 - 5)
    assert output.count("event: pair") == pairs
    assert output.count("event: turn") > 2 * pairs
