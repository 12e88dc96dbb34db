"""Columns of rows on their way to experts, divided over ranks: what is proved of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_fx.sharding.audit.relations import columns, rows
from mindspeed_fx.sharding.audit.relations.parts import Digit, Part, Unknown, Unproved, profile
from tests.sharding.test_prove_experts import context

ZERO = rows.ZERO


def some_rows(*pairs, width=8):
    x = Part(0, ((Digit(1, 1, 4),), (Digit(2, 1, width),)))
    return rows.Rows(x, tuple(torch.tensor(p) for p in pairs), torch.zeros(4, dtype=torch.int64))


def pieces(x, order=(0, 1)):
    return [columns.piece(x, 2, [i, i]) for i in order]


def test_pieces_joined_are_what_they_were_split_from():
    x = some_rows([0, 1], [2, 3])
    both = columns.joined(pieces(x), 1)
    assert both.part.arranged == x.part.arranged and both.part.local == x.part.local and both.pairs == x.pairs
    stacked = columns.joined(pieces(x), 0)
    assert isinstance(stacked, columns.Stacked) and stacked.rows.part.arranged == x.part.arranged
    assert columns.joined([stacked.piece([i, i]) for i in (0, 1)], 1).part == both.part


def test_a_sum_over_ranks_leaves_each_a_piece_of_every_row():
    x = some_rows([0, ZERO], [ZERO, 1])
    y = columns.scattered(context(), columns.joined(pieces(x), 0), "ep")
    assert [p.tolist() for p in y.pairs] == [[0, 1]] * 2
    assert y.part.local == (4, 4) and [m for m, _ in profile(y.part.dims[1])] == ["ep"]
    back = columns.gathered(context(), y, "ep")
    assert back.count == 2 and back.rows.part.arranged == x.part.arranged and not list(back.rows.part.meshes())


def test_pieces_in_another_order_or_of_other_rows_are_refused():
    x, c = some_rows([0, ZERO], [ZERO, 1]), context()
    with pytest.raises(Unknown, match="no pieces of one tensor"):
        columns.joined(pieces(x, (1, 0)), 1)
    with pytest.raises(Unknown, match="no pieces of one tensor"):
        columns.joined([pieces(x)[0]] * 2, 0)
    with pytest.raises(Unproved, match="rows of different pairs meet"):
        columns.joined([pieces(x)[0], pieces(x)[1].moved(x.pairs[::-1])], 1)
    with pytest.raises(Unproved, match="adds two rows"):
        columns.scattered(c, columns.joined(pieces(some_rows([0, 1], [0, 1])), 0), "ep")
    y = columns.scattered(c, columns.joined(pieces(x), 0), "ep")
    with pytest.raises(Unproved, match="columns of different rows"):
        columns.gathered(c, y.moved([torch.tensor([0, 1]), torch.tensor([1, 0])]), "ep")
    with pytest.raises(Unproved, match="columns that are divided over it"):
        columns.scattered(c, columns.Stacked(y, 2), "ep")
    four = columns.joined([columns.piece(x, 4, [i, i]) for i in range(4)], 0)
    with pytest.raises(Unknown, match="4 pieces for 2 ranks"):
        columns.scattered(c, four, "ep")


def test_divided_columns_are_summed_over_no_rank_and_meet_no_expert():
    c = context()
    c.numbers = lambda i: [torch.tensor([2, 4])] * 2
    y = columns.scattered(c, columns.joined(pieces(some_rows([0, ZERO], [ZERO, 1])), 0), "ep")
    weight = Part(5, ((Digit(6, 1, 2),), (Digit(7, 1, 8),), (Digit(8, 1, 3),)))
    with pytest.raises(Unknown, match="columns are divided meet experts"):
        rows.product(c, y, weight, c.numbers(2))
    tokens = Part(3, ((Digit(4, 1, 2),), (Digit(9, 1, 8),)))
    at, own = (torch.tensor([0, 1]),) * 2, (torch.tensor([0, 1]),) * 2
    order = rows.Order(tokens, at, own, 2, y.experts)
    whole = rows.unpermuted(c, "moe_unpermute", y, order, None)
    assert not whole.partial and [m for m, _ in profile(whole.dims[1])] == ["ep"]
    half = y.moved([torch.tensor([0, ZERO]), torch.tensor([ZERO, 1])])
    with pytest.raises(Unproved, match="ranks that hold other columns"):
        rows.unpermuted(c, "moe_unpermute", half, order, None)


def test_the_gradient_of_a_share_is_a_sum_over_divided_columns():
    c = context()
    y = columns.scattered(c, columns.joined(pieces(some_rows([0, ZERO], [ZERO, 1])), 0), "ep")
    tokens = Part(3, ((Digit(4, 1, 2),), (Digit(9, 1, 8),)))
    at, own = (torch.tensor([0, 1]),) * 2, (torch.tensor([0, 1]),) * 2
    order = rows.Order(tokens, at, own, 2, y.experts)
    grad = Part(10, ((Digit(11, 1, 2),), (Digit(12, 4, 2, "ep"), Digit(12, 1, 4))))
    shares = Part(13, ((Digit(14, 1, 2),), (Digit(15, 1, 1),)))
    back, share = rows.unpermuted_backward(c, grad, y, order, shares)
    assert share.partial == {"ep"} and profile(back.part.dims[1]) == profile(y.part.dims[1])
    with pytest.raises(Unproved, match="a gradient is divided otherwise"):
        rows.unpermuted_backward(c, replace(grad, dims=(grad.dims[0], (Digit(12, 1, 8),))), y, order, shares)
