"""``--init-model-with-meta-device``: what a model built without memory gets when it gets memory.

Megatron leaves there what the memory holds. Its parallel layers name their device, so that they have weights already;
norms and routers do not, and a run without a checkpoint trained on garbage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.patches import EVERYWHERE, Patch

FILL = "megatron.training.utils:to_empty_if_meta_device"


def to_empty_if_meta_device(module: nn.Module, *, device: torch.device, recurse: bool = True) -> Any:
    """``to_empty_if_meta_device``, after which modules whose weights had no memory have made them anew.

    Raises:
        ValueError: a module with such weights has no ``reset_parameters``; the message names it.
    """
    parts = list(module.named_modules()) if recurse else [("", module)]
    empty = [(n, m) for n, m in parts if any(p.is_meta for p in m.parameters(recurse=False))]
    result = patches.original(FILL)(module, device=device, recurse=recurse)
    for name, part in empty:
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"--init-model-with-meta-device: {name or 'the model'} ({type(part).__name__}) has no "
                "reset_parameters, so that nothing fills its weights; leave the flag away"
            )
        reset()
    return result


def table() -> list[Patch]:
    """The patches."""
    return [Patch(FILL, to_empty_if_meta_device, "weights of norms and routers are garbage", EVERYWHERE)]
