"""``--moe-fb-overlap``: Megatron's schedule of parts of layers of two micro-batches; the losses of the run without."""

from __future__ import annotations

import pytest

from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2
    --moe-ffn-hidden-size 32 --bf16 --use-distributed-optimizer --moe-router-dtype fp32 --global-batch-size 16"""
STAGES = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
RECORD = "tests.megatron.launch.test_fb_overlap:record"
pytestmark = pytest.mark.slow


def record(rank: int) -> None:
    """Prints which layers of two micro-batches run together."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan as Layer

    run = Layer.run

    def recorded(forward, backward, *args, **kwargs):
        print(f"event: {forward is not None} {backward is not None}", flush=True)
        return run(forward, backward, *args, **kwargs)

    Layer.run = staticmethod(recorded)


@pytest.mark.parametrize("flags, world", [(EXPERTS, 2), (f"{EXPERTS} {STAGES}", 4)])
def test_two_micro_batches_at_once(flags, world):
    plain = train(flags, world, EAGER)
    both = train(f"{flags} --moe-fb-overlap", world, COMPILED, setup=RECORD)
    assert both.losses == plain.losses and both.grad_norms == plain.grad_norms
    assert both.output[0].count("event: True True") > 0
    if world == 2:  # 4 micro-batches of 2 layers: the first forward and the last backward are alone
        assert both.output[0].count("event: True True") == 3 * 3 * 2
