"""An argument of a call is the same one however it was given."""

import pytest
import torch

from mindspeed_fx.graph.schema import all_arguments, argument, has_argument

aten = torch.ops.aten


def call(target, *args, **kwargs):
    return torch.fx.Graph().call_function(target, args, kwargs)


@pytest.mark.parametrize(
    "node, name, says",
    [
        (call(aten.slice.Tensor, 0, 1, 2, 3), "end", 3),
        (call(aten.slice.Tensor, 0, 1, end=3), "end", 3),
        (call(aten.slice.Tensor, 0), "step", 1),  # the schema's default
        (call(aten.scaled_dot_product_attention.default, 0, 1, 2), "dropout_p", 0.0),
        (call(aten.scaled_dot_product_attention.default, 0, 1, 2, None, 0.1), "dropout_p", 0.1),
        (call(aten.scaled_dot_product_attention.default, 0, 1, 2, attn_mask=3), "attn_mask", 3),
        (call(aten.relu.default, 0), "dim", "absent"),
    ],
)
def test_argument(node, name, says):
    assert argument(node, name, "absent") == says


def test_overloads_differ_in_what_they_have():
    assert has_argument(call(aten.sum.dim_IntList, 0, [1]), "dim") and not has_argument(
        call(aten.sum.default, 0), "dim"
    )


def test_all_arguments_in_order():
    assert all_arguments(aten.slice.Tensor, (0, 1), {"end": 3}) == [0, 1, None, 3, 1]
