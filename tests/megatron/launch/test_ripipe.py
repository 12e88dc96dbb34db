"""Ripipe in Megatron-LM's interleaved schedule: the losses of the run without it, and recomputation before arrival."""

from __future__ import annotations

import pytest

from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

STAGES = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
WHOLE = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
ADVANCE, BUBBLE = f"{WHOLE} --recompute-in-advance", "--recompute-in-bubble"
RECORD = "tests.megatron.launch.test_ripipe:record"
BACKWARDS = 3 * 4 * 2
"""Iterations, micro-batches, chunks."""
pytestmark = pytest.mark.slow


def record(rank: int) -> None:
    """Prints when a chunk is recomputed, and when a gradient that is waited for has come."""
    from mindspeed_fx.megatron import ripipe

    recompute, wait = ripipe.Pass.recompute, ripipe._Request.wait

    def recomputed(self):
        if self.output is None:
            print("event: again", flush=True)
        recompute(self)

    def waited(self):
        result = wait(self)
        print("event: arrived", flush=True)
        return result

    ripipe.Pass.recompute, ripipe._Request.wait = recomputed, waited


@pytest.mark.parametrize("environ", [EAGER, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("words", [ADVANCE, BUBBLE])
def test_chunks_are_recomputed_before_their_gradient_arrives(words, environ):
    flags = f"{STAGES} {DROPOUT}"
    plain, early = train(flags, 2, environ), train(f"{flags} {words}", 2, environ, setup=RECORD)
    assert early.losses == plain.losses and early.grad_norms == plain.grad_norms
    lines = [line.removeprefix("event: ") for line in early.output[0].splitlines() if line.startswith("event: ")]
    assert lines.count("arrived") == BACKWARDS  # all gradients of rank 0 are sent to it
    if words == ADVANCE:
        assert lines == ["again", "arrived"] * BACKWARDS
    else:  # rank 0 would keep 5 chunks of 8, and keeps 4
        assert 0 < lines.count("again") < BACKWARDS / 2
        assert all(lines[i + 1] == "arrived" for i, line in enumerate(lines) if line == "again")
