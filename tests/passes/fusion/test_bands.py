"""The algebra of bands, by membership: a band and its complement part all places; and masks off the diagonal."""

import math

import pytest
import torch

from mindspeed_fx.passes.fusion.analysis.bands import Band, complement
from mindspeed_fx.passes.fusion.analysis.positions import _slice, meaning
from tests.models import double, function_agrees


def value(band, distance):
    return band.inside if band.low <= distance <= band.high else band.outside


@pytest.mark.parametrize("bound", [-3, -1, 0, 1, 4])
@pytest.mark.parametrize("above", [False, True])
def test_the_complement_of_a_half_plane_has_the_same_values(bound, above):
    band = Band(bound, math.inf, 5.0, 7.0) if above else Band(-math.inf, bound, 5.0, 7.0)
    other = complement(band)
    assert [value(other, d) for d in range(-9, 9)] == [value(band, d) for d in range(-9, 9)]
    assert (other.low == -math.inf) is above  # the other half


def test_one_of_many_positions_is_a_number():
    graph = torch.fx.Graph()
    row = graph.call_function(torch.ops.aten.arange.default, (8,))
    row.meta["val"] = torch.arange(8)
    for start, end in ((3, 4), (0, 4)):
        part = graph.call_function(torch.ops.aten.slice.Tensor, (row, 0, start, end))
        part.meta["val"] = row.meta["val"][start:end]
        assert (meaning(part) == 3) is (start == 3)


def test_a_part_of_the_batch_has_other_documents():
    graph = torch.fx.Graph()
    mask = graph.placeholder("mask")
    mask.meta["val"] = torch.empty(2, 1, 8, 8)
    part = graph.call_function(torch.ops.aten.slice.Tensor, (mask, 0, 0, 1))
    part.meta["val"] = mask.meta["val"][:1]
    apart = Band(-math.inf, 0, 0.0, -math.inf, documents=mask)
    assert _slice(part, lambda _: apart) is None
    part.meta["val"] = mask.meta["val"]
    assert _slice(part, lambda _: apart) is apart


@pytest.mark.parametrize("ahead", [-2, 0, 1, 3])
def test_keys_from_a_distance_on_are_blocked(ahead):
    def attend(q, k, v):
        i = torch.arange(q.shape[2])
        scores = q @ k.mT * 0.5
        return scores.masked_fill(i[None, :] >= i[:, None] + ahead, -1e30).softmax(-1) @ v

    function_agrees(attend, double(2, 3, 7, 4), double(2, 3, 7, 4), double(2, 3, 7, 4))
