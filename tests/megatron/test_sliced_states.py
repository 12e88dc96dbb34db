"""States of the distributed optimizer without gloo's groups are those that Megatron gathers and gives out by them."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from mindspeed_fx.errors import OptionError
from tests import ranks
from tests.megatron import optimizers

SLICE = 50


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    import torch.distributed as dist
    from megatron.core import parallel_state

    import mindspeed_fx.megatron_adaptor  # noqa: F401
    from mindspeed_fx.megatron import sliced_states

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(1)
    wrapped, chained = optimizers.build(True)
    optimizers.train(wrapped, chained, 2)
    (optimizer,) = chained.chained_optimizers
    by_gloo = optimizer.get_parameter_state_dp_zero()
    optimizer.data_parallel_group_gloo, lengths = None, []
    sliced_states.training_arguments = lambda: Namespace(hccl_slice_size=SLICE)
    gather, scatter = dist.all_gather, dist.scatter

    def counted(function):
        def call(first, second, *args, **kwargs):
            lengths.append((first if torch.is_tensor(first) else second).numel())
            return function(first, second, *args, **kwargs)

        return call

    dist.all_gather, dist.scatter = counted(gather), counted(scatter)
    try:
        sliced = optimizer.get_parameter_state_dp_zero()
        assert (sliced is None) == (by_gloo is None) == (rank == 1)
        if rank == 0:
            compare(sliced, by_gloo)
        mains = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        kept = [[t.clone() for t in (p, *states(optimizer, p))] for p in mains]
        for p in mains:
            for t in (p, *states(optimizer, p)):
                t.data.zero_()
        optimizer.load_parameter_state_from_dp_zero(sliced)
    finally:
        dist.all_gather, dist.scatter = gather, scatter
    for p, before in zip(mains, kept, strict=True):
        assert all(map(torch.equal, (p, *states(optimizer, p)), before)) and before[1].any()
    assert max(lengths) == SLICE and len(lengths) > 6
    with pytest.raises(OptionError, match="once without --disable-gloo-group"):
        optimizer.load_parameter_state_from_dp_zero(sliced, update_legacy_format=True)
    dist.destroy_process_group()


def states(optimizer, parameter):
    held = optimizer.optimizer.state[parameter]
    return held["exp_avg"], held["exp_avg_sq"]


def compare(one, other):
    assert one.keys() == other.keys() and one["buckets_coalesced"]
    for buffer in one.keys() - {"buckets_coalesced"}:
        ((dtype, tensors),) = one[buffer].items()
        assert tensors.keys() == other[buffer][dtype].keys()
        assert tensors.pop("numel_unpadded") == other[buffer][dtype].pop("numel_unpadded") > SLICE
        assert all(torch.equal(t, other[buffer][dtype][key]) for key, t in tensors.items())
        tensors["numel_unpadded"] = len(tensors["param"])


def test_slices_are_what_gloo_gathers(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),))
