"""Where the rotated part of a head lies, and how cos and sin are laid beside the heads."""

import pytest
import torch

from tests.models import double, function_agrees

NAME = "fusion.rope"


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def angles(seq, size):
    table = torch.outer(torch.arange(seq, dtype=torch.double), 0.5 ** torch.arange(size // 2, dtype=torch.double))
    table = torch.cat((table, table), -1)[None]
    return table.cos() * 1.5, table.sin() * 1.5


PLACES = {"first": (4, 0), "last": (0, 4), "middle": (2, 2)}
"""Elements of the head before and after the rotated ones."""


@pytest.mark.parametrize(
    "place, dim, heads, cut",
    [("first", 2, 3, "split"), ("last", 2, 1, "split"), ("last", 1, 3, "slice"), ("middle", 2, 3, "slice")],
)
def test_a_part_of_each_head_with_scaled_angles_laid_beside_the_heads(place, dim, heads, cut):
    """``cos[:, None]`` for [batch, heads, seq, dim] and ``cos[:, :, None]`` for [batch, seq, heads, dim], of angles
    that the graph scales.
    """
    before, after = PLACES[place]

    def rotate(x):
        x = x.view(2, 3, heads, 12)
        x = x.transpose(1, 2) if dim == 1 else x
        a, turned, b = (
            x.split((before, 12 - before - after, after), -1)
            if cut == "split"
            else (x[..., :before], x[..., before : 12 - after], x[..., 12 - after :])
        )
        cos, sin = (t.unsqueeze(dim) for t in angles(3, 12 - before - after))
        return torch.cat((a, turned * cos + half(turned) * sin, b), -1)

    report = function_agrees(rotate, double(2, 3, heads * 12))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


def test_as_many_heads_as_positions():
    """Angles that lose the dimension of the heads would be broadcast along it."""

    def rotate(x):
        cos, sin = (t.unsqueeze(2) for t in angles(3, 8))
        return x * cos + half(x) * sin

    assert function_agrees(rotate, double(2, 3, 3, 8)).counts[NAME] == 1


def test_without_gradient_beside_a_loss():
    """DeepSeek's indexer rotates heads of its own where no gradient is recorded."""

    def f(x):
        with torch.no_grad():
            cos, sin = (t.unsqueeze(2) for t in angles(3, 8))
            turned = x * cos + half(x) * sin
        return turned * x

    assert function_agrees(f, double(2, 3, 4, 8)).counts[NAME] == 1


def test_angles_over_more_dimensions_than_a_head_leave_a_reason():
    """A rotation by angles of their own for each head, read together with the heads' dimension on one side only."""

    def f(x, c, s):
        cos, sin = (torch.stack((t, t * 2), -2) for t in (c, s))
        return x * cos + half(x) * sin

    report = function_agrees(f, double(2, 3, 2, 8), double(3, 8, grad=False), double(3, 8, grad=False))
    assert report.counts[NAME] or any("over more dimensions" in s.reason for s in report.skipped(NAME))


def test_the_one_head_of_latent_keys():
    """Megatron: a part of a projection, given a dimension of one head, its even elements before its odd ones; angles
    with that dimension too.
    """

    def f(x, c):
        k = x[..., 16:].unsqueeze(2)
        k = torch.cat((k[..., 0::2], k[..., 1::2]), -1)
        cos, sin = (g * 1.0 for g in (c.cos(), c.sin()))
        return k * cos + half(k) * sin

    report = function_agrees(f, double(5, 2, 24), double(5, 1, 1, 8, grad=False))
    assert report.counts[NAME] == 1, report.skipped(NAME)


def test_heads_that_are_normalized_after_they_turn():
    """HunYuan: the rotation's sum is no residual of the norm."""

    def f(x, w):
        cos, sin = (t.unsqueeze(1) for t in angles(3, 8))
        return torch.nn.functional.rms_norm(x * cos + half(x) * sin, (8,), w, 1e-5)

    assert function_agrees(f, double(2, 4, 3, 8), double(8)).counts[NAME] == 1
