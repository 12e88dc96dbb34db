"""Tokens [batch * sequence] whose sequence two mesh dimensions divide: what a rank holds after every redistribution and
view, by definition.

A placement takes, mesh dimension after mesh dimension, a part of what those before left: ``_StridedShard(d, sf)`` a
part of each of ``sf`` pieces.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from mindspeed_fx.compat import dtensor, strided_shards
from mindspeed_fx.sharding.spmd import aten_rules
from mindspeed_fx.sharding.spmd.program import HANDLERS
from mindspeed_fx.sharding.spmd.redistribute import _redistribute, reshape

R = Replicate()


@pytest.fixture(autouse=True)
def as_in_a_program():
    """Prices too: which placement DTensor gives a gradient follows from them."""
    strided_shards.correct()


def part(x: torch.Tensor, sizes: list[int], placements: list, coordinates: tuple[int, ...]) -> torch.Tensor:
    for n, p, at in zip(sizes, placements, coordinates):
        if dtensor.is_divided(p):
            pieces = p.split_factor if dtensor.is_strided(p) else 1
            x = torch.cat([chunk(piece, n, p.dim)[at] for piece in chunk(x, pieces, p.dim)], p.dim)
    return x


def chunk(x: torch.Tensor, n: int, dim: int) -> list[torch.Tensor]:
    """``torch.chunk`` into n, the last ones empty where there is too little."""
    chunks = list(x.chunk(n, dim))
    return chunks + [x.narrow(dim, 0, 0)] * (n - len(chunks))


def check(x, whole: torch.Tensor, sizes: list[int]) -> None:
    """Every rank has its part of ``whole``; of a sum, all ranks along its mesh dimensions together."""
    held, sums = x.to_local()._local_tensors, [i for i, p in enumerate(x.placements) if p.is_partial()]
    every = list(itertools.product(*map(range, sizes)))
    for at in every:
        beside = [
            rank
            for rank, other in enumerate(every)
            if all(a == b for i, (a, b) in enumerate(zip(at, other)) if i not in sums)
        ]
        assert torch.equal(
            sum(held[rank] for rank in beside) if sums else held[every.index(at)], part(whole, sizes, x.placements, at)
        ), (x.placements, at)


def redistributed(sizes: list[int], pieces: int, every: int) -> None:
    rows = pieces * torch.tensor(sizes).prod().item() * 2
    whole = torch.arange(rows * 12.0, dtype=torch.float64).view(rows, 12)
    strided = _StridedShard(0, split_factor=pieces)
    kinds = list(itertools.product((R, Shard(0), strided, Shard(1)), repeat=len(sizes)))
    pairs = [
        (s, t)
        for s in (*kinds, (Partial(), *[strided] * (len(sizes) - 1)))
        for t in kinds
        if strided in (*s, *t) and s != t
    ]
    check_redistributions(sizes, whole, pairs[::every])


def check_redistributions(sizes: list[int], whole: torch.Tensor, pairs: list[tuple]) -> None:
    with dtensor.all_ranks(dict(zip("abc", sizes))) as mesh:
        for source, target in pairs:
            held = [R if p.is_partial() else p for p in source]
            x = dtensor.on_every_rank(whole)
            x._local_tensors.update(
                {
                    rank: part(whole, sizes, held, at).contiguous()
                    for rank, at in enumerate(itertools.product(*map(range, sizes)))
                }
            )
            x = type(x)(x._local_tensors)
            made = torch.distributed.tensor.DTensor.from_local(
                x, mesh, source, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            summed = sizes[0] if Partial() in source else 1
            for way in (made.redistribute(placements=target), _redistribute(made, target)):
                check(way, whole * summed, sizes)


@pytest.mark.parametrize(
    "sizes, pieces, every",
    [
        ([2, 2], 2, 17),
        ([2, 3], 3, 37),
        ([2, 2, 2], 2, 1597),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ([2, 2], 2, 1),
                ([2, 3], 2, 1),
                ([3, 2], 3, 1),
                ([2, 2], 4, 1),
                ([2, 2, 2], 2, 13),
                ([2, 1, 3], 3, 17),
            )
        ),
    ],
)
def test_redistribute(sizes, pieces, every):
    redistributed(sizes, pieces, every)


STRIDED = _StridedShard(0, split_factor=2)


@pytest.mark.parametrize(
    "sizes, shape, pairs",
    [
        (
            [2, 2, 2],
            (32, 12),
            [
                ((Shard(1), Shard(1), Shard(1)), (Shard(0), STRIDED, R)),
                ((Shard(1), Shard(1), Shard(1)), (STRIDED, STRIDED, R)),
                ((Partial(), STRIDED, STRIDED), (Shard(1), Shard(1), Shard(1))),
            ],
        ),
        (
            [2, 3],
            (23, 7),
            [
                ((Shard(1), Shard(1)), (Shard(0), STRIDED)),
                ((Shard(1), R), (STRIDED, Shard(0))),
                ((STRIDED, Shard(0)), (Shard(0), Shard(1))),
                ((STRIDED, Shard(1)), (Shard(1), STRIDED)),
            ],
        ),
    ],
)
def test_redistribute_parts_of_different_sizes(sizes, shape, pairs):
    """DTensor alone gives a rank of the first mesh rows 0 to 7 where 0 to 3 and 8 to 11 are its own."""
    check_redistributions(sizes, torch.arange(math.prod(shape), dtype=torch.float64).view(shape), pairs)


def test_strided_shards_of_different_sizes_are_refused():
    """On all ranks in one process alone: a rank by itself knows its sizes."""
    with pytest.raises(RuntimeError, match=r"cannot gather .* dimension 0 of \(11, 5\) .* parts of different sizes"):
        check_redistributions([2, 2], torch.zeros(11, 5), [((Shard(0), STRIDED), (R, Shard(0)))])


# With two sequences on three mesh dimensions DTensor's own view fails, of a gradient that is divided as its value is.
@pytest.mark.parametrize(
    "sizes, placements, batch",
    [
        ([2, 2], [Shard(1), Shard(1)], 2),
        ([2, 2], [Shard(0), Shard(1)], 4),
        ([2, 2, 2], [Shard(0), Shard(1), Shard(1)], 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ([2, 2], [Shard(1), Shard(1)], 4),
                ([2, 3], [Shard(1), Shard(1)], 2),
                ([2, 3], [Shard(1), Shard(1)], 4),
                ([2, 2], [Shard(0), Shard(1)], 2),
                ([2, 2], [Shard(1), Shard(0)], 2),
                ([2, 2], [Shard(1), Shard(0)], 4),
                ([2, 2, 2], [Shard(0), Shard(1), Shard(1)], 4),
            )
        ),
    ],
)
def test_tokens_of_sequences_and_back(sizes, placements, batch):
    """And the gradients of both views."""
    x, weight = torch.randn(batch, 12, 4, dtype=torch.float64), torch.randn(batch, 12, 2, 2, dtype=torch.float64)
    with dtensor.all_ranks(dict(zip("abc", sizes))) as mesh:
        given = distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()
        tokens = reshape(given, [-1, 4])
        check(tokens, x.view(-1, 4), sizes)
        assert not any(p == R for p in tokens.placements), "nothing is gathered"
        back = reshape(tokens * tokens, [batch, 12, 2, 2])
        check(back, (x * x).view(batch, 12, 2, 2), sizes)
        assert list(back.placements) == placements
        (gradient,) = torch.autograd.grad(
            (back * distribute_tensor(weight, mesh, [R] * len(sizes), src_data_rank=None)).sum(), given
        )
        torch.testing.assert_close(gradient.full_tensor().reconcile(), 2 * x * weight.view(x.shape))


def divided_tokens(mesh, width: int) -> tuple[torch.Tensor, torch.distributed.tensor.DTensor]:
    """Tokens [batch * sequence, width] of four sequences that the mesh dimension divides, whole and in parts."""
    x = torch.randn(4, 12, width, dtype=torch.float64)
    given = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    return x.view(-1, width).requires_grad_(), reshape(given, [-1, width])


@pytest.mark.parametrize("repeat", [torch.ops.aten.repeat.default, torch.ops.aten.tile.default])
@pytest.mark.parametrize("times", [(3, 1), (1, 2), (2, 1, 1), (3, 2)])
def test_repeated_tokens_and_their_gradient(repeat, times):
    """DTensor alone (2.13) gives the gradient other rows, or none: it views it as parts of another dimension."""
    with dtensor.all_ranks({"a": 2}) as mesh:
        whole, x = divided_tokens(mesh, 6)
        expected, found = whole.repeat(times), HANDLERS[repeat](x, times)
        check(found, expected, [2])
        weight = torch.randn_like(expected)
        (gradient,) = torch.autograd.grad((found * distribute_tensor(weight, mesh, [R], src_data_rank=None)).sum(), x)
        check(gradient, *torch.autograd.grad((expected * weight).sum(), whole), [2])


def test_a_gradient_in_pieces_of_a_view_of_a_whole_value():
    """As that of a router's scores, which scale tokens of divided sequences."""
    with dtensor.all_ranks({"a": 2}) as mesh:
        whole, x = divided_tokens(mesh, 6)
        scores = torch.randn(48, 4, dtype=torch.float64, requires_grad=True)
        given = distribute_tensor(scores, mesh, [R], src_data_rank=None).requires_grad_()
        scale = reshape(given.transpose(0, 1), [-1, 1])
        found = HANDLERS[torch.ops.aten.repeat.default](x, (4, 1)) * scale
        expected = whole.repeat(4, 1) * scores.t().reshape(-1, 1)
        gradients = torch.autograd.grad(expected.square().sum(), (scores, whole))
        for gradient, wanted in zip(torch.autograd.grad(found.square().sum(), (given, x)), gradients, strict=True):
            torch.testing.assert_close(gradient.full_tensor().reconcile(), wanted)


