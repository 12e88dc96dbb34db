"""``--use-torch-fsdp2``: torch's FSDP2 in Megatron's wrapper.

Megatron-core 0.16.1 ends a step with ``finish_grad_sync(force_all_reduce=...)``, which its wrapper of FSDP2 does not
take, and fails in its first step; gradients are there reduced already. FSDP2 gathers and frees the weights of a layer
in hooks that Dynamo does not enter, so that the forward of each layer is a graph between them, and the rest is eager.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_fx.megatron.patches import EVERYWHERE, Patch

FINISH = "distributed.data_parallel_base:_BaseDataParallel.finish_grad_sync"


def finish_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
    """``_BaseDataParallel.finish_grad_sync``: nothing is left to be done."""


def is_divided(chunk: torch.nn.Module) -> bool:
    """Whether FSDP2 divides the model in ``chunk``."""
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel

    while isinstance(chunk, torch.nn.Module):
        if isinstance(chunk, TorchFullyShardedDataParallel):
            return True
        chunk = getattr(chunk, "module", None)
    return False


def compile_layers(model: torch.nn.Module, options: dict[str, Any]) -> None:
    """Compile the forward of every transformer layer of ``model``, in place.

    Args:
        options: of the backend.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in (m for m in model.modules() if isinstance(m, TransformerLayer)):
        layer.forward = torch.compile(layer.forward, backend="mindspeed", fullgraph=True, options=options)


def table() -> list[Patch]:
    """The patch."""
    return [Patch(FINISH, finish_grad_sync, "Megatron's FSDP2 has nothing to do at a step's end", EVERYWHERE)]
