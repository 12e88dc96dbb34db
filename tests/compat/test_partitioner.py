"""What torch's partitioner is asked otherwise: two equal draws stay two, and draws follow the seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.compat import partitioner

TWICE = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout before an addition": lambda x: x + F.dropout(x * 2, 0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x.detach(), 1, 1000),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(),
    "normal_": lambda x: torch.zeros_like(x).normal_(),
    "exponential_": lambda x: torch.zeros_like(x).exponential_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_equal_draws_stay_two_and_are_those_of_eager(checkpointed):
    def draw(x):
        return [f(x) * x for f in TWICE.values() for _ in range(2)]

    def step(x):
        return torch.utils.checkpoint.checkpoint(draw, x, use_reentrant=False) if checkpointed else draw(x)

    def run(f):
        torch.manual_seed(1)
        values = f(x)
        (gradient,) = torch.autograd.grad(sum(v.square().sum() for v in values), x)
        return [v.detach() for v in values], gradient

    x = torch.randn(4, 16, dtype=torch.double, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (values, gradient), (right, wanted) = (
        run(f) for f in (torch.compile(step, backend="mindspeed", options={"codegen": "eager"}), step)
    )
    for i, name in enumerate(TWICE):
        assert not torch.equal(values[2 * i], values[2 * i + 1]), name
        torch.testing.assert_close(values[2 * i : 2 * i + 2], right[2 * i : 2 * i + 2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_checkpointed_draws_follow_the_seed_but_in_cuda_graphs(monkeypatch, cudagraphs):
    """What follows on a CUDA device: tests/cuda/test_training.py."""
    import torch._functorch.config as functorch_config
    import torch._functorch.partitioners as partitioners
    import torch._inductor.config as inductor_config

    seen = []

    def partition(*_):
        seen.append(functorch_config.graphsafe_rng_functionalization)

    monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", partition)
    with inductor_config.patch({"triton.cudagraphs": cudagraphs}):
        partitioner.partition(None, [], lambda *_: None)
    assert seen == [cudagraphs]
