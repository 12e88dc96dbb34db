"""``--disable-gloo-group``: states of the distributed optimizer gathered and given out by the training's own groups.

A checkpoint of ``--ckpt-format torch`` has the states of all data-parallel ranks in one file, which Megatron gathers by
gloo. Without gloo's groups they go through the device, ``--hccl-slice-size`` float32 numbers of a rank at a time, so
that a device holds that many times ranks + 1 and no whole bucket. The files are Megatron's. Source: MindSpeed's
replacement of gloo by HCCL.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import groups, patches
from mindspeed_fx.megatron.run_arguments import training_arguments

DISTRIBUTED = "optimizer.distrib_optimizer:DistributedOptimizer"
GET, LOAD = f"{DISTRIBUTED}.get_parameter_state_dp_zero", f"{DISTRIBUTED}.load_parameter_state_from_dp_zero"
KEYS = ("param", "exp_avg", "exp_avg_sq")
SLICE = 10 * 1024 * 1024
"""Numbers, where the run does not say."""


def get(self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False) -> Any:
    """``DistributedOptimizer.get_parameter_state_dp_zero``, without gloo where there are no groups of it."""
    if self.data_parallel_group_gloo is not None or not use_gloo_comm or empty_data or return_on_all_ranks:
        return patches.original(GET)(self, use_gloo_comm, empty_data, return_on_all_ranks)
    group, state = self.data_parallel_group, {"buckets_coalesced": True}
    is_first = group.rank() == 0
    for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
        ((dtype, buckets),) = ranges.items()
        whole: dict[str, Any] = {}
        if is_first:
            whole = {key: torch.zeros(buffer.numel_unpadded, dtype=torch.float32) for key in KEYS}
            whole["numel_unpadded"] = buffer.numel_unpadded
        start = 0
        for bucket, held in zip(buffer.buckets, buckets, strict=True):
            for key, own in _own_parts(self, bucket, held).items():
                gathered = _gather(own, group)
                if gathered is not None:
                    whole[key][start : start + bucket.numel_unpadded] = gathered[: bucket.numel_unpadded]
            start += bucket.numel_unpadded
        state[index] = {dtype: whole}
    return state if is_first else None


def load(self: Any, state_dict: Any, *, update_legacy_format: bool = False) -> None:
    """``DistributedOptimizer.load_parameter_state_from_dp_zero``, without gloo where there are no groups of it.

    Raises:
        OptionError: a checkpoint of before 2024, or of another number of weights.
    """
    if self.data_parallel_group_gloo is not None:
        return patches.original(LOAD)(self, state_dict, update_legacy_format=update_legacy_format)
    if update_legacy_format:
        raise OptionError(
            "a checkpoint of before 2024 is read by gloo alone: load it once without --disable-gloo-group"
        )
    group = self.data_parallel_group
    is_first = group.rank() == 0
    if is_first:
        self.split_state_dict_if_needed(state_dict)
    for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
        ((dtype, buckets),) = ranges.items()
        saved = state_dict[index][dtype] if is_first else None
        if saved is not None and saved["numel_unpadded"] != buffer.numel_unpadded:
            raise OptionError(
                f"the checkpoint's optimizer has {saved['numel_unpadded']} weights in buffer {index}, this run's "
                f"{buffer.numel_unpadded}"
            )
        received: dict[Any, dict[str, Tensor]] = {}
        for key in KEYS:
            start = 0
            for bucket, held in zip(buffer.buckets, buckets, strict=True):
                count, padded = bucket.numel_unpadded, bucket.grad_data.numel()
                part = None if saved is None else functional.pad(saved[key][start : start + count], (0, padded - count))
                start += count
                own = _scatter(part, padded // group.size(), group)
                for parameter, places in held["param_map"].items():
                    local = places["gbuf_local"]
                    received.setdefault(parameter, {})[key] = own[local.start : local.end]
        for parameter, tensors in received.items():
            self._set_main_param_and_optimizer_states(parameter, tensors)


def _own_parts(optimizer: Any, bucket: Any, held: Any) -> dict[str, Tensor]:
    """This rank's part of a bucket, of each state, in host memory."""
    count = bucket.grad_data.numel() // optimizer.data_parallel_group.size()
    parts = {key: torch.zeros(count, dtype=torch.float32) for key in KEYS}
    for parameter, places in held["param_map"].items():
        states, local = optimizer._get_main_param_and_optimizer_states(parameter), places["gbuf_local"]
        for key, part in parts.items():
            part[local.start : local.end] = states[key].detach()
    return parts


def _slice_size() -> int:
    return getattr(training_arguments(), "hccl_slice_size", None) or SLICE


def _gather(own: Tensor, group: Any) -> Tensor | None:
    """The parts of all ranks one after the other, on the first rank; ``own`` [n], in host memory."""
    device, whole = groups.current_device(), None
    if group.rank() == 0:
        whole = own.new_empty(group.size(), own.numel())
    for start in range(0, own.numel(), size := _slice_size()):
        piece = own[start : start + size].to(device)
        pieces = [torch.empty_like(piece) for _ in range(group.size())]
        dist.all_gather(pieces, piece, group=group)  # HCCL has no gather to one rank
        if whole is not None:
            for row, other in zip(whole, pieces):
                row[start : start + size] = other
    return None if whole is None else whole.view(-1)


def _scatter(whole: Tensor | None, count: int, group: Any) -> Tensor:
    """This rank's ``count`` numbers of what the first rank has, in host memory."""
    device, first = groups.current_device(), dist.get_global_rank(group, 0)
    own = torch.empty(count, dtype=torch.float32)
    rows = None if whole is None else whole.view(group.size(), count)
    for start in range(0, count, size := _slice_size()):
        piece = torch.empty(min(size, count - start), dtype=torch.float32, device=device)
        pieces = None
        if rows is not None:
            pieces = [row[start : start + size].to(device=device, dtype=torch.float32).contiguous() for row in rows]
        dist.scatter(piece, pieces, first, group=group)
        own[start : start + size] = piece
    return own
