"""Evaluation while float16's first steps are skipped, with --overlap-param-gather."""

from __future__ import annotations

import pytest

from mindspeed_fx.megatron.training import forward_hooks
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train


class Chunk:
    """What of Megatron's DistributedDataParallel the hooks are; as strict as it is."""

    def __init__(self):
        self.remove_forward_pre_hook_handles, self.gathered = {}, 0

    def enable_forward_pre_hook(self):
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles["module"] = "handle"

    def disable_forward_pre_hook(self, param_sync=True):
        del self.remove_forward_pre_hook_handles["module"]
        if param_sync:
            self.start_param_sync(force_sync=True)

    def start_param_sync(self, force_sync=False):
        assert force_sync
        self.gathered += 1


def test_hooks_are_taken_off_and_put_on_once():
    chunk = Chunk()
    forward_hooks.disable_forward_pre_hook([chunk])
    assert chunk.gathered == 1
    forward_hooks.disable_forward_pre_hook([chunk], param_sync=False)
    forward_hooks.enable_forward_pre_hook([chunk])
    forward_hooks.enable_forward_pre_hook([chunk])
    assert chunk.remove_forward_pre_hook_handles and chunk.gathered == 1
    forward_hooks.disable_forward_pre_hook([chunk])
    assert not chunk.remove_forward_pre_hook_handles and chunk.gathered == 2


@pytest.mark.slow
@pytest.mark.parametrize("environ", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_skipped_first_steps_are_evaluated(environ):
    """The losses of the run that gathers parameters behind its steps."""
    flags = """--fp16 --initial-loss-scale 4294967296 --min-loss-scale 1 --loss-scale-window 2 --hysteresis 1
        --train-iters 24 --global-batch-size 4 --eval-iters 1 --eval-interval 4 --use-distributed-optimizer
        --no-gradient-accumulation-fusion --overlap-grad-reduce"""
    behind, beside = (train(f"{flags} {more}", 2, environ) for more in ("", "--overlap-param-gather"))
    assert 0 < len(beside.grad_norms) < 24  # some steps were skipped, some not
    assert beside.losses == behind.losses and beside.grad_norms == behind.grad_norms
