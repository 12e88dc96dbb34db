"""The sharding rule of every operator: right for every way it allows, and no way missing."""

from __future__ import annotations

import functools

import pytest
import torch

from mindspeed_fx.compat.placements import Even, is_even
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels.sharding import register_sharding_rules, strategies
from mindspeed_fx.planning.verify_device.operators import calls
from mindspeed_fx.sharding.spmd import aten_rules
from tests.sharding.exhaust import missing_ways, wrong_ways

EVEN, UNEVEN, ONE_KEY_HEAD, OWN_KEYS = (4, 4, 4, 2, 4, 4), (3, 5, 6, 3, 4, 6), (2, 3, 4, 1, 4, 6), (4, 4, 3, 3, 4, 4)


def one(x: torch.Tensor) -> torch.Tensor:
    """The tensor that all ranks hold alike."""
    return x.reconcile() if hasattr(x, "reconcile") else x


pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")


@pytest.mark.parametrize(
    "sizes,ranks", [(EVEN, 2), (UNEVEN, 2), (ONE_KEY_HEAD, 2), (OWN_KEYS, 2), ((5, 4, 6, 3, 6, 8), 3)]
)
def test_every_way_gives_the_whole_result(sizes, ranks):
    seen, tried, wrong = set(), {}, []
    for operator, args in calls(*sizes):
        seen.add(operator.overload)
        count, bad = wrong_ways(operator, args, ranks)
        tried[operator.name] = max(count, tried.get(operator.name, 0))
        wrong += bad
    assert not wrong
    assert not [o.name for o in REGISTRY.values() if o.overload not in seen and not o.name.endswith("_triton")], (
        "operators without a case"
    )
    assert not [name for name, n in tried.items() if n < 2], "only the replicated way could be tried"


@functools.cache
def given() -> list[tuple]:
    """(operator, arguments) of every call in even sizes, the same in every test."""
    torch.manual_seed(0)
    return list(calls(*EVEN))


def _by_size() -> list:
    """Names of the operators; those with tens of thousands of placements are slow."""
    names = sorted(o.name for o in REGISTRY.values() if not o.name.endswith("_triton"))
    many = ("attention", "delta_rule", "delta_tiles", "ssd", "selective_scan", "linear_jsd", "linear_grpo")
    ends = ("_backward", "_total", ".ssd", ".selective_scan")
    return [
        pytest.param(n, marks=pytest.mark.slow) if any(m in n for m in many) and n.endswith(ends) else n for n in names
    ]


@pytest.mark.parametrize("name", _by_size())
def test_no_way_is_missing(name):
    """Every placement of whole and divided tensors that gives the whole result is a way of the rule."""
    found = []
    for operator, args in given():
        if operator.name != name:
            continue
        if name.startswith("mindspeed.varlen_attention") and args[4 if "backward" not in name else 7] is not None:
            continue  # ends count the tokens of all rows: the reference does not read them, other kernels do
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        found += [f"{shapes}: {way}" for way in sorted(missing_ways(operator, args, 2), key=str)]
    assert found == []


def test_triton_operators_take_their_operators_rule():
    for operator in REGISTRY.values():
        if operator.name.endswith("_triton"):
            of = next(o for o in REGISTRY.values() if o.name == operator.name.removesuffix("_triton"))
            args = next(a for o, a in calls(*EVEN) if o is of)
            assert strategies(operator, args) == strategies(of, args)


def test_dtensor_takes_every_way_without_a_collective(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    from mindspeed_fx.compat.dtensor import placement

    register_sharding_rules()
    given = list(calls(*EVEN))
    for operator, args in given:
        args[:] = [a.float() if operator.name == "mindspeed.gemm" and isinstance(a, torch.Tensor) else a for a in args]
    with ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        for operator, args in given:
            whole = operator.overload(*args)
            for results, inputs in strategies(operator, args):
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                if (
                    any(isinstance(p, Even) and not is_even(t.shape, p, 2) for t, p in zip(tensors, inputs))
                    or "partial" in inputs
                ):
                    continue
                if any(isinstance(p, int) and t.shape[int(p)] < 2 for t, p in zip(tensors, inputs)):
                    continue
                own = iter(inputs)
                local = [
                    distribute_tensor(a, mesh, [placement(next(own))]) if isinstance(a, torch.Tensor) else a
                    for a in args
                ]
                with CommDebugMode() as communication:
                    made = operator.overload(*local)
                assert communication.get_total_counts() == 0, (operator.name, inputs)
                made = made if isinstance(made, (tuple, list)) else [made]
                for want, have, p in zip(
                    whole if isinstance(whole, (tuple, list)) else [whole], made, results, strict=True
                ):
                    assert have.placements == (placement(p),), (operator.name, inputs)
                    torch.testing.assert_close(one(have.full_tensor()), want, rtol=1e-5, atol=1e-6)


def test_uneven_groups_of_heads_are_not_cut(ranks):
    """Six query and three key heads on two ranks: a cut by head would pair the wrong ones, so the heads are
    gathered.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    register_sharding_rules()
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 3, 4, 8), torch.randn(1, 3, 4, 8)
    expected = torch.ops.mindspeed.attention(q, k, v, None, True, 0.3)[0]
    with ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        out = torch.ops.mindspeed.attention(
            *(distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k, v)), None, True, 0.3
        )[0]
        assert out.placements != (Shard(1),)
        torch.testing.assert_close(one(out.full_tensor()), expected)


def test_flags_are_part_of_the_rules_key(ranks):
    """The same tensors with and without ``causal`` must not share a cached rule."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    register_sharding_rules()
    q = torch.randn(1, 2, 4, 8)
    with ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        rows, whole = distribute_tensor(q, mesh, [Shard(2)]), distribute_tensor(q, mesh, [Replicate()])
        for causal in (False, True, False):
            out = torch.ops.mindspeed.attention(rows, whole, whole, None, causal, 0.3)[0]
            assert (out.placements == (Shard(2),)) != causal
            torch.testing.assert_close(
                one(out.full_tensor()), torch.ops.mindspeed.attention(q, q, q, None, causal, 0.3)[0]
            )


def test_images_are_divided_by_the_batch_alone():
    images, one = torch.empty(4, 3, 8, 8, device="meta"), torch.empty(3, 8, 8, device="meta")
    pool = torch.ops.aten.avg_pool2d.default
    assert [aten_rules.strategies(pool, (x, [2, 2]), {}, [x]) for x in (images, one)] == [[(0, [0])], []]
