"""Queries and keys that turn by the same angles turn in one launch, on npu alone."""

import pytest
import torch

from mindspeed_fx.report import recorder


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def two(q, k, cos, sin, others):
    """The sum of what depends on both rotations; ``others``: k turns by angles of its own, or after q."""
    turned = rotated(q, cos, sin)
    if others == "angles":
        return (turned.sum(1) * rotated(k, cos * 0.5, sin).sum(1)).exp().sum()
    if others == "chain":
        return rotated(turned * 2, cos, sin).exp().sum()
    return (turned.sum(1) * rotated(k, cos, sin).sum(1)).exp().sum()


def run(others, **options):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 6, 16, requires_grad=True), torch.randn(2, 1, 6, 16, requires_grad=True)
    angles = torch.randn(6, 16), torch.randn(6, 16)
    torch._dynamo.reset()
    with recorder.collecting() as records:
        have = two_gradients(torch.compile(two, backend="mindspeed", options=options), q, k, *angles, others)
    want = two_gradients(two, q, k, *angles, others)
    for h, w in zip(have, want, strict=True):
        torch.testing.assert_close(h, w, rtol=2e-5, atol=2e-5)
    return [row["side"] for r in records for row in r.lowered if row["operator"] == "mindspeed.rope_pair"]


def two_gradients(f, q, k, cos, sin, others):
    loss = f(q, k, cos, sin, others)
    return [loss, *torch.autograd.grad(loss, (q, k), allow_unused=True)][: 2 if others == "chain" else 3]


@pytest.mark.parametrize("others, joined", [("", 2), ("angles", 0), ("chain", 0)])
def test_pairs_are_joined_forward_and_backward(others, joined):
    assert run(others, target="npu") == ["forward", "backward"][:joined]


def test_elsewhere_rotations_stay_as_they_are():
    assert run("", target="cuda", codegen="eager") == []
