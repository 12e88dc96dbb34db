"""Dropout from a seed: the numbers are uniform and independent, both directions draw the same, and nothing of their
size is kept.
"""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.kernels.dropout_add_seeded import LEVELS, draw_levels
from tests.models import explain

NAME = "fusion.dropout_add_seeded"


def seeds(count):
    """The same in every process: parallel runs must collect the same tests."""
    return torch.randint(2**31 - 1, (count, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(count))


def numbers(seed, n=2**18):
    return draw_levels(torch.Size([n]), seed).double() / LEVELS


@pytest.mark.parametrize("seed", seeds(4), ids=str)
def test_the_numbers_are_uniform_and_their_neighbours_unrelated(seed):
    u = numbers(seed)
    expected = len(u) / 256
    assert ((torch.histc(u, 256, 0, 1) - expected) ** 2 / expected).sum() < 255 + 5 * (2 * 255) ** 0.5
    z = (u - 0.5) * 12**0.5
    for lag in (1, 2, 64, 512, 1000, 4096):
        assert (z[lag:] * z[:-lag]).mean().abs() < 5 / (len(z) - lag) ** 0.5
    kept = (u >= 0.1).double().view(512, 512)
    for dim in (0, 1):  # a binomial distribution along rows and along columns
        assert 0.7 < kept.sum(dim).var() / (512 * 0.09) < 1.4


def test_two_seeds_draw_unrelated_numbers():
    a, b = seeds(2)
    for given in ((a, b), (a, torch.stack((b[0], a[1])))):
        x, y = (numbers(s) - 0.5 for s in given)
        assert (x * y).mean().abs() * 12 < 5 / len(x) ** 0.5


def test_every_number_below_the_limit_can_be_drawn_and_the_places_count_beyond_32_bits():
    u = draw_levels(torch.Size([2**16]), torch.tensor([2**31 - 2, 0], dtype=torch.int32))
    assert 0 <= u.min() and u.max() < LEVELS and len(u.unique()) > 2**16 - 256


@pytest.mark.parametrize("bias", [True, False])
def test_gradients(bias):
    x, r, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 7), (5, 7), (7,)))
    seed = seeds(1)[0]
    run = lambda x, r, b: torch.ops.mindspeed.dropout_add_seeded(x, b if bias else None, r, seed, 0.4) + 0 * b  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, r, b))
    kept = draw_levels(x.shape, seed) >= 0.4 * LEVELS
    torch.testing.assert_close(run(x, r, b), r + kept * (x + b if bias else x) / 0.6)


def on_npu(f, *inputs):
    """(outputs, gradients) of ``f`` compiled for npu, its operators emulated."""
    leaves = [i.detach().clone().requires_grad_() for i in inputs]
    out = torch.compile(f, backend="mindspeed", options={"target": "npu"})(*leaves)
    return out, torch.autograd.grad(out.sum(), leaves)


def test_forward_and_backward_draw_the_same():
    f = lambda x, b, r: r + F.dropout(x + b, 0.25, True)  # noqa: E731
    x, b, r = torch.rand(64, 48) + 1, torch.rand(48), torch.zeros(64, 48)
    out, (dx, db, dr) = on_npu(f, x, b, r)
    kept = out != 0
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(out, kept * (x + b) / 0.75)
    torch.testing.assert_close(dx, kept / 0.75)
    torch.testing.assert_close(db, dx.sum(0))
    assert torch.equal(dr, torch.ones_like(r))
    again, _ = on_npu(f, x, b, r)
    assert not torch.equal(out, again)
    torch.manual_seed(5)
    first, _ = on_npu(f, x, b, r)
    torch.manual_seed(5)
    assert torch.equal(first, on_npu(f, x, b, r)[0])


def test_every_layer_draws_for_itself_and_nothing_is_saved_but_seeds():
    def f(x, r):
        for _ in range(3):
            r = r + F.dropout(x, 0.5, True)
        return r

    x, r = torch.ones(32, 64, requires_grad=True), torch.zeros(32, 64)
    report = explain(f, x, r, target="npu")
    assert report.counts[NAME] == 3 and not report.skipped(NAME)
    compiled, saved = torch.compile(f, backend="mindspeed", options={"target": "npu"}), []
    compiled(x, r)  # while it is compiled other tensors are saved
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = compiled(x, r)
    assert sum(t.numel() for t in saved) <= 6 and len(out.detach().unique()) == 4


@pytest.mark.parametrize("f, reason", [
    (lambda x, r: r + F.dropout(x.double(), 0.5, True), "x is float64"),
    (lambda x, r: r + F.dropout(x, 0.0, True), "nothing is dropped"),
])  # fmt: skip
def test_skips_say_why(f, reason):
    x, r = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    report = explain(f, x, r.double() if "float64" in reason else r, target="npu")
    assert report.counts[NAME] == 0 and (
        reason in report.skipped(NAME)[0].reason if report.counts["fusion.dropout_add"] else "nothing" in reason
    )


def test_elsewhere_the_models_own_numbers_are_drawn():
    f = lambda x, r: r + F.dropout(x, 0.5, True)  # noqa: E731
    assert explain(f, torch.randn(8, 8, requires_grad=True), torch.randn(8, 8), codegen="eager").counts[NAME] == 0
