"""DeepSeek-V4's attention over two ranks, tensor- or context-parallel, is that of one: values and all gradients."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests import ranks

LENGTH, BATCH, HIDDEN, SCALE = 24, 2, 32, 0.25


def settings():
    from mindspeed_fx.megatron.deepseek4.settings import Settings

    return Settings(
        ratios=(0, 4, 6, 5), window=5, output_groups=2, output_rank=6, index_heads=8, index_width=8, index_topk=3,
        loss_coefficient=0.7, theta=100.0, pooled_theta=500.0, factor=4.0, beta_fast=8, beta_slow=1, original_length=64,
        streams=3, iterations=4, stream_epsilon=1e-6,
    )  # fmt: skip


def build(layer, tensor, context):
    """An Attention in float64 with random weights, the same on all ranks before they are divided."""
    from mindspeed_fx.megatron.deepseek4.attention import Attention
    from mindspeed_fx.megatron.groups import size
    from tests.megatron.gpt_models import tiny_gpt

    fields = dict(qk_head_dim=8, qk_pos_emb_head_dim=4, init_method_std=0.3, num_moe_experts=None)
    config = dataclasses.replace(
        tiny_gpt(layers=1, latent=True, **fields).config,
        tensor_model_parallel_size=size(tensor),
        sequence_parallel=size(tensor) > 1,
    )
    groups = SimpleNamespace(tp=tensor, cp=context)
    return Attention(config, layer, settings(), groups).double()


def divide(x, dim, group):
    return x.chunk(group.size(), dim)[group.rank()]


def check(layer, rank, tensor, context):
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from mindspeed_fx.megatron.context_parallel.sequence import own_chunks
    from mindspeed_fx.megatron.groups import ALONE, size

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(SCALE))
    DSAIndexerLossLoggingHelper.tracker["values"] = torch.zeros(4)
    torch.manual_seed(3)
    whole, part = build(layer, ALONE, ALONE), build(layer, tensor, context)
    with torch.no_grad():
        for one, other in zip(whole.parameters(), part.parameters()):
            one.copy_(torch.rand(one.shape, dtype=one.dtype) - 0.4)
            is_divided = getattr(other, "tensor_model_parallel", False)
            other.copy_(divide(one, other.partition_dim, tensor) if is_divided else one)

    def own(x):
        return divide(x, 0, tensor) if size(tensor) > 1 else own_chunks(x, 0, 2, rank)

    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64, requires_grad=True)
    towards = torch.randn_like(x)
    expected = whole(x)[0]
    (expected * towards).sum().backward()
    x_part = own(x.detach()).clone().requires_grad_()
    found = part(x_part)[0]
    torch.testing.assert_close(found, own(expected), rtol=1e-5, atol=1e-7)  # angles are float32
    (found * own(towards)).sum().backward()
    torch.testing.assert_close(x_part.grad, own(x.grad), rtol=1e-5, atol=1e-7)
    for (name, right), parameter in zip(whole.named_parameters(), part.parameters()):
        gradient = parameter.grad.clone()
        if size(context) > 1 or getattr(parameter, "sequence_parallel", False):  # Megatron adds these up
            torch.distributed.all_reduce(gradient)
        is_divided = getattr(parameter, "tensor_model_parallel", False)
        wanted = divide(right.grad, parameter.partition_dim, tensor) if is_divided else right.grad
        assert wanted.abs().max() > 1e-8, name
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-7, msg=lambda m: f"{name}: {m}")


def worker(rank, store):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from megatron.core import parallel_state

    import mindspeed_fx.megatron_adaptor  # noqa: F401
    from mindspeed_fx.megatron.groups import ALONE

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    group = dist.group.WORLD
    for layer in (1, 2, 3, 4):
        check(layer, rank, group, ALONE)
        check(layer, rank, ALONE, group)
    dist.destroy_process_group()


def test_attention_over_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks.spawn(worker, args=(str(tmp_path / "store"),), nprocs=2)


def test_groups_of_heads_that_do_not_divide_are_refused():
    from mindspeed_fx.megatron.deepseek4 import attention

    with pytest.raises(ValueError, match=r"--o-groups 2: 4 heads .* 4 tensor-parallel ranks; valid: \[4\]"):
        attention._divide(SimpleNamespace(num_attention_heads=4), settings(), 4)
