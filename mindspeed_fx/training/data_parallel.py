"""Option "data_parallel": gradients of an unmodified model averaged over ranks inside its backward graph.

Each parameter of the graph is read through a function that is the identity forward and, backward, an all_reduce of the
gradient divided by the number of ranks: what ``DistributedDataParallel`` computes, in the same order. In the backward
graph the all_reduces stand where gradients become ready; ``overlap.bucket`` and ``overlap.schedule`` do with them what
they do with others.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import distributed, graph_inputs
from mindspeed_fx.errors import OptionError


def ranks(name: str) -> tuple[str, int]:
    """Name of the process group that the option names, and its size.

    Raises:
        OptionError: torch.distributed is not initialized, or has no such group.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(
            f'option "data_parallel" is {name!r}, and torch.distributed is not initialized: call '
            "torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD.group_name if name == "world" else name
    try:
        return group, len(distributed.ranks_of(group))
    except Exception:
        raise OptionError(
            f'option "data_parallel" is {name!r}, which names no process group; valid: "world", or the group_name of a '
            'group, as mesh["dp"].get_group().group_name'
        ) from None


def parameters(inputs: Sequence[Any]) -> list[int]:
    """Positions of the inputs that are parameters to train."""
    return [i for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter) and x.requires_grad]


def average(gm: fx.GraphModule, positions: Sequence[int], name: str) -> None:
    """Read the parameters at ``positions`` of the inputs of ``gm`` through :func:`read_averaged`, in place."""
    group, size = ranks(name)
    if size > 1:
        graph_inputs.read_through(gm, dict.fromkeys(positions, (group, size)), read_averaged)


def read_averaged(parameter: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """``parameter``, whose gradient is the mean over the ranks of ``group``."""
    return _Averaged.apply(parameter, group, size)


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: str, size: int) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        share = (grad / ctx.size).contiguous()
        return (
            torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(share, "sum", ctx.group)),
            None,
            None,
        )
