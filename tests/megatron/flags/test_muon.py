"""Muon in Megatron-core without the package emerging_optimizers: its iteration by singular values, its steps written
out, and a run of Megatron's own optimizer around it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from mindspeed_fx.megatron import muon
from tests import ranks
from tests.megatron.flags.values import apply


def by_singular_values(x: torch.Tensor, steps: int, kind: str) -> torch.Tensor:
    """U p(s) V^T: each step is a polynomial of the singular values, s (a + b s^2 + c s^4)."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    rows = muon.COEFFICIENTS[kind]
    rest = itertools.repeat(rows[-1]) if kind == "polar_express" else itertools.cycle(rows)
    for a, b, c in itertools.islice(itertools.chain(rows, rest) if kind == "polar_express" else rest, steps):
        s = s * (a + b * s**2 + c * s**4)
    return u * s @ v


@pytest.mark.parametrize("kind", list(muon.COEFFICIENTS))
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_newton_schulz_by_formula(kind, shape):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for steps in (1, 7, 9):
        wanted = by_singular_values(x, steps, kind)
        torch.testing.assert_close(muon.orthogonalize(x, steps, kind), wanted, rtol=1e-9, atol=1e-10)
    values = torch.linalg.svdvals(muon.orthogonalize(x, 10, kind))
    assert 0.6 < values.min() and values.max() < 1.3
    with pytest.raises(ValueError, match="there are simple, quintic, polar_express, aol"):
        muon.orthogonalize(x, 5, "cubic")


def test_products_in_bfloat16():
    """--muon-fp32-matmul-prec medium, the default: within bfloat16 of the others."""
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(2))
    wanted = muon.orthogonalize(x, 5, "quintic")
    with muon._precision("medium"):
        narrow = muon.orthogonalize(x, 5, "quintic")
    assert narrow.dtype == torch.float32 and not torch.equal(narrow, wanted)
    torch.testing.assert_close(narrow, wanted, rtol=0, atol=0.05)


def test_scales():
    scales = [muon.scale_of(12, 48, mode) for mode in ("spectral", "shape_scaling", "unit_rms_norm")]
    assert scales == [48**0.5, 1.0, 0.5] and muon.scale_of(48, 12, "shape_scaling") == 2.0


def build(**more):
    """A model of Megatron's and its Muon; gradients in float32."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    from tests.megatron.gpt_models import batch, tiny_gpt

    model = tiny_gpt(layers=1, **more)
    model.ddp_config = SimpleNamespace(num_distributed_optimizer_instances=1, use_megatron_fsdp=False)
    model(**batch()).mean().backward()
    for p in model.parameters():
        p.main_grad = p.grad.float()
    config = OptimizerConfig(
        optimizer="muon",
        lr=0.01,
        weight_decay=0.1,
        muon_momentum=0.9,
        muon_use_nesterov=True,
        muon_fp32_matmul_prec="highest",
        muon_num_ns_steps=4,
        clip_grad=0.0,
    )
    return model, get_megatron_muon_optimizer(config, [model])


def steps_by_formula(w: torch.Tensor, grads: list[torch.Tensor], is_qkv: bool, decay: float) -> torch.Tensor:
    average = torch.zeros_like(w)
    for g in grads:
        average = 0.9 * average + 0.1 * g
        u = 0.1 * g + 0.9 * average
        parts = [u] if not is_qkv else list(u.view(2, 32, -1).split([16, 8, 8], 1))  # 2 groups of 2 heads of 8
        each = [x.reshape(-1, u.shape[-1]) for x in parts]
        each = [by_singular_values(x, 4, "quintic") * max(x.shape) ** 0.5 for x in each]
        step = torch.cat([x.view(2, -1, u.shape[-1]) for x in each], 1).view_as(u) if is_qkv else each[0]
        w = w * (1 - 0.01 * decay) - 0.01 * step
    return w


@pytest.mark.usefixtures("on_one_rank")
def test_steps_of_megatrons_optimizer():
    """Matrices take Muon's steps, everything else Adam's; queries, keys and values are three matrices."""
    model, optimizer = build()
    before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    grads = {n: [p.main_grad.double().clone()] for n, p in model.named_parameters()}
    assert optimizer.step()[0]
    for n, p in model.named_parameters():
        p.main_grad.mul_(-0.5).add_(0.1)
        grads[n].append(p.main_grad.double().clone())
    assert optimizer.step()[0]
    names = [n for n, p in model.named_parameters() if p.ndim == 2 and "embedding" not in n and "output_layer" not in n]
    assert len(names) == 4
    for n, p in model.named_parameters():
        if n in names:
            wanted = steps_by_formula(before[n], grads[n], "linear_qkv" in n, 0.1)
            torch.testing.assert_close(p.double(), wanted, rtol=1e-4, atol=1e-5)
    biases = [n for n in before if n not in names]
    assert biases and all(not torch.equal(before[n], dict(model.named_parameters())[n].double()) for n in biases)


def worker(rank: int, store: str) -> None:
    """Parts of a matrix: put together, or with sums over ranks, as the whole; each by itself."""

    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group = dist.group.WORLD
    for shape in ((12, 20), (20, 12)):
        x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        for dim in (0, 1):
            part = x.chunk(2, dim)[rank].contiguous()
            wanted = by_singular_values(x, 5, "quintic").chunk(2, dim)[rank]
            for mode in ("duplicated", "distributed"):
                found = muon.orthogonalize(part, 5, "quintic", group, dim, mode)
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
            for mode, size in (("blockwise", part.shape), ("duplicated", x.shape)):
                p = torch.nn.Parameter(torch.zeros_like(part))
                p.grad, p.partition_dim = part.clone(), dim
                groups = SimpleNamespace(tp=group, expt_tp=None)
                more = dict(use_nesterov=False, fp32_matmul_prec="highest", pg_collection=groups, mode=mode)
                muon.Muon([p], lr=1.0, momentum_beta=0.0, weight_decay=0.0, **more).step()
                step = by_singular_values(part, 5, "quintic") if mode == "blockwise" else wanted
                torch.testing.assert_close(-p.detach(), step * max(size) ** 0.5, rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()


def test_divided_matrices(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),))


def test_the_flag():
    assert apply("--optimizer muon --muon-coefficient-type aol --muon-nesterov").muon_use_nesterov