def test_a_view_is_stored_as_that_of_the_whole_is():
    """What is a view of the whole alone, or of the parts alone, would fail on the other."""
    with dtensor.all_ranks({"a": 2}) as mesh:
        whole, x = divided_tokens(mesh, 6)
        apart = whole.view(48, 2, 3).transpose(0, 1).contiguous().transpose(0, 1).view(4, 12, 2, 3)
        found = reshape(reshape(x, [48, 2, 3]).transpose(0, 1).contiguous().transpose(0, 1), [4, 12, 2, 3])
        assert found.stride() == apart.stride() and not found.is_contiguous()
        check(found.flatten(2), apart.flatten(2), [2])
        heads = torch.randn(4, 2, 1, 5, 3, dtype=torch.float64)  # of which each rank has one, and repeats it
        given = distribute_tensor(heads, mesh, [Shard(1)], src_data_rank=None)
        repeated, found = (t.expand(-1, -1, 3, -1, -1) for t in (heads, given))
        found = reshape(found, [4, 6, 5, 3])
        assert found.to_local()._local_tensors[0].is_contiguous()
        check(found, repeated.reshape(4, 6, 5, 3), [2])


def test_views_without_elements():
    """DTensor's own do not end (2.13)."""
    with dtensor.all_ranks({"a": 2}) as mesh:
        whole, x = divided_tokens(mesh, 6)
        for start, shape in ((lambda t: t[:0], [0, 2, 3]), (lambda t: t[:, :0], [4, 12, 0]), (lambda t: t[:0], [6, 0])):
            found = reshape(start(x), shape)
            assert found.shape == start(whole).view(shape).shape
            (gradient,) = torch.autograd.grad(found.sum() + x.sum(), x)
            torch.testing.assert_close(gradient.full_tensor().reconcile(), torch.ones_like(whole))


