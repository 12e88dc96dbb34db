"""Process groups: the tensor-parallel group by default, and a group of one where torch.distributed is not
initialized.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_fx.compat import npu
from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.flags import group_options
from mindspeed_fx.megatron.run_arguments import training_arguments


def has_accelerator() -> bool:
    """True where there is CUDA or an NPU."""
    return torch.cuda.is_available() or (hasattr(torch, "npu") and torch.npu.is_available())


def kind() -> str:
    """Device type of this process: "cuda" (torch_npu's transfer_to_npu calls an NPU so too), else "npu", else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "npu" if has_accelerator() else "cpu"


def current_device() -> torch.device:
    """The accelerator of this process, CUDA's or an NPU (with or without torch_npu's transfer_to_npu), else the CPU."""
    return torch.device(kind(), getattr(torch, kind()).current_device()) if kind() != "cpu" else torch.device("cpu")


class Alone:
    """The group of a process that runs without torch.distributed."""

    @staticmethod
    def size() -> int:
        return 1

    @staticmethod
    def rank() -> int:
        return 0


ALONE = Alone()


def size(group: Any) -> int:
    return 1 if group is None else group.size()


def everybodys(group: Any) -> list[tuple[int, ...]]:
    """The ranks of this group and of those that other processes of the job call this for, sorted; all processes call
    it.
    """
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dist.get_process_group_ranks(group))
    return sorted({tuple(ranks) for ranks in everybody})


def group_or_default(tp_group: Any = None, is_expert: bool = False, check_initialized: bool = True) -> Any:
    """``get_tensor_model_parallel_group_if_none`` without the warning."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        return ALONE if tp_group is None else tp_group
    if tp_group is not None or not parallel_state.is_initialized():
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized=check_initialized)
    return parallel_state.get_tensor_model_parallel_group(check_initialized=check_initialized)


def use_mpu_process_groups(cls: type, required_pgs: list[str] | None = None) -> Any:
    """``ProcessGroupCollection.use_mpu_process_groups`` that gives groups of one without torch.distributed."""
    if dist.is_initialized():
        return patches.original(USE_MPU_PROCESS_GROUPS).__func__(cls, required_pgs)
    names = [f.name for f in dataclasses.fields(cls)]
    unknown = set(required_pgs or ()) - set(names)
    if unknown:
        raise ValueError(f"Invalid process groups requested: {sorted(unknown)}")
    return cls(**{name: None if name in ("embd", "pos_embd", "hcp") else ALONE for name in required_pgs or names})


def get_global_memory_buffer() -> Any:
    """``parallel_state.get_global_memory_buffer``, also where nothing was initialized."""
    return patches.original(GLOBAL_MEMORY_BUFFER)() if dist.is_initialized() else _BUFFER


def buffer_get_tensor(
    self: Any, tensor_shape: Any, dtype: torch.dtype, name: str, mem_alloc_context: Any = None
) -> torch.Tensor:
    """``GlobalMemoryBuffer.get_tensor``: a tensor of its own for each caller."""
    return torch.empty(tuple(tensor_shape), dtype=dtype, device=current_device())


class _Buffer:
    get_tensor = buffer_get_tensor


_BUFFER = _Buffer()
GLOBAL_MEMORY_BUFFER = "parallel_state:get_global_memory_buffer"
USE_MPU_PROCESS_GROUPS = "process_groups_config:ProcessGroupCollection.use_mpu_process_groups"


NCCL_OPTIONS = "parallel_state:get_nccl_options"


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Any) -> Any:
    """``get_nccl_options``: HCCL's as the flags of the run have them; NCCL's on CUDA; else None."""
    args = training_arguments()
    config = {} if args is None else group_options.configurations(args).get(pg_name)
    options = npu.hccl_options(config) if config else None
    if options is None and torch.cuda.is_available():
        return patches.original(NCCL_OPTIONS)(pg_name, nccl_comm_cfgs)
    return options
