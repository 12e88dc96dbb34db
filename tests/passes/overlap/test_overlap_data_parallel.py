"""Option "data_parallel": two gloo processes train as DistributedDataParallel does, within rounding, with the
all_reduces in the backward graph.
"""

import copy

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from tests import ranks


def worker(rank, store, codegen):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    ).double()
    model[2].weight.requires_grad_(False)
    model[4].register_parameter("unused", torch.nn.Parameter(torch.ones(3).double()))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64)
    rival = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    options = {"codegen": codegen, "hardware": "h100", "data_parallel": "world", "overlap_memory": "1MiB", "level": 2}
    step = torch.compile(model, backend="mindspeed", options=options)
    for _ in range(2):  # gradients add up over calls, each call's part averaged
        for run in (rival, step):
            run(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), rival.module.parameters(), strict=True):
        if name in ("2.weight", "4.unused"):
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    if codegen == "eager":
        torch._dynamo.reset()
        model.zero_grad()
        report = mindspeed_fx.explain(model, x, options=options)
        code = report.graphs[0].stages["backward"]
        assert (
            code.count("= _c10d_functional.all_reduce") >= 1 and "all_reduce" not in report.graphs[0].stages["forward"]
        )
        assert "averaged" in report.effective_options["caches"], report.effective_options["caches"]
        first = code.index("all_reduce")
        assert "mm" in code[first:], "the first gradients are reduced before the last are made"
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_gradients_are_those_of_distributed_data_parallel(codegen, tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), codegen), nprocs=2)


def test_bad_groups():
    with pytest.raises(OptionError, match='"data_parallel" is True; valid: "world"'):
        Options(data_parallel=True)
    step = torch.compile(torch.nn.Linear(2, 2), backend="mindspeed", options={"data_parallel": "world"})
    with pytest.raises(Exception, match="torch.distributed is not initialized"):
        step(torch.ones(1, 2))


def test_a_group_that_is_none(lone_world):
    torch._dynamo.reset()
    step = torch.compile(torch.nn.Linear(2, 2), backend="mindspeed", options={"data_parallel": "dp"})
    with pytest.raises(Exception, match="\"data_parallel\" is 'dp', which names no process group"):
        step(torch.ones(1, 2))
