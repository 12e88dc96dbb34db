"""FLOP of a small GPT equal a closed form, per run, with and without what is computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mindspeed_fx

B, S, H, HEADS, LAYERS, V = 2, 8, 16, 2, 2, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, again: bool = False):
        super().__init__()
        self.again = again
        self.table = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(H, V, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def layer(b: int, s: int) -> int:
    """Forward of one: 12 h^2 weights, and scores and their sums of values."""
    return 2 * b * s * 12 * H * H + 2 * 2 * b * s * s * H


def model_flops(b: int, s: int) -> int:
    return 3 * (LAYERS * layer(b, s) + 2 * b * s * H * V)


def count(model, *shapes, eager=False):
    with mindspeed_fx.FlopCount(eager=eager) as result:
        for shape in shapes:
            model(torch.zeros(shape, dtype=torch.long)).backward()
    assert not result.uncounted
    return result


LAST = 2 * B * S * 4 * H * H
"""The last product of a block, which no gradient of the block needs: torch's checkpoint stops before it."""
SCORES_AGAIN = LAYERS * 2 * B * S * S * H
"""The attention's backward makes its scores again."""


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("again", [False, True])
def test_a_compiled_gpt(codegen, again):
    torch._dynamo.reset()
    model = torch.compile(GPT(again), backend="mindspeed", options={"count_flops": True, "codegen": codegen})
    first = count(model, (B, S))
    assert first.model == model_flops(B, S)
    # the first block's last product makes what is saved; the second's is wanted for the head's gradient
    assert first.hardware == first.model + SCORES_AGAIN + again * (LAYERS * layer(B, S) - LAST)
    both = count(model, (B, S), (B, S))
    assert (both.model, both.hardware) == (2 * first.model, 2 * first.hardware), "each run counts"


@pytest.mark.parametrize("again", [False, True])
def test_an_eager_gpt(again):
    result = count(GPT(again), (B, S), eager=True)
    assert result.model == model_flops(B, S)
    assert result.hardware == result.model + SCORES_AGAIN + again * LAYERS * (layer(B, S) - LAST)


def test_sizes_that_change():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"count_flops": True, "codegen": "eager"}
    model = torch.compile(GPT(), backend="mindspeed", options=options, dynamic=True)
    for s in (8, 12):
        assert count(model, (B, s)).model == model_flops(B, s)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_planners_recomputation_is_no_work_of_the_model():
    torch._dynamo.reset()
    model = torch.compile(
        GPT(), backend="mindspeed", options={"count_flops": True, "codegen": "eager", "recompute": "full"}
    )
    result = count(model, (B, S))
    assert result.model == model_flops(B, S)
    assert result.hardware > result.model + SCORES_AGAIN


def test_an_operator_without_a_formula_is_named():
    @torch.library.custom_op("tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    torch._dynamo.reset()
    step = torch.compile(lambda x: twice(x @ x), backend="mindspeed", options={"count_flops": True, "codegen": "eager"})
    for function, eager in ((step, False), (lambda x: twice(x @ x), True)):
        with mindspeed_fx.FlopCount(eager=eager) as result:
            function(torch.ones(4, 4))
        assert (result.model, result.uncounted) == (2 * 4**3, ["tests.twice"])


def test_without_the_option_nothing_is_counted():
    torch._dynamo.reset()
    assert count(torch.compile(GPT(), backend="mindspeed", options={"codegen": "eager"}), (B, S)).hardware == 0
