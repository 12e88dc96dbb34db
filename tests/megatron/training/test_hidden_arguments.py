"""What Megatron's check of arguments refuses and is done here is hidden from the check, and there after it."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_fx.megatron.training import habits

GLOO = {"disable_gloo_group": True, "enable_gloo_process_groups": False}


@pytest.mark.parametrize(
    "values, name, seen",
    [
        ({**GLOO, "ckpt_format": "torch"}, "enable_gloo_process_groups", True),
        ({**GLOO, "ckpt_format": "torch_dist"}, "enable_gloo_process_groups", False),
        ({"mindspeed_layerzero": {}, "use_torch_fsdp2": True}, "use_torch_fsdp2", False),
        ({"use_torch_fsdp2": True}, "use_torch_fsdp2", True),
    ],
)
def test_a_check_sees_what_it_takes(values, name, seen):
    args, there = Namespace(**values), []
    assert (
        habits.check_hidden(lambda args, more: there.append(getattr(args, name)) or more, args, "checked") == "checked"
    )
    assert there == [seen] and vars(args) == values
