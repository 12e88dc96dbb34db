import pytest
import torch

from mindspeed_fx.passes.fusion.analysis.element_exprs import ElementExprs
from tests.models import double, function_agrees

NAME = "fusion.rope"


def half_slices(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def half_chunk(x):
    a, b = torch.chunk(x, 2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def interleaved(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def interleaved_view(x):
    return torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).view(x.shape)


def two_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    c, s = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def every_other(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    return a, b, c, s


def reordered(x, cos, sin):
    a, b, c, s = every_other(x, cos, sin)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def stacked(x, cos, sin):
    a, b, c, s = every_other(x, cos, sin)
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def complex_product(x, cos, sin):
    _, _, c, s = every_other(x, cos.detach(), sin.detach())
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.complex(c, s)
    return torch.view_as_real(turned).flatten(-2)


def complex_halves(x, cos, sin):
    """Gemma's own code, on heads that lie after the tokens."""
    _, _, c, s = every_other(x, cos.detach(), sin.detach())
    pairs = torch.stack(torch.chunk(x, 2, dim=-1), dim=-1)
    turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(c, s)).type_as(x)
    turned = torch.cat(torch.chunk(turned, 2, dim=-1), dim=-2)
    return turned.reshape(turned.shape[0], turned.shape[1], turned.shape[2], -1).transpose(1, 2)


def complex_partial(x, cos, sin):
    _, _, c, s = every_other(x, cos.detach(), sin.detach())
    turned = torch.view_as_complex(x[..., :8].unflatten(-1, (-1, 2))) * torch.complex(c, s)
    return torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 8:]), -1)


FORMS = {
    "half, backwards": lambda x, c, s: x * c + torch.cat((x.chunk(2, -1)[1], -x.chunk(2, -1)[0]), -1) * s,
    "reordered": reordered,
    "stacked": stacked,
    "complex": complex_product,
    "complex, halves": complex_halves,
    "complex, partial": complex_partial,
    "half, slices": lambda x, c, s: x * c + half_slices(x) * s,
    "half, chunk": lambda x, c, s: (half_chunk(x) * s) + (c * x),
    "interleaved": lambda x, c, s: x * c + interleaved(x) * s,
    "interleaved, view": lambda x, c, s: x * c + s * interleaved_view(x),
    "two halves": two_halves,
    "partial": lambda x, c, s: torch.cat((x[..., :8] * c + half_chunk(x[..., :8]) * s, x[..., 8:]), -1),
    "transposed": lambda x, c, s: (x.transpose(1, 2) * c + half_chunk(x.transpose(1, 2)) * s).transpose(1, 2),
}


@pytest.mark.parametrize("angles", ["constant", "trained"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name, angles):
    x = double(2, 3, 3, 12 if "partial" in name else 8)
    report = function_agrees(FORMS[name], x, *(double(3, 8, grad=angles == "trained") for _ in range(2)))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@pytest.mark.parametrize(
    "angles",
    [
        lambda c, s: torch.complex(c, s).conj(),
        lambda c, s: torch.polar(c.abs(), s),
        lambda c, s: torch.view_as_complex(torch.stack((c, s), -1)),
        lambda c, s: torch.complex(c, s).unsqueeze(0).unsqueeze(0),
    ],
    ids=["conjugate", "polar", "pairs", "unsqueezed"],
)
def test_complex_angles_made_in_the_graph_and_trained(angles):
    def turn(x, c, s):
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * angles(c, s)
        return torch.view_as_real(turned).flatten(-2)

    report = function_agrees(turn, double(2, 3, 5, 8), double(5, 4), double(5, 4))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


def test_a_complex_product_of_narrow_types():
    x, c, s = torch.randn(2, 3, 8).bfloat16().requires_grad_(), torch.randn(3, 8), torch.randn(3, 8)
    report = function_agrees(lambda x, c, s: complex_product(x.float(), c, s).type_as(x), x, c, s, tolerance=2e-2)
    assert report.counts[NAME] == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda a, b, c, s: torch.cat((b * c - a * s, a * c + b * s), -1),
        lambda a, b, c, s: torch.cat((a * c - b * s, b * c - a * s), -1),
        lambda a, b, c, s: torch.stack((b * c + a * s, a * c - b * s), -1).flatten(-2),
        lambda a, b, c, s: torch.stack((a * c - b * s, b * c + a * s), -2).flatten(-2),
    ],
)
def test_other_orders_and_signs_are_what_the_operator_computes(other):
    assert (
        function_agrees(
            lambda x, c, s: other(*every_other(x, c, s)), double(2, 3, 8), double(3, 8), double(3, 8)
        ).counts[NAME]
        == 1
    )


