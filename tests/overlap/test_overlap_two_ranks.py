"""Two gloo processes: values against the uncompiled program, bitwise, and the check of the order across ranks."""

import pathlib

import torch
import torch.multiprocessing as mp

HERE = pathlib.Path(__file__).parent


def program(x, w, group):
    import torch.distributed._functional_collectives as functional

    reduce = lambda t: functional.wait_tensor(functional.all_reduce(t, "sum", group))
    whole = functional.wait_tensor(functional.all_gather_tensor(w, 0, group))
    a = torch.tanh(x @ whole.t())
    return reduce(a), reduce(x.sin()), reduce(x.cos()), reduce(w.exp()), functional.wait_tensor(functional.reduce_scatter_tensor(a.t().contiguous(), "sum", 0, group)) + 1


def worker(rank, store):
    torch.set_num_threads(1)
    import torch.distributed as dist

    import mindspeed_fx
    from mindspeed_fx.passes.overlap.order import OrderMismatch, check_across_ranks

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    inputs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + s)) for s in (1, 2)]
    expected = program(*inputs, group)
    for codegen in ("eager", "inductor"):
        torch._dynamo.reset()
        options = {"codegen": codegen, "hardware": "h100", "overlap_memory": "1MiB"}
        got = torch.compile(lambda x, w: program(x, w, group), backend="mindspeed", options=options, fullgraph=True)(*inputs)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b) if codegen == "eager" else torch.allclose(a, b, rtol=1e-6, atol=1e-6)
    report = mindspeed_fx.explain(lambda x, w: program(x, w, group), *inputs, options={"codegen": "eager", "hardware": "h100", "overlap_memory": "1MiB"})
    assert [s.operator.split(" ")[0] for s in report.sites("overlap.bucket")] == ["all_reduce_coalesced"], str(report)
    assert "order of collectives" in str(report)

    def swapped(x, first):
        import torch.distributed._functional_collectives as functional

        starts = [lambda: functional.all_reduce(x, "sum", group), lambda: functional.all_gather_tensor(x, 0, group)]
        return [functional.wait_tensor(s()) for s in (starts if first else reversed(starts))]

    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: swapped(x, rank == 0), tracing_mode="fake")(inputs[0])
    if rank == 1:
        dist.barrier()
        try:
            check_across_ranks(gm, "forward")
        except OrderMismatch as e:
            assert "number 1 of 2" in str(e) and "all_reduce(float32[4, 6])" in str(e) and "all_gather_into_tensor" in str(e)
        else:
            raise AssertionError("different orders were not noticed")
    else:
        assert check_across_ranks(gm, "forward")
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.spawn(worker, (str(tmp_path / "store"),), nprocs=2)
