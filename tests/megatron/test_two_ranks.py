"""Two gloo processes: every mapping, the losses, dropout and experts in a graph against Megatron's own in eager mode.

Several checks share a pair of processes, because starting a pair costs more than they do.
"""

import pytest
import torch

from tests import ranks


def worker(rank, store, checks):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from megatron.core import parallel_state

    import mindspeed_fx.megatron_adaptor  # noqa: F401

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    expert = 2 if checks == EXPERT_PARALLEL else 1
    parallel_state.initialize_model_parallel(1 if expert == 2 else 2, expert_model_parallel_size=expert)
    for check in checks:
        check(rank)
    dist.destroy_process_group()


def whole(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def compare(function, *inputs, **tolerance):
    """Value and input gradients of ``function`` in eager mode (Megatron's own code) and in a graph (ours)."""
    results = []
    for call in (function, whole(function)):
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = call(*(x * 1.0 if x.is_floating_point() else x for x in leaves))
        weight = torch.linspace(0.5, 2.0, out.numel()).view(out.shape)
        (out * weight).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves if x.is_floating_point())])
    torch.testing.assert_close(results[1], results[0], **tolerance)


def mappings(rank):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings as m

    group = parallel_state.get_tensor_model_parallel_group()
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(rank))
    same = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(7))
    compare(m.copy_to_tensor_model_parallel_region, same)
    compare(lambda t: m.reduce_from_tensor_model_parallel_region(t * 2), x)
    compare(m.scatter_to_tensor_model_parallel_region, same)
    compare(m.gather_from_tensor_model_parallel_region, x)
    compare(m.scatter_to_sequence_parallel_region, same)
    compare(m.gather_from_sequence_parallel_region, x)
    compare(lambda t: m.gather_from_sequence_parallel_region(t, tensor_parallel_output_grad=False), x)
    compare(m.reduce_scatter_to_sequence_parallel_region, x)
    compare(m.all_gather_last_dim_from_tensor_parallel_region, x)
    compare(m.reduce_scatter_last_dim_to_tensor_parallel_region, x)
    compare(lambda t: m.all_to_all(group, t), x)
    compare(lambda t: m.all_to_all(group, t, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1]), x)
    uneven = x[: 1 + 2 * rank]  # of 1 and 3 rows, in eager mode too: gloo's own gather takes parts of one length alone
    gathered = torch.cat(
        [torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(r))[: 1 + 2 * r] for r in (0, 1)]
    )
    gather = lambda t: m.gather_from_sequence_parallel_region(t, group=group, output_split_sizes=[1, 3])  # noqa: E731
    scatter = lambda t: m.reduce_scatter_to_sequence_parallel_region(t, group=group, input_split_sizes=[1, 3])  # noqa: E731
    assert torch.equal(gather(uneven), gathered) and torch.equal(scatter(gathered), 2 * uneven)
    for call, given, gradient in (
        (gather, uneven, 2 * uneven),
        (scatter, gathered, gathered),
    ):  # each is the other's gradient
        leaf = given.clone().requires_grad_()
        call(leaf).backward(gathered if call is gather else uneven)
        assert gradient.abs().max() > 0 and torch.equal(leaf.grad, gradient)
        compare(call, given)
    compare(m.all_to_all_sp2hp, x)
    compare(m.all_to_all_hp2sp, x)


def losses(rank):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy

    from mindspeed_fx.megatron import cross_entropy

    full = 3 * torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 12, (5, 2), generator=torch.Generator().manual_seed(1))
    part = full.chunk(2, -1)[rank]
    for smoothing in (0.0, 0.1):
        leaf = full.clone().requires_grad_()
        expected = cross_entropy._loss(leaf, target, smoothing, None)  # one rank: torch's cross_entropy
        (expected * torch.arange(10.0).view(5, 2)).sum().backward()
        for call in (vocab_parallel_cross_entropy, whole(vocab_parallel_cross_entropy)):
            shard = part.clone().requires_grad_()
            loss = call(shard, target, smoothing)
            (loss * torch.arange(10.0).view(5, 2)).sum().backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(shard.grad, leaf.grad.chunk(2, -1)[rank])
        if not smoothing:
            torch.testing.assert_close(_VocabParallelCrossEntropy.apply(part.clone(), target, 0.0), expected.detach())


def sequence_parallel(rank):
    """Megatron's modules, eager and in a graph, with dropout, over two steps."""
    sharded_layers([{"tie": True, "sequence_parallel": True}])


def plain_and_recomputed(rank):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    sharded_layers([{}, full])


def sharded_layers(several):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from tests.megatron.gpt_models import batch, tiny_gpt, train

    for settings in several:
        torch.manual_seed(0)
        model, inputs = tiny_gpt(tp=2, layers=1, dropout=0.1, **settings), batch()
        results = []
        for call in (model, whole(model)):
            model_parallel_cuda_manual_seed(5)
            results.append([train(model, inputs, call) for _ in range(2)])
        for (loss, grads), (expected_loss, expected_grads) in zip(results[1], results[0]):
            torch.testing.assert_close(loss, expected_loss)
            for name in grads:
                torch.testing.assert_close(grads[name], expected_grads[name], rtol=1e-4, atol=1e-6)


def experts_over_two_ranks(rank):
    """Padded to capacity the shapes are known; else they are symbols. Both are one graph."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from tests.megatron.gpt_models import batch, tiny_gpt, train

    model_parallel_cuda_manual_seed(5)
    for settings in (
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {},
        {"moe_token_dispatcher_type": "allgather"},
    ):
        torch.manual_seed(0)
        model = tiny_gpt(
            experts=4,
            layers=1,
            expert_model_parallel_size=2,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            **{"moe_token_dispatcher_type": "alltoall"} | settings,
        )
        inputs = batch()
        expected = train(model, inputs)
        loss, grads = train(model, inputs, whole(model))
        torch.testing.assert_close(loss, expected[0])
        for name in grads:
            torch.testing.assert_close(grads[name], expected[1][name], rtol=1e-4, atol=1e-6)


TENSOR_PARALLEL, EXPERT_PARALLEL = (mappings, losses, sequence_parallel), (experts_over_two_ranks,)


# tensor and sequence parallelism in whole runs are in the usual tests: launch/test_pretrain.py, test_scripts.py
@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(TENSOR_PARALLEL, id="tensor-parallel", marks=pytest.mark.slow),
        pytest.param((plain_and_recomputed,), id="plain-and-recomputed", marks=pytest.mark.slow),
        pytest.param(EXPERT_PARALLEL, id="expert-parallel", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(tmp_path, monkeypatch, checks):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks.spawn(worker, args=(str(tmp_path / "store"), checks), nprocs=2)
