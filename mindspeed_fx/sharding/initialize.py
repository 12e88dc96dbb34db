"""Parameters on the meta device -> initialized shards, the same values whatever the mesh.

Module by module: its own parameters are made whole, initialized from a seed that depends on the module's name alone,
divided, and given back before the next module's are made.
"""

from __future__ import annotations

import hashlib
from typing import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_fx.sharding.plan import ShardingError


def materialize(
    model: nn.Module,
    mesh: DeviceMesh,
    init: Callable[[nn.Module], None] | None,
    seed: int,
    divide: Callable[[str, nn.Parameter], nn.Parameter],
) -> None:
    """Initialize what is on the meta device, in place; a model without such parameters and buffers is left alone.

    Args:
        init: called with each module; default: its ``reset_parameters``.
        divide: called with name and whole parameter; gives the parameter to keep.

    Raises:
        ShardingError: a module cannot initialize itself.
    """
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        own = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
        buffers = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        for name, p in list(own.items()):
            if p in tied:
                module._parameters[name] = tied[p]
                del own[name]
        if not own and not buffers:
            continue
        if init is None and not hasattr(module, "reset_parameters"):
            raise ShardingError(
                f'module "{path}" ({type(module).__name__}) has {", ".join([*own, *buffers])} on the meta device and '
                "no reset_parameters; give parallelize(init=...)"
            )
        with torch.random.fork_rng(devices=[] if mesh.device_type == "cpu" else None):
            torch.manual_seed(_seed(seed, path))
            module.to_empty(device=mesh.device_type, recurse=False)
            init(module) if init is not None else module.reset_parameters()
        for name, meta in own.items():
            module._parameters[name] = tied[meta] = divide(f"{path}.{name}".lstrip("."), module._parameters[name])


def _seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "big")