@pytest.mark.parametrize("second", [(4, 12, 3, 5), (4, 1, 3, 5), (12, 3, 5), (1, 12, 3, 5), (3, 5)])
@pytest.mark.parametrize("placed", [[R, R], [Shard(1), Shard(1)]])
def test_products_of_matrices_for_every_token(second, placed):
    """Of a sequence that two mesh dimensions divide, as in hyper-connections and indexers."""
    x = torch.randn(4, 12, 2, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(second, dtype=torch.float64, requires_grad=True)
    placed = placed if len(second) == 4 and second[1] > 1 else [R, R]
    with dtensor.all_ranks({"a": 2, "b": 2}) as mesh:
        given = distribute_tensor(x.detach(), mesh, [Shard(1), Shard(1)], src_data_rank=None).requires_grad_()
        other = distribute_tensor(y.detach(), mesh, placed, src_data_rank=None).requires_grad_()
        turned = (other.mT, given.mT, y.mT @ x.mT)  # by a matrix alone it is no linear layer
        for first, after, expected in ((given, other, x @ y), turned) if y.ndim > 2 else (turned,):
            found = HANDLERS[torch.ops.aten.matmul.default](first, after)
            check(found, expected, [2, 2])
            assert found.placements == given.placements
            gradients = torch.autograd.grad(expected.square().sum(), (x, y))
            for gradient, wanted in zip(torch.autograd.grad(found.square().sum(), (given, other)), gradients):
                torch.testing.assert_close(gradient.full_tensor().reconcile(), wanted)


def test_a_gradient_in_pieces_of_a_product_of_whole_matrices():
    x, y = (torch.randn(4, 12, *s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (3, 5)))
    weight = torch.randn(4, 12, 1, 1, dtype=torch.float64)
    with dtensor.all_ranks({"a": 2, "b": 2}) as mesh:
        given = [distribute_tensor(t.detach(), mesh, [R, R], src_data_rank=None).requires_grad_() for t in (x, y)]
        found = HANDLERS[torch.ops.aten.matmul.default](*given)
        found = found * distribute_tensor(weight, mesh, [Shard(1), Shard(1)], src_data_rank=None)
        gradients = torch.autograd.grad((x @ y * weight).square().sum(), (x, y))
        for gradient, wanted in zip(torch.autograd.grad(found.square().sum(), given), gradients, strict=True):
            torch.testing.assert_close(gradient.full_tensor().reconcile(), wanted)


@pytest.mark.parametrize("terms", [("bnd", "ndh"), ("bnd", "dh"), ("bnd", "ndh", "n")])
def test_einsum_leaves_a_sum_over_ranks_of_what_it_sums(terms):
    """Rows over one mesh dimension, heads that are summed over the other: nothing is gathered, nor added up yet."""
    equation, size = f"{','.join(terms)}->bh", {"b": 4, "n": 6, "d": 3, "h": 5}
    given = [torch.randn([size[n] for n in t], dtype=torch.float64, requires_grad=True) for t in terms]
    expected = torch.einsum(equation, given)
    wanted = torch.autograd.grad(expected.square().sum(), given)
    with dtensor.all_ranks({"a": 2, "b": 2}) as mesh, dtensor.plain_tensors_as_replicated():
        parts = []
        for x, term in zip(given, terms):
            heads = Shard(term.index("n")) if "n" in term else R
            rows = Shard(0) if "b" in term else R
            part = distribute_tensor(x.detach(), mesh, [rows, heads], src_data_rank=None)
            parts.append(part.requires_grad_())
        result = aten_rules.run(torch.ops.aten.einsum.default, (equation, parts), {})
        assert list(result.placements) == [Shard(0), Partial()]
        torch.testing.assert_close(result.full_tensor().reconcile(), expected.detach())
        gradients = torch.autograd.grad(result.full_tensor().square().sum(), parts)
        for gradient, want in zip(gradients, wanted):
            torch.testing.assert_close(gradient.full_tensor().reconcile(), want)


@pytest.mark.parametrize(
    "equation, sizes, placements",
    [
        ("bsd,de->bse", [2, 2], [Shard(1), Shard(1)]),
        pytest.param("bsd,de->bse", [2, 2, 2], [Shard(0), Shard(1), Shard(1)], marks=pytest.mark.slow),
        pytest.param("bsd,btd->bst", [2, 2], [Shard(1), Shard(1)], marks=pytest.mark.slow),
    ],
)
def test_einsum_and_unbind_of_what_two_mesh_dimensions_divide(equation, sizes, placements):
    """DTensor alone fails in the view that it makes of an operand, and does not unbind what is divided."""
    x, weight = torch.randn(2, 8, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    other = x if equation.startswith("bsd,btd") else weight
    expected, factor = torch.einsum(equation, x, other), torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
    reference = x.clone().requires_grad_()
    second = reference if other is x else weight
    factored = (torch.einsum(equation, reference, second) * factor.view(8, 1)).sum() + reference.unbind(1)[
        3
    ].exp().sum()
    (wanted,) = torch.autograd.grad(factored, reference)
    with dtensor.all_ranks(dict(zip("abc", sizes))) as mesh, dtensor.plain_tensors_as_replicated():

        def whole(t):
            return distribute_tensor(t, mesh, [R] * len(sizes), src_data_rank=None)

        given = distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()
        second = given if other is x else whole(weight)
        result = aten_rules.run(torch.ops.aten.einsum.default, (equation, [given, second]), {})
        torch.testing.assert_close(result.full_tensor().reconcile(), expected)
        row = aten_rules.run(torch.ops.aten.unbind.int, (given, 1), {})[3]
        torch.testing.assert_close(row.full_tensor().reconcile(), x[:, 3])
        total = (result * whole(factor.view(8, 1))).sum() + row.exp().sum()
        (gradient,) = torch.autograd.grad(total, given)
        torch.testing.assert_close(gradient.full_tensor().reconcile(), wanted)
