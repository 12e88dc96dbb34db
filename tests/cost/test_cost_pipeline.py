"""Schedules of a pipeline, played."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.cost.pipeline import (
    Parts,
    one_f_one_b,
    play,
    play_stages,
    recompute_ahead,
    torch_order,
    zero_bubble,
)


@pytest.mark.parametrize("ranks, microbatches", [(2, 2), (4, 8), (8, 16)])
def test_one_f_one_b_has_the_bubble_of_the_formula(ranks, microbatches):
    played = play(one_f_one_b(ranks, microbatches), Parts(1.0, 0.5, 1.0, 1.0))
    assert played.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert played.waiting == ranks


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (8, 24)])
def test_zero_bubble_of_the_paper(ranks, microbatches):
    """ZB-H1 with F = I = W: (p - 1)(F + I - W) idle on each rank where 1F1B has (p - 1)(F + I + W)."""
    parts = Parts(1.0, 0.0, 1.0, 1.0)
    played, plain = play(zero_bubble(ranks, microbatches), parts), play(one_f_one_b(ranks, microbatches), parts)
    idle = lambda p: p.seconds - 3 * microbatches  # noqa: E731
    assert idle(plain) == pytest.approx(3 * (ranks - 1)) and idle(played) == pytest.approx(ranks - 1)
    assert played.waiting <= plain.waiting


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.tuples(*[st.floats(0.1, 3.0)] * 4), st.floats(0.0, 0.5))
def test_every_schedule_does_all_the_work_and_splitting_never_costs(ranks, microbatches, times, send):
    parts = Parts(*times, send)
    every = {
        "1f1b": one_f_one_b(ranks, microbatches),
        "ahead": recompute_ahead(ranks, microbatches),
        "zero": zero_bubble(ranks, microbatches, recompute=True),
    }
    played = {}
    for name, orders in every.items():
        kinds = "FB" if name == "1f1b" else "FRIW"
        assert all(sorted(o) == sorted((k, m) for k in kinds for m in range(microbatches)) for o in orders)
        played[name] = play(orders, parts)
        assert played[name].waiting <= ranks and -1e-12 <= played[name].bubble < 1
    assert played["ahead"].seconds <= played["1f1b"].seconds * (1 + 1e-9)


def test_an_order_that_waits_for_ever_is_named():
    with pytest.raises(ValueError, match=r"rank 0: \('B', 0, 0\)"):
        play([[("B", 0), ("F", 0)]], Parts(1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "name,virtual,bubble",
    [("GPipe", 1, 9 / 33), ("1F1B", 1, 9 / 33), ("Interleaved1F1B", 2, 4.5 / 28.5), ("ZBVZeroBubble", 2, 1.5 / 25.5)],
)
def test_torchs_orders_have_the_bubbles_of_their_papers(name, virtual, bubble):
    """(p - 1)(F + I + W) / v of idle time, and (p - 1)(F + I - W) / 2 of the V, for v stages a rank."""
    work, stages = 1 / virtual, 4 * virtual
    played = play_stages(torch_order(name, 4, stages, 8), [Parts(work, 0.0, work, work)] * stages)
    assert played.bubble == pytest.approx(bubble) and played.seconds == pytest.approx(24 / (1 - bubble))


def test_a_forward_beside_a_backward_sends_when_both_are_done():
    beside, after = [(("B", 1, 0), ("F", 1, 1))], [(("B", 1, 0),), (("F", 1, 1),)]
    seconds = [
        play_stages(
            [[(("F", 0, 0),), (("F", 0, 1),), (("B", 0, 0),)], [(("F", 1, 0),), *second]], [Parts(1, 0, 1, 1)] * 2
        )
        for second in (beside, after)
    ]
    assert [p.seconds for p in seconds] == [7, 6]
