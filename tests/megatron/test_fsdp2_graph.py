"""A model that torch's FSDP2 divides as one graph: the same gradients as with its hooks, gathers that the backward
makes again, and what is uneven, shared, frozen or cast."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.megatron import fsdp2_graph
from mindspeed_fx.training import freed_weights
from tests import ranks
from tests.megatron.flags import test_fsdp2 as files

WIDTH = 6


class Block(nn.Module):
    """Rows of 5 and of 1, which two ranks cannot share evenly, and of 6."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.mix, x, use_reentrant=False)
        return self.mix(x)

    def mix(self, x):
        return x + torch.sigmoid(self.gate(x)) * self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(checkpointed), files.Frozen(WIDTH, WIDTH), Block(checkpointed)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tail = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tail.weight = self.head.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tail(torch.relu(self.head(x)))


def divided(settings, checkpointed: bool = False) -> nn.Module:
    from mindspeed_fx.megatron import torch_fsdp2

    torch.manual_seed(0)
    model = Model(checkpointed).double()
    torch_fsdp2.divide(model, settings, torch_fsdp2.make_mesh(settings.sharding_size, dist.group.WORLD))
    return model


def settings(**more):
    return files.fsdp2_config.Settings(
        sub_modules_to_wrap=(f"{__name__}.Block",), ignored_modules=(f"{files.__name__}.Frozen",), **more
    )


def two_batches(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of two batches whose gradients are added up."""
    outputs = [model(part) for part in x.chunk(2)]
    for output in outputs:
        output.double().square().mean().backward()
    return outputs


CASES = {
    "all ranks": (settings(), 1e-12),
    "kept": (settings(reshard_after_forward=False), 1e-12),
    "copies": (settings(sharding_size=1), 1e-12),
    "narrow": (settings(param_dtype="bf16", reduce_dtype="fp32", output_dtype="bf16"), 2e-2),
    "half": (settings(param_dtype="fp16", cast_forward_inputs=True), 2e-3),
    "again": (settings(), 1e-12),
}


def worker(rank: int, store: str, world: int, names: list[str]) -> None:
    from mindspeed_fx.report import recorder

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    x = torch.randn(world, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[rank]
    for name in names:
        chosen, tolerance = CASES[name] if name in CASES else (settings(sharding_size=2), 1e-12)
        hooked = divided(chosen, name == "again")
        whole = divided(chosen, name == "again")
        with recorder.collecting() as records:
            fsdp2_graph.compile_whole(whole, {"codegen": "eager"})
            expected, results = two_batches(hooked, x), two_batches(whole, x)
        assert len(records) == 1, records
        for one, other in zip(results, expected):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for (where, one), other in zip(whole.named_parameters(), hooked.parameters()):
            assert (one.grad is None) == (other.grad is None), where
            if one.grad is not None:
                assert one.grad.placements == other.grad.placements == one.placements
                assert one.grad.dtype == other.grad.dtype and one.grad.to_local().shape == other.grad.to_local().shape
                torch.testing.assert_close(
                    one.grad.full_tensor(), other.grad.full_tensor(), rtol=tolerance, atol=tolerance
                )
        with torch.no_grad():  # as an optimizer, and as a checkpoint that brings memory of its own
            for one, other in zip(whole.parameters(), hooked.parameters()):
                one.mul_(0.5)
                other.mul_(0.5)
            weight = whole.head.weight
            weight._local_tensor = weight.to_local().clone()
            torch.testing.assert_close(whole(x), hooked(x), rtol=tolerance, atol=tolerance)
    dist.destroy_process_group()


def test_gradients_are_those_of_the_hooks(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), 2, ["all ranks", "narrow"]))


@pytest.mark.slow
def test_every_setting(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), 2, [n for n in CASES if n not in ("all ranks", "narrow")]))


@pytest.mark.slow
def test_copies_over_four_ranks(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), 4, ["two by two"]), nprocs=4)


def test_what_is_made_of_a_freed_part_alone_is_made_again():
    """From its gather on; what else the gathered weight meets is kept as ever."""
    from mindspeed_fx.compat import partitioner

    c10d, aten = torch.ops._c10d_functional, torch.ops.aten
    part = nn.Parameter(torch.randn(2, 3))
    freed_weights.free_after_forward(part)
    graph = fx.Graph()
    weight, x = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    cast = graph.call_function(aten.to.dtype, (weight, torch.float32))
    start = graph.call_function(c10d.all_gather_into_tensor.default, (cast, 2, "0"))
    whole = graph.call_function(c10d.wait_tensor.default, (start,))
    turned = graph.call_function(aten.t.default, (whole,))
    product = graph.call_function(aten.mm.default, (x, turned))
    other = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "0"))
    graph.output((product, other))
    freed = freed_weights.FreedWeights([part, torch.randn(2, 3)])
    assert freed.positions == [0] and freed.identity == "-freed[0]"
    freed.mark(fx.GraphModule(nn.Module(), graph))
    assert [n for n in graph.nodes if partitioner.must_recompute(n)] == [start, whole, turned]
    assert freed_weights.FreedWeights([copy.copy(x)]).identity == ""


@pytest.mark.parametrize("ranks_, first", [(1, 1), (2, 2), (4, 2), (8, 4), (16, 4), (64, 8)])
def test_halves_are_divided_before_and_after_as_torch_does(ranks_, first):
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    class Group:
        def size(self):
            return ranks_

    before, *_ = _get_gradient_divide_factors(Group(), None, torch.float16)
    assert fsdp2_graph.first_divisor(ranks_, torch.float16) == before == first
    assert fsdp2_graph.first_divisor(ranks_, torch.bfloat16) == 1
