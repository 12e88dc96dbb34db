"""Ring attention: every score once, as many on every rank; what it refuses; bfloat16; queries of another length."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

import mindspeed_fx  # noqa: F401  registers the operators
from mindspeed_fx.cost.ring import ring_seconds
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from mindspeed_fx.sharding.presets import QKV, named_plan
from mindspeed_fx.sharding.spmd.ring_messages import Ring, take_half
from tests.sharding.llama import Llama

ops = torch.ops.mindspeed
CONTEXT = {"cp": "S(2)"}
PLAN = Plan(
    "ring",
    ("cp",),
    inputs=dict.fromkeys("qkv", CONTEXT),
    operators={
        "mindspeed.attention|aten.scaled_dot_product_attention": Boundary(
            arguments=dict.fromkeys(QKV, CONTEXT), output=CONTEXT
        )
    },
)


def at(rank: int, ranks: int, causal: bool = True, window: int = 0) -> Ring:
    class At(Ring):
        def by_rank(self, value):
            return value(rank)

    return At(None, 0, ranks, causal, 1.0, 0.0, window or ranks)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 12))
def test_every_score_once_and_as_many_on_every_rank(ranks, half, window):
    """The blocks that Ring.blocks names, by the chunks that the docstring says a rank has."""
    chunks = [
        [*range(r * half, (r + 1) * half), *range((2 * ranks - 1 - r) * half, (2 * ranks - r) * half)]
        for r in range(ranks)
    ]
    computed, work = torch.zeros(2 * ranks * half, 2 * ranks * half, dtype=torch.int), []
    for r in range(ranks):
        own = torch.tensor(chunks[r])
        computed[own.unsqueeze(1), own] += torch.ones(2 * half, 2 * half, dtype=torch.int).tril()
        work.append(half * (2 * half + 1))
        for step in (mine := at(r, ranks, window=math.gcd(ranks, window))).steps():
            there = torch.tensor(chunks[mine.owner(r, *step)])
            for row, column in ((i * half, j * half) for i, j in mine.blocks(*step)):
                computed[own[row : row + half].unsqueeze(1), there[column : column + half]] += 1
                work[-1] += half * half
    assert torch.equal(computed, torch.ones_like(computed).tril())
    assert max(work) == min(work)


@given(st.integers(1, 12))
def test_exchange_brings_each_rank_its_two_chunks_in_order(ranks):
    sent = {r: [c for _, c in sorted((at(r, ranks)._owner(c), c) for c in (2 * r, 2 * r + 1))] for r in range(ranks)}
    for r in range(ranks):
        arrived = []
        for source in range(ranks):
            own = [c for c in sent[source] if at(0, ranks)._owner(c) == r]
            assert len(own) == at(source, ranks)._chunks_from_to(source, r)
            arrived += own
        assert arrived == [r, 2 * ranks - 1 - r]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.sampled_from([torch.float64, torch.float32]))
def test_update_joins_two_sets_of_keys(first, second, transposed, dtype):
    q, k, v = (torch.randn(2, 3, n, 4, dtype=dtype) for n in (3, first + second, first + second))
    if transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    whole = ops.attention(q, k, v, None, False, 0.5)
    parts = [ops.attention(q, k[:, :, s], v[:, :, s], None, False, 0.5) for s in (slice(0, first), slice(first, None))]
    for got, expected in zip(ops.ring_attention_update(*parts[0], *parts[1]), whole):
        torch.testing.assert_close(got, expected)


def test_update_with_rows_that_see_nothing_of_the_block():
    out, lse = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2)
    new = ops.ring_attention_update(out, lse, torch.zeros_like(out), torch.tensor([[[-float("inf"), 0.0]]]))
    assert (
        torch.equal(new[0][:, :, 0], out[:, :, 0])
        and torch.equal(new[1][:, :, 0], lse[:, :, 0])
        and (new[0][:, :, 1] != out[:, :, 1]).all()
    )


class Attend(torch.nn.Module):
    """Projects, so that there is a parameter whose gradient can be compared."""

    def __init__(self, dtype, **settings):
        super().__init__()
        self.settings, self.weight = settings, torch.nn.Parameter(torch.randn(3, 4, 4, dtype=dtype))

    def forward(self, q, k, v):
        q, k, v = (x @ w for x, w in zip((q, k, v), self.weight))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.settings) ** 2


def qkv(dtype=torch.float64, seq=8, keys=8):
    return (
        torch.randn(2, 4, seq, 4, dtype=dtype),
        torch.randn(2, 2, keys, 4, dtype=dtype),
        torch.randn(2, 2, keys, 4, dtype=dtype),
    )


@pytest.mark.parametrize(
    "causal,ranks,inner",
    [
        (True, 2, 0),
        (False, 2, 0),
        (True, 3, 0),
        (False, 3, 0),
        (True, 4, 2),
        (False, 4, 2),
        *(pytest.param(c, n, w, marks=pytest.mark.slow) for c in (True, False) for n, w in ((4, 1), (6, 2), (6, 3))),
    ],
)
def test_equals_one_device(causal, ranks, inner):
    model, inputs = Attend(torch.float64, is_causal=causal), qkv(seq=4 * ranks, keys=4 * ranks)
    expected = model(*inputs)
    expected.sum().backward()
    result = simulate(model, {"cp": ranks}, dataclasses.replace(PLAN, rings={"cp": inner} if inner else {}), *inputs)
    rounds = ranks // inner if inner else 1
    near, far = ranks * (inner != 1), rounds * (rounds > 1)
    assert (
        result.forward["all_to_all_single"] == ranks - 1 + 2 * causal
        and result.backward["all_to_all_single"] == ranks - 1 + near + far + 2 * causal
    )
    torch.testing.assert_close(result.outputs[0], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.gradients["weight"], model.weight.grad, rtol=1e-10, atol=1e-12)


def test_bfloat16_is_as_close_to_float64_as_one_device_is():
    model, inputs = Attend(torch.bfloat16, is_causal=True), qkv(torch.bfloat16, 32, 32)
    exact = Attend(torch.float64, is_causal=True)
    exact.load_state_dict({"weight": model.weight.detach().double()})
    exact(*(x.double() for x in inputs)).sum().backward()
    model(*inputs).sum().backward()
    found = simulate(model, {"cp": 2}, PLAN, *inputs).gradients["weight"]
    assert (found - exact.weight.grad).norm() <= 2 * (model.weight.grad - exact.weight.grad).norm()


@pytest.mark.parametrize("settings, inputs, says", [
    (dict(is_causal=True), qkv(seq=6, keys=6), "two chunks per rank: 6 elements do not divide into 4"),
    (dict(), qkv(seq=4), "as many queries as keys; here 4 and 8"),
])  # fmt: skip
def test_what_it_refuses(settings, inputs, says):
    with pytest.raises(ShardingError) as error:
        simulate(Attend(torch.float64, **settings), {"cp": 2}, PLAN, *inputs)
    assert says in str(error.value)


@pytest.mark.parametrize("length,ranks", [(32768, 16), (131072, 32)])
def test_inner_rings_hide_the_links_between_machines(length, ranks):
    """On machines of eight, where a step is shorter than a message between two of them."""
    step, nbytes = 1e-4, 4 * length // ranks * 1024
    times = {w: ring_seconds(step, nbytes, ranks, "ascend910b2", w) for w in (0, 1, 2, 4, 8, ranks)}
    best = min(times, key=times.get)
    assert times[0] == times[ranks] and best in (2, 4, 8) and times[best] < 0.8 * times[0]
    assert (
        ring_seconds(1.0, nbytes, ranks, "ascend910b2", 8) == ring_seconds(1.0, nbytes, ranks, "ascend910b2") == ranks
    ), "compute hides everything"


def test_words_for_inner_rings():
    assert named_plan("hybrid:2", Llama()).rings == {"cp_ring": 2} and named_plan("zero2+ring:4", Llama()).rings == {
        "cp": 4
    }
    for word, says in (("ring:0", "ring:N"), ("tp:2", "ring:N")):
        with pytest.raises(ShardingError, match=says):
            named_plan(word, Llama())
    with pytest.raises(ShardingError, match="an inner ring of 3 ranks does not divide the 4"):
        simulate(Attend(torch.float64, is_causal=True), {"cp": 4}, dataclasses.replace(PLAN, rings={"cp": 3}), *qkv())


def test_one_ring_goes_round_one_dimension():
    both = {"a": "S(2)", "b": "S(2)"}
    plan = Plan(
        "rings",
        ("a", "b"),
        inputs=dict.fromkeys("qkv", both),
        operators={
            "mindspeed.attention|aten.scaled_dot_product_attention": Boundary(
                arguments=dict.fromkeys(QKV, both), output=both
            )
        },
    )
    with pytest.raises(ShardingError, match="round one mesh dimension, and the sequence is divided over a, b"):
        simulate(Attend(torch.float64, is_causal=True), {"a": 2, "b": 2}, plan, *qkv())


def test_a_model_without_gradient():
    model = Llama(layers=1).double().requires_grad_(False)
    ids = torch.randint(0, 64, (2, 16))
    assert abs(simulate(model, {"cp": 2}, "ring", ids, ids).outputs[0] - model(ids, ids)) < 1e-12


@pytest.mark.slow
def test_a_second_process_group_of_one_process(ranks):
    """It has the name of the first, by which torch finds the old group as long as a compiled step holds it."""
    ids = torch.randint(0, 32, (4, 8))
    for _ in range(2):
        torch._dynamo.reset()
        ranks(2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = mindspeed_fx.parallelize(Llama(1), mesh, "ring")
        step = torch.compile(model, backend="mindspeed", dynamic=False, options={"codegen": "eager"})
        step(ids, ids.roll(1, 1)).backward()
        assert all(p.grad is not None for p in model.parameters())
        dist.destroy_process_group()


class Watch(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_halves_are_captured_where_a_mode_watches():
    """As Megatron's generators do around a compiled chunk."""

    def second(x):
        with Watch():
            return take_half(x, 1, 2) + 1

    x = torch.randn(1, 2, 4, 3)
    assert torch.equal(torch.compile(second, backend="eager", fullgraph=True)(x), x[:, :, 2:] + 1)
