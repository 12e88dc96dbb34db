import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.cost.collectives import KINDS, TOPOLOGIES, collective, collective_seconds, formula, place_group
from mindspeed_fx.cost.hardware import hardware, names
from mindspeed_fx.errors import OptionError

GIB = 2**30


def test_two_cards_of_a_mesh_share_one_link_and_eight_have_seven():
    hw = hardware("ascend910b2")
    times = {p: collective("all_gather", GIB, p, hw).beta for p in (2, 4, 8)}
    assert times[2] == pytest.approx(GIB / 2 / hw.tiers[0].rate)
    assert times[2] == pytest.approx(2 * times[4]) == pytest.approx(4 * times[8])
    switch = {p: collective("all_gather", GIB, p, "h100").beta for p in (2, 8)}
    assert switch[8] == pytest.approx(switch[2] * (7 / 8) / (1 / 2)), "at a switch a larger group is not faster"


def test_collectives_are_made_of_each_other():
    for name in names():
        one = {k: collective(k, GIB, 8, name) for k in KINDS}
        assert one["all_reduce"].beta == pytest.approx(one["all_gather"].beta + one["reduce_scatter"].beta)
        assert one["all_gather"].beta == pytest.approx(one["reduce_scatter"].beta)
        assert one["all_to_all"].beta <= one["all_gather"].beta * (1 + 1e-9)


def test_groups_across_machines_use_the_outer_network():
    assert collective("all_reduce", GIB, 8, "h100", ranks_per_node=1).tier == "network"
    assert collective("all_reduce", GIB, 8, "h100").tier == "nvlink"
    assert collective_seconds("all_reduce", GIB, 8, "h100", ranks_per_node=1) > 5 * collective_seconds(
        "all_reduce", GIB, 8, "h100"
    )
    # Sixteen ranks in two machines: inside as eight, outside an eighth of the tensor between two.
    both = collective("all_gather", GIB, 16, "h100").beta
    assert both == pytest.approx(
        collective("all_gather", GIB, 8, "h100").beta
        + collective("all_gather", GIB / 8, 2, "h100", ranks_per_node=1).beta
    )


@pytest.mark.parametrize(
    "name, ranks, per_node, expected",
    [
        ("ascend910b2", 8, None, [("hccs", 8)]),
        ("ascend910b2", 32, None, [("hccs", 8), ("roce", 4)]),
        ("ascend910b2", 4, 1, [("roce", 4)]),
        ("ascend910b2", 8, 2, [("hccs", 2), ("roce", 4)]),
        ("ascend910c", 2, None, [("sio", 2)]),
        ("ascend910c", 16, None, [("sio", 2), ("ub", 8)]),
        ("ascend910c", 32, None, [("sio", 2), ("ub", 8), ("supernode", 2)]),
        ("ascend910c", 96 * 16, None, [("sio", 2), ("ub", 8), ("supernode", 48), ("rdma", 2)]),
        ("ascend910c", 4, 1, [("supernode", 4)]),
        ("ascend950pr", 32, None, [("ub", 32)]),
        ("ascend950pr", 4, 1, [("ub", 4)]),
        ("h100", 1, None, []),
    ],
)
def test_placement(name, ranks, per_node, expected):
    assert [(t.name, p) for t, p in place_group(ranks, hardware(name), per_node)] == expected


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from(names()), st.integers(1, 300), st.floats(1, 1e11), st.floats(1.1, 10))
def test_more_bytes_take_longer_and_one_rank_takes_nothing(kind, name, ranks, size, factor):
    hw = hardware(name)
    one, more = collective(kind, size, ranks, hw), collective(kind, size * factor, ranks, hw)
    assert more.alpha == one.alpha and more.beta >= one.beta >= 0
    assert (one.seconds == 0) == (ranks == 1)
    assert ranks == 1 or one.seconds > hw.launch


@pytest.mark.parametrize("kind", KINDS)
def test_symbolic_bytes_give_an_expression_with_the_same_value(kind):
    b, s, h = sympy.symbols("b s h", positive=True)
    for ranks in (2, 8, 16):
        expression = collective_seconds(kind, 2 * b * s * h, ranks, "ascend910b2")
        assert expression.free_symbols == {b, s, h}
        assert float(expression.subs({b: 2, s: 4096, h: 5120})) == pytest.approx(
            collective_seconds(kind, 2 * 2 * 4096 * 5120, ranks, "ascend910b2")
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_formula_agrees_with_numbers(kind, topology):
    name, tier = ("ascend910b2", 0) if topology == "mesh" else ("h100", 0)
    hw = hardware(name)
    one = collective(kind, GIB, 8, hw)
    values = {
        "n": GIB,
        "p": 2 if kind == "send_recv" else 8,
        "a": float(hw.tiers[tier].latency),
        "b": hw.tiers[tier].rate,
    }
    text = formula(kind, topology)
    assert float(text.subs({x: values[x.name] for x in text.free_symbols})) == pytest.approx(one.alpha + one.beta)


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("all_reduc", 1, 2, "h100"), 'did you mean "all_reduce"'),
        (("all_reduce", 1, 2, "h1000"), "h100"),
        (("all_reduce", 1, 0, "h100"), "ranks is 0"),
        (("all_reduce", 1, 8, "h100", 3), "ranks_per_node is 3"),
        (("all_reduce", 1, 32, "h100", 16), "up to 8"),
    ],
)
def test_bad_arguments(arguments, word):
    with pytest.raises(OptionError, match=word):
        collective_seconds(*arguments)


def test_measured_all_gathers_of_a_mesh():
    """Published for 910B: 149, 64, 38 GB/s all-gather and 72, 30, 18 all-reduce on 8, 4, 2 cards, read as tensor bytes
    / time.
    """
    for kind, published in {"all_gather": {8: 149, 4: 64, 2: 38}, "all_reduce": {8: 72, 4: 30, 2: 18}}.items():
        for ranks, rate in published.items():
            modelled = GIB / collective_seconds(kind, GIB, ranks, "ascend910b1") / 1e9
            assert abs(modelled / rate - 1) < 0.25, (kind, ranks, modelled)
