"""Two gloo processes: values against the uncompiled program, bitwise, and the check of the order across ranks."""

import pytest
import torch

from tests import ranks


def program(x, w, group):
    import torch.distributed._functional_collectives as functional

    reduce = lambda t: functional.wait_tensor(functional.all_reduce(t, "sum", group))
    whole = functional.wait_tensor(functional.all_gather_tensor(w, 0, group))
    a = torch.tanh(x @ whole.t())
    return (
        reduce(a),
        reduce(x.sin()),
        reduce(x.cos()),
        reduce(w.exp()),
        functional.wait_tensor(functional.reduce_scatter_tensor(a.t().contiguous(), "sum", 0, group)) + 1,
    )


def trained(layer, given, options):
    """Loss and gradients of two layers, compiled, or not where ``options`` is None."""
    inputs = [t.clone().requires_grad_() for t in given]

    def loss(x, *weights):
        return layer(layer(x, *weights), *weights).square().sum()

    torch._dynamo.reset()
    out = (loss if options is None else torch.compile(loss, backend="mindspeed", options=options, fullgraph=True))(
        *inputs
    )
    out.backward()
    return [out.detach(), *(t.grad for t in inputs)]


def by_work(gm, hardware, fused):
    """Times for which chunks pay at the sizes of a test: work and communication by the number of elements, no
    launch.
    """
    from mindspeed_fx.graph.collectives import is_start

    def cost(node):
        if is_start(node):
            return 1e-6 * node.meta["val"].numel(), "wire"
        return (
            3e-6 * node.meta["val"].numel() if "mm" in str(node.target) or "linear" in str(node.target) else 0.0
        ), ""

    return cost


def training(rank, codegens, names):
    """A training step in another order and in buckets is bitwise that of the graph as it came; in chunks it is so
    within rounding.
    """
    from unittest import mock

    from tests.passes.overlap import parallel_layers as layers

    given = layers.inputs(rank)
    for layer in (getattr(layers, n) for n in names):
        options = {"codegen": "eager", "hardware": "h100", "overlap_memory": "1MiB"}
        plain = trained(layer, given, None)
        for a, b in zip(plain, trained(layer, given, {**options, "disable": ["overlap.decompose"]}), strict=True):
            assert torch.equal(a, b)
        with mock.patch("mindspeed_fx.passes.overlap.chunking.chunk_search.cost_of", by_work):
            for codegen in codegens:
                found = trained(
                    layer, given, {**options, "codegen": codegen, "strict": True, "enable": ["overlap.decompose"]}
                )
                for a, b in zip(found, plain, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def fused(rank):
    """torch_npu's operators for a product and its collective, emulated: values and gradients within twice bfloat16's
    own error.
    """
    from tests.passes.overlap import parallel_layers as layers

    of = layers.shapes(hidden=256, ffn=256)
    exact = trained(layers.mlp, layers.inputs(rank, of), None)
    plain = trained(layers.mlp, layers.inputs(rank, of, torch.bfloat16), None)
    options = {"target": "npu", "hardware": "ascend910b2", "enable": ["overlap.mc2"], "strict": True}
    for e, p, f in zip(
        exact, plain, trained(layers.mlp, layers.inputs(rank, of, torch.bfloat16), options), strict=True
    ):
        assert f.dtype == torch.bfloat16 and (f.double() - e).norm() <= 2 * (p.double() - e).norm() > 0


def agrees(codegen, inputs, expected, group):
    torch._dynamo.reset()
    options = {"codegen": codegen, "hardware": "h100", "overlap_memory": "1MiB"}
    got = torch.compile(lambda x, w: program(x, w, group), backend="mindspeed", options=options, fullgraph=True)(
        *inputs
    )
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b) if codegen == "eager" else torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def scattered(x, group):
    """Three results of scatters; the first is used, and its memory free, before the next is waited for."""
    import torch.distributed._functional_collectives as functional

    y = x
    for _ in range(3):
        parts = [functional.reduce_scatter_tensor(t, "sum", 0, group) for t in (y.sin(), y.cos(), y.exp())]
        y = torch.cat([functional.wait_tensor(p).tanh() for p in parts])[: len(x)]
    return y


def scatters(rank, group):
    """gloo writes all results of a joined scatter at each wait, so that its scatters are not joined."""
    import torch.distributed as dist

    from mindspeed_fx.planning.explain import Report
    from mindspeed_fx.report import recorder

    c10d, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    first, second = c10d.reduce_scatter_tensor_coalesced([torch.ones(2), torch.ones(4)], "sum", 2, name)
    c10d.wait_tensor(first).zero_()
    c10d.wait_tensor(second)
    assert first.item() == 2.0, "torch no longer writes again: joined scatters may be allowed"
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    torch._dynamo.reset()
    options = {"codegen": "eager", "hardware": "h100", "overlap_memory": "1MiB"}
    with recorder.collecting() as records:
        step = torch.compile(lambda x: scattered(x, group), backend="mindspeed", options=options, fullgraph=True)
        assert torch.equal(step(x), scattered(x, group))
    report = Report(list(records), [])
    assert not report.sites("overlap.bucket")
    assert any("again at each wait" in s.reason for s in report.skipped("overlap.bucket")), str(report)


def worker(rank, store):
    torch.set_num_threads(1)
    import torch.distributed as dist

    from mindspeed_fx.passes.overlap.scheduler.rank_agreement import OrderMismatch, check_across_ranks
    from mindspeed_fx.planning.explain import Report
    from mindspeed_fx.report import recorder

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    inputs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + s)) for s in (1, 2)]
    expected = program(*inputs, group)
    with recorder.collecting() as records:
        agrees("eager", inputs, expected, group)
    report = Report(list(records), [])
    assert [s.operator.split(" ")[0] for s in report.sites("overlap.bucket")] == ["all_reduce_coalesced"], str(report)
    assert "order of collectives" in str(report)

    training(rank, ("eager",), ("mlp",))
    scatters(rank, group)

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
            assert (
                "number 1 of 2" in str(e)
                and "all_reduce(float32[4, 6])" in str(e)
                and "all_gather_into_tensor" in str(e)
            )
        else:
            raise AssertionError("different orders were not noticed")
    else:
        assert check_across_ranks(gm, "forward")
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def generated(rank, store):
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    inputs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + s)) for s in (1, 2)]
    agrees("inductor", inputs, program(*inputs, group), group)
    fused(rank)
    training(rank, ("eager", "inductor"), ("mlp", "mlp_whole"))
    dist.destroy_process_group()


# minutes of compilation; test_two_ranks runs the same graphs as they are, test_overlap_mc2.py fused ones on one rank
@pytest.mark.slow
def test_two_ranks_fused_and_with_generated_code(tmp_path):
    ranks.spawn(generated, (str(tmp_path / "store"),), nprocs=2)


def test_two_ranks(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),), nprocs=2)
