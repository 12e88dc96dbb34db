"""``--tp-2d``: layers on two times two ranks are those of one; a run is that of tensor parallelism in one dimension."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from tests import ranks
from tests.megatron.flags.values import normal
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

SEQ, BATCH, HIDDEN, FFN, RANKS = 8, 2, 16, 24, 4


def plain(x, norm, qkv, proj, fc1, fc2):
    """A norm, products as attention's, and a gated MLP."""
    y = functional.rms_norm(x, (HIDDEN,), norm, 1e-5)
    x = x + functional.linear(torch.sin(functional.linear(y, qkv)), proj)
    gate, up = functional.linear(functional.rms_norm(x, (HIDDEN,), norm, 1e-5), fc1).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, fc2)


def worker(rank: int, store: str) -> None:
    import torch.distributed as dist

    import mindspeed_fx.megatron_adaptor
    from mindspeed_fx.megatron import collectives, tp_2d

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    grid = tp_2d.grid_of(dist.group.WORLD, 2)
    i, j = divmod(rank, 2)
    assert (grid.x.rank(), grid.y.rank()) == (i, j) and grid.x.size() == grid.y.size() == 2
    x = normal(0, SEQ, BATCH, HIDDEN).requires_grad_()
    norm = (1 + 0.1 * normal(1, HIDDEN)).requires_grad_()
    shapes = [(HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
    weights = [normal(2 + n, *shape).mul(0.2).requires_grad_() for n, shape in enumerate(shapes)]
    qkv, proj, fc1, fc2 = weights
    out = plain(x, norm, *weights)
    upstream = normal(9, *out.shape)
    out.backward(upstream)

    def of(weight, dim, halves=1):
        """The weight of tensor parallelism in one dimension."""
        parts = [half.chunk(RANKS, dim)[rank] for half in weight.detach().chunk(halves, dim)]
        return SimpleNamespace(weight=torch.nn.Parameter(torch.cat(parts, dim)))

    layers = [
        tp_2d.RMSNorm(SimpleNamespace(weight=norm.detach(), eps=1e-5), grid),
        tp_2d.ColumnLinear(of(qkv, 0), grid, True),
        tp_2d.RowLinear(of(proj, 1), grid, True),
        tp_2d.ColumnLinear(of(fc1, 0, 2), grid, False, True),
        tp_2d.RowLinear(of(fc2, 1), grid, False),
    ]

    def part(whole):
        return whole.detach().chunk(2, 0)[i].chunk(2, -1)[j]

    def run(own):
        first, column, row, up_gate, down = layers
        own = own + row(torch.sin(column(first(own))[0]))[0]
        gate, up = up_gate(first(own))[0].chunk(2, -1)
        return own + down(functional.silu(gate) * up)[0]

    own = part(x).clone().requires_grad_()
    result = run(own)
    result.backward(part(upstream))
    close = dict(rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(result, part(out), **close)
    torch.testing.assert_close(own.grad, part(x.grad), **close)
    gated = torch.cat([h.chunk(2, 0)[i] for h in fc1.grad.chunk(2, 0)], 0).chunk(2, 1)[j]
    expected = [
        norm.grad.chunk(2, 0)[j],
        qkv.grad.chunk(2, 0)[i].chunk(2, 1)[j],
        proj.grad.chunk(2, 0)[j].chunk(2, 1)[i],
        gated,
        fc2.grad.chunk(2, 0)[j].chunk(2, 1)[i],
    ]
    for layer, gradient in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.weight.grad, gradient, **close)
    assert layers[0].weight.tensor_model_parallel == (i == 0)
    back = collectives.gather_from_tensor_model_parallel_region(result.detach(), grid.y)
    back = collectives.gather_from_sequence_parallel_region(back, False, grid.x)
    torch.testing.assert_close(back, out.detach(), **close)
    dist.destroy_process_group()


def test_two_times_two_ranks(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),), nprocs=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--group-query-attention --num-query-groups 4", "--use-distributed-optimizer"])
def test_a_run_is_that_of_one_dimension(flags):
    """The same first weights; losses, and norms of gradients, in which every weight counts once."""
    words = f"{flags} --tensor-model-parallel-size 4"
    one = train(words, 4, EAGER)
    for environ, graphs in ((EAGER, 0), (COMPILED, 1)):
        two = train(f"{words} --tp-2d --tp-x 2 --tp-y 2", 4, environ)
        assert two.graphs == [graphs] * 4
        check_near(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["", "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"])
@pytest.mark.parametrize("grid", ["--tp-x 2 --tp-y 1", "--tp-x 1 --tp-y 2"])
def test_stages_of_a_pipeline(grid, stages):
    """Messages of divided hidden states, in both of Megatron's schedules, also of an evaluation."""
    words = f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {stages} --eval-iters 1 --eval-interval 3"
    one = train(words, 4, EAGER)
    graphs_of_a_rank = 2 * (2 if stages else 1)  # of each chunk one that trains and one that evaluates
    for environ, graphs in ((EAGER, 0), (COMPILED, graphs_of_a_rank)):
        two = train(f"{words} --tp-2d {grid}", 4, environ)
        assert two.graphs == [graphs] * 4
        check_near(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ulysses_cp_algo", "megatron_cp_algo"])
def test_a_divided_sequence(algorithm):
    """Beside context parallelism: tokens of a rank are divided once more between layers."""
    words = f"--tensor-model-parallel-size 2 --context-parallel-size 2 --context-parallel-algo {algorithm}"
    one = train(words, 4, EAGER)
    for environ, graphs in ((EAGER, 0), (COMPILED, 1)):
        two = train(f"{words} --tp-2d --tp-x 1 --tp-y 2", 4, environ)
        assert two.graphs == [graphs] * 4
        check_near(two, one)


def check_near(two, one):
    assert set(two.losses) == set(one.losses) and one.losses
    for k, losses in one.losses.items():
        assert two.losses[k] == pytest.approx(losses, rel=1e-6)
        assert two.grad_norms[k] == pytest.approx(one.grad_norms[k], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_a_checkpoint_of_both_forms(tmp_path, optimizer):
    """``torch_dist``: goes on bitwise; tensor parallelism of one dimension, of another size, reads it, and back."""
    flags = f"""--bf16 {optimizer} --ckpt-format torch_dist --lr-decay-iters 4 --train-iters 4 --global-batch-size 4
        --dist-ckpt-optim-fully-reshardable"""
    grid = "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2"
    whole = train(f"{flags} {grid} --save {tmp_path} --save-interval 2", 4, EAGER)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(tmp_path / "iter_0000004")
    rest = train(f"{flags} {grid} --load {tmp_path}", 4, EAGER)
    assert rest.losses == {k: whole.losses[k] for k in (3, 4)}
    assert rest.grad_norms == {k: whole.grad_norms[k] for k in (3, 4)}
    line = f"{flags} --tensor-model-parallel-size 2 --load {tmp_path}"
    one = train(f"{line} --save {tmp_path / 'one'} --save-interval 3 --exit-interval 3", 2, EAGER)
    assert one.losses[3] == pytest.approx(whole.losses[3], rel=1e-3)
    assert one.grad_norms[3] == pytest.approx(whole.grad_norms[3], rel=1e-2)
    back = train(f"{flags} {grid} --load {tmp_path / 'one'}", 4, EAGER)
    assert back.losses[4] == pytest.approx(whole.losses[4], rel=1e-3)