def real_product(x, cos, sin):
    """torchtune's: pairs are the last dimension of a view."""
    pairs, (_, _, c, s) = x.reshape(*x.shape[:-1], -1, 2), every_other(x, cos, sin)
    turned = torch.stack((pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 1] * c + pairs[..., 0] * s), -1)
    return turned.flatten(-2)


@pytest.mark.parametrize("heads", [2, 3, 8])
@pytest.mark.parametrize("form", [complex_product, real_product])
def test_pairs_of_heads_that_are_views_of_a_narrow_projection(form, heads):
    report = function_agrees(
        lambda x, w, c, s: form((x @ w).view(2, 3, heads, 8), c, s),
        double(2, 3, 4),
        double(4, heads * 8),
        double(3, 1, 8),
        double(3, 1, 8),
    )
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


CUTS = {
    "split": lambda x: x.split(x.shape[-1] // 3, -1),
    "chunk": lambda x: x.chunk(3, -1),
    "slices": lambda x: (x[..., : x.shape[-1] // 3], x[..., x.shape[-1] // 3 : x.shape[-1] // 3 * 2]),
}


@pytest.mark.parametrize(
    ("form", "cut", "heads"),
    [
        *((form, "split", 3) for form in FORMS if form != "transposed"),
        *((form, cut, 2) for form in ("half, chunk", "complex, partial") for cut in CUTS),
    ],
)
def test_heads_of_a_joint_projection_that_turn_before_they_are_transposed(form, cut, heads):
    """EXAONE 4.5's vision: queries and keys are parts of one product, and heads lie behind the tokens."""
    size = 12 if "partial" in form else 8

    def both(x, w, c, s):
        q, k = (part.view(2, 3, heads, size) for part in CUTS[cut](x @ w)[:2])
        return FORMS[form](q, c, s), FORMS[form](k, c, s)

    x, w = double(2, 3, 4), double(4, 3 * heads * size)
    report = function_agrees(both, x, w, *(double(3, 1, 8, grad=False) for _ in range(2)))
    assert report.counts[NAME] == 2 and not report.skipped(NAME)


def test_bfloat16():
    x, c, s = (torch.randn(2, 3, 4, 8).bfloat16().requires_grad_() for _ in range(3))
    assert function_agrees(FORMS["half, chunk"], x, c.detach(), s.detach(), tolerance=3e-2).counts[NAME] == 1


@pytest.mark.parametrize(
    "turned",
    [
        lambda x: torch.cat((half_slices(x)[..., 4:], half_slices(x)[..., :4]), -1),
        lambda x: x.flip(-2),
        lambda x: half_slices(x) ** 2,
    ],
)
def test_a_different_rotation_is_left_alone(turned):
    assert (
        function_agrees(lambda x, c, s: x * c + turned(x) * s, double(2, 3, 8), double(3, 8), double(3, 8)).counts[NAME]
        == 0
    )


def test_two_different_tensors_are_left_alone():
    assert (
        function_agrees(
            lambda x, y, c, s: x * c + half_slices(y) * s, double(3, 8), double(3, 8), double(8), double(8)
        ).counts[NAME]
        == 0
    )


def test_many_heads_of_one_projection():
    """Together they are wider than what is read element by element; each is not."""

    def heads(x, cos, sin):
        q = x.view(1, 4, 32, 128).transpose(1, 2)
        return q * cos + half_chunk(q) * sin

    assert function_agrees(heads, double(1, 4, 4096), double(4, 128), double(4, 128)).counts[NAME] == 1


def test_a_line_of_states_is_not_read_anew_for_each_of_its_tokens(monkeypatch):
    """Each state is a sum of products of the one before; all together are looked at a bounded number of times each."""
    seen, leaf = [], ElementExprs.leaf
    monkeypatch.setattr(ElementExprs, "leaf", lambda self, n, dims: seen.append(n) or leaf(self, n, dims))

    def recurrence(x, decay):
        state, outs = x[:, 0], []
        for i in range(1, x.shape[1]):
            state = state * decay[:, i] + x[:, i].roll(1, -1) * decay[:, i]
            outs.append(state)
        return torch.stack(outs, 1)

    counts = []
    for length in (8, 16, 32):
        seen.clear()
        report = function_agrees(recurrence, double(2, length, 4), double(2, length, 4))
        assert report.counts[NAME] == 0
        counts.append(len(seen))
    assert 0 < counts[0] and counts[2] - counts[1] < 2.2 * (counts[1] - counts[0]), counts
